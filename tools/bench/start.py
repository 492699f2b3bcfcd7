"""Cost of starting a run, from the command to the first stage, with the processes that it starts.

    python tools/bench/start.py                        # half a minute: the quickstart's data, all pictures drawn anew
    python tools/bench/start.py --rows 2000 20000      # rows with a 56-pixel picture each; what a row adds

With `--rows` each number of rows is started twice: with an empty index of files (cold) and again in another run
directory (warm). The cost of a row follows from the difference between the most and the fewest rows. Exits 1 when
the quickstart takes more than 15 s of CPU time, or a row more than 0.6 ms or 2 KB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from results import make_parser, write_results

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
MAX_START_S, MAX_ROW_MS, MAX_ROW_KB = 15.0, 0.6, 2.0
# Ends the run where its first stage would begin, and prints what the process and its children have used.
START_ONLY = """
import json, resource, sys
import mmrl.training.run as run
from mmrl.cli import main

def stop(*_):
    used = {}
    for name, who in (("self", resource.RUSAGE_SELF), ("children", resource.RUSAGE_CHILDREN)):
        usage = resource.getrusage(who)
        used[name] = usage.ru_utime + usage.ru_stime
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"cpu_s": sum(used.values()), "peak_mb": peak_kb / 1024}), file=sys.stderr)
    raise KeyboardInterrupt

run.run_sft_stage = run.run_rl_stage = stop
sys.exit(main(sys.argv[1:]))
"""
CONFIG = """
run: {name: start, cpu_threads: 1}
model: {from_scratch: {language: {hidden_size: 128}}, dtype: float32, min_pixels: 3136, max_pixels: 3136}
data:
  train:
    - fn: mmrl_datasets.readers.table:rows
      args: {path: rows.jsonl, answer_type: number, columns: {question: question, answer: answer, images: image}}
rewards: {terms: [{fn: "mmrl_rewards.number:exact"}]}
stages:
  - {name: rl, kind: rl, steps: 1, prompts_per_step: 4, optimizer: {lr: 1e-5}}
"""


def write_rows(folder: Path, count: int) -> Path:
    """Write a table of `count` questions with a picture each, and return the config of a run on them."""
    pictures = folder / "pictures"
    pictures.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lines = []
    for index in range(count):
        pixels = np.repeat(np.repeat(rng.integers(0, 256, (7, 7, 3), dtype=np.uint8), 8, axis=0), 8, axis=1)
        Image.fromarray(pixels).save(pictures / f"{index}.png", compress_level=1)
        row = {"image": f"pictures/{index}.png", "question": f"How many squares are in {index}?", "answer": index % 10}
        lines.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    return config


def measure_start(config: Path, run_dir: Path, cache: Path) -> dict[str, float]:
    """Start a run in a separate process; return its CPU seconds, its children's included, and its peak in MB."""
    program = run_dir.with_name("start_only.py")
    program.write_text(START_ONLY)
    done = subprocess.run(
        [sys.executable, str(program), "train", str(config), "--run-dir", str(run_dir)],
        capture_output=True,
        check=False,  # it ends as an interrupted run does
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)},
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith('{"cpu_s"')]
    if not lines:
        sys.exit(f"the run did not start:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    used: dict[str, float] = json.loads(lines[-1])
    return used


def measure_rows(counts: Sequence[int], folder: Path, numbers: dict[str, object]) -> bool:
    """Start runs on tables of these lengths, print a row for each, and return True if no row costs too much."""
    starts: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    print("| rows | index | CPU | peak |\n|---|---|---|---|")
    for count in sorted(counts):
        config = write_rows(folder / str(count), count)
        for index, found in starts.items():
            used = measure_start(config, folder / f"run-{count}-{index}", folder / f"cache-{count}")
            found.append(used)
            numbers[f"{count} rows, {index}"] = used
            print(f"| {count:,} | {index} | {used['cpu_s']:.1f} s | {used['peak_mb']:.0f} MB |")
    good, more_rows = True, max(counts) - min(counts)
    for index, found in starts.items():
        row_ms = 1e3 * (found[-1]["cpu_s"] - found[0]["cpu_s"]) / more_rows
        row_kb = 1024 * (found[-1]["peak_mb"] - found[0]["peak_mb"]) / more_rows
        numbers |= {f"row_ms, {index}": row_ms, f"row_kb, {index}": row_kb}
        print(f"{index}: {row_ms:.2f} ms of CPU and {row_kb:.1f} KB a row")
        good = good and row_ms <= MAX_ROW_MS and row_kb <= MAX_ROW_KB
    return good


def main() -> None:
    """Measure, print, judge."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs=2, metavar=("FEW", "MANY"), help="lengths of two made tables")
    arguments = parser.parse_args()
    numbers: dict[str, object] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.rows:
            good = measure_rows(arguments.rows, folder, numbers)
        else:
            used = measure_start(QUICKSTART, folder / "run", folder / "cache")
            numbers |= used
            print(f"quickstart: {used['cpu_s']:.1f} s of CPU, {used['peak_mb']:.0f} MB at most")
            good = used["cpu_s"] <= MAX_START_S
    write_results(arguments.json, "start", numbers)
    sys.exit(0 if good else "more than a start may cost")


if __name__ == "__main__":
    main()
