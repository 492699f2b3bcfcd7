"""Drawing ahead: by whose weights, in which order, whose part, and what becomes of errors."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from test_dealing import Rank
from test_loop import World, answer, ask, sample, train

from mmrl.algo.select_experiences import Everything
from mmrl.algo.staleness import Lagging
from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import LoraConfig
from mmrl.distributed.ranks import SharedRolloutPipeline, SingleProcess
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.qwen_vl import Policy
from mmrl.rollout.engines.hf import HfSampler
from mmrl.rollout.engines.policy_copy import PolicyCopySampler
from mmrl.rollout.pipeline import CompleteRollouts
from mmrl.training import rl
from mmrl.training.async_rollouts import ThreadedAsyncRollouts
from mmrl.types import Group, RolloutBatch, TrainingState, UserError


class AtOnce:
    """An executor that works when asked."""

    def submit(self, work, *args, **options):
        done = Future()
        try:
            done.set_result(work(*args, **options))
        except UserError as error:
            done.set_exception(error)
        return done


def overlap(program, *, ranks=None, places=2, thread=None):
    shared = SharedRolloutPipeline(
        pipeline=program, ranks=ranks or SingleProcess(), prompts_per_round=places, gather_for_sampling=None
    )
    return ThreadedAsyncRollouts(pipeline=shared, executor=thread or AtOnce())


def drawn(groups):
    return [[segment for rollout in group for segment in rollout.segments] for group in groups]


def adapted(world):
    """The world with a new adapter, of which some is left out in learning, and nothing in drawing."""
    LoraAdapter(world.policy.model, LoraConfig(targets=("language.attention", "vision.mlp"), dropout=0.5), seed=7)
    return replace(world, policy=Policy(world.policy.model))


@pytest.mark.parametrize("made", [lambda world: world, adapted], ids=["whole", "adapter"])
def test_what_is_drawn_while_weights_change_is_what_they_were(tiny, made):
    """And after a sync, bit for bit, what the policy itself would draw."""
    world = made(tiny())
    prompts = [world.processor.ask(each) for each in world.samples[:5]]
    salted = partial(HfSampler, processor=world.processor, salt=("a",))
    before = salted(world.policy).generate(prompts, 2, world.law, step=1)
    copied = PolicyCopySampler(world.policy, salted)
    begun, changed = threading.Event(), threading.Event()

    class Slowly(CompleteRollouts):
        def answer(self, prompts, *, step, pending=()):
            begun.set()
            assert changed.wait(60)
            return super().generate(prompts, step=step)

    program = Slowly(sampler=copied, group_size=2, law=world.law)
    with ThreadPoolExecutor(1) as thread:
        finish = overlap(program, thread=thread, places=5).start(prompts, step=1, version=0)
        assert begun.wait(60)
        with torch.no_grad():
            for parameter in world.policy.learned.values():
                parameter.add_(0.05)
        changed.set()
        ahead = finish()
    assert drawn(ahead.groups) == drawn(before)
    copied.sync(3)
    live = salted(world.policy, version=3).generate(prompts, 2, world.law, step=2)
    assert drawn(copied.generate(prompts, 2, world.law, step=2)) == drawn(live) != drawn(before)


class Ahead(World):
    """A world that draws ahead, at once, and writes it down."""

    version = 0

    def begin(self, prompts, *, step, version):
        self.calls.append(("begin", step))
        drawn_now = RolloutBatch(groups=tuple((answer(prompt, 0), answer(prompt, 1)) for prompt in prompts))

        def finish():
            self.calls.append(("finish", step))
            return drawn_now

        return finish

    def due(self, answers, *, version):
        self.calls.append(("due", version))
        return answers


def test_the_next_step_is_asked_before_and_waited_for_behind_the_learning(monkeypatch):
    """The first step is drawn as ever, and behind the last nothing is."""
    monkeypatch.setattr(rl, "Parts", partial(rl.RlComponents, async_rollouts=(world := Ahead())))
    state = TrainingState(version=6)
    train(world, state, steps=2)
    around = ["judge", "begin", "learn", "finish", "sync", "show", "tell", "keep"]
    first, second = world.calls[: 2 + len(around) + 1], world.calls[2 + len(around) + 1 :]
    assert [name for name, _ in first] == ["take", "answer", "judge", "take", *around[1:]]
    assert [name for name, _ in second] == ["due", "judge", "learn", "sync", "show", "tell", "keep"]
    assert [call for call in world.calls if call[0] in ("take", "begin", "due")] == [
        ("take", 0),
        ("take", 2),
        ("begin", 1),
        ("due", 7),
    ]
    assert (state.data_position, state.prefetched) == (4, None)


def test_a_round_that_lies_ahead_is_part_of_the_state(monkeypatch):
    """A step after a restart learns from what was drawn before it, and asks nobody."""
    groups = tuple((answer(ask(sample(i)), 0), answer(ask(sample(i)), 1)) for i in range(2))
    ahead = RolloutBatch(groups=groups, probes=({"grey": groups[0]}, {}), metrics={"rethink/kept": 2.0})
    state = loads(dumps(TrainingState(step=2, data_position=6, prefetched=ahead)), TrainingState)
    assert state.prefetched == ahead
    monkeypatch.setattr(rl, "Parts", partial(rl.RlComponents, async_rollouts=(world := Ahead())))
    train(world, state, steps=3)
    assert [name for name, _ in world.calls][:2] == ["due", "judge"]
    assert {e.rollout.prompt.sample.id for e in world.learned[0]} == {"0", "1"}
    assert world.told[0][0]["rethink/kept"] == 2.0


def test_an_error_in_the_thread_is_raised_where_it_is_waited_for_and_says_for_whom():
    class Broken(World):
        def answer(self, prompts, *, step, pending=()):
            raise UserError("sample 7: its picture is gone")

    with ThreadPoolExecutor(1) as thread:
        finish = overlap(Broken(), thread=thread).start([ask(sample(7)), ask(sample(8))], step=3, version=1)
        with pytest.raises(UserError, match="sample 7: its picture is gone") as caught:
            finish()
    assert caught.value.__notes__ == ["while the rollouts of step 4 were drawn ahead, for samples 7, 8"]


def versioned(rollout, version):
    return replace(rollout, segments=tuple(replace(segment, version=version) for segment in rollout.segments))


def test_no_rollout_is_more_than_a_version_old():
    drawn_by_3 = RolloutBatch(groups=tuple((versioned(answer(ask(sample(i)), 0), 3),) for i in range(2)))
    foresight = overlap(World())
    for version in (3, 4):
        assert foresight.take(drawn_by_3, version=version) == drawn_by_3
    for version in (2, 5):
        with pytest.raises(RuntimeError, match="sample 0, rollout 0: drawn by policy 3, where .* by one version"):
            foresight.take(drawn_by_3, version=version)
    with pytest.raises(RuntimeError, match="drawn by policy 0, where 1 to 1 are allowed"):  # not the one that was told
        foresight.start([ask(sample(1))], step=1, version=1)()


def test_answers_of_all_ranks_are_gathered_and_dealt_out_again():
    class Between(Rank):
        """The second of three; the first gave two groups, the last none."""

        def gather(self, mine):
            first = {dict: {"n": 2.0}, int: 2, tuple: (two.groups, two.probes)}[type(mine)]
            last = {dict: {}, int: 0, tuple: ((), ())}[type(mine)]
            return [first, mine, last]

    class Counting(World):
        def answer(self, prompts, *, step, pending=()):
            answers = super().answer(prompts, step=step)
            return replace(answers, probes=({},) * len(prompts), metrics={"n": float(len(prompts))})

    two = Counting().answer([ask(sample(0)), ask(sample(1))], step=0)
    foresight = overlap(Counting(), ranks=Between(1, 3), places=4)
    whole = foresight.start([ask(sample(2))], step=0, version=0)()
    assert [group[0].prompt.sample.id for group in whole.groups] == ["0", "1", "2"]
    assert len(whole.probes) == 3
    assert whole.metrics == {"n": 3.0, "data/dropped": 1.0}
    mine = foresight.take(whole, version=1)
    assert [group[0].prompt.sample.id for group in mine.groups] == ["1"]
    assert len(mine.probes) == 1


@pytest.mark.parametrize(("corrected", "old"), [(False, "sampler"), (True, None)])
def test_what_is_old_is_known_to_be(corrected, old):
    """Below its ratio stands what it was drawn with, unless importance weights correct for the step between."""
    rollouts = [versioned(answer(ask(sample(0)), i), version) for i, version in enumerate((5, 4))]
    group = Group(prompt=ask(sample(0)), rollouts=tuple(rollouts), scores=World().scores())
    chooser = Lagging(Everything(lambda groups: [(0.5, -0.5)] * len(groups)), corrected=corrected)
    choice = chooser.select([group], TrainingState(version=5))
    assert [(e.staleness, e.old_logprobs_source) for e in choice.experiences] == [(0, None), (1, old)]
    assert choice.metrics == {"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0}
    assert chooser.select([], TrainingState(version=5)).metrics == {}
