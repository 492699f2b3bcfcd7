"""A dataset loader as a run makes it, for the folder of a config."""

from pathlib import Path

from mmrl.config import Config
from mmrl.data.context import make_dataset_context
from mmrl.data.load import DatasetLoader, DataSplits
from mmrl.data.rows import load_dataset_function
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.opened_index import OpenedMediaIndex
from mmrl.utils.file_index import FileIndex


def make_loader(config: Config, folder: Path, *, files: FileIndex | None = None) -> tuple[DatasetLoader, MediaCache]:
    """Return a loader of the config's datasets that looks into `files`, and the cache that it fills."""
    context = make_dataset_context(config, folder, folder / "work")
    cache = MediaCache(context.media_policy, config.data.media_limits, max_bytes=10**6)
    functions = {}
    for split, sources in config.data.sources_by_split().items():
        functions[split] = [load_dataset_function(source, folder) for source in sources]
    index = files and OpenedMediaIndex(files, context.media_policy, config.data.media_limits)
    return DatasetLoader(config, context, functions, cache, Console(), opened_index=index), cache


def load_all(loader: DatasetLoader) -> DataSplits:
    """Return all samples of a loader, at once."""
    *_, samples = loader.load()
    assert samples is not None
    return samples
