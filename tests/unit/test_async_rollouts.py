"""Asynchronous rollouts: by which weights, in which order, for which rank, and where errors are raised."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from fake_ranks import FakeRanks
from samplers import hf_sampler
from selection import NO_CHANGED_MEDIA
from test_rl_loop import FakeRun, build_prompt, components_of, make_rollout, sample

from mmrl.algo.select_experiences import ExperienceSelector
from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import LoraConfig
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import Policy
from mmrl.rollout.pipeline import StepPipeline
from mmrl.training.async_rollouts import AsyncRollouts, check_staleness
from mmrl.training.rl import RlSettings, StepBatch, collect_groups, finish_next_round, run_rl_stage
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


def async_rollouts_of(pipeline, *, executor=None):
    return AsyncRollouts(pipeline=pipeline, executor=executor or AtOnce())


def drawn(groups):
    return [[segment for rollout in group for segment in rollout.segments] for group in groups]


def adapted(tiny):
    """The tiny model with a new adapter, of which some is left out in learning, and nothing in drawing."""
    LoraAdapter(tiny.policy.model, LoraConfig(targets=("language.attention", "vision.mlp"), dropout=0.5), seed=7)
    return replace(tiny, policy=Policy(tiny.policy.model))


@pytest.mark.parametrize("made", [lambda tiny: tiny, adapted], ids=["whole", "adapter"])
def test_what_is_drawn_while_weights_change_is_what_they_were(make_tiny, made):
    """And after a sync, bit for bit, what the policy itself would draw."""
    tiny = made(make_tiny())
    prompts = [tiny.processor.build(each) for each in tiny.samples[:5]]
    salted = partial(hf_sampler, processor=tiny.processor, seed_parts=("a",))
    before = salted(tiny.policy).generate(prompts, 2, tiny.params, step=1)
    copied = salted(tiny.policy, copy_policy=True)
    begun, changed = threading.Event(), threading.Event()

    class Slowly(StepPipeline):
        def run(self, prompts, *, step):
            begun.set()
            assert changed.wait(60)
            return super().run(prompts, step=step)

    program = Slowly(sampler=copied, group_size=2, sampling_params=tiny.params)
    with ThreadPoolExecutor(1) as thread:
        pending = async_rollouts_of(program, executor=thread).start(prompts, step=1, version=0)
        assert begun.wait(60)
        with torch.no_grad():
            for parameter in tiny.policy.trained.values():
                parameter.add_(0.05)
        changed.set()
        ahead = pending.wait()
    assert drawn(ahead.groups) == drawn(before)
    copied.sync(3)
    live = salted(tiny.policy, version=3).generate(prompts, 2, tiny.params, step=2)
    assert drawn(copied.generate(prompts, 2, tiny.params, step=2)) == drawn(live) != drawn(before)


class FakeAsyncRun(FakeRun):
    """A fake run that is its own `AsyncRollouts`, too; it generates at once and records its calls."""

    def start(self, prompts, *, step, version):
        self.calls.append(("start", step))
        rollouts = [[versioned(make_rollout(prompt, index), version) for index in (0, 1)] for prompt in prompts]
        return FakePendingRound(self, prompts, step, RolloutBatch(groups=tuple(map(tuple, rollouts))))


@dataclass
class FakePendingRound:
    """A round that a fake run has generated; it records when it is waited for."""

    run: FakeAsyncRun
    prompts: list
    step: int
    batch: RolloutBatch

    def wait(self):
        self.run.calls.append(("wait", self.step))
        return self.batch


def train(run, state, *, steps):
    settings = RlSettings(num_steps=steps, prompts_per_round=2)
    run_rl_stage(settings, replace(components_of(run), async_rollouts=run), state)


def test_the_next_step_is_started_before_and_waited_for_after_the_update():
    """The first step is generated as ever, and the last one starts none."""
    run, state = FakeAsyncRun(), TrainingState(version=6)
    train(run, state, steps=2)
    update = ["sleep", "learn", "update reference"]
    end = ["sync", "log rollouts", "log", "callback"]
    first = ["take", "rollout", "score", "take", "start", *update, "wait", *end]
    second = ["score", *update, *end]
    assert [name for name, _ in run.calls] == [*first, *second]
    assert [call for call in run.calls if call[0] in ("take", "start")] == [("take", 0), ("take", 2), ("start", 1)]
    assert [segment.version for e in run.learned[1] for segment in e.rollout.segments] == [6] * 4
    assert (state.data_position, state.prefetched) == (4, None)


def test_a_prefetched_round_is_part_of_the_state():
    """A step after a restart learns from what was generated before it, and asks for no samples."""
    groups = tuple(
        (make_rollout(build_prompt(sample(i)), 0), make_rollout(build_prompt(sample(i)), 1)) for i in range(2)
    )
    prefetched = RolloutBatch(groups=groups, probes=({"grey": groups[0]}, {}), metrics={"rethink/kept": 2.0})
    state = loads(dumps(TrainingState(step=2, data_position=6, prefetched=prefetched)), TrainingState)
    assert state.prefetched == prefetched
    run = FakeAsyncRun()
    train(run, state, steps=3)
    assert [name for name, _ in run.calls][:3] == ["score", "sleep", "learn"]
    assert {e.rollout.prompt.sample.id for e in run.learned[0]} == {"0", "1"}
    assert run.logged[0][0]["rethink/kept"] == 2.0


def test_an_error_in_the_thread_is_raised_where_it_is_waited_for_and_says_for_whom():
    class Broken(FakeRun):
        def run(self, prompts, *, step, unfinished=()):
            raise UserError("sample 7: its picture is gone")

    with ThreadPoolExecutor(1) as thread:
        pending = async_rollouts_of(Broken(), executor=thread).start(
            [build_prompt(sample(7)), build_prompt(sample(8))], step=3, version=1
        )
        with pytest.raises(UserError, match="sample 7: its picture is gone") as caught:
            pending.wait()
    assert caught.value.__notes__ == ["while the rollouts of step 4 were generated in advance, for samples 7, 8"]


def versioned(rollout, version):
    return replace(rollout, segments=tuple(replace(segment, version=version) for segment in rollout.segments))


def test_no_rollout_is_more_than_a_version_old():
    drawn_by_3 = RolloutBatch(groups=tuple((versioned(make_rollout(build_prompt(sample(i)), 0), 3),) for i in range(2)))
    for version in (3, 4):
        check_staleness(drawn_by_3, version)
    for version in (2, 5):
        with pytest.raises(
            RuntimeError, match="sample 0, rollout 0: generated by policy version 3, but .* 1 version old"
        ):
            check_staleness(drawn_by_3, version)
    with pytest.raises(
        RuntimeError, match="generated by policy version 0, but only 1 to 1 are allowed"
    ):  # not the one that was told
        async_rollouts_of(FakeRun()).start([build_prompt(sample(1))], step=1, version=1).wait()


def test_a_prefetched_round_is_gathered_from_all_ranks_and_shared_out_again():
    class Between(FakeRanks):
        """The second of three; the first gave two groups, the last none."""

        def all_gather(self, mine):
            first = {dict: {"n": 2.0}, int: 2, tuple: (two.groups, two.probes)}[type(mine)]
            last = {dict: {}, int: 0, tuple: ((), ())}[type(mine)]
            return [first, mine, last]

    class Counting(FakeRun):
        def run(self, prompts, *, step, unfinished=()):
            batch = super().run(prompts, step=step)
            return replace(batch, probes=({},) * len(prompts), metrics={"n": float(len(prompts))})

    class Gathering(FakeRanks):
        def all_gather(self, mine):
            return [(), mine, ()]

    two = Counting().run([build_prompt(sample(0)), build_prompt(sample(1))], step=0)
    pending = async_rollouts_of(Counting()).start([build_prompt(sample(2))], step=0, version=0)
    whole = finish_next_round(pending, 4, Between(1, 3))
    assert [group[0].prompt.sample.id for group in whole.groups] == ["0", "1", "2"]
    assert len(whole.probes) == 3
    assert whole.metrics == {"n": 3.0, "data/dropped": 1.0}

    run, collected = FakeRun(), StepBatch()
    components = replace(components_of(run), ranks=Gathering(1, 3))
    state = TrainingState(version=1, prefetched=whole)
    collect_groups(RlSettings(num_steps=1, prompts_per_round=4), components, state, collected)
    assert [group.prompt.sample.id for group in collected.groups] == ["1"]
    assert collected.metrics == whole.metrics
    assert state.prefetched is None


@pytest.mark.parametrize(("corrected", "old"), [(False, "recorded"), (True, None)])
def test_what_is_old_is_known_to_be(corrected, old):
    """Below its ratio stands what it was drawn with, unless importance weights correct for the step between."""
    rollouts = [versioned(make_rollout(build_prompt(sample(0)), i), version) for i, version in enumerate((5, 4))]
    group = Group(prompt=build_prompt(sample(0)), rollouts=tuple(rollouts), scores=FakeRun().scores())
    chooser = ExperienceSelector(
        compute_advantages=lambda groups: [(0.5, -0.5)] * len(groups),
        find_changed_media=NO_CHANGED_MEDIA,
        stale_old_logprobs=None if corrected else "recorded",
        rollouts_may_be_stale=True,
    )
    choice = chooser.select([group], TrainingState(version=5))
    assert [(e.staleness, e.old_logprobs_source) for e in choice.experiences] == [(0, None), (1, old)]
    assert choice.metrics == {"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0}
    assert chooser.select([], TrainingState(version=5)).metrics == {}
