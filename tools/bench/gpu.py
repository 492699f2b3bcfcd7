"""Checks mmrl on a GPU: exactness, vLLM, speed against TRL, and a run's memory and time against its plan.

    pip install -e '.[vllm,test]' trl flash-linear-attention
    python tools/bench/gpu.py --json gpu.json                # about half an hour on one H100
    python tools/bench/gpu.py --json gpu.json --part run     # one part, or some
    python tools/bench/gpu.py --json tiny.json --tiny        # exactness and a run without a GPU, on a tiny model

Models have random weights, in the shape of Qwen2.5-VL-3B, so no hub is asked. Every part is a process with a time
limit. The file is written again after each part, which keeps its results if a later part fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from learner_vs_trl import MODEL, MODEL_3B, write_models
from results import make_parser, write_results

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
# Half an hour together.
LIMITS_S = {"exactness": 480, "run": 300, "learner_vs_trl": 480, "rollouts": 240, "run with vLLM": 300}
STEPS = 3  # of a run; the first one compiles and is not counted
# Images of 900 tokens at 14 pixels a patch and four patches a token.
FULL = {"image_px": 840, "prompts_per_step": 8, "group_size": 8, "max_new_tokens": 256}
TINY = {"image_px": 56, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4}


def make_config(folder: Path, *, tiny: bool, vllm: bool) -> dict[str, Any]:
    """Return the config of a run: all language weights, or with vLLM an adapter, which leaves room for the engine."""
    sizes = TINY if tiny else FULL
    on_gpu = torch.cuda.is_available()
    stage = {name: sizes[name] for name in ("prompts_per_step", "group_size")}
    scenes = {"split": "train", "size": 64, "image_px": sizes["image_px"]}
    model = {"path": str(folder / "model"), "freeze": ["vision", "projector"], "gradient_checkpointing": ["language"]}
    if vllm:
        model["lora"] = {"rank": 32, "alpha": 64}
    return {
        "run": {"name": "gpu", "dir": str(folder / "run")},
        "model": model | {"dtype": "bfloat16" if on_gpu else "float32", "device": "cuda" if on_gpu else "cpu"},
        "rollout": {"engine": "vllm" if vllm else "hf"},
        "data": {"train": [{"fn": "mmrl_datasets.generators.scenes:grounding", "args": scenes}]},
        # Random weights ground nothing, and without a difference in reward nothing is learned.
        "rewards": {"terms": [{"fn": f"{BENCH}/vowels_reward.py:vowel_fraction"}]},
        "callbacks": [{"fn": f"{BENCH}/step_memory.py:record_steps", "args": {"file": str(folder / "steps.jsonl")}}],
        "stages": [
            stage
            | {"name": "rl", "kind": "rl", "steps": STEPS, "max_steps_without_signal": STEPS + 1}
            | {"sampling": {"max_new_tokens": sizes["max_new_tokens"]}, "loss": {"kl": {"coef": 0.001}}}
        ],
    }


def run_part(command: list[str], limit_s: float) -> dict[str, Any]:
    """Run a command; return its seconds, and the end of its output if it failed or took too long."""
    start = time.monotonic()
    try:
        done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as stopped:
        code, output = None, f"stopped after {limit_s:.0f} s: {stopped.stdout!r}"
    found = {"seconds": round(time.monotonic() - start, 1), "exit_code": code}
    return found if code == 0 else found | {"output": output[-6000:]}


def check_exactness(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the tests of CUDA; return how many passed, and which did not."""
    file = folder / "tests.xml"
    # Most of the time goes into compiling kernels, which processes do beside each other. Without a GPU all are skipped.
    processes = "4" if torch.cuda.is_available() else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "tests/gpu", f"--junitxml={file}"]
    found = run_part(command, LIMITS_S["exactness"])
    if file.exists():
        cases = list(ElementTree.parse(file).iter("testcase"))
        outcomes = {case.get("name"): {child.tag for child in case} for case in cases}
        for outcome in ("skipped", "failure", "error"):
            found[outcome] = sorted(name or "" for name, tags in outcomes.items() if outcome in tags)
        found["passed"] = sum(not tags & {"skipped", "failure", "error"} for tags in outcomes.values())
    return found


def compare_at_3b(folder: Path, options: argparse.Namespace, *, part: str, command: list[str]) -> dict[str, Any]:
    """Run a benchmark that compares us with another library; return its numbers."""
    file = folder / "numbers.json"
    script, *arguments = command
    found = run_part([sys.executable, str(BENCH / script), *arguments, "--json", str(file)], LIMITS_S[part])
    return found | (json.loads(file.read_text())["numbers"] if file.exists() else {})


def check_run(folder: Path, options: argparse.Namespace, *, vllm: bool = False) -> dict[str, Any]:
    """Plan a run and train it; return both, and the share of the GPU's peak that learning reached.

    A torch that cannot plan says so, and the run continues.
    """
    spec = MODEL_3B
    if options.tiny:
        one_layer = {"num_layers": 1}
        vision, language = MODEL.vision.model_copy(update=one_layer), MODEL.language.model_copy(update=one_layer)
        spec = MODEL.model_copy(update={"vision": vision, "language": language})
    write_models(spec, {"model": folder / "model"}, "float32" if options.tiny else "bfloat16")
    config = folder / "run.yaml"
    config.write_text(json.dumps(make_config(folder, tiny=options.tiny, vllm=vllm)))
    mmrl = [sys.executable, "-m", "mmrl"]
    command = [*mmrl, "plan", str(config), "--gpu", options.gpu, "--efficiency", "1", "--json"]
    planned = subprocess.run(command, check=False, capture_output=True, text=True)
    plan = json.loads(planned.stdout) if planned.returncode in (0, 1) else None
    limit_s = LIMITS_S["run with vLLM" if vllm else "run"]
    found = run_part([*mmrl, "train", str(config)], limit_s) | {"plan": plan or planned.stderr[-2000:]}
    file = folder / "steps.jsonl"
    found["steps"] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if found["steps"] and plan:
        found |= compare_with_plan(plan, found["steps"][-1])
    return found


def compare_with_plan(plan: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measured and planned cost of a step. Learning was planned at the GPU's peak."""
    planned, seconds = plan["step_seconds"], step["seconds"]
    at_peak = planned["learning"] + planned["reference"]
    return {
        "learning_share_of_peak": at_peak / (seconds["time/learn_s"] - planned["update"]),
        "planned_rollout_s": planned["prefill"] + planned["decoding"],
        "rollout_s": seconds["time/rollout_s"],
        "planned_peak_gb": max(plan["phase_gb"].values()),
        "peak_gb": step.get("peak_gb"),
    }


def main() -> None:
    """Run all parts."""
    parser = make_parser(__doc__)
    parser.add_argument("--gpu", default="h100-80gb", help="kind of GPU, as `mmrl plan` names it")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, without vLLM and TRL: for a smoke test")
    parser.add_argument("--part", choices=LIMITS_S, action="append", help="one or more; all of them by default")
    options = parser.parse_args()
    learner = ["learner_vs_trl.py", "--cell", "3b-300x100", "--pairs", "3"]
    rollouts = ["rollout.py", "--size", "3b", "--prompts", "8", "--pairs", "2"]
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "exactness": check_exactness,
        "run": check_run,
        "learner_vs_trl": partial(compare_at_3b, part="learner_vs_trl", command=learner),
        "rollouts": partial(compare_at_3b, part="rollouts", command=rollouts),
        "run with vLLM": partial(check_run, vllm=True),
    }
    asked = options.part or (["exactness", "run"] if options.tiny else list(parts))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    numbers: dict[str, Any] = {"device": device, "cuda": torch.version.cuda}
    for name in asked:
        print(f"{name}: at most {LIMITS_S[name]} s", flush=True)
        with tempfile.TemporaryDirectory() as temporary:
            numbers[name] = parts[name](Path(temporary), options)
        print(json.dumps(numbers[name], indent=1), flush=True)
        write_results(options.json, "gpu", numbers)


if __name__ == "__main__":
    main()
