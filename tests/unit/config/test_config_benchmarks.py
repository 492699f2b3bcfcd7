"""Benchmarks in a run's config: explanation, names, and changes when a run is resumed."""

import pytest
from config_samples import SMALL, refused, write

from mmrl.config import diff_configs, explain, flatten_settings, load_config, load_eval_config
from mmrl.types import CoordinateSystem, UserError

TAKEN = (
    SMALL
    + """
evaluation:
  benchmarks:
    - {name: mathvista, data: [MathVista], every: 5}
    - {name: testA, benchmark: refcoco, data: [RefCOCO], split: testA}
    - {name: mmmu, data: [MMMU], responses_per_question: 8, temperature: 0.7}
"""
)


def test_explain_says_when_each_benchmark_runs(tmp_path):
    cold, rl = explain(load_config(write(tmp_path, TAKEN))).partition("Stage 2 of 2")[::2]
    assert (
        "mathvista, before the first step, every 5 steps, and as the stage ends: benchmark/mathvista/accuracy" in cold
    )
    assert "testA by the rules of refcoco, before the first step, and as the stage ends" in cold
    assert "mathvista, every 5 steps, and as the stage ends" in rl
    assert "benchmark/mmmu/accuracy, pass@k and maj@k of 8 responses at temperature 0.7" in rl
    assert "testA by the rules of refcoco, as the stage ends: benchmark/testA/accuracy" in rl
    assert "benchmark/" not in explain(load_config(write(tmp_path, SMALL, "plain.yaml")))


def test_several_greedy_responses_are_refused(tmp_path):
    path, greedy = write(tmp_path, TAKEN), "evaluation.benchmarks.mathvista.responses_per_question=4"
    said = refused(path, greedy)
    assert (
        "benchmark 'mathvista': all 4 responses to a question are the same at temperature 0; set its temperature"
        in said
    )
    assert (
        load_config(path, [greedy, "evaluation.temperature=1"]).config.evaluation.benchmarks[0].responses_per_question
        == 4
    )


def test_coordinates_of_a_benchmark_are_not_resized_pixels(tmp_path):
    path, frame = write(tmp_path, TAKEN), "evaluation.benchmarks.testA.coordinates="
    assert load_config(path, [frame + "norm_1"]).config.evaluation.benchmarks[1].coordinates is CoordinateSystem.NORM_1
    said = (
        "evaluation.benchmarks.1.coordinates: must be 'px_original', 'norm_1' or 'norm_1000', got the text 'px_resized'"
    )
    assert said in refused(path, frame + "px_resized")


def test_two_benchmarks_of_one_name_are_refused(tmp_path):
    said = refused(write(tmp_path, TAKEN), "evaluation.benchmarks.testA.name=mathvista")
    assert "evaluation.benchmarks: two benchmarks are named 'mathvista'" in said


@pytest.mark.parametrize(("metric", "fine"), [("benchmark/testA/accuracy", True), ("benchmark/testB/accuracy", False)])
def test_the_best_checkpoint_needs_a_metric_of_a_benchmark(tmp_path, metric, fine):
    path, best = write(tmp_path, TAKEN), f"checkpoints.best={{metric: {metric}}}"
    if fine:
        assert load_config(path, [best]).config.checkpoints.best.metric == metric
    else:
        assert "is of no benchmark in evaluation.benchmarks (mathvista, testA, mmmu)" in refused(path, best)


def test_a_resumed_run_may_change_benchmarks(tmp_path):
    old = flatten_settings(load_config(write(tmp_path, SMALL)).config.model_dump(mode="json"))
    found = diff_configs(old, load_config(write(tmp_path, TAKEN)).config)
    assert found
    assert {change.effect for change in found} == {"no result depends on it"}


def test_mmrl_eval_refuses_benchmarks_in_its_config():
    given = {"model": {"path": "m"}}
    with pytest.raises(UserError, match="evaluation.benchmarks: unknown key"):
        load_eval_config(given, "m", ["evaluation.benchmarks=[{name: mathvista, data: [x]}]"])
