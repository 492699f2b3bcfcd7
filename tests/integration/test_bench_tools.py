"""Every benchmark in tools/bench runs, measures something and writes it down: one tiny pair each."""

import json
from pathlib import Path

import pytest
from fork_server import run_forked

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
MATHVISTA = ROOT.parent / "shared" / "eval" / "mathvista"

# Script, its smallest useful options, and a number that must be among its results.
COMMANDS = [
    ("async_rollouts", "--engine hf --steps 5 --rounds 1 --prompts 1 --tokens 4", "ratio"),
    ("checkpoint", "--rounds 1 --steps 2 --prompts 2 --busy", "stall_fraction_of_an_rl_step"),
    ("gpu", "--tiny", "run"),
    ("launches", "--sizes 3B --side 8 --layers 1", "3B token: calls"),
    # With recurrent layers: the default family is in the table of docs/benchmarks.md, and takes the same path.
    ("learner_vs_trl", "--family qwen3_5 --cell 40x8 --pairs 1", "40x8"),
    ("looking", "--rounds 1 --width 320", "look:likeness png"),
    ("environments", "--episodes 4 --steps 2", "added_ms"),
    ("math_rewards", "--rounds 1", "time_ratio"),
    ("media", "throughput --files 8 --rounds 1", "jpeg 640x480"),
    ("media", "ahead --rounds 1 --steps 2 --prompts 1", "step_s with 1 workers"),
    ("plan", "--cells qwen2_5_vl,tiny,full,kept", "qwen2_5_vl,tiny,full,kept"),
    ("records", "--steps 3 --prompts 2", "fraction_of_step"),
    ("replay", "", "fraction_of_step"),
    ("rewards", "--seconds 0.01", "mmrl_rewards.box:iou"),
    ("rollout", "--family qwen3_5 --prompts 1 --group 2 --completion 8 --pairs 1", "ratio"),
    ("run_vs_trl", "--small --pairs 1", "ratio"),
    ("rollout_vllm", "--prompts 1 --siblings 2 --tokens 4 --rounds 1", "ratio"),
    ("scoring", "--seconds 0.05", "hanging_calls_s"),
    ("start", "--rows 8 16", "row_ms, warm"),
    ("two_processes", "--rounds 1 --steps 1 --prompts 2 --only two", "speedup_of_two"),
    ("verdicts", "--repeat 1", "verdicts_per_s"),
    ("view", "--rollouts 16 --tokens 5", "page, CPU s"),
    ("vision", "--family qwen2_5_vl --tiny --pairs 1", "qwen2_5_vl: two images of 8 x 8 patches"),
]
NEEDS = {"learner_vs_trl": "trl", "run_vs_trl": "trl", "rollout_vllm": "vllm"}


def test_every_benchmark_has_a_smoke_test():
    scripts = {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert scripts == {script for script, _, _ in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize(("script", "options", "number"), COMMANDS, ids=lambda value: str(value)[:30])
def test_a_benchmark_runs_and_writes_its_numbers(script, options, number, tmp_path):
    if script in NEEDS:
        pytest.importorskip(NEEDS[script])
    file, data = tmp_path / "numbers.json", []
    if script == "verdicts":
        if not MATHVISTA.exists():
            pytest.skip("MathVista's published responses are not here")
        data = ["--data", str(MATHVISTA)]
    done = run_forked(BENCH / f"{script}.py", *options.split(), *data, "--json", file, timeout=900)
    # So small a run may miss a floor on speed, which is exit code 1; it may not fail otherwise, nor print a traceback.
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["benchmark"].startswith(script)
    assert record["date"]
    assert record["libraries"]["torch"]
    assert number in record["numbers"]
