"""Seconds of a step with asynchronous rollouts, compared with a step that generates before it learns.

    python tools/bench/async_rollouts.py                 # a vLLM server
    python tools/bench/async_rollouts.py --engine hf       # a copy of the model in a thread

GRPO on counting questions with a from-scratch Qwen2.5-VL, `--rounds` of each arm in turn, a thread for the learner and
a thread for the server. Seconds are wall-clock, from `timings.jsonl`, medians over all steps but each run's first two.
`bound` is the ratio that perfect overlap would reach: a step's seconds, divided by the same without the shorter of
generating and learning. If cores are shared with other work or by learner and server, ratios come out lower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from results import make_parser, write_results

SKIPPED_STEPS = 2
PHASES = ("prompt", "rollout", "score", "select", "learn")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engine", choices=["vllm_server", "hf"], default="vllm_server")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    asked = parser.parse_args()
    steps: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for _ in range(asked.rounds):
        for overlap in steps:
            steps[overlap] += run_training(asked, async_rollouts=overlap)
    load = os.getloadavg()[0]
    waits, overlaps = _phase_medians(steps[False]), _phase_medians(steps[True])
    alone, together = _median_step(steps[False]), _median_step(steps[True])
    bound = alone / (alone - min(waits["rollout"], waits["learn"]))
    seconds = {"waits": {"step": alone, **waits}, "overlaps": {"step": together, **overlaps}}
    numbers = {"seconds": seconds, "ratio": alone / together, "bound": bound, "cores": os.cpu_count(), "load": load}
    print(json.dumps(numbers, indent=1))
    write_results(asked.json, "async_rollouts", numbers)


def run_training(arguments: argparse.Namespace, *, async_rollouts: bool) -> list[dict[str, float]]:
    """Train, and return the seconds of each part of each step."""
    with TemporaryDirectory() as folder:
        config = Path(folder) / "bench.json"
        config.write_text(json.dumps(make_config(arguments, Path(folder) / "run", async_rollouts=async_rollouts)))
        command = [sys.executable, "-m", "mmrl", "train", str(config)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        lines = (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "time/learn_s" in record]
    timed_steps = []
    for step in steps[SKIPPED_STEPS:-1]:  # the last draws nothing
        timed_steps.append({verb: step[f"time/{verb}_s"] for verb in PHASES})
    return timed_steps


def _phase_medians(steps: list[dict[str, float]]) -> dict[str, float]:
    return {verb: median(map(itemgetter(verb), steps)) for verb in PHASES}


def _median_step(steps: list[dict[str, float]]) -> float:
    return median(sum(step.values()) for step in steps)


def make_config(arguments: argparse.Namespace, run_dir: Path, *, async_rollouts: bool) -> dict[str, Any]:
    """Return a config whose rollouts are long enough to take about as much time as learning."""
    stage = {
        "name": "rl",
        "kind": "rl",
        "steps": arguments.steps,
        "prompts_per_step": arguments.prompts,
        "async_rollouts": async_rollouts,
        "max_steps_without_signal": arguments.steps + 1,
        "loss": {"entropy": {"coef": 0.01}},  # the policy learns from every rollout, whatever it earns
        "sampling": {"max_new_tokens": arguments.tokens},
    }
    data = {"fn": "mmrl_datasets.generators.scenes:counting", "args": {"split": "train", "size": 64}}
    scratch = {
        "vision": {"hidden_size": 64, "num_heads": 2, "intermediate_size": 128},
        "language": {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 1024, "num_layers": 4},
    }
    return {
        "run": {"name": "bench", "dir": str(run_dir), "cpu_threads": 1},
        "model": {"from_scratch": scratch, "dtype": "float32", "device": "cpu"},
        "data": {"train": [data]},
        "response_format": {"add_instruction": False},
        "rewards": {"terms": [{"fn": "mmrl_rewards.number:exact", "name": "count"}]},
        "rollout": {"engine": arguments.engine, "vllm": {"cpu_kv_cache_mib": 256}},
        "stages": [stage],
    }


if __name__ == "__main__":
    main()
