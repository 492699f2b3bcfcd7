"""Two processes learn what one learns of models with recurrent layers and with experts, under ZeRO-2 and ZeRO-3."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks_worker import CHUNK_ELEMENTS, Lessons, Trial, for_engines, learn
from test_gradients import experiences
from test_ranks import furthest, launch, same_metrics, zero

from mmrl.config.schema import LoraConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.policy.batch import group_by_prompt

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

TARGETS = {
    "qwen3_5": ("language.attention", "language.mlp"),
    "qwen3_vl_moe": ("language.attention", "language.experts"),
}


@pytest.fixture(scope="module")
def courses(tiny) -> dict[str, Lessons]:
    """Three steps of each family: a picture, text and a video; text against a picture; text alone."""
    found = {}
    for family, targets in TARGETS.items():
        world = tiny(family)
        image, _, text, video, _ = group_by_prompt(experiences(world, group_size=3))
        for module in world.policy.model.modules():
            module.__dict__.pop("forward", None)  # what was put into layers cannot be pickled
        steps = ([*image, *text, *video], [*text, *image], list(text))
        plain = Trial(deepspeed=None, steps=steps, resume_after=1)
        once = replace(plain, resume_after=None, steps=steps[:2])
        adapter = LoraConfig(rank=4, targets=targets)
        trials = {
            "zero3": replace(plain, deepspeed=zero(3), recomputes=True, feeds=True),
            "zero2": replace(plain, deepspeed=zero(2)),
            "zero3-adapted": replace(once, deepspeed=zero(3), feeds=True, lora=adapter),
        }
        if world.policy.routers:
            # Mini-batches, so that all but the first replay what an extra pass has recorded.
            trials["zero3-routed"] = replace(once, deepspeed=zero(3), mini_batches=2, routing_replay="learner")
        trials = {f"{family}/{name}": trial for name, trial in trials.items()}
        found[family] = Lessons(policy=world.policy, processor=world.processor, eos_id=world.eos_id, trials=trials)
    return found


@pytest.fixture(scope="module")
def answers(courses, tmp_path_factory):
    return launch(tmp_path_factory.mktemp("ranks"), list(courses.values()), 2)


@pytest.fixture(scope="module")
def alone(courses):
    """What a single process makes of the trials with plain torch, those of one outcome once."""
    found = {}
    for family, lessons in courses.items():
        for name, trial in lessons.trials.items():
            if not name.endswith("zero2"):
                found[name] = learn(lessons, replace(trial, deepspeed=None, resume_after=None), SingleProcess())
        found[f"{family}/zero2"] = found[f"{family}/zero3"]
    return found


def of_tokens(metrics):
    """Metrics without those of routers, which are means over micro-batches: ranks have others than one process."""
    return [{name: value for name, value in step.items() if "/router_" not in name} for step in metrics]


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_two_ranks_learn_what_one_learns(answers, alone, courses, family, name):
    """Though another pair of engines goes on from what the first has saved, and layers are recomputed."""
    ours, theirs = answers[f"{family}/{name}"], alone[f"{family}/{name}"]
    same_metrics(*map(of_tokens, (ours["metrics"], theirs["metrics"])))
    assert furthest(ours["weights"], theirs["weights"]) < 5e-5
    assert furthest(dict(courses[family].policy.trained), theirs["weights"]) > 2e-3
    for index, moments in theirs["state"]["moments"].items():
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(ours["state"]["moments"][index][moment], moments[moment], rtol=1e-3, atol=1e-6)
    assert furthest(ours["weights"], ours["dissolved"]) == 0.0


@pytest.mark.parametrize("family", TARGETS)
def test_an_engine_is_fed_a_few_weights_at_a_time(answers, courses, family):
    found, policy = answers[f"{family}/zero3"], courses[family].policy
    assert found["refused"] == "it takes no more"
    fed = {name: tensor for name, tensor in found["fed"].items() if name != "lm_head.weight"}
    assert furthest(fed, dict(for_engines(policy, found["weights"]))) == 0.0
    sizes = [parameter.numel() for parameter in policy.model.parameters()]
    assert found["most_whole"] <= max(CHUNK_ELEMENTS, *sizes) < sum(sizes) / 4


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_of_recurrent_layers_and_of_experts_learn_too(answers, alone, family):
    ours, theirs = answers[f"{family}/zero3-adapted"], alone[f"{family}/zero3-adapted"]
    same_metrics(*map(of_tokens, (ours["metrics"], theirs["metrics"])))
    assert furthest(ours["weights"], theirs["weights"]) < 5e-5
    assert furthest(ours["fed"], theirs["fed"]) < 5e-5


def test_routes_are_replayed_on_each_rank(answers, alone):
    ours, theirs = (found["qwen3_vl_moe/zero3-routed"] for found in (answers, alone))
    same_metrics(*map(of_tokens, (ours["metrics"], theirs["metrics"])))
    assert furthest(ours["weights"], theirs["weights"]) < 5e-5
