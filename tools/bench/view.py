"""CPU seconds that `mmrl view` takes to show a run with many kept rollouts, live and as a folder; the folder's size.

python tools/bench/view.py --rollouts 10000 --tokens 1000

The run is made: groups of 8 rollouts, each group with a picture of its own, each rollout with its tokens.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image
from results import make_parser, write_results

GROUP_SIZE = 8
GROUPS_PER_STEP = 32
PICTURE_SIZE = (336, 252)
WORDS = ("the", "cat", "sits", "left", "of", "a", "box", "which", "is", "red", "so", "answer", "follows", "here")


def main() -> None:
    """Make a run, open its live page, write its page twice, and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a rollout")
    arguments = parser.parse_args()
    numbers = {}
    with tempfile.TemporaryDirectory(prefix="mmrl-bench-view-") as folder:
        run = Path(folder) / "run"
        make_run(run, arguments.rollouts, arguments.tokens)
        numbers |= {"live page, CPU s": measure_live(run, 0), "live page and a picture, CPU s": measure_live(run, 1)}
        for name, options in (("page", []), ("page without media", ["--no-media"])):
            numbers |= measure(run, Path(folder) / name, name, options)
    print(f"{arguments.rollouts} rollouts of {arguments.tokens} tokens")
    for name, value in numbers.items():
        print(f"{name}: {value:.1f}")
    write_results(arguments.json, "view", numbers)


def measure_live(run: Path, num_pictures: int) -> float:
    """Return CPU seconds until the live page has its first view, with this number of pictures."""
    before = cpu_seconds()
    command = [sys.executable, "-m", "mmrl", "view", str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address, _, token = server.stdout.readline().split()[1].partition("/?")

        def read(name: str) -> bytes:
            with urllib.request.urlopen(f"{address}/{name}?{token}") as response:
                content: bytes = response.read()
            return content

        entry = json.loads(read("data/index.json"))["runs"][0]
        read("data/r0/metrics.json")
        step = json.loads(read(f"data/{entry['steps'][-1]['key']}.json"))
        for group in step["groups"][:num_pictures]:
            read(group["media"][0]["frames"][0]["src"])
        server.terminate()
    return cpu_seconds() - before


def cpu_seconds() -> float:
    """Return CPU seconds of all commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(run: Path, out: Path, name: str, options: list[str]) -> dict[str, float]:
    """Return seconds, memory and size of one export."""
    before, start = cpu_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "mmrl", "view", str(run), "--out", str(out), *options], check=True)
    num_bytes = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    numbers = {"CPU s": cpu_seconds() - before, "s": time.perf_counter() - start, "MB": num_bytes / 1e6}
    # The largest of all children so far.
    numbers["memory, MB"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    return {f"{name}, {key}": value for key, value in numbers.items()}


def make_run(run: Path, num_rollouts: int, num_tokens: int) -> None:
    """Write a run with its rollouts in steps of 32 groups."""
    rng = np.random.default_rng(0)
    (run / "rollouts").mkdir(parents=True)
    (run / "data").mkdir()
    (run / "manifest.json").write_text(json.dumps({"records": 2}))
    (run / "config.yaml").write_text("stages:\n  - {name: rl, kind: rl, steps: 1000}\n")
    per_step = GROUP_SIZE * GROUPS_PER_STEP
    for step in range(-(-num_rollouts // per_step)):
        count = min(per_step, num_rollouts - step * per_step)
        lines = [json.dumps(make_row(run, rng, step, index, num_tokens)) for index in range(count)]
        path = run / "rollouts" / f"rl-{step:06d}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        write_tokens(path.with_suffix(".npz"), rng, count, num_tokens)


def make_row(run: Path, rng: np.random.Generator, step: int, index: int, num_tokens: int) -> dict[str, object]:
    """Return the line of a rollout; the first of a group writes its picture."""
    group, rollout = divmod(index, GROUP_SIZE)
    picture = run / "data" / f"{step}-{group}.png"
    if not rollout:
        coarse = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(PICTURE_SIZE, Image.Resampling.BICUBIC).save(picture)
    response = " ".join(rng.choice(WORDS, num_tokens))
    sizes = {"original": PICTURE_SIZE, "resized": PICTURE_SIZE, "offset": (0, 0)}
    sha256 = hashlib.sha256(picture.read_bytes()).hexdigest()
    medium = {"kind": "image", "path": f"data/{picture.name}", "sha256": sha256, **sizes}
    term = {"value": 0.5, "reason": "IoU 0.5", "transformed": 0.5, "weight": 1.0, "counts": True, "contribution": 0.5}
    return {
        **{"stage": "rl", "step": step, "group": group, "sample": f"s{step}-{group}", "task": "find"},
        **{"rollout": rollout, "question": "<image>Where?", "prompt": "⟨image: 108 tokens⟩Where?"},
        **{"response": response, "thinking": None, "answer": [10, 20, 60, 40], "answer_text": response[-20:]},
        **{"answer_type": "box", "target": [10, 20, 70, 50], "target_frame": "px_original", "frame": "px_resized"},
        **{"media_index": 0, "media": [medium], "finish": "eos", "tokens": num_tokens, "version": step},
        "segments": [{"author": "policy", "n": num_tokens, "chars": [0, len(response)], "version": step}],
        **{"terms": {"iou": term, "format": term}, "total": 1.0, "advantage": float(rng.normal())},
        "selection": {"status": "trained", "reason": None, "carried_over": False, "staleness": 0},
    }


def write_tokens(path: Path, rng: np.random.Generator, count: int, num_tokens: int) -> None:
    """Write the numbers of all tokens of a step."""
    total = count * num_tokens
    columns = {}
    for name in ("recorded_logprob", "logprob", "ratio", "entropy", "advantage"):
        columns[name] = rng.normal(size=total).astype(np.float32)
    np.savez_compressed(
        path,
        offset=np.arange(count + 1, dtype=np.int64) * num_tokens,
        token_id=rng.integers(0, 150_000, total, dtype=np.int32),
        end=np.tile(4 * np.arange(1, num_tokens + 1, dtype=np.int32), count),
        author=np.zeros(total, dtype=np.uint8),
        clipped=np.zeros(total, dtype=np.int8),
        **columns,
    )


if __name__ == "__main__":
    main()
