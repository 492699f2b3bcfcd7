"""Real runs of a few seconds to cause faults in, always in the same folder, and undisturbed ones to compare with."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple

from mmrl.checkpoint.verify_resume import find_differing_files
from mmrl.cli import main as mmrl_command

TINY_VISION = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16}
TINY_LANGUAGE = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
TINY_MODEL = {"vision": TINY_VISION, "language": {**TINY_LANGUAGE, "vocab_size": 400}}
DATASET_ARGS = {"split": "train", "size": 8, "image_px": 128, "digit_px": 12, "resized_px": 32}
DATASET = {"fn": "mmrl_datasets.generators.tiny_digits:corner_digits", "args": DATASET_ARGS}
ZOOM = {
    **{"kind": "tools", "max_media": 1, "max_turns": 1, "max_total_tokens": 512, "max_result_chars": 400},
    "tools": [{"fn": "mmrl.rollout.tools.builtin:zoom"}],
}
RETHINK = {
    **{"kind": "rethink", "correct": ["digit"], "fraction": 0.5, "max_new_tokens": 8},
    "triggers": [{"text": " Wait."}],
}
SFT_STAGE = {
    **{"name": "cold", "kind": "sft", "steps": 4, "prompts_per_step": 4, "target_field": "response"},
    **{"rollout_steps": [ZOOM], "optimizer": {"lr": 3e-4, "lr_schedule": "linear"}},
}
# Everything that a resumed run might do differently: a tool, rethinking, replay, KL, and a rate that decays.
RL_STAGE = {
    **{"name": "rl", "kind": "rl", "steps": 6, "prompts_per_step": 4, "group_size": 4},
    **{"rollout_steps": [{"kind": "generate"}, ZOOM, RETHINK], "sampling": {"max_new_tokens": 40}},
    **{"loss": {"kl": {"coef": 0.05}, "entropy": {"coef": 0.01}}},
    **{"replay": {"capacity": 64}},
    "optimizer": {"lr": 1e-3, "lr_schedule": "cosine", "warmup_steps": 2},
}
MODEL = {"dtype": "float32", "device": "cpu", "min_pixels": 1024, "max_pixels": 1024}
CONFIG = {
    "run": {"name": "faults", "cpu_threads": 1},
    "logging": {"rollouts": {"every": 3}},
    "data": {"train": [DATASET], "test": [{**DATASET, "args": {**DATASET_ARGS, "split": "test", "size": 2}}]},
    "rewards": {"terms": [{"fn": "mmrl_rewards.number:exact", "name": "digit"}]},
    "evaluation": {"max_new_tokens": 40, "rollout_steps": [{"kind": "generate"}, ZOOM]},
    "checkpoints": {"every": 1, "keep_last": 3},
    "stages": [SFT_STAGE, RL_STAGE],
}
MODULES_FILE = "modules"
FORK_CONTEXT = get_context("fork")
MAX_EXIT_S = 10.0
ASYNC_CHECKPOINTS = "checkpoints.async_save=true"


class FaultRow(NamedTuple):
    """One line of the table; `lost` lists everything that went wrong."""

    fault: str
    tried: str
    outcome: str
    problems: list[str]


@dataclass(slots=True)
class FaultHarness:
    """Runs configs in a folder at a fixed path, so that not even the path differs between runs."""

    folder: Path
    rng: random.Random
    num_kills: int
    undisturbed_runs: dict[tuple[str, ...], tuple[Path, float]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Return the directory of the run under test."""
        return self.folder / "run"

    @property
    def base_dir(self) -> Path:
        """Return the directory of the run that trained the model which all others begin with."""
        return self.folder / "base"

    @property
    def log_text(self) -> str:
        """Return the output of the last run."""
        return (self.folder / "log").read_text()

    def train_base_model(self) -> None:
        """Train the model that every run begins with, which calls the tool by itself."""
        cold = {**SFT_STAGE, "steps": 90, "prompts_per_step": 12, "optimizer": {"lr": 1e-2}}
        train = {**DATASET, "args": {**DATASET_ARGS, "size": 96}}
        config = {**CONFIG, "data": {"train": [train]}, "stages": [cold], "checkpoints": {"every": 1000}}
        model = {**MODEL, "from_scratch": TINY_MODEL}
        process = self._launch({**config, "model": model}, self.base_dir)
        if wait_for_exit(process):
            sys.exit(f"the model that the runs begin with could not be trained:\n{self.log_text}")
        import_modules((self.folder / MODULES_FILE).read_text().splitlines())

    def start(self, *overrides: str, prepare: Callable[[], None] | None = None) -> ForkProcess:
        """Begin or continue the run in a separate process."""
        model = {**MODEL, "path": str(self.base_dir / "model")}
        return self._launch({**CONFIG, "model": model}, self.run_dir, *overrides, prepare=prepare)

    def _launch(
        self, config: Mapping[str, object], run_dir: Path, *overrides: str, prepare: Callable[[], None] | None = None
    ) -> ForkProcess:
        path = self.folder / "faults.yaml"
        path.write_text(json.dumps(config))
        arguments = ["train", str(path), *overrides, "--run-dir", str(run_dir)]
        process = FORK_CONTEXT.Process(target=run_child, args=(self.folder / "log", arguments, prepare))
        process.start()
        return process

    def run_to_end(self, *overrides: str, prepare: Callable[[], None] | None = None) -> int:
        """Run until it ends; returns the exit code."""
        return wait_for_exit(self.start(*overrides, prepare=prepare))

    def random_moment(self, *overrides: str) -> float:
        """Return a random moment of a run, in seconds from its start."""
        return self.rng.uniform(0.0, self.undisturbed_run(*overrides)[1])

    def undisturbed_run(self, *overrides: str) -> tuple[Path, float]:
        """Return the directory of an undisturbed run, and the seconds that it took."""
        if overrides not in self.undisturbed_runs:
            start = time.perf_counter()
            if self.run_to_end(*overrides):
                sys.exit(f"the undisturbed run failed:\n{self.log_text}")
            took = time.perf_counter() - start
            folder = self.run_dir.rename(self.folder / f"whole{len(self.undisturbed_runs)}")
            self.undisturbed_runs[overrides] = (folder, took)
        return self.undisturbed_runs[overrides]

    def finish_and_compare(self, *overrides: str) -> list[str]:
        """Resume the run to its end, compare it with an undisturbed one, and clean up; returns what is lost."""
        whole, _ = self.undisturbed_run(*overrides)  # made before, because it runs in the same folder
        code = self.run_to_end(*overrides)
        lost = [f"ended with {code}: {self.log_text[-300:]}"] if code else find_differing_files(whole, self.run_dir)
        shutil.rmtree(self.run_dir, ignore_errors=True)
        return lost

    def run_and_check(self, *overrides: str, words: str, prepare: Callable[[], None] | None = None) -> list[str]:
        """Run until it is refused with exit code 2 and these words; otherwise return what is wrong."""
        code = self.run_to_end(*overrides, prepare=prepare)
        is_refused = code == 2 and words in self.log_text
        return [] if is_refused else [f"ended with {code}: {self.log_text[-300:]}"]

    def restore_half_run(self) -> Path:
        """Put a copy of a run that was killed half-way, with its checkpoints, in the place of the run under test."""
        kept = self.folder / "half"
        if not kept.exists():
            self.undisturbed_run()
            process = self.start()
            while not (self.run_dir / "checkpoints" / "01-000003").exists():
                time.sleep(0.001)
            process.kill()
            wait_for_exit(process)
            self.run_dir.rename(kept)
        return Path(shutil.copytree(kept, self.run_dir))


def import_modules(names: Sequence[str]) -> None:
    """Import what an earlier run imported: the runs, which are forked from this process, then need not."""
    for name in names:
        # Some have no file, and were created while another was imported.
        with suppress(Exception):
            importlib.import_module(name)


def run_child(log: Path, arguments: list[str], prepare: Callable[[], None] | None) -> None:
    """Run `mmrl` with these arguments in this process, with its output in a log file, and list what was imported."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if prepare is not None:
        prepare()
    code = mmrl_command(arguments)
    modules = log.with_name(MODULES_FILE)
    if not modules.exists():  # once: some faults let no file grow
        modules.write_text("\n".join(sys.modules))
    sys.exit(code)


def is_saving(run_dir: Path) -> bool:
    """Return True while a checkpoint or export is half-written."""
    return any(run_dir.glob(".*.partial")) or any(run_dir.glob("checkpoints/.*.partial"))


def wait_for_exit(process: ForkProcess) -> int:
    """Wait for a process; returns its exit code, negative for a signal."""
    process.join()
    code = process.exitcode
    assert code is not None
    return code
