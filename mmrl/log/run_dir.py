"""The run directory: it holds everything of a run, and belongs to one config."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import mmrl
from mmrl.config import Config, SettingChange, diff_configs, dump_yaml, load_config, read_flat_settings
from mmrl.log.rollout_records import RECORDS_VERSION
from mmrl.types import UserError
from mmrl.utils.digests import text_digest
from mmrl.utils.files import (
    PARTIAL_SUFFIX,
    remove_leftovers,
    replace_nonfinite,
    report_write_errors,
    temporary_path,
    write_atomically,
)
from mmrl.utils.libraries import LIBRARIES, installed_version
from mmrl.utils.messages import first_lines

EXPORTED_CONFIG_FILE = "mmrl.yaml"
"""File of an exported folder with the config of its run, so that `mmrl eval` prompts and parses as training did."""
_MAX_CHANGES_SHOWN: Final = 12
_OTHER_DIRECTORY = "choose another directory with run.dir=... or --run-dir, or delete this one"
_LOCK_WAIT_S: Final = 3.0
_GIT_TIMEOUT_S: Final = 10.0  # git may hang on a network file system


class RunDir:
    """Paths inside a run directory, and locks that give one config and one process exclusive use of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # the resolved config, every setting with its value
        self.metrics = path / "metrics.jsonl"  # reproducible metrics, one JSON line for each step and evaluation
        self.timings = path / "timings.jsonl"  # wall-clock times, one JSON line for each step, repeated steps included
        self.events = path / "events.jsonl"  # problems of the run's health, a JSON line where each begins and ends
        self.status = path / "status.json"  # stage and step that the run is in, renewed every few seconds
        self.log = path / "log.txt"  # warnings and errors of libraries, each once
        self.manifest = path / "manifest.json"  # versions, git commit, platform, and digests of config and data
        self.summary = path / "summary.json"  # held-out rewards before and after, as JSON
        self.rollouts = path / "rollouts"  # records of the rollouts of some steps, and of held-out samples
        self.checkpoints = path / "checkpoints"  # checkpoints, a folder for each
        self.data = path / "data"  # files that datasets generated or downloaded
        self.outputs = path / "outputs"  # tables of `sample`, `select` and `rl` stages
        self.data_record = path / "data_digests.json"  # digests of every row and medium that the run began with
        self.processor = path / "processor"  # processor and config of a model made from scratch, which no hub has
        self.reference_weights = path / "reference_weights"  # weights of fixed KL references, a folder for each stage
        self.engine = path / "engine"  # for a rollout engine in another process: model, current adapter, log
        self.benchmarks = path / "benchmarks"  # results: a folder for each benchmark, in it one for each evaluation
        self.trackers = path / "trackers"  # what each tracker has received, and what trackers write on this machine
        self.tensorboard = path / "tensorboard"  # event files of TensorBoard
        self.adapter = path / "adapter"  # only the final LoRA adapter, in peft's format, if the run trains one
        self.model = path / "model"  # the final Hugging Face folder, written last: a run that has it is finished
        self._changed: Sequence[SettingChange] = ()  # settings that a begun run changes when it continues

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
            _wait_for_lock(lock, self.path)
            yield
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
            if self._has_begun():
                self._accept_changes(config)
                return self.is_finished()
            if not self.config.exists():
                self._refuse_files(self._list_files())
        return False

    def claim(self, config: Config, notify: Callable[[str], None]) -> bool:
        """Make this the directory of a run of `config`; return True if the run has begun in it.

        `notify` receives a line for each setting that a begun run changes. Its config.yaml stays until `reopen`.

        Raises:
            UserError: it holds the run of another config, one that ended and lost its checkpoints, or files that belong
                to no run; or it cannot be made.
        """
        with report_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            foreign_files = self._list_files()
        if self._has_begun():
            self._accept_changes(config)
            if not self.is_finished():
                for change in self._changed:
                    notify(f"This run continues with {change} ({change.effect}).")
            return True
        if self.config.exists():
            # A run without a checkpoint or an export has nothing to resume from and nothing to lose.
            foreign_files = self._remove_run_files()
        self._refuse_files(foreign_files)
        write_atomically(self.config, dump_yaml(config))
        return False

    @contextmanager
    def remove_on_error(self, *, keep: bool) -> Iterator[None]:
        """Remove the directory if this block raises, unless `keep` says that a run has begun in it."""
        try:
            yield
        except BaseException:
            if not keep:
                shutil.rmtree(self.path)
            raise

    def is_finished(self) -> bool:
        """Return True if the model is exported and the current config does not lengthen any stage."""
        return self.model.exists() and all(change.lengthened_stage is None for change in self._changed)

    def find_lengthened_stage(self) -> int | None:
        """Return the index of the first stage that has more steps than the run had, or None if none was lengthened."""
        stages = [change.lengthened_stage for change in self._changed]
        return min((stage for stage in stages if stage is not None), default=None)

    def reopen(self, config: Config) -> None:
        """Write the changed settings of a begun run, and remove its exports; the end of the run writes them again."""
        if not self._changed:
            return
        with report_write_errors(self.path):
            remove_leftovers(self.path)
            for folder in (self.model, self.adapter):
                # Renamed first: a folder that is half deleted would still look like a finished run.
                if folder.exists():
                    shutil.rmtree(folder.rename(temporary_path(folder)))
            self.summary.unlink(missing_ok=True)
        write_atomically(self.config, dump_yaml(config))

    def _accept_changes(self, config: Config) -> None:
        """Keep the settings that differ from the run's; raise a UserError if it cannot continue with them."""
        self._changed = diff_configs(read_flat_settings(self.config), config)
        check_same_run(self.path, self._changed)
        if not self._has_checkpoint() and not self.is_finished():
            raise UserError(
                f"{self.path} holds the result of a run but none of its checkpoints, so the run cannot continue; "
                f"{_OTHER_DIRECTORY}"
            )
        self._check_stages_can_grow(len(config.stages))

    def _check_stages_can_grow(self, num_stages: int) -> None:
        """Raise a UserError if a stage that is over got more steps, unless it is the last and has a checkpoint."""
        begun = [int(folder.name.partition("-")[0]) for folder in self.checkpoints.glob("[0-9]*-[0-9]*")]
        for change in self._changed:
            index = change.lengthened_stage
            if index is None or index >= max(begun, default=0):
                continue
            problem = "later stages have trained on from its weights"
            if index == num_stages - 1:
                if index in begun:
                    continue
                problem = "none of its checkpoints is left to continue from (checkpoints.keep_last)"
            raise UserError(f"{self.path}: {change}: this stage is over, and {problem}; {_describe_new_run(self.path)}")

    def write_manifest(
        self, config: Config, base_dir: Path, data: Mapping[str, str], data_differences: Sequence[str] = ()
    ) -> None:
        """Write manifest.json; `data` maps each split to the digest of its samples.

        Relative paths of the config start from `base_dir`. `data_differences` describe how the data differ from the
        data that the run began with; they are added to the differences of earlier starts.
        """
        changes = json.loads(self.manifest.read_text()).get("data_changes", []) if self.manifest.exists() else []
        noticed = datetime.now(UTC).isoformat(timespec="seconds")
        if data_differences:
            listed = list(data_differences[:_MAX_CHANGES_SHOWN])
            changes.append({"noticed": noticed, "count": len(data_differences), "differences": listed})
        libraries = {name: installed_version(name) or None for name in LIBRARIES}
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
            "created": noticed,
            "records": RECORDS_VERSION,
            "config_folder": str(base_dir.absolute()),
            "config_sha256": text_digest(dump_yaml(config)),
            "data": dict(data),
            "data_changes": changes,
        }
        write_atomically(self.manifest, json.dumps(manifest, indent=2) + "\n")

    def find_config_folder(self) -> Path:
        """Return the folder that relative paths of the run's config start from; if it is gone, the current one."""
        if self.config.is_file() and self.manifest.is_file():
            folder = Path(json.loads(self.manifest.read_text()).get("config_folder", ""))
            if folder.is_dir():
                return folder.absolute()
        return Path.cwd()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; values that are not finite become null."""
        write_atomically(self.summary, json.dumps(replace_nonfinite(summary), indent=2, allow_nan=False) + "\n")

    def _has_begun(self) -> bool:
        # The user may have deleted the checkpoints of a finished run, and must not lose its model with them.
        results = self._has_checkpoint() or self.model.exists() or self.adapter.exists()
        return self.config.exists() and results

    def _has_checkpoint(self) -> bool:
        # A partial folder is what a kill inside the first save leaves; a retired one becomes a checkpoint again.
        names = [entry.name for entry in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return any(not name.endswith(PARTIAL_SUFFIX) for name in names)

    def _list_files(self) -> list[str]:
        return sorted({entry.name for entry in self.path.iterdir()} - {temporary_path(self.config).name})

    def _refuse_files(self, names: Sequence[str]) -> None:
        """Refuse to begin a run among files that belong to no run."""
        if names:
            raise UserError(
                f"{self.path} holds {names[0]!r} but is not an mmrl run directory; choose an empty or new one "
                "with run.dir=... or --run-dir"
            )

    def _remove_run_files(self) -> list[str]:
        """Remove the files of a run; return the names of what is left."""
        with report_write_errors(self.path):
            named = [path for path in vars(self).values() if isinstance(path, Path) and path != self.path]
            # Earlier versions kept the index of files in the last of these.
            for path in (*named, self.path / "opened_media.json"):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
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
    is_length = all(change.obstacle for change in refused)
    if is_length:
        head = f"{path} holds this experiment with another length; it cannot continue with"
    else:
        _check_version(path)
        head = f"{path} holds the run of another config; these settings differ"
    lines = [f"{head} (there -> here):"]
    lines += first_lines(list(map(str, refused)), _MAX_CHANGES_SHOWN)
    lines.append(f"set them back, or {_describe_new_run(path)}" if is_length else f"set them back, {_OTHER_DIRECTORY}")
    raise UserError("\n".join(lines))


def _check_version(path: Path) -> None:
    """Raise a UserError if the config of the run or checkpoint in a folder has keys of another version of mmrl."""
    try:
        load_config(path / "config.yaml")
    except UserError as error:
        lines = [f"{path} holds a run of another version of mmrl; this one cannot read its config:"]
        lines += first_lines(str(error).splitlines())
        lines.append(f"continue the run with the version that began it, or {_OTHER_DIRECTORY}")
        raise UserError("\n".join(lines)) from None


def _wait_for_lock(lock: int, path: Path) -> None:
    """Take the lock of the open directory `path`.

    The system releases a lock when its process ends, even by a kill. It frees the memory of the process first, so a
    run started right after a kill has to wait for a moment.

    Raises:
        UserError: another process still holds it after `_LOCK_WAIT_S` seconds.
    """
    until = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                problem = f"{path}: another process is running here; wait for it or choose another run.dir"
                raise UserError(problem) from None
        time.sleep(0.05)


def _describe_new_run(path: Path) -> str:
    """Return the command that starts a new run from the weights of the run in a directory."""
    model, prefix = path / "model", "start a new run from its model:"
    if not model.exists():
        model, prefix = Path("DIR"), f"start a new run from its weights: mmrl export {path} --out DIR, then"
    return f"{prefix} mmrl train CONFIG model.path={model} model.from_scratch=null run.dir=NEW"


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S)
    except (FileNotFoundError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
