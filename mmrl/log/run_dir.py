"""One directory holds everything of a run, and belongs to one config."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mmrl
from mmrl.config import Config, SettingChange, diff_configs, dump_yaml, read_flat_settings
from mmrl.types import UserError
from mmrl.utils.files import remove_leftovers, replace_nonfinite, report_write_errors, temporary_path, write_atomically

LIBRARIES = ("torch", "transformers", "peft", "deepspeed", "vllm")
_MAX_CHANGES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class RunDir:
    """Where each thing of a run lies."""

    path: Path

    @property
    def config(self) -> Path:
        """Every setting of the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Reproducible numbers, one JSON line per step."""
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """Wall-clock numbers, one JSON line per step done."""
        return self.path / "timings.jsonl"

    @property
    def manifest(self) -> Path:
        """What the run was made with."""
        return self.path / "manifest.json"

    @property
    def summary(self) -> Path:
        """What the run achieved."""
        return self.path / "summary.json"

    @property
    def rollouts(self) -> Path:
        """Rollouts kept for reading."""
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        """What a resumed run starts from."""
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        """Files that datasets made."""
        return self.path / "data"

    @property
    def outputs(self) -> Path:
        """Tables that stages made: rollouts, what was chosen of them, how samples fared."""
        return self.path / "outputs"

    @property
    def opened_media(self) -> Path:
        """Which pictures were opened and found good."""
        return self.path / "pictures.json"

    @property
    def processor(self) -> Path:
        """The processor and configuration of a model made from scratch, which no hub has."""
        return self.path / "reader"

    @property
    def reference_weights(self) -> Path:
        """Weights that stages with a KL penalty began with."""
        return self.path / "references"

    @property
    def engine(self) -> Path:
        """What a rollout engine beside the run reads and writes: the model, the adapter of the moment, a log."""
        return self.path / "engine"

    @property
    def benchmarks(self) -> Path:
        """Benchmarks taken in training: a folder for each, and in it one for each time."""
        return self.path / "benchmarks"

    @property
    def adapter(self) -> Path:
        """The final adapter alone, as peft reads it, where the run trains one."""
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The final model as a Hugging Face folder; written last, so a run that has it is finished."""
        return self.path / "model"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from running here.

        Raises:
            UserError: one already does.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError(
                f"{self.path}: another process is running here; wait for it or choose another run.dir"
            ) from None
        finally:
            os.close(lock)

    def claim(self, config: Config, notify: Callable[[str], None]) -> bool:
        """Make the directory this config's; returns whether it already was, that is, whether to resume.

        Settings that a run may change are taken over and noted.

        Raises:
            UserError: it holds another config's run, or files that are no run's, or cannot be made.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            strangers = sorted({entry.name for entry in self.path.iterdir()} - {temporary_path(self.config).name})
        if self.config.exists() and self._has_checkpoint():
            self._update_config(config, notify)
            return True
        if self.config.exists():  # a run that came to nothing: there is nothing to go on from, and nothing to lose
            strangers = self._remove_run_files()
        if strangers:
            raise UserError(
                f"{self.path} holds {strangers[0]!r} and no run of mmrl; choose an empty or new directory "
                "with run.dir=... or --run-dir"
            )
        write_atomically(self.config, dump_yaml(config))
        return False

    def write_manifest(self, config: Config, data: Mapping[str, str]) -> None:
        """Write what the run is made with; `data` maps each source to the digest of its samples."""
        write_atomically(self.manifest, json.dumps(_build_manifest(config, data), indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write what the run achieved; null stands for a number that is not finite."""
        write_atomically(self.summary, json.dumps(replace_nonfinite(summary), indent=2, allow_nan=False) + "\n")

    def _has_checkpoint(self) -> bool:
        return self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def _remove_run_files(self) -> list[str]:
        """Remove what a run wrote; returns the names of what is left."""
        with report_write_errors(self.path):
            for path in (self.config, self.metrics, self.timings, self.manifest, self.summary, self.opened_media):
                path.unlink(missing_ok=True)
            for path in (
                self.rollouts,
                self.checkpoints,
                self.processor,
                self.reference_weights,
                self.outputs,
                self.data,
                self.benchmarks,
                self.adapter,
                self.model,
            ):
                shutil.rmtree(path, ignore_errors=True)
            remove_leftovers(self.path)
            return sorted(entry.name for entry in self.path.iterdir())

    def _update_config(self, config: Config, notify: Callable[[str], None]) -> None:
        changed = diff_configs(read_flat_settings(self.config), config)
        check_same_run(self.path, changed)
        if not changed or self.model.exists():  # a finished run does not go on with anything
            return
        for change in changed:
            notify(f"This run goes on with {change} ({change.effect}).")
        write_atomically(self.config, dump_yaml(config))


def check_same_run(path: Path, changed: Sequence[SettingChange]) -> None:
    """Keep a run from going on, in or from `path`, as another one.

    Raises:
        UserError: settings changed that make another run.
    """
    found = [change for change in changed if change.effect is None]
    if not found:
        return
    if all(change.key.startswith("stages.") and change.key.endswith(".steps") for change in found):
        head = f"{path} holds this very experiment with another length"
        advice = "set these back to go on with that run: its schedule and results depend on them"
    else:
        head, advice = f"{path} holds the run of another config", "these settings differ"
    lines = [f"  {change}" for change in found[:_MAX_CHANGES_SHOWN]]
    more = [f"  and {len(found) - _MAX_CHANGES_SHOWN} more"] if len(found) > _MAX_CHANGES_SHOWN else []
    last = "set them back, choose another directory with run.dir=... or --run-dir, or delete this one"
    raise UserError("\n".join([f"{head}; {advice} (there -> here):", *lines, *more, last]))


def _build_manifest(config: Config, data: Mapping[str, str]) -> dict[str, Any]:
    return {
        "mmrl": mmrl.__version__,
        "python": platform.python_version(),
        "libraries": {name: _library_version(name) for name in LIBRARIES},
        "git": _git_state(Path(mmrl.__file__).parent),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_sha256": hashlib.sha256(dump_yaml(config).encode()).hexdigest(),
        "data": dict(data),
    }


def _library_version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _git_state(package: Path) -> dict[str, Any] | None:
    """Commit and whether anything differs from it; None where the package is not under version control."""
    if _run_git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return {"commit": _run_git(package, "rev-parse", "HEAD"), "dirty": bool(_run_git(package, "status", "--porcelain"))}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
