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

COMPARED = ["torch", "zero0", "zero2", "zero2-offload", "zero3", "zero3-offload"]
"""Trials that compare the layout of shared prefixes with that of rows."""
PLAIN = [*COMPARED, "zero1", "torch-without-shared-prefix", "zero3-gradient-checkpointing"]
"""Trials that must learn the same from the same five steps."""


def keep_advantages(experiences, num_groups):
    """Return the experiences with no advantage in any group but the first `num_groups`."""
    kept = {group[0].rollout.prompt.digest for group in group_by_prompt(experiences)[:num_groups]}
    return [e if e.rollout.prompt.digest in kept else replace(e, advantage=0.0) for e in experiences]


@pytest.fixture(scope="module")
def trial_set(make_tiny) -> TrialSet:
    """Five steps: all groups; text against a picture; a video against text; a picture against nothing; text alone."""
    tiny = make_tiny("qwen2_5_vl")
    image, _, text, video, _ = groups = group_by_prompt(make_off_policy_experiences(tiny, group_size=3))
    every = [experience for group in groups for experience in group]
    five = (every, [*text, *image], [*video, *text], list(image), list(text))
    one, two = five[:1], five[:2]

    def trial(deepspeed=None, steps=five, **options):
        return Trial(deepspeed=deepspeed, steps=steps, **options)

    lora, recomputed = LoraConfig(rank=4), {"old_logprobs": "recomputed", "num_mini_batches": 2}
    trials = {
        "torch": trial(resume_after=2),
        "zero3": trial(zero(3), resume_after=2),  # before the rest: nothing else has set DeepSpeed up
        "torch-without-shared-prefix": trial(shared_prefix=False),
        "zero0": trial(zero(0), resume_after=2),
        "zero1": trial(zero(1)),
        "zero2": trial(zero(2), resume_after=2),
        "zero2-offload": trial(zero(2, offload_optimizer=True)),
        "zero3-engine": trial(zero(3), one, feeds=True),
        "torch-engine": trial(None, one, feeds=True),
        "zero3-lora-engine": trial(zero(3), two, feeds=True, lora=lora),
        "torch-lora-engine": trial(None, two, feeds=True, lora=lora),
        "zero3-offload": trial(zero(3, offload_optimizer=True, offload_parameters=True)),
        "zero3-gradient-checkpointing": trial(zero(3), recomputes=True, float32_output_layer=True),
        "zero3-reference": trial(zero(3), two, kl=0.1),
        "torch-few-advantages": trial(None, (keep_advantages(every, 2),)),
        # The last group alone has no second mini-batch: it must wait for nobody.
        "torch-mini-batches": trial(num_mini_batches=2),
        "zero2-old-logprobs": trial(zero(2), **recomputed),
        "zero3-old-logprobs": trial(zero(3), **recomputed),
        "zero3-old-logprobs-lora": trial(zero(3), two, lora=lora, recomputes=True, **recomputed),
        "zero2-bfloat16": trial(zero(2), two, dtype=torch.bfloat16, resume_after=1),
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
    trial = replace(trial_set.trials["zero3-reference"], deepspeed=None)
    expected = run_trial(trial_set, trial, SingleProcess())
    assert expected["metrics"][1]["policy/reference_kl_nats"] > 1e-4
    same_metrics(results["zero3-reference"]["metrics"], expected["metrics"])


def test_mini_batches_of_two_ranks_are_those_of_one(results, single, trial_set):
    """Two updates a step, but where one group is all there is."""
    expected = run_trial(trial_set, trial_set.trials["torch-mini-batches"], SingleProcess())
    same_metrics(results["torch-mini-batches"]["metrics"], expected["metrics"])
    assert furthest(results["torch-mini-batches"]["weights"], expected["weights"]) < 5e-5
    assert furthest(single["weights"], expected["weights"]) > 5e-4


@pytest.mark.parametrize("name", ["zero2-old-logprobs", "zero3-old-logprobs", "zero3-old-logprobs-lora"])
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
    trial = trial_set.trials["torch-few-advantages"]
    [given] = trial.steps
    with_advantage = [experience for experience in given if experience.advantage]
    assert 0 < len(with_advantage) < len(given) / 2
    expected = run_trial(trial_set, replace(trial, steps=(with_advantage,)), SingleProcess())
    [ours], [theirs] = results["torch-few-advantages"]["metrics"], expected["metrics"]
    means = {name for name in theirs if name.startswith(("policy/", "rollout/"))}
    assert {"policy/entropy_nats", "policy/clip_frac", "rollout/logprob_diff_mean"} <= means
    for name in means:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_narrow_weights_have_masters(results, trial_set):
    """Sums of bfloat16 gradients depend on their order: the first norm within 5 %, weights within an update or two."""
    found = results["zero2-bfloat16"]
    trial = replace(trial_set.trials["zero2-bfloat16"], deepspeed=None, resume_after=None)
    expected = run_trial(trial_set, trial, SingleProcess())
    assert found["metrics"][0]["learner/loss"] == pytest.approx(expected["metrics"][0]["learner/loss"], rel=0.05)
    assert len(found["state"]["masters"]) == len(expected["state"]["masters"]) > 50
    for place, theirs in expected["state"]["masters"].items():
        ours = found["state"]["masters"][place]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)
        assert ours.dtype == torch.float32


@pytest.mark.parametrize("name", ["torch-engine", "zero3-engine"])
def test_an_engine_fed_by_the_first_rank_has_the_weights_of_now(results, trial_set, name):
    """Though it broke a pass off, and though it was fed before; under ZeRO-3 a few weights at a time are whole."""
    found = results[name]
    assert found["refused"] == "it takes no more"
    weights = {key: tensor for key, tensor in found["fed"].items() if key != "lm_head.weight"}
    assert furthest(weights, found["weights"]) == 0.0
    assert furthest(weights, dict(trial_set.policy.trainable)) > 5e-4
    before, after_an_error = found["hooks"]
    assert before == after_an_error
    if name == "zero3-engine":
        assert before > 0
        sizes = [parameter.numel() for parameter in trial_set.policy.model.parameters()]
        assert found["most_whole"] <= max(CHUNK_ELEMENTS, *sizes) < sum(sizes) / 4


def test_an_adapters_matrices_are_whole_one_after_the_other(results, trial_set):
    found, expected = results["zero3-lora-engine"], results["torch-lora-engine"]
    assert found["refused"] == "it takes no more"
    assert furthest(found["fed"], expected["fed"]) < 5e-5
    assert furthest(found["fed"], {name: trial_set.policy.model.get_parameter(name) for name in found["fed"]}) > 1e-6
    sizes = [parameter.numel() for parameter in trial_set.policy.model.parameters()]
    assert found["most_whole"] <= 2 * max(sizes) < sum(sizes) / 2


@pytest.mark.parametrize("name", [name for name in PLAIN if name.startswith("zero")])
def test_a_dissolved_model_is_an_ordinary_one(results, name):
    assert furthest(results[name]["weights"], results[name]["dissolved"]) == 0.0
