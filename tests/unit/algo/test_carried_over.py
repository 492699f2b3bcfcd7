"""Groups that wait for room, over random runs: in order, none lost, never more than a step holds, equal on all ranks.

The loop, partial and asynchronous rollouts, the exchange between ranks and the selection are the real ones. Ranks are
threads; lengths, rewards and changed media derive from the sample, so that one process and two meet the same ones.
"""

import random
from collections import deque
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from factories import make_group, make_prompt, make_rollout, make_sample, make_score
from rl_loop import ImmediateExecutor
from selection import centered, make_media_finder
from thread_ranks import run_on_ranks

from mmrl.algo.replay import ReplaySettings
from mmrl.algo.select_experiences import ExperienceSelector
from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardRangeConfig, ReplayConfig
from mmrl.distributed.ranks import SingleProcess, own_rows
from mmrl.rollout.pipeline import StepPipeline
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.training import rl
from mmrl.training.async_rollouts import AsyncRollouts
from mmrl.types import Author, FinishReason, SamplingParams, Segment, TrainingState, UserError

LONGEST, GROUP_SIZE, STEPS = 12, 2, 14
PARAMS = SamplingParams(max_new_tokens=LONGEST)


def take_samples(start, count):
    return [make_sample(id=str(start + index)) for index in range(count)]


class RandomSampler:
    """A sampler whose responses have random lengths, by sample and index."""

    def __init__(self):
        self.version = 0

    def generate(self, prompts, group_size, sampling_params, *, step):
        groups = []
        for prompt in prompts:
            empty = replace(make_rollout(prompt), segments=(), sampling_params=PARAMS)
            rollouts = [replace(empty, index=index) for index in range(group_size)]
            groups.append(self.extend(rollouts, sampling_params, step=step))
        return groups

    def extend(self, rollouts, sampling_params, *, step):
        return [self._extend(rollout, sampling_params.max_new_tokens) for rollout in rollouts]

    def _extend(self, rollout, most):
        length = random.Random(f"length {rollout.prompt.sample.id} {rollout.index}").randrange(1, LONGEST + 1)
        count = min(most, length - rollout.num_tokens)
        segment = Segment(token_ids=(5,) * count, logprobs=(-1.0,) * count, author=Author.POLICY, version=self.version)
        reason = FinishReason.EOS if rollout.num_tokens + count == length else FinishReason.LENGTH
        return replace(rollout, segments=(*rollout.segments, segment), finish_reason=reason)


class Plan:
    """Settings of one random run."""

    def __init__(self, seed):
        rng = random.Random(seed)
        self.seed = seed
        self.prompts_per_step = rng.randrange(2, 6)
        self.chunk = rng.choice((None, 2, 4))
        self.is_async = self.chunk is None and rng.random() < 0.5
        factor = rng.choice((1.0, 1.5, 2.0, 3.0)) if self.chunk else 1.0
        self.prompts_per_round = int(self.prompts_per_step * factor)
        self.dynamic_sampling, self.carry_over = None, factor > 1.0
        if rng.random() < 0.7:
            ranges = (GroupRewardRangeConfig(term="right"),)
            extra = rng.choice(("drop", "carry", "carry"))
            self.dynamic_sampling = DynamicSamplingConfig(ranges=ranges, max_rounds=rng.randrange(1, 4), extra=extra)
            self.carry_over = extra == "carry"
        self.replay = rng.random() < 0.5

    def is_mixed(self, sample_id):
        return random.Random(f"reward {self.seed} {sample_id}").random() < 0.7

    def media_changed(self, sample_id):
        return random.Random(f"media {self.seed} {sample_id}").random() < 0.1


class Run:
    """One rank of a run: its parts, and what it saw, step by step."""

    def __init__(self, plan, ranks):
        self.plan, self.ranks, self.state = plan, ranks, TrainingState()
        self.arrived, self.trained, self.waiting, self.learned, self.metrics = [], [], [], [], []

    def score_groups(self, rollouts, *, step, probes=()):
        groups = []
        for siblings in rollouts:
            prompt = siblings[0].prompt
            rewards = (0.0, 1.0) if self.plan.is_mixed(prompt.sample.id) else (1.0, 1.0)
            groups.append(make_group(prompt, siblings, [make_score(right=reward) for reward in rewards]))
        return tuple(groups)

    def check_media(self, rollout):
        if self.plan.media_changed(rollout.prompt.sample.id):
            raise UserError("changed")

    def build(self, sample):
        return make_prompt(sample)

    def step(self, experiences, *, step):
        # A rank is known to have the media of each, also of groups of earlier steps.
        assert {e.rollout.prompt.digest for e in experiences} <= self.ranks.media_ranks.keys()
        self.learned.append([(e.rollout.prompt.sample.id, e.rollout.index, e.staleness) for e in experiences])
        return {}

    def on_step_end(self, state, result):
        self.metrics.append(dict(result.metrics))
        # What waits is part of every checkpoint: from here on the run continues with what was read.
        saved = loads(dumps(state), TrainingState)
        for name in ("carried_over", "unfinished", "replay_buffer"):
            setattr(state, name, getattr(saved, name))

    def select(self, groups, state):
        self.arrived.append([group.prompt.sample.id for group in groups])
        selected = self.selector.select(groups, state)
        self.trained.append([g.prompt.sample.id for g in selected.groups if self.is_trained(g)])
        self.waiting.append([group.prompt.sample.id for group in state.carried_over])
        return selected

    def is_trained(self, group):
        return self.plan.dynamic_sampling is None or self.plan.is_mixed(group.prompt.sample.id)

    def recheck_carried_over(self, state):
        return self.selector.recheck_carried_over(state)

    def needs_another_round(self, groups, state, *, rounds):
        return self.selector.needs_another_round(groups, state, rounds=rounds)

    def train(self):
        plan, ranks, sampler = self.plan, self.ranks, RandomSampler()
        context = SimpleNamespace(
            sampler=sampler,
            group_size=GROUP_SIZE,
            sampling_params=PARAMS,
            prompts_per_step=plan.prompts_per_step,
            ranks=ranks,
        )
        parts = None
        if plan.chunk:
            parts = PartialRollouts(context=context, chunk_tokens=plan.chunk)
        pipeline = StepPipeline(context=context, partial_rollouts=parts)
        replay = ReplayConfig(max_staleness=2, capacity=9)
        self.selector = ExperienceSelector(
            compute_advantages=centered,
            prompts_per_step=plan.prompts_per_step,
            dynamic_sampling=plan.dynamic_sampling,
            carry_over=plan.carry_over,
            replay=ReplaySettings(options=replay, rollouts_per_step=8, seed=("s",)) if plan.replay else None,
            find_changed_media=make_media_finder(self.check_media, ranks=ranks),
        )
        rl_parts = rl.RlParts(
            num_steps=STEPS,
            prompts_per_round=plan.prompts_per_round,
            source=SimpleNamespace(
                take=lambda start, count: own_rows(take_samples(start, count), plan.prompts_per_round, ranks)
            ),
            processor=self,
            rollout_pipeline=pipeline,
            engine=SimpleNamespace(gather_for_sampling=nullcontext, sleep=lambda: None),
            async_rollouts=AsyncRollouts(pipeline=pipeline, executor=ImmediateExecutor()) if plan.is_async else None,
            scorer=self,
            group_rewards=(),
            selector=self,
            learner=self,
            update_reference=None,
            sync_weights=lambda version: setattr(sampler, "version", version),
            callbacks=[self],
            ranks=ranks,
        )
        rl.train_rl(rl_parts, self.state)
        return self


def check_against_a_queue(run):
    """Compare a run with a plain queue, which knows nothing of slices."""
    plan, queue = run.plan, deque()
    for step in range(STEPS):
        usable = [each for each in queue if not plan.media_changed(each)]
        if plan.carry_over and len(usable) >= plan.prompts_per_step:
            assert run.arrived[step] == []  # nothing is generated that would only wait
        else:
            assert run.arrived[step]
        lost = len(queue) - len(usable)
        num_carried = min(len(usable), plan.prompts_per_step)
        new = [each for each in run.arrived[step] if plan.dynamic_sampling is None or plan.is_mixed(each)]
        queue = deque([*usable, *new])
        expected = [queue.popleft() for _ in range(min(plan.prompts_per_step, len(queue)))]
        dropped = []
        if not plan.carry_over:
            dropped, queue = list(queue), deque()
        assert [each for each in run.trained[step] if each not in dropped] == expected
        assert run.waiting[step] == list(queue)
        assert len(queue) < plan.prompts_per_round + plan.prompts_per_step
        if plan.carry_over:
            assert run.metrics[step]["groups/carried_over"] == num_carried
            assert run.metrics[step]["groups/dropped_changed_media"] == lost
        learned = {each for each, _, _ in run.learned[step]} & set(expected)
        assert learned == {each for each in expected if plan.is_mixed(each) or not plan.replay}
        if plan.replay:
            assert all(age <= 2 for each, _, age in run.learned[step] if each not in expected)
        else:
            assert len(run.learned[step]) == GROUP_SIZE * len(expected)
    all_trained = [each for step in run.trained for each in step]
    assert len(set(all_trained)) == len(all_trained)


@pytest.mark.parametrize("seed", range(40))
def test_groups_wait_in_order_and_equally_on_all_ranks(seed):
    plan = Plan(seed)
    one = Run(plan, SingleProcess()).train()
    check_against_a_queue(one)
    for rank in run_on_ranks(2, lambda ranks: Run(plan, ranks).train()):
        assert (rank.trained, rank.waiting, rank.learned) == (one.trained, one.waiting, one.learned)
        for name in ("groups/carried_over", "groups/dropped_changed_media", "dynamic_sampling/passed_frac"):
            assert [step.get(name) for step in rank.metrics] == [step.get(name) for step in one.metrics]


def test_the_random_runs_contain_full_queues_and_changed_media():
    plans = [Plan(seed) for seed in range(40)]
    overfull = [plan for plan in plans if plan.carry_over and plan.prompts_per_round > plan.prompts_per_step]
    assert sum(plan.dynamic_sampling is not None for plan in overfull) > 3
    assert sum(plan.dynamic_sampling is None for plan in overfull) > 2
    assert sum(plan.is_async and plan.carry_over for plan in plans) > 1
    skipped = lost = 0
    for plan in overfull:
        run = Run(plan, SingleProcess()).train()
        skipped += run.arrived.count([])
        lost += sum(step["groups/dropped_changed_media"] for step in run.metrics)
    assert skipped > 10 and lost > 5
