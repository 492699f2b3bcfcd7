"""Asynchronous rollouts: by which weights, in which order, for which rank, and where errors are raised."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from factories import make_group, make_prompt, make_rollout, make_score
from fake_ranks import FakeRanks
from rl_loop import FakePipeline, FakeRun, ImmediateExecutor, numbered_sample, train_with_fakes
from samplers import hf_sampler, make_context
from selection import select_all

from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import LoraConfig
from mmrl.policy.lora import LoraAdapter
from mmrl.policy.policy import PolicyModel
from mmrl.rollout.pipeline import StepPipeline
from mmrl.training.async_rollouts import AsyncRollouts
from mmrl.training.callbacks import StepTimer
from mmrl.training.rl import collect_groups, finish_next_batch
from mmrl.types import RolloutBatch, TrainingState, UserError


def numbered_prompts(*numbers):
    return [make_prompt(numbered_sample(number)) for number in numbers]


def segments_of(groups):
    return [[segment for rollout in group for segment in rollout.segments] for group in groups]


def with_adapter(tiny):
    """The tiny model with a new adapter that has dropout, which acts in learning but not in sampling."""
    LoraAdapter(tiny.policy.model, LoraConfig(targets=("language.attention", "vision.mlp"), dropout=0.5), seed=7)
    return replace(tiny, policy=PolicyModel(tiny.policy.model))


@pytest.mark.parametrize("change_model", [lambda tiny: tiny, with_adapter], ids=["full", "adapter"])
def test_copied_policy_samples_with_old_weights_until_it_is_synced(make_tiny, change_model):
    """After the sync it samples, bit for bit, what the policy itself would sample."""
    tiny = change_model(make_tiny())
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    make_sampler = partial(hf_sampler, processor=tiny.processor, seed_parts=("a",))
    before = make_sampler(tiny.policy).generate(prompts, 2, tiny.params, step=1)
    copied = make_sampler(tiny.policy, copy_policy=True)
    begun, changed = threading.Event(), threading.Event()

    class SlowPipeline(StepPipeline):
        def run(self, prompts, *, step):
            begun.set()
            assert changed.wait(60)
            return super().run(prompts, step=step)

    pipeline = SlowPipeline(context=make_context(tiny, sampler=copied))
    with ThreadPoolExecutor(1) as thread:
        pending = AsyncRollouts(pipeline=pipeline, executor=thread).start(prompts, step=1, version=0)
        assert begun.wait(60)
        with torch.no_grad():
            for parameter in tiny.policy.trainable.values():
                parameter.add_(0.05)
        changed.set()
        next_batch = pending.wait()
    assert segments_of(next_batch.groups) == segments_of(before)
    copied.sync(3)
    live = make_sampler(tiny.policy, version=3).generate(prompts, 2, tiny.params, step=2)
    synced = copied.generate(prompts, 2, tiny.params, step=2)
    assert segments_of(synced) == segments_of(live) != segments_of(before)


@dataclass
class RecordingAsyncRollouts:
    """Generates at once, and records when a round is started and waited for."""

    calls: list

    def start(self, prompts, *, step, version):
        self.calls.append(("start", step))
        groups = tuple(tuple(with_version(make_rollout(each, index), version) for index in (0, 1)) for each in prompts)

        def wait():
            self.calls.append(("wait", step))
            return RolloutBatch(groups=groups)

        return SimpleNamespace(prompts=prompts, wait=wait)


def with_version(rollout, version):
    return replace(rollout, segments=tuple(replace(segment, version=version) for segment in rollout.segments))


def test_next_step_is_started_before_the_update_and_waited_for_after_it():
    """The first step is generated as without async rollouts, and the last one starts none."""
    run, state = FakeRun(), TrainingState(version=6)
    train_with_fakes(run, state, steps=2, async_rollouts=RecordingAsyncRollouts(run.calls))
    update = ["sleep", "learn", "update reference"]
    end = ["sync", "record rollouts", "log", "callback"]
    first = ["take", "rollout", "score", "take", "start", *update, "wait", *end]
    second = ["score", *update, *end]
    assert [name for name, _ in run.calls] == [*first, *second]
    assert [call for call in run.calls if call[0] in ("take", "start")] == [("take", 0), ("take", 2), ("start", 1)]
    assert [segment.version for e in run.learner.learned[1] for segment in e.rollout.segments] == [6] * 4
    assert (state.data_position, state.next_batch) == (4, None)


def test_step_after_a_restart_learns_from_the_next_batch_of_the_state():
    groups = tuple((make_rollout(prompt, 0), make_rollout(prompt, 1)) for prompt in numbered_prompts(0, 1))
    next_batch = RolloutBatch(groups=groups, probes=({"grey": groups[0]}, {}), metrics={"rethink/kept": 2.0})
    state = loads(dumps(TrainingState(step=2, data_position=6, next_batch=next_batch)), TrainingState)
    assert state.next_batch == next_batch
    run = FakeRun()
    train_with_fakes(run, state, steps=3, async_rollouts=RecordingAsyncRollouts(run.calls))
    assert [name for name, _ in run.calls][:3] == ["score", "sleep", "learn"]
    assert {e.rollout.prompt.sample.id for e in run.learner.learned[0]} == {"0", "1"}
    assert run.logger.metrics[0]["rethink/kept"] == 2.0


def test_error_in_the_thread_is_raised_by_wait_with_a_note_that_names_the_samples():
    class BrokenPipeline:
        def run(self, prompts, *, step):
            raise UserError("sample 7: its picture is gone")

    with ThreadPoolExecutor(1) as thread:
        rollouts = AsyncRollouts(pipeline=BrokenPipeline(), executor=thread)
        pending = rollouts.start(numbered_prompts(7, 8), step=3, version=1)
        with pytest.raises(UserError, match="its picture is gone") as caught:
            pending.wait()
    [note] = caught.value.__notes__
    assert "step 4" in note and "samples 7, 8" in note


def test_wait_refuses_rollouts_of_another_policy_version():
    """`FakePipeline` generates with version 0."""
    rollouts = AsyncRollouts(pipeline=FakePipeline([]), executor=ImmediateExecutor())
    assert len(rollouts.start(numbered_prompts(1), step=1, version=0).wait().groups) == 1
    with pytest.raises(RuntimeError, match="sample 1, rollout 0: .* version 0, not by 1"):
        rollouts.start(numbered_prompts(1), step=1, version=1).wait()


def test_next_batch_is_gathered_from_all_ranks_and_divided_again():
    class CountingPipeline(FakePipeline):
        def run(self, prompts, *, step):
            batch = super().run(prompts, step=step)
            return replace(batch, probes=({},) * len(prompts), metrics={"n": float(len(prompts))})

    pipeline = CountingPipeline([])
    of_rank_0 = pipeline.run(numbered_prompts(0, 1), step=0)

    def gather_round(value):
        """Return what three ranks gather: rank 0 has two groups, this rank one, rank 2 none."""
        first = {dict: {"n": 2.0}, int: 2, tuple: (of_rank_0.groups, of_rank_0.probes)}[type(value)]
        last = {dict: {}, int: 0, tuple: ((), ())}[type(value)]
        return [first, value, last]

    pending = AsyncRollouts(pipeline=pipeline, executor=ImmediateExecutor()).start(
        numbered_prompts(2), step=0, version=0
    )
    gathered = finish_next_batch(pending, 4, SimpleNamespace(rank=1, size=3, all_gather=gather_round))
    assert [group[0].prompt.sample.id for group in gathered.groups] == ["0", "1", "2"]
    assert len(gathered.probes) == 3
    assert gathered.metrics == {"n": 3.0, "data/dropped": 1.0}

    ranks = FakeRanks(1, 3, others=((), ()))
    state = TrainingState(version=1, next_batch=gathered)
    parts = FakeRun().rl_parts(num_steps=1, prompts_per_round=4, ranks=ranks)
    groups, metrics = collect_groups(parts, state, StepTimer())
    assert [group.prompt.sample.id for group in groups] == ["1"]
    assert metrics == gathered.metrics
    assert state.next_batch is None


@pytest.mark.parametrize(("is_corrected", "source"), [(False, "recorded"), (True, None)])
def test_stale_rollouts_divide_by_recorded_logprobs_unless_importance_weights_correct_them(is_corrected, source):
    [prompt] = numbered_prompts(0)
    rollouts = [with_version(make_rollout(prompt, index), version) for index, version in enumerate((5, 4))]
    group = make_group(prompt, rollouts, [make_score(count=0.0), make_score(count=1.0)])
    source = None if is_corrected else "recorded"
    selector = select_all(
        lambda groups: [(0.5, -0.5)] * len(groups), stale_old_logprobs=source, rollouts_span_versions=True
    )
    selected = selector.select([group], TrainingState(version=5))
    assert [(e.staleness, e.old_logprobs_source) for e in selected.experiences] == [(0, None), (1, source)]
    assert selected.metrics == {"rollout/staleness_mean": 0.5, "rollout/staleness_max": 1.0}
    assert selector.select([], TrainingState(version=5)).metrics == {}
