"""The folders of a run's datasets and benchmarks. Imports without torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from mmrl.config import Config
from mmrl.media.checks import make_media_policy
from mmrl.media.pixel_reader import PixelReader
from mmrl.types import DatasetContext


def make_dataset_context(config: Config, base_dir: Path, work_dir: Path) -> DatasetContext:
    """Return the argument that the config's dataset functions receive.

    Relative paths start from `base_dir`, the config's folder; files that functions make go into `work_dir`. Media may
    lie in `work_dir`, in `data.media_roots`, and beside the files of benchmarks.
    """
    roots = [work_dir, *(base_dir / root for root in config.data.media_roots)]
    for benchmark in config.evaluation.benchmarks:
        roots += benchmark_folders(benchmark.data, benchmark.media_root, base_dir)
    limits, schemes = config.data.media_limits, config.data.allowed_url_schemes
    policy = make_media_policy(limits, roots, schemes=schemes, media=config.media)
    return DatasetContext(
        work_dir=work_dir,
        base_dir=base_dir,
        seed=config.run.seed,
        media_policy=policy,
        media_opener=PixelReader(policy, limits),
    )


def benchmark_folders(paths: Iterable[str], media_root: str | None, base_dir: Path) -> list[Path]:
    """Return the folders of a benchmark's local files, and its media folder; relative paths start from `base_dir`."""
    folders = []
    for path in paths:
        if "://" not in path:
            local = base_dir / path
            folders.append(local if local.is_dir() else local.parent)
    if media_root:
        folders.append(base_dir / media_root)
    return folders
