"""The run directory: it holds everything of a run, and belongs to one config."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import mmrl
from mmrl.config import Config, SettingChange, diff_configs, dump_yaml, read_flat_settings
from mmrl.types import UserError
from mmrl.utils.environment import LIBRARIES, installed_version
from mmrl.utils.files import remove_leftovers, replace_nonfinite, report_write_errors, temporary_path, write_atomically

EXPORTED_CONFIG_FILE = "mmrl.yaml"
"""File of an exported folder with the config of its run, so that `mmrl eval` prompts and parses as training did."""
_MAX_CHANGES_SHOWN = 12


class RunDir:
    """Paths inside a run directory, and what keeps it in the hands of one config and one process."""

    def __init__(self, path: Path) -> None:
        """Name the files and folders; nothing is made yet."""
        self.path = path
        self.config = path / "config.yaml"  # the resolved config, every setting with its value
        self.metrics = path / "metrics.jsonl"  # reproducible metrics, one JSON line for each step and evaluation
        self.timings = path / "timings.jsonl"  # wall-clock times, one JSON line for each step, repeated steps included
        self.log = path / "log.txt"  # warnings and errors of libraries, each once
        self.manifest = path / "manifest.json"  # versions, git commit, platform, and digests of config and data
        self.summary = path / "summary.json"  # held-out rewards before and after, as JSON
        self.rollouts = path / "rollouts"  # rollouts of some steps, for people to read
        self.checkpoints = path / "checkpoints"  # checkpoints, a folder for each
        self.data = path / "data"  # files that datasets generated or downloaded
        # Tables of stages: rollouts (`sample`), selected samples (`select`), rewards by sample (`rl`).
        self.outputs = path / "outputs"
        # Index of the images that were opened without error, so that a resumed run need not open them again.
        self.opened_media = path / "opened_media.json"
        self.processor = path / "processor"  # processor and config of a model made from scratch, which no hub has
        # Weights at the start of stages with a KL penalty towards a fixed reference.
        self.reference_weights = path / "reference_weights"
        # Files for a rollout engine in another process: the model, the current adapter, the engine's log.
        self.engine = path / "engine"
        # Results of benchmarks during training: a folder for each benchmark, and in it one for each evaluation.
        self.benchmarks = path / "benchmarks"
        self.adapter = path / "adapter"  # the final LoRA adapter alone, in peft's format, if the run trains one
        # The final model as a Hugging Face folder. It is written last, so a run that has it is finished.
        self.model = path / "model"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from running in this directory until the block ends.

        Raises:
            UserError: one already runs here, or the directory cannot be made.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path, os.O_RDONLY)
        try:
            # The system releases this lock when the process ends, however it ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise UserError(
                f"{self.path}: another process is running here; wait for it or choose another run.dir"
            ) from None
        finally:
            os.close(lock)

    def check(self, config: Config) -> bool:
        """Return True if a run of `config` is finished here. Writes nothing; `claim` follows when the run starts.

        Raises:
            UserError: `lock` or `claim` would refuse it, or the directory cannot be made or written.
        """
        existing = self.path
        while not existing.exists():
            existing = existing.parent
        with report_write_errors(self.path):
            if not existing.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{existing} is a file")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"no permission to write into {existing}")
        if existing != self.path:
            return False
        with self.lock():
            if self._has_checkpoint():
                check_same_run(self.path, diff_configs(read_flat_settings(self.config), config))
                return self.model.exists()
            if not self.config.exists():
                self._refuse_files(self._list_files())
        return False

    def claim(self, config: Config, notify: Callable[[str], None]) -> bool:
        """Make this the directory of a run of `config`; return True if it has a checkpoint to resume from.

        Settings that may change within a run are updated in its config.yaml, and `notify` receives a line for each.

        Raises:
            UserError: it holds the run of another config, or files that belong to no run, or it cannot be made.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            foreign_files = self._list_files()
        if self._has_checkpoint():
            changed = diff_configs(read_flat_settings(self.config), config)
            check_same_run(self.path, changed)
            # A finished run keeps the config it was made with.
            if changed and not self.model.exists():
                for change in changed:
                    notify(f"This run continues with {change} ({change.effect}).")
                write_atomically(self.config, dump_yaml(config))
            return True
        if self.config.exists():
            # A run without a checkpoint has nothing to resume from and nothing to lose.
            foreign_files = self._remove_run_files()
        self._refuse_files(foreign_files)
        write_atomically(self.config, dump_yaml(config))
        return False

    def write_manifest(self, config: Config, data: Mapping[str, str]) -> None:
        """Write manifest.json; `data` maps each data source to the digest of its samples."""
        libraries: dict[str, str | None] = {}
        for name in LIBRARIES:
            libraries[name] = installed_version(name) or None
        package = Path(mmrl.__file__).parent
        git = None
        # An installed package may lie inside another repository (a .venv does), whose commit would say nothing.
        if _run_git(package, "ls-files", "--error-unmatch", "__init__.py") is not None:
            has_changes = bool(_run_git(package, "status", "--porcelain"))
            git = {"commit": _run_git(package, "rev-parse", "HEAD"), "dirty": has_changes}
        manifest = {
            "mmrl": mmrl.__version__,
            "python": platform.python_version(),
            "libraries": libraries,
            "git": git,
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "config_sha256": hashlib.sha256(dump_yaml(config).encode()).hexdigest(),
            "data": dict(data),
        }
        write_atomically(self.manifest, json.dumps(manifest, indent=2) + "\n")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; values that are not finite become null."""
        write_atomically(self.summary, json.dumps(replace_nonfinite(summary), indent=2, allow_nan=False) + "\n")

    def _has_checkpoint(self) -> bool:
        return self.config.exists() and self.checkpoints.is_dir() and any(self.checkpoints.iterdir())

    def _list_files(self) -> list[str]:
        return sorted({entry.name for entry in self.path.iterdir()} - {temporary_path(self.config).name})

    def _refuse_files(self, names: Sequence[str]) -> None:
        """Refuse to begin a run among files that belong to no run."""
        if names:
            raise UserError(
                f"{self.path} holds {names[0]!r} and no run of mmrl; choose an empty or new directory "
                "with run.dir=... or --run-dir"
            )

    def _remove_run_files(self) -> list[str]:
        """Remove the files of a run; return the names of what is left."""
        with report_write_errors(self.path):
            records = (self.metrics, self.timings, self.log, self.summary)
            for path in (self.config, self.manifest, self.opened_media, *records):
                path.unlink(missing_ok=True)
            inputs = (self.data, self.checkpoints, self.processor, self.reference_weights)
            results = (self.rollouts, self.outputs, self.benchmarks, self.adapter, self.model)
            for folder in (*inputs, *results):
                shutil.rmtree(folder, ignore_errors=True)
            remove_leftovers(self.path)
            return sorted(entry.name for entry in self.path.iterdir())


def run_dir_of(config: Config) -> RunDir:
    """Return the run directory that a config names."""
    return RunDir(Path(config.run.dir.replace("{name}", config.run.name)))


def check_same_run(path: Path, changed: Sequence[SettingChange]) -> None:
    """Check that a run can continue, in the directory or from the checkpoint `path`, with the changed settings.

    Raises:
        UserError: a setting changed that results depend on; the message lists them.
    """
    refused = [change for change in changed if change.effect is None]
    if not refused:
        return
    if all(change.key.startswith("stages.") and change.key.endswith(".steps") for change in refused):
        head = f"{path} holds this very experiment with another length"
        advice = "set these back to continue that run: its schedule and results depend on them"
    else:
        head, advice = f"{path} holds the run of another config", "these settings differ"
    lines = [f"{head}; {advice} (there -> here):"]
    lines += [f"  {change}" for change in refused[:_MAX_CHANGES_SHOWN]]
    if len(refused) > _MAX_CHANGES_SHOWN:
        lines.append(f"  and {len(refused) - _MAX_CHANGES_SHOWN} more")
    lines.append("set them back, choose another directory with run.dir=... or --run-dir, or delete this one")
    raise UserError("\n".join(lines))


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
