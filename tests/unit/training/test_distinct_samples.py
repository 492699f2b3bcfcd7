"""No step draws a sample twice: data orders, ways of drawing rollouts and a resume together, in the real loop."""

import random
from collections import Counter
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace

import pytest
from factories import make_config, make_context, make_rollout, make_sample
from rl_loop import FakeProcessor, FakeRun, ImmediateExecutor, train_with_fakes
from selection import at_version, centered, select_all

from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.data.load import DataSplits, check_stages_have_samples
from mmrl.data.stage_data import StageData
from mmrl.distributed.ranks import SingleProcess
from mmrl.log.console import Console
from mmrl.training.async_rollouts import AsyncRollouts
from mmrl.types import RolloutBatch, TrainingState, UserError

SIZES = {"a": 6, "b": 14}  # samples of each source
STEPS = 60
SAVED = (7, 23, 44)  # steps after which a run may be stopped
WEIGHTS = {"train": [{"fn": "m:a", "weight": 1.0}, {"fn": "m:b", "weight": 1.0}]}
CURRICULUM = {
    "kind": "curriculum",
    "phases": [
        {"when": {"task": ["a"]}, "max_samples": 6},
        {"plateau": {"window": 5, "min_improvement": 0.9}},
        {"when": {"task": ["b"]}, "max_samples": 50},
        {},
    ],
}
PLAIN = {"train": [{"fn": "m:a"}, {"fn": "m:b"}]}
DATA_ORDERS = {
    "shuffled": (PLAIN, {}),
    "sorted": (PLAIN, {"data_order": {"kind": "sorted", "column": "number"}}),
    "weights": (WEIGHTS, {}),
    "mixture": (PLAIN, {"data_order": {"kind": "mixture", "points": [[0, [0, 1]], [20, [1, 1]]]}}),
    "curriculum": (PLAIN, {"data_order": CURRICULUM, "track_rewards": ["count"]}),
    "priority": (PLAIN, {"data_order": {"kind": "priority"}, "track_rewards": ["count"]}),
    "stream": ({"train": [{"fn": "m:b"}], "streaming": {"shuffle_buffer_size": 12}}, {}),
    "streams": ({**WEIGHTS, "streaming": {"shuffle_buffer_size": 12}}, {}),
}
DYNAMIC = {"ranges": [{"term": "count", "low": 0.2, "high": 0.8}], "max_rounds": 3}
ROLLOUTS = {
    "plain": {},
    "dynamic": {"dynamic_sampling": DYNAMIC},
    "carried over": {"dynamic_sampling": {**DYNAMIC, "extra": "carry"}},
    "partial": {"rollout_steps": [{"kind": "generate", "partial_rollout_tokens": 8, "oversampling": 1.5}]},
    "async": {"async_rollouts": True, "dynamic_sampling": DYNAMIC},
}


def source_samples(name):
    return [make_sample(id=f"{name}{number}", task=name, meta={"number": number}) for number in range(SIZES[name])]


class RecordingPipeline:
    """Records the samples that each step begins, and leaves some groups unfinished, by chance, with `partial`."""

    def __init__(self, *, partial=False):
        self.partial, self.drawn = partial, {}

    def run(self, prompts, *, step, unfinished=()):
        rounds = self.drawn.setdefault(step, [])
        rounds.append([prompt.sample.id for prompt in prompts])
        groups = list(unfinished)
        for prompt in prompts:
            # Of the version that generates in advance.
            groups.append(tuple(at_version(make_rollout(prompt, index), max(0, step - 1)) for index in range(2)))
        num_waiting = random.Random(f"{step} {len(rounds)}").randrange(len(groups)) if self.partial else 0
        return RolloutBatch(groups=tuple(groups[num_waiting:]), unfinished=tuple(groups[:num_waiting]))


def rewards(step, index):
    """Return rewards of two rollouts: in four groups out of ten they differ."""
    rng = random.Random(f"{step} {index}")
    return (0.0, 1.0) if rng.random() < 0.4 else (1.0, 1.0)


class SourceProcessor(FakeProcessor):
    """A processor without a model."""

    def encode(self, sample):
        return None

    def retain(self, samples, prompts, *, step):
        pass


def train_stage(tmp_path, data, options, state):
    """Train a stage on the samples that its config names; return what each step drew, and the states of `SAVED`."""
    config = make_config(
        data={**data, "media_workers": 0},
        stages=[{"kind": "rl", "name": "rl", "steps": STEPS, "prompts_per_step": 4, **options}],
    )
    stage = config.stages[0]
    names = [source.fn.removeprefix("m:") for source in config.data.train]
    samples, source_indices = [], {}
    for index, name in enumerate(names):
        samples += source_samples(name)
        source_indices |= {sample.id: index for sample in source_samples(name)}
    check_stages_have_samples(config, samples, source_indices)
    splits = DataSplits(train=tuple(samples), validation=(), test=(), source_indices=source_indices)
    stage_data = StageData(
        config,
        make_context(tmp_path),
        splits,
        train_functions=[lambda context, name=name: iter(source_samples(name)) for name in names],
        processor=SourceProcessor(),
        outputs=tmp_path,
    )
    pipeline = RecordingPipeline(partial=stage.has_partial_rollouts)
    saved = {}

    def save(state, result):
        if state.step in SAVED:
            saved[state.step] = dumps(state)

    selector = select_all(
        centered,
        prompts_per_step=stage.prompts_per_step,
        dynamic_sampling=stage.dynamic_sampling,
        carry_over=stage.carries_groups,
        tracked_terms=stage.track_rewards,
        curriculum_phases=getattr(stage.data_order, "phases", ()),
    )
    async_rollouts = None
    if stage.async_rollouts:
        async_rollouts = AsyncRollouts(pipeline=pipeline, executor=ImmediateExecutor())
    with stage_data.open_source(stage, state, Console(), SingleProcess()) as source:
        train_with_fakes(
            FakeRun(rewards),
            state,
            steps=stage.steps,
            prompts_per_round=stage.prompts_per_round,
            source=source,
            rollout_pipeline=pipeline,
            async_rollouts=async_rollouts,
            selector=selector,
            callbacks=[SimpleNamespace(on_step_end=save)],
        )
    return pipeline.drawn, saved


@pytest.mark.parametrize("rollouts", ROLLOUTS)
@pytest.mark.parametrize("data_order", DATA_ORDERS)
def test_no_step_draws_a_sample_twice_and_a_resumed_run_draws_the_same(tmp_path, data_order, rollouts):
    data, order_options = DATA_ORDERS[data_order]
    options = {**order_options, **ROLLOUTS[rollouts]}
    drawn, saved = train_stage(tmp_path, data, options, TrainingState())
    for rounds in drawn.values():
        counts = Counter(chain.from_iterable(rounds))
        assert max(counts.values(), default=1) == 1
    for step, text in saved.items():
        resumed, _ = train_stage(tmp_path, data, options, loads(text, TrainingState))
        expected = {later: rounds for later, rounds in drawn.items() if later >= step}
        if rollouts == "async":  # the first round of the next step is in the saved state
            expected[step] = expected[step][1:]
        assert resumed == {later: rounds for later, rounds in expected.items() if rounds}


@pytest.mark.parametrize(
    ("data_order", "options", "message"),
    [
        ("weights", {"prompts_per_step": 13}, "takes up to 7 of a step's 13 samples from source 'm:a', which has 6"),
        ("weights", {"prompts_per_step": 12}, None),
        ("mixture", {"prompts_per_step": 13}, "takes up to 7 of a step's 13 samples from source 'm:a', which has 6"),
        ("mixture", {"prompts_per_step": 15, "steps": 1}, "up to 15 of a step's 15 .* from source 'm:b', which has 14"),
        ("mixture", {"prompts_per_step": 14, "steps": 1}, None),  # it ends before the other source has a share
        ("curriculum", {"prompts_per_step": 5, "dynamic_sampling": DYNAMIC}, "15 samples .* phase 2 .* has 14: see"),
    ],
)
def test_what_is_too_small_for_a_step_is_refused(tmp_path, data_order, options, message):
    data, order_options = DATA_ORDERS[data_order]
    expected = nullcontext() if message is None else pytest.raises(UserError, match=message)
    with expected:
        train_stage(tmp_path, data, {**order_options, **options}, TrainingState())
