"""Two processes learn what one learns of models with recurrent layers and with experts, under ZeRO-2 and ZeRO-3."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from learning import make_off_policy_experiences
from rank_trials import furthest, launch, same_metrics, zero
from ranks_worker import CHUNK_ELEMENTS, Trial, TrialSet, for_engines, run_trial
from samplers import hf_sampler

from mmrl.config.schema import LoraConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.policy.batch import group_by_prompt

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs mmrl[deepspeed]")]

SAME = {"zero2": "zero3", "torch-engine": "zero3-engine"}
"""Trials in which one process does what it does in another."""


@pytest.fixture(scope="module")
def trial_sets(make_tiny) -> dict[str, TrialSet]:
    """Three steps of each family: a picture, text and a video; text against a picture; text alone.

    The family with recurrent layers and experts has every trial, those with one of them have one or two.
    """
    found = {}
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"):
        tiny = make_tiny(family)
        image, _, text, video, _ = group_by_prompt(make_off_policy_experiences(tiny, group_size=3))
        steps = ([*image, *text, *video], [*text, *image], list(text))
        plain = Trial(deepspeed=None, steps=steps, resume_after=1)
        once = replace(plain, resume_after=None, steps=steps[:2])
        adapter = LoraConfig(rank=4, targets=("language.attention", "language.experts"))
        trials = {
            "zero3": replace(plain, deepspeed=zero(3), recomputes=True, feeds=True),
            "zero2": replace(plain, deepspeed=zero(2)),
            "zero3-adapted": replace(once, deepspeed=zero(3), feeds=True, lora=adapter),
        }
        if family == "qwen3_5":
            trials = {"zero3": trials["zero3"]}
        if family == "qwen3_vl_moe":
            sent = replace(once, steps=routed_by_an_engine(tiny), num_mini_batches=2, routing_replay="engine")
            trials = {
                # Mini-batches, so that all but the first replay what an extra pass has recorded.
                "zero3-routed": replace(once, deepspeed=zero(3), num_mini_batches=2, routing_replay="learner"),
                "torch-engine": sent,
                "zero3-engine": replace(sent, deepspeed=zero(3)),
            }
        trials = {f"{family}/{name}": trial for name, trial in trials.items()}
        found[family] = TrialSet(policy=tiny.policy, processor=tiny.processor, eos_id=tiny.eos_id, trials=trials)
    return found


def routed_by_an_engine(tiny):
    """A step with a picture and text, sampled by an engine that sends tokens to other experts."""
    engine = tiny.policy.frozen_copy()
    with torch.no_grad():
        for router in engine.routers:
            router.weight.add_(0.5 * router.weight.flip(0))
    sampler = hf_sampler(engine, tiny.processor, seed_parts=("test",), record_routes=True)
    image, _, text, *_ = group_by_prompt(make_off_policy_experiences(tiny, group_size=3, sampler=sampler))
    return ([*image, *text],)


@pytest.fixture(scope="module")
def results(trial_sets, tmp_path_factory):
    return launch(tmp_path_factory.mktemp("ranks"), list(trial_sets.values()), 2)


@pytest.fixture(scope="module")
def single(trial_sets):
    """Run the trials in a single process with plain torch; trials with the same outcome run once."""
    found = {}
    for family, trial_set in trial_sets.items():
        for name, trial in trial_set.trials.items():
            if name.partition("/")[2] not in SAME:
                found[name] = run_trial(trial_set, replace(trial, deepspeed=None, resume_after=None), SingleProcess())
        for name, other in SAME.items():
            if f"{family}/{name}" in trial_set.trials:
                found[f"{family}/{name}"] = found[f"{family}/{other}"]
    return found


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "zero3"), ("qwen3_5_moe", "zero3"), ("qwen3_5_moe", "zero2")])
def test_two_ranks_learn_what_one_learns(results, single, trial_sets, family, name):
    """Another pair of engines continues from what the first has saved; under ZeRO-3 layers are recomputed."""
    ours, theirs = results[f"{family}/{name}"], single[f"{family}/{name}"]
    same_metrics(ours["metrics"], theirs["metrics"])
    assert furthest(ours["weights"], theirs["weights"]) < 5e-5
    assert furthest(dict(trial_sets[family].policy.trainable), theirs["weights"]) > 2e-3
    for index, moments in theirs["state"]["moments"].items():
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours["state"]["moments"][index][moment], moments[moment], rtol=1e-3, atol=1e-6)
    assert furthest(ours["weights"], ours["dissolved"]) == 0.0


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_an_engine_is_fed_a_few_weights_at_a_time(results, trial_sets, family):
    found, policy = results[f"{family}/zero3"], trial_sets[family].policy
    assert found["refused"] == "it takes no more"
    fed = {name: tensor for name, tensor in found["fed"].items() if name != "lm_head.weight"}
    assert furthest(fed, dict(for_engines(policy, found["weights"]))) == 0.0
    sizes = [parameter.numel() for parameter in policy.model.parameters()]
    assert found["most_whole"] <= max(CHUNK_ELEMENTS, *sizes) < sum(sizes) / 4


def test_adapters_of_recurrent_layers_and_of_experts_learn(results, single):
    ours, theirs = results["qwen3_5_moe/zero3-adapted"], single["qwen3_5_moe/zero3-adapted"]
    same_metrics(ours["metrics"], theirs["metrics"])
    assert furthest(ours["weights"], theirs["weights"]) < 5e-5
    assert furthest(ours["fed"], theirs["fed"]) < 5e-5


@pytest.mark.parametrize("name", ["zero3-routed", "torch-engine", "zero3-engine"])
def test_routes_are_replayed_on_each_rank(results, single, name):
    """Those of the learner's own; and those of an engine, which the learner would not have taken."""
    ours, theirs = (found[f"qwen3_vl_moe/{name}"] for found in (results, single))
    same_metrics(ours["metrics"], theirs["metrics"])
    assert furthest(ours["weights"], theirs["weights"]) < 5e-5
    if name.endswith("engine"):
        (found,) = theirs["metrics"]
        assert 0.0 < found["rollout/route_diff_choices_frac"] <= found["rollout/route_diff_tokens_frac"] < 1.0
