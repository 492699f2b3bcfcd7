"""Train small configs and write digests of all that they leave, to show that a change of the code changed no byte.

    python tools/dev/golden_runs.py --out base.json                      # all runs with this checkout
    python tools/dev/golden_runs.py tools zero3 --compare base.json      # two of them; exit code 1 if they differ
    python tools/dev/golden_runs.py --repo ../other --out other.json     # all runs with another checkout

The configs are in `tools/dev/golden/`. With `--repo` those of the other checkout are used if it has any, since its keys
may have other names. Digests can be compared on one machine only: another CPU rounds in another way.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
CONFIGS = "tools/dev/golden"
# After so few steps of imitation no answer is right; the entropy bonus moves the weights all the same.
QUICKSTART = ("stages.rl.max_steps_without_signal=100", "stages.rl.loss.entropy.coef=0.02", "--steps", "20")
QUICKSTART_SIZES = tuple(f"data.{split}.{index}.args.size=64" for split in ("train", "test") for index in range(3))
# Config, relative to the checkout, and the arguments of `mmrl train` after it.
RUNS = {
    "quickstart": ("configs/quickstart.yaml", *QUICKSTART, *QUICKSTART_SIZES),
    "rethink_replay": (f"{CONFIGS}/rethink_replay.yaml",),
    "async": (f"{CONFIGS}/async.yaml",),
    "partial": (f"{CONFIGS}/partial.yaml",),
    "tools": (f"{CONFIGS}/tools.yaml",),
    "zero2": (f"{CONFIGS}/ranks.yaml", "deepspeed.zero_stage=2", "--nproc", "2"),
    "zero3": (f"{CONFIGS}/ranks.yaml", "deepspeed.zero_stage=3", "--nproc", "2"),
    "lora_vllm": (f"{CONFIGS}/lora_vllm.yaml",),
    "qwen3_5": (f"{CONFIGS}/qwen3_5.yaml",),
}


def train(name: str, repo: Path, run_dir: Path) -> None:
    """Make a run of `RUNS` with the code of the checkout `repo`, in another process. Ends this one if it fails."""
    config, *arguments = RUNS[name]
    path = next(tree / config for tree in (repo, ROOT) if (tree / config).exists())
    packages = f"{repo}:{repo / 'rewards'}:{repo / 'datasets'}"
    environment = {**os.environ, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mmrl", "train", str(path), "--run-dir", str(run_dir), *arguments]
    done = subprocess.run(command, cwd=run_dir.parent, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}:\n{(done.stdout + done.stderr)[-6000:]}")


def digest_run(run_dir: Path) -> dict[str, str]:
    """Return name → digest of all that a finished run left and that its config and seed decide."""
    metrics = read_text(run_dir / "metrics.jsonl", run_dir)
    rollouts = "".join(read_text(path, run_dir) for path in sorted((run_dir / "rollouts").glob("*.jsonl")))
    digests = digest_lines("metrics", metrics) | digest_lines("rollouts", rollouts)
    for folder in ("model", "adapter"):
        if (run_dir / folder).exists():
            digests[f"{folder} weights"] = digest_weights(run_dir / folder)
    for checkpoint in sorted((run_dir / "checkpoints").iterdir()):
        digests |= digest_checkpoint(checkpoint, run_dir)
    return digests


def digest_checkpoint(folder: Path, run_dir: Path) -> dict[str, str]:
    """Return digests of the weights, the optimizer's tensors and each field of the state."""
    digests = {"weights": digest_weights(folder)}
    optimizer = [torch.load(path, weights_only=True) for path in sorted(folder.glob("optimizer*.pt"))]
    digests["optimizer"] = digest(iter_values(optimizer))
    saved = json.loads(read_text(folder / "state.json", run_dir))
    for name, value in resolve(saved["$value"], saved["$objects"]).items():
        if name != "metrics_bytes":  # it changes with the name of a metric
            digests[f"state {name}"] = digest([json.dumps(value)])
            digests[f"state {name} (values)"] = digest(iter_values(value))
    return {f"checkpoint {folder.name} {name}": value for name, value in digests.items()}


def resolve(value: Any, objects: list[Any]) -> Any:
    """Return a value of a state without the names of its types, and with objects in place of references to them."""
    if isinstance(value, list):
        return [resolve(inner, objects) for inner in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return resolve(objects[value["$ref"]], objects)
    if len(value) == 1 and next(iter(value)).startswith("$"):
        return resolve(next(iter(value.values())), objects)
    return {key: resolve(inner, objects) for key, inner in value.items()}


def digest_lines(name: str, text: str) -> dict[str, str]:
    """Return digests of JSON lines: of all, and for each key of its values and the numbers of their lines."""
    values: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines()):
        for key, value in json.loads(line).items():
            values.setdefault(key, []).append(f"{number} {json.dumps(value)}")
    digests = {name: digest([text])}
    for key, lines in values.items():
        digests[f"{name} {key}"] = digest(lines)
    return digests


def digest_weights(folder: Path) -> str:
    """Return a digest of the weights in all safetensors files of a folder, without their metadata."""
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return digest([*sorted(weights), *iter_values([weights[name] for name in sorted(weights)])])


def iter_values(value: Any) -> Iterable[str | bytes]:
    """Yield the leaves of nested lists and mappings, without the keys; tensors as dtype, shape and bytes."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from iter_values(inner)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        yield value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        yield repr(value)


def read_text(path: Path, run_dir: Path) -> str:
    """Return a file with the path of the run left out."""
    return re.sub(rf"{re.escape(str(run_dir))}\b", "RUN", path.read_text())


def digest(parts: Iterable[str | bytes]) -> str:
    """Return the first 16 digits of the sha256 of `parts`, each with its length."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(f"{len(data)} ".encode() + data)
    return hashed.hexdigest()[:16]


def compare(base: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a line for each difference; differences only in names begin with `renamed`."""
    gone = [name for name in base if name not in new]
    added = [name for name in new if name not in base]
    changed = [name for name in base if name in new and base[name] != new[name]]
    lines = []
    for name in list(gone):
        same = [other for other in added if new[other] == base[name] and other.split()[0] == name.split()[0]]
        if same:
            lines.append(f"renamed {name} to {same[0]}")
            gone.remove(name)
            added.remove(same[0])
    for name in list(changed):
        # Files differ where a key of theirs was renamed; their keys are compared one by one.
        keys_renamed = any(line.startswith(f"renamed {name} ") for line in lines)
        if keys_renamed or base.get(f"{name} (values)", "") == new.get(f"{name} (values)"):
            lines.append(f"renamed keys in {name}")
            changed.remove(name)
    lines += [f"changed {name}" for name in changed] + [f"missing {name}" for name in gone]
    return lines + [f"new {name}" for name in added]


def main() -> int:
    """Make the runs that were asked for, write their digests and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RUN", help=f"runs to make: {', '.join(RUNS)}; all by default")
    parser.add_argument("--repo", type=Path, default=ROOT, help="checkout whose code is run; this one by default")
    parser.add_argument("--out", type=Path, help="JSON file to write; runs that it already holds stay in it")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier call to compare with")
    parser.add_argument("--keep", type=Path, help="empty folder in which the run folders stay")
    options = parser.parse_args()
    if not set(options.names) <= RUNS.keys():
        parser.error(f"there is no such run as one of {', '.join(options.names)}; there is {', '.join(RUNS)}")
    base = json.loads(options.compare.read_text()) if options.compare else {}
    same = True
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.names or RUNS:
            run_dir, start = (options.keep or Path(temporary)).resolve() / name, time.monotonic()
            train(name, options.repo.resolve(), run_dir)
            made = {"seconds": round(time.monotonic() - start, 1), "digests": digest_run(run_dir)}
            print(f"{name}: {made['seconds']} s, {len(made['digests'])} digests", flush=True)
            if options.out:
                written = json.loads(options.out.read_text()) if options.out.exists() else {}
                options.out.write_text(json.dumps({**written, name: made}, indent=1))
            if options.compare:
                lines = compare(base[name]["digests"], made["digests"]) if name in base else ["new run"]
                same_run = all(line.startswith("renamed ") for line in lines)
                print(f"{name}: {'equal' if same_run else 'DIFFERENT'}", *lines, sep="\n    ", flush=True)
                same &= same_run
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
