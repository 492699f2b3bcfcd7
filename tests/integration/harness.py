"""A complete experiment of seconds for the end-to-end tests, and ways to run it."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fork_server import ONE_THREAD, Forked, run_forked
from json_lines import read_json_lines
from PIL import Image
from waiting import PATIENCE_S, wait_for

TINY = {
    "vision": {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16},
    "language": dict(num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=32, vocab_size=320),
}
"""A real Qwen-VL class of some 30,000 parameters."""


class Done(NamedTuple):
    """How a command ended. `output` is standard output, `errors` standard error."""

    code: int
    output: str
    errors: str


Command = Callable[..., Done]


def succeed(done: Done) -> Done:
    """Return how a command ended, whose exit code must be 0."""
    assert done.code == 0, done
    return done


def refuse(done: Done, *words: str) -> Done:
    """Return how a command ended, whose exit code must be 2 and whose errors must hold these words."""
    assert done.code == 2, done
    for word in words:
        assert word in done.errors, done
    return done


def counting(split: str, size: int, **options: object) -> dict[str, Any]:
    """Return a source of counting questions."""
    return {
        "fn": "mmrl_datasets.generators.scenes:counting",
        "args": {"split": split, "size": size, "image_px": 32, **options},
    }


def jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "rows", **columns: str) -> dict[str, Any]:
    """Return a source of counting questions in NAME.jsonl; each row gets a picture unless it has one."""
    for number, row in enumerate(rows):
        if "picture" not in row:
            row["picture"] = f"{number}.png"
            Image.new("RGB", (32, 32), (8 * number, 99, 99)).save(folder / row["picture"])
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    roles = {"id": "id", "images": "picture", "question": "question", "answer": "count", **columns}
    return {
        "fn": "mmrl_datasets.readers.table:rows",
        "args": {"path": f"{name}.jsonl", "columns": roles, "answer_type": "number", "task": "count"},
    }


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "question": "How many?", "count": number % 3} for number in range(count)]


def experiment(run_dir: Path, **sections: object) -> dict[str, Any]:
    """A config as a mapping: imitation until a gate, then GRPO with KL and two epochs. `sections` replace sections."""
    config: dict[str, Any] = {
        "run": {"name": "tiny", "dir": str(run_dir), "cpu_threads": 1},
        "logging": {"rollouts": {"every": 2}},
        "model": {"from_scratch": TINY, "dtype": "float32", "device": "cpu", "min_pixels": 1024, "max_pixels": 1024},
        "data": {
            "train": [counting("train", 12, label_miss_prob=0.2)],
            "validation": [counting("validation", 8)],
            "test": [counting("test", 6)],
        },
        "response_format": {"add_instruction": False},
        "rewards": {
            "terms": [{"fn": "mmrl_rewards.number:exact", "name": "count"}, {"fn": "mmrl_rewards.format:tags"}]
        },
        "evaluation": {"max_new_tokens": 6, "batch_size": 8},
        "checkpoints": {"every": 3, "keep_last": 2},
        "stages": [
            sft_stage(validation={"every": 4, "stop_at_mean_reward": 0.8}, optimizer=scheduled(1.5e-2, 24)),
            rl_stage(optimizer=scheduled(3e-3, 8)),
        ],
    }
    return deepcopy({**config, **sections})  # what a test changes in it must not reach the next one


def scheduled(lr: float, steps: int) -> dict[str, Any]:
    """An optimizer that makes each step unlike the others: warm-up, a cosine over `steps`, and weight decay.

    With a constant rate, a resumed run that begins its schedule again would end like one that was not disturbed.
    """
    rates = {"warmup_steps": 2, "lr_schedule": "cosine", "final_lr_frac": 0.1, "decay_steps": steps}
    return {"lr": lr, **rates, "weight_decay": 0.1}


def sft_stage(**options: object) -> dict[str, Any]:
    """A cold start of at most 24 steps."""
    return {"name": "cold", "kind": "sft", "steps": 24, "prompts_per_step": 6, "optimizer": {"lr": 1e-2}, **options}


def rl_stage(**options: object) -> dict[str, Any]:
    """Eight steps of GRPO that visibly move the weights."""
    sizes = {"steps": 8, "prompts_per_step": 4, "group_size": 4, "ppo_epochs": 2}
    means = {"sampling": {"max_new_tokens": 6}, "loss": {"kl": {"coef": 0.05}}, "optimizer": {"lr": 3e-3}}
    return {"name": "rl", "kind": "rl", **sizes, **means, **options}


def write(config: Mapping[str, Any], path: Path) -> Path:
    """The config as a file; JSON is YAML."""
    path.write_text(json.dumps(config, indent=1))
    return path


def run_mmrl(
    *arguments: object,
    fault: Sequence[object] = (),
    cwd: Path | None = None,
    timeout: float = 1200.0,
    fresh: bool = False,
) -> Done:
    """Run `python -m mmrl ARGUMENTS` in another process; `fault` is what fault_injection.py takes before them.

    It is forked from a process that has the imports after it. `fresh` starts a new interpreter instead.
    """
    program = [Path(__file__).with_name("fault_injection.py"), *fault] if fault else ["-m", "mmrl"]
    command = [*map(str, program), *map(str, arguments)]
    if fresh:
        options = {"capture_output": True, "text": True, "timeout": timeout, "cwd": cwd}
        done = subprocess.run([sys.executable, *command], env={**os.environ, **ONE_THREAD}, **options)
    else:
        done = run_forked(*command, cwd=cwd, timeout=timeout)
    return Done(done.returncode, done.stdout, done.stderr)


def stop_in_rl(config: Path, nth: int) -> None:
    """Train until Ctrl-C arrives in the `nth` RL step of the process, which saves it and ends."""
    done = run_mmrl("train", config, fault=("mmrl.rollout.engine_sampler:EngineSampler.sync", nth, "SIGINT"))
    assert done.code == 128 + signal.SIGINT, done.errors
    assert f"Saved. Continue with: mmrl train {config}" in done.output
    assert not done.errors


def processes_in(folder: Path) -> list[int]:
    """Return the processes whose working directory is this folder, in the order in which they began."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                place = (entry / "cwd").readlink()
            except OSError:  # it has just ended
                continue
            if place == folder:
                found.append(int(entry.name))
    return sorted(found)


def train_and_signal(config: Path, run_dir: Path, which: signal.Signals, *, rank: int | None, lines: int = 8) -> Done:
    """Train with two ranks, and signal one of them, or the launcher, once metrics.jsonl has so many lines.

    They work in the folder of the config.
    """
    command = ["-m", "mmrl", "train", str(config), "--nproc", "2"]
    launcher = Forked(command, cwd=config.parent)
    written = run_dir / "metrics.jsonl"

    def is_due() -> bool:
        assert Path(f"/proc/{launcher.pid}").exists(), launcher.communicate(PATIENCE_S)
        return written.exists() and written.read_bytes().count(b"\n") >= lines

    wait_for(is_due)
    ranks = [pid for pid in processes_in(config.parent) if pid != launcher.pid]
    assert len(ranks) == 2
    os.kill(launcher.pid if rank is None else ranks[rank], which)
    output, errors = launcher.communicate(timeout=PATIENCE_S)
    return Done(launcher.returncode, output, errors)


def shared(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` has filled once for all processes of pytest-xdist: the first to ask fills it."""
    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent  # of all workers of this run
    folder, made = root / name, root / f"{name}.made"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, name: str, make_config: Callable[[Path], dict[str, Any]]
) -> Path:
    """Return the directory of a run that nobody disturbed, made once for all processes of pytest-xdist."""

    def run(folder: Path) -> None:
        succeed(run_mmrl("train", write(make_config(folder / "run"), folder / "tiny.yaml")))

    return shared(tmp_path_factory, name, run) / "run"


def reproducible_files(run_dir: Path) -> dict[str, bytes]:
    """Return the files of a finished run that its seed decides: weights, logs, summary and rollouts."""
    logs = [run_dir / name for name in ("metrics.jsonl", "events.jsonl", "summary.json")]
    files = [run_dir / "model" / "model.safetensors", *logs]
    rollouts = sorted((run_dir / "rollouts").iterdir())
    placeless = {file.name: re.sub(rb'"/[^"]*/data/', b'"data/', file.read_bytes()) for file in rollouts}
    return {file.name: file.read_bytes() for file in files} | placeless


def moved_parts(run_dir: Path, earlier: str, later: str) -> set[str]:
    """The first two words in the names of the weights that differ between two checkpoints, of any number of ranks."""
    from safetensors.torch import load_file

    saved = []
    for checkpoint in (earlier, later):
        files = (run_dir / "checkpoints" / checkpoint).glob("model*.safetensors")
        saved.append({name: weight for file in files for name, weight in load_file(file).items()})
    before, after = saved
    assert before.keys() == after.keys()
    return {".".join(name.split(".")[:2]) for name in before if not before[name].equal(after[name])}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return read_json_lines(run_dir / "metrics.jsonl")


def questions(folder: Path) -> Path:
    """Ten questions on ten pictures, as canonical JSONL."""
    folder.mkdir(exist_ok=True)
    rows = []
    for number in range(10):
        Image.new("RGB", (32, 32), (25 * number, 0, 0)).save(folder / f"{number}.png")
        row = {"id": f"q{number}", "images": f"{number}.png", "question": "How many red shapes?", "answer": number % 3}
        rows.append({**row, "answer_type": "count", "meta": {"parity": number % 2}})
    path = folder / "ten.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def check_metrics_alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Check that records are equal, numbers up to rounding.

    AdamW's first update has the sign of a gradient, however small, so gradients after the first step differ by more.
    """
    assert len(ours) == len(theirs)
    for here, there in zip(ours, theirs, strict=True):
        words = {key for key, value in there.items() if not isinstance(value, float)}
        assert {key: here[key] for key in words} == {key: there[key] for key in words}
        norms = {key for key in there.keys() - words if "grad_norm" in key and there["step"] > 1}
        for keys, tolerance in ((norms, 2e-2), (there.keys() - words - norms, 1e-3)):
            expected = pytest.approx({key: there[key] for key in keys}, rel=tolerance, abs=1e-5)
            assert {key: here[key] for key in keys} == expected


def check_records(run_dir: Path) -> list[dict[str, Any]]:
    """Check that the records of a run agree with each other; return the lines of its training steps.

    Segments spell the response, contributions add up to the total, and each token that was trained on has numbers.
    """
    lines: list[dict[str, Any]] = []
    for file in sorted((run_dir / "rollouts").glob("*-[0-9]*.jsonl")):
        if file.stem.endswith("-validation"):
            continue
        records = read_json_lines(file)
        with np.load(file.with_suffix(".npz"), allow_pickle=False) as arrays:
            tokens = dict(arrays)
        assert len(tokens["offset"]) == len(records) + 1
        for start, end, record in zip(tokens["offset"], tokens["offset"][1:], records, strict=False):
            check_record(record, {name: values[start:end] for name, values in tokens.items() if name != "offset"})
        lines += records
    assert lines
    return lines


def check_record(record: dict[str, Any], tokens: dict[str, np.ndarray]) -> None:
    """Check one line of records against the arrays of its tokens."""
    places = [segment["chars"] for segment in record["segments"]]
    assert places[0][0] == 0 and places[-1][1] == len(record["response"])
    assert all(before[1] == after[0] for before, after in pairwise(places))
    assert sum(segment["n"] for segment in record["segments"]) == record["tokens"] == len(tokens["end"])
    assert tokens["end"][-1] == len(record["response"])
    is_policy = tokens["author"] == 0
    assert np.isfinite(tokens["recorded_logprob"][is_policy]).all()
    assert np.isnan(tokens["logprob"][~is_policy]).all()
    if "terms" in record and record["selection"]["status"] != "replayed":
        shares = [term["contribution"] for term in record["terms"].values()]
        assert record["total"] == pytest.approx(sum(shares))
    is_trained = record.get("selection", {}).get("status") in ("trained", "replayed")
    if is_trained and record.get("advantage") and "dropped" not in record:
        for name in ("logprob", "ratio", "entropy", "advantage"):
            assert np.isfinite(tokens[name][is_policy]).all(), name
        assert set(tokens["clipped"][is_policy]) <= {0, 1, 2}
