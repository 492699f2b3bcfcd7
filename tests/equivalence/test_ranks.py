"""Two processes learn what one learns, with every optimizer, whatever each of them has to look at."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from learning import make_off_policy_experiences
from rank_trials import furthest, launch, same_metrics, zero
from ranks_worker import CHUNK_ELEMENTS, Trial, TrialSet, run_trial
from rounding import LOGPROBS

from mmrl.config.schema import LoraConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.policy.batch import group_by_prompt

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs mmrl[deepspeed]")]

PLAIN = ["torch", "rows", "zero0", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload", "zero3-recomputes"]
COMPARED = ["torch", "zero0", "zero2", "zero2-offload", "zero3", "zero3-offload"]
"""Trials that compare the layout of shared prefixes with that of rows."""


def silence(experiences_, kept):
    """Return the experiences with no advantage in any group but the first `kept`."""
    loud = {group[0].rollout.prompt.digest for group in group_by_prompt(experiences_)[:kept]}
    return [e if e.rollout.prompt.digest in loud else replace(e, advantage=0.0) for e in experiences_]


@pytest.fixture(scope="module")
def trial_set(make_tiny) -> TrialSet:
    """Five steps: all groups; text against a picture; a video against text; a picture against nothing; text alone."""
    tiny = make_tiny("qwen2_5_vl")
    image, _, text, video, _ = groups = group_by_prompt(make_off_policy_experiences(tiny, group_size=3))
    every = [experience for group in groups for experience in group]
    steps = (every, [*text, *image], [*video, *text], list(image), list(text))
    plain = Trial(deepspeed=None, steps=steps, resume_after=2)
    mini = replace(plain, num_mini_batches=2, resume_after=None)
    adapted = replace(plain, resume_after=None, feeds=True, steps=steps[:2], lora=LoraConfig(rank=4))
    trials = {
        "torch": plain,
        "zero3": replace(plain, deepspeed=zero(3)),  # first: nothing else has set DeepSpeed up
        "rows": replace(plain, shared_prefix=False, resume_after=None),
        "zero0": replace(plain, deepspeed=zero(0)),
        "zero1": replace(plain, deepspeed=zero(1), resume_after=None),
        "zero2": replace(plain, deepspeed=zero(2)),
        "zero2-offload": replace(plain, deepspeed=zero(2, offload_optimizer=True), resume_after=None),
        "zero3-fed": replace(plain, deepspeed=zero(3), resume_after=None, feeds=True, steps=steps[:1]),
        "torch-fed": replace(plain, resume_after=None, feeds=True, steps=steps[:1]),
        "zero3-adapted": replace(adapted, deepspeed=zero(3)),
        "torch-adapted": adapted,
        "zero3-offload": replace(
            plain, deepspeed=zero(3, offload_optimizer=True, offload_parameters=True), resume_after=None
        ),
        "zero3-recomputes": replace(
            plain, deepspeed=zero(3), resume_after=None, recomputes=True, float32_output_layer=True
        ),
        "zero3-penalty": replace(plain, deepspeed=zero(3), kl=0.1, resume_after=None, steps=steps[:2]),
        "torch-quiet": replace(plain, resume_after=None, steps=(silence(every, 2),)),
        # The last group alone has no second mini-batch: it must wait for nobody.
        "torch-mini": mini,
        "zero2-old": replace(mini, old_logprobs="recomputed", deepspeed=zero(2)),
        "zero3-old": replace(mini, old_logprobs="recomputed", deepspeed=zero(3)),
        "zero3-old-adapted": replace(
            adapted, deepspeed=zero(3), feeds=False, num_mini_batches=2, old_logprobs="recomputed", recomputes=True
        ),
        "zero2-narrow": replace(plain, deepspeed=zero(2), dtype=torch.bfloat16, resume_after=1, steps=steps[:2]),
    }
    trials |= {name: replace(trials[name], compares_layouts=True) for name in COMPARED}
    return TrialSet(policy=tiny.policy, processor=tiny.processor, eos_id=tiny.eos_id, trials=trials)


@pytest.fixture(scope="module")
def results(trial_set, tmp_path_factory):
    """Return the results of all trials. Each of the two processes makes 18 DeepSpeed optimizers, one after another."""
    return launch(tmp_path_factory.mktemp("ranks"), [trial_set], 2)


@pytest.fixture(scope="module")
def single(trial_set):
    """Return what a single process learns with plain torch."""
    return run_trial(trial_set, replace(trial_set.trials["torch"], resume_after=None), SingleProcess())


@pytest.mark.parametrize("name", PLAIN)
def test_two_ranks_learn_what_one_learns(results, single, trial_set, name):
    """In float32: metrics to 1e-4 relative; weights to 5e-5, where they differ by 8e-6 and moved by 8e-3."""
    found = results[name]
    same_metrics(found["metrics"], single["metrics"])
    assert furthest(found["weights"], single["weights"]) < 5e-5
    assert furthest(dict(trial_set.policy.trainable), single["weights"]) > 2e-3
    assert any(metrics["learner/grad_norm/vision"] == 0.0 for metrics in single["metrics"])  # text alone


@pytest.mark.parametrize("name", PLAIN)
def test_an_optimizers_state_is_that_of_a_single_process(results, single, name):
    ours, theirs = (each["state"]["moments"] for each in (results[name], single))
    assert ours.keys() == theirs.keys()
    for index, moments in theirs.items():
        assert float(ours[index]["step"]) == float(moments["step"]) == 5.0
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours[index][moment], moments[moment], rtol=1e-3, atol=1e-6)
    assert results[name]["state"]["masters"] == {}


@pytest.mark.parametrize("name", PLAIN)
def test_each_rank_has_half_of_what_is_saved(results, name):
    first, second = results[name]["parts"]
    assert 0.8 < first / second < 1.25


@pytest.mark.parametrize("name", COMPARED)
def test_the_self_check_sees_what_a_single_process_sees(results, single, name):
    """Under ZeRO-3 the model and its gradient stay divided: the differences of pieces add up to that of the whole."""
    right, wrong = results[name]["apart"]
    assert max(right) < LOGPROBS
    assert wrong == pytest.approx(single["apart"][1], rel=1e-3)
    assert min(wrong) > 1e-3


def test_a_reference_beside_sharded_weights(results, trial_set):
    trial = replace(trial_set.trials["zero3-penalty"], deepspeed=None)
    expected = run_trial(trial_set, trial, SingleProcess())
    assert expected["metrics"][1]["policy/reference_kl_nats"] > 1e-4
    same_metrics(results["zero3-penalty"]["metrics"], expected["metrics"])


def test_mini_batches_of_two_ranks_are_those_of_one(results, single, trial_set):
    """Two updates a step, but where one group is all there is."""
    expected = run_trial(trial_set, trial_set.trials["torch-mini"], SingleProcess())
    same_metrics(results["torch-mini"]["metrics"], expected["metrics"])
    assert furthest(results["torch-mini"]["weights"], expected["weights"]) < 5e-5
    assert furthest(single["weights"], expected["weights"]) > 5e-4


@pytest.mark.parametrize("name", ["zero2-old", "zero3-old", "zero3-old-adapted"])
def test_old_log_probs_of_two_ranks_are_those_of_one(results, trial_set, name):
    """Mini-batches whose ratios are taken from the step's start, though their ranks have unequal passes to make."""
    trial = replace(trial_set.trials[name], deepspeed=None)
    expected = run_trial(trial_set, trial, SingleProcess())
    recorded = run_trial(trial_set, replace(trial, old_logprobs="recorded"), SingleProcess())
    same_metrics(results[name]["metrics"], expected["metrics"])
    assert furthest(results[name]["weights"], expected["weights"]) < 5e-5
    ratio = "policy/importance_ratio_max"
    assert expected["metrics"][-2][ratio] != pytest.approx(recorded["metrics"][-2][ratio], rel=1e-3)


def test_means_of_two_ranks_are_over_the_tokens_that_were_run(results, trial_set):
    """They are those of a single process that is given nothing but the groups with an advantage."""
    [given] = trial_set.trials["torch-quiet"].steps
    loud = [experience for experience in given if experience.advantage]
    assert 0 < len(loud) < len(given) / 2
    expected = run_trial(trial_set, replace(trial_set.trials["torch-quiet"], steps=(loud,)), SingleProcess())
    [ours], [theirs] = results["torch-quiet"]["metrics"], expected["metrics"]
    means = {name for name in theirs if name.startswith(("policy/", "rollout/"))}
    assert {"policy/entropy_nats", "policy/clip_frac", "rollout/logprob_diff_mean"} <= means
    for name in means:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_narrow_weights_have_masters(results, trial_set):
    """Sums of bfloat16 gradients depend on their order: the first norm within 5 %, weights within an update or two."""
    found = results["zero2-narrow"]
    expected = run_trial(
        trial_set, replace(trial_set.trials["zero2-narrow"], deepspeed=None, resume_after=None), SingleProcess()
    )
    assert found["metrics"][0]["learner/loss"] == pytest.approx(expected["metrics"][0]["learner/loss"], rel=0.05)
    assert len(found["state"]["masters"]) == len(expected["state"]["masters"]) > 50
    for place, theirs in expected["state"]["masters"].items():
        ours = found["state"]["masters"][place]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)
        assert ours.dtype == torch.float32


@pytest.mark.parametrize("name", ["torch-fed", "zero3-fed"])
def test_an_engine_fed_by_the_first_rank_has_the_weights_of_now(results, trial_set, name):
    """Though it broke a pass off, and though it was fed before; under ZeRO-3 a few weights at a time are whole."""
    found = results[name]
    assert found["refused"] == "it takes no more"
    weights = {key: tensor for key, tensor in found["fed"].items() if key != "lm_head.weight"}
    assert furthest(weights, found["weights"]) == 0.0
    assert furthest(weights, dict(trial_set.policy.trainable)) > 5e-4
    before, after_an_error = found["hooks"]
    assert before == after_an_error
    if name == "zero3-fed":
        assert before > 0
        sizes = [parameter.numel() for parameter in trial_set.policy.model.parameters()]
        assert found["most_whole"] <= max(CHUNK_ELEMENTS, *sizes) < sum(sizes) / 4


def test_an_adapters_matrices_are_whole_one_after_the_other(results, trial_set):
    found, expected = results["zero3-adapted"], results["torch-adapted"]
    assert found["refused"] == "it takes no more"
    assert furthest(found["fed"], expected["fed"]) < 5e-5
    assert furthest(found["fed"], {name: trial_set.policy.model.get_parameter(name) for name in found["fed"]}) > 1e-6
    sizes = [parameter.numel() for parameter in trial_set.policy.model.parameters()]
    assert found["most_whole"] <= 2 * max(sizes) < sum(sizes) / 2


@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("zero")])
def test_a_dissolved_model_is_an_ordinary_one(results, name):
    assert furthest(results[name]["weights"], results[name]["dissolved"]) == 0.0
