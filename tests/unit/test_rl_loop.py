"""The loops: the calls of a step in order, its metrics, and when a run gives up."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
from selection import select_all

from mmrl.algo.replay import ReplaySettings
from mmrl.algo.step_metrics import compute_step_metrics
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardRangeConfig, ReplayConfig
from mmrl.config.schema.presets import REPLAY_PRESETS
from mmrl.distributed.ranks import MediaOwners, SingleProcess
from mmrl.training import rl, sft
from mmrl.training.callbacks import StepLogger
from mmrl.training.health import FailedStepCounter, FailedStepLimit
from mmrl.types import (
    Answer,
    AnswerType,
    Author,
    CoordinateSystem,
    Dropped,
    FinishReason,
    Group,
    Prompt,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Rollout,
    RolloutBatch,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Target,
    TrainingState,
    UserError,
)

SAMPLING_PARAMS = SamplingParams(max_new_tokens=4)
NUMBER = Target(answer_type=AnswerType.NUMBER, value=1)


def sample(i, task="t", label=None):
    return Sample(id=str(i), task=task, parts=("?",), target=NUMBER, label=label)


def build_prompt(sample_):
    return Prompt(
        sample=sample_,
        token_ids=(1,),
        grids=(),
        resize_maps=(),
        coordinate_system=CoordinateSystem.NORM_1,
        digest=sample_.id,
    )


def make_rollout(prompt, index, tokens=2, finish=FinishReason.EOS):
    segment = Segment(token_ids=(5,) * tokens, logprobs=(-1.0,) * tokens, author=Author.POLICY)
    nothing = Answer(text=None, thinking=None, value=None)
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(segment,),
        text="",
        answer=nothing,
        finish_reason=finish,
        sampling_params=SAMPLING_PARAMS,
    )


def score(**terms):
    return Score(terms={name: RewardValue(value, "") for name, value in terms.items()}, total=sum(terms.values()))


class FakeRun:
    """Every component and callback of a loop at once; it records its calls."""

    def __init__(self, rewards=(0.0, 1.0), done_at=None):
        self.rewards, self.done_at = rewards, done_at
        self.calls, self.logged, self.learned = [], [], []
        self.nonfinite_updates, self.forced = {}, []

    def take(self, start_position, count):
        self.calls.append(("take", start_position))
        return [sample(start_position + i, label=NUMBER) for i in range(count)]

    def build(self, sample_):
        return build_prompt(sample_)

    def build_demonstration(self, prompt, demonstration, *, with_thinking, loss_on):
        return make_rollout(prompt, 0)

    def run(self, prompts, *, step, unfinished=()):
        self.calls.append(("rollout", step))
        groups = tuple((make_rollout(prompt, 0), make_rollout(prompt, 1)) for prompt in prompts)
        return RolloutBatch(groups=groups)

    def sync(self, version):
        self.calls.append(("sync", version))

    def score_groups(self, rollouts, *, step, probes=()):
        self.calls.append(("score", step))
        return [Group(prompt=r[0].prompt, rollouts=tuple(r), scores=self.scores()) for r in rollouts]

    def scores(self):
        return tuple(score(count=reward) for reward in self.rewards)

    def step(self, experiences, *, step):
        self.calls.append(("learn", step))
        self.learned.append(experiences)
        update = {"learner/nonfinite_updates": self.nonfinite_updates[step]} if step in self.nonfinite_updates else {}
        return {"learner/loss": 0.25, **update}

    def sleep_engine(self):
        self.calls.append(("sleep", None))

    def update_reference(self, step):
        self.calls.append(("update reference", step))
        return {"learner/reference_resets": 0.0}

    def log_rollouts(self, state, groups, advantages, *, force):
        self.calls.append(("log rollouts", state.step))
        self.forced += [state.step] * force
        return f"kept-{state.step}"

    def log(self, state, metrics, times):
        self.calls.append(("log", state.step))
        self.logged.append((metrics, times))

    def on_step_end(self, state, result):
        self.calls.append(("callback", state.step))
        state.stage_done = state.step == self.done_at


def centred(groups):
    means = [sum(group.totals) / max(len(group.totals), 1) for group in groups]
    return [[total - mean for total in group.totals] for group, mean in zip(groups, means, strict=True)]


def callbacks_of(run, *, max_steps_without_signal=None):
    """The callbacks of a stage as a run orders them, with `run` as the last."""
    is_rl = max_steps_without_signal is not None
    return [
        FailedStepCounter(count_steps_without_signal=is_rl),
        StepLogger(run, only_failed_rollouts=not is_rl),
        FailedStepLimit(max_nonfinite_steps=2, max_steps_without_signal=max_steps_without_signal),
        run,
    ]


def components_of(run, *, max_steps_without_signal=2, add_group_rewards=lambda group, step: group):
    ports = ("source", "processor", "rollout_pipeline", "scorer", "learner")
    return rl.RlComponents(
        **dict.fromkeys(ports, run),
        gather_policy=nullcontext,
        sleep_engine=run.sleep_engine,
        async_rollouts=None,
        selector=select_all(centred),
        add_group_rewards=add_group_rewards,
        update_reference=run.update_reference,
        sync_weights=run.sync,
        callbacks=callbacks_of(run, max_steps_without_signal=max_steps_without_signal),
        ranks=SingleProcess(),
        media_owners=MediaOwners(),
    )


def train(run, state, *, steps=3, **options):
    settings = rl.RlSettings(num_steps=steps, prompts_per_round=2)
    rl.run_rl_stage(settings, components_of(run, **options), state)


def test_a_step_makes_its_calls_in_order():
    run, state = FakeRun(), TrainingState(step=4, data_position=8, version=6)
    train(run, state, steps=5)
    before_update = [
        ("take", 8),
        ("rollout", 4),
        ("score", 4),
        ("sleep", None),
        ("learn", 4),
        ("update reference", 4),
        ("sync", 7),
    ]
    assert run.calls == [*before_update, ("log rollouts", 5), ("log", 5), ("callback", 5)]
    assert (state.step, state.data_position, state.version, state.steps_without_signal) == (5, 10, 7, 0)
    metrics, times = run.logged[0]
    assert metrics["learner/loss"] == 0.25
    assert times.keys() == {"time/prompt_s", "time/rollout_s", "time/score_s", "time/select_s", "time/learn_s"}


def test_each_rollout_is_trained_with_its_own_advantage():
    run = FakeRun(rewards=(0.25, 1.0))
    train(run, TrainingState(), steps=1)
    found = [(e.rollout.prompt.sample.id, e.rollout.index, e.advantage) for e in run.learned[0]]
    assert found == [("0", 0, -0.375), ("0", 1, 0.375), ("1", 0, -0.375), ("1", 1, 0.375)]


def test_a_stage_ends_at_its_goal():
    run, state = FakeRun(done_at=2), TrainingState()
    train(run, state, steps=10)
    assert (state.step, state.stage_done) == (2, True)
    train(run, state, steps=10)  # and stays ended
    assert state.step == 2


def test_steps_without_signal_in_a_row_end_the_run():
    state = TrainingState()
    with pytest.raises(
        UserError, match="2 steps in a row had no group to learn from: in each, all rollouts of a group"
    ):
        train(FakeRun(rewards=(0.5, 0.5)), state, steps=10)
    assert state.step == 2
    resumed = TrainingState(step=1, steps_without_signal=1)
    with pytest.raises(UserError):
        train(FakeRun(rewards=(0.5, 0.5)), resumed, steps=10)
    assert resumed.step == 2


def test_one_group_with_signal_resets_the_count():
    class Seldom(FakeRun):
        def score_groups(self, rollouts, *, step, probes=()):
            first, *rest = super().score_groups(rollouts, step=step)
            self.rewards = (0.0, 1.0) if len(self.logged) % 2 else (0.5, 0.5)
            return [replace(first, scores=self.scores()), *rest]

        def scores(self):
            return tuple(score(count=reward) for reward in self.rewards)

    state = TrainingState()
    train(Seldom(rewards=(0.5, 0.5)), state, steps=6)
    assert (state.step, state.steps_without_signal) == (6, 0)


@pytest.mark.parametrize("preset", REPLAY_PRESETS)
def test_steps_that_only_replay_end_the_run(preset):
    """Only the first step has a group to learn from; replaying it is not a sign that the task still teaches."""

    class Saturating(FakeRun):
        def scores(self):
            return tuple(score(count=1.0 if self.logged else reward) for reward in self.rewards)

    run, state = Saturating(), TrainingState()
    config = ReplayConfig(preset=preset, **REPLAY_PRESETS[preset])
    replay = ReplaySettings(options=config, rollouts_per_step=4, seed=())
    components = replace(components_of(run, max_steps_without_signal=3), selector=select_all(centred, replay=replay))
    with pytest.raises(UserError, match="3 steps in a row had no group .*what replay trains on is not counted"):
        rl.run_rl_stage(rl.RlSettings(num_steps=60, prompts_per_round=2), components, state)
    assert state.step == 4
    assert all(run.learned[1:]) and run.logged[-1][0]["replay/staleness_max"] == 3.0


def test_a_group_carried_over_is_a_signal():
    """It was sampled before, but is trained on for the first time; the step's own groups are filtered out."""
    prompt = build_prompt(sample("old"))
    rollouts = (make_rollout(prompt, 0), make_rollout(prompt, 1))
    carried = Group(prompt=prompt, rollouts=rollouts, scores=(score(count=0.0), score(count=1.0)))
    run, state = FakeRun(rewards=(1.0, 1.0)), TrainingState(steps_without_signal=1, carried_over=(carried,))
    options = DynamicSamplingConfig(ranges=(GroupRewardRangeConfig(term="count"),), max_rounds=2, extra="carry")
    selector = select_all(centred, dynamic_sampling=options, carry_over=True, prompts_per_step=2)
    components = replace(components_of(run), selector=selector)
    rl.run_rl_stage(rl.RlSettings(num_steps=1, prompts_per_round=2), components, state)
    assert state.steps_without_signal == 0


def test_metrics_of_a_step_by_hand():
    a, b = build_prompt(sample("a", task="count")), build_prompt(sample("b", task="find"))
    groups = [
        Group(
            prompt=a,
            rollouts=(make_rollout(a, 0, tokens=1), make_rollout(a, 1, tokens=2, finish=FinishReason.LENGTH)),
            scores=(score(count=1.0, format=0.5), score(count=0.0, format=0.5)),
        ),
        Group(
            prompt=b,
            rollouts=(make_rollout(b, 0, tokens=3), make_rollout(b, 1, tokens=4)),
            scores=(score(iou=0.25), score(iou=0.25)),
        ),
    ]
    assert compute_step_metrics(groups, [(0.5, -0.5), (0.0, 0.0)]) == {
        "reward/mean": 0.625,
        "reward/std": pytest.approx(math.sqrt((0.875**2 + 0.125**2 + 2 * 0.375**2) / 4)),
        "reward/min": 0.25,
        "reward/max": 1.5,
        "reward/task/count": 1.0,
        "reward/task/find": 0.25,
        "reward/term/count": 0.5,
        "reward/term/format": 0.5,
        "reward/term/iou": 0.25,
        "advantage/min": -0.5,
        "advantage/max": 0.5,
        "groups/nonzero_advantage_frac": 0.5,
        "rollout/response_tokens_mean": 2.5,
        "rollout/response_tokens_min": 1.0,
        "rollout/response_tokens_max": 4.0,
        "rollout/truncated_frac": 0.25,
        "rollout/duplicate_frac": 0.5,
        "rollout/duplicate_answer_frac": 0.5,
    }


class Skipping(FakeRun):
    """Judges the first group's first `judged` rollouts, and nothing else."""

    def __init__(self, judged):
        super().__init__()
        self.judged = judged

    def score_groups(self, rollouts, *, step, probes=()):
        group, *others = super().score_groups(rollouts, step=step)
        failures = {"count": RewardFailure(RewardErrorKind.TIMEOUT, "took more than 1 s")}
        return [self.only(group, self.judged, failures), *(self.only(other, 0, {}) for other in others)]

    def only(self, group, count, failures):
        skipped = tuple(Dropped(rollout, failures) for rollout in group.rollouts[count:])
        return replace(group, rollouts=group.rollouts[:count], scores=group.scores[:count], dropped=skipped)


def test_dropped_rollouts_are_not_trained_on_and_are_counted():
    run, state = Skipping(2), TrainingState()
    train(run, state, steps=1)
    assert [(e.rollout.prompt.sample.id, e.advantage) for e in run.learned[0]] == [("0", -0.5), ("0", 0.5)]
    assert state.steps_without_signal == 0
    metrics, _ = run.logged[0]
    assert metrics["reward/dropped"] == 2
    assert metrics["reward/mean"] == 0.5  # of what was judged
    assert metrics["rollout/response_tokens_mean"] == 2.0  # of everything
    assert metrics["groups/nonzero_advantage_frac"] == 0.5


def test_a_step_whose_rollouts_were_all_dropped_is_survived():
    run, state = Skipping(0), TrainingState()
    train(run, state, steps=1)
    assert run.learned == [()]
    assert state.steps_without_signal == 1
    metrics, _ = run.logged[0]
    assert metrics["reward/count/timeouts"] == 2  # the other group's rollouts only went along
    assert metrics["reward/dropped"] == 4
    assert "reward/mean" not in metrics
    with pytest.raises(UserError, match="or could not be scored"):
        train(run, state, steps=2)


def imitate(run, state):
    settings = sft.SftSettings(
        num_steps=9,
        batch_size=2,
        target_field="label",
        loss_on="response",
        drop_thinking_prob=0.0,
        seed_parts=(0, "cold"),
    )
    ports = dict.fromkeys(("source", "processor", "learner"), run)
    components = sft.SftComponents(
        **ports,
        sleep_engine=lambda: None,
        callbacks=callbacks_of(run),
        ranks=SingleProcess(),
        media_owners=MediaOwners(),
    )
    sft.run_sft_stage(settings, components, state)


@pytest.mark.parametrize("run_stage", [lambda run, state: train(run, state, steps=9), imitate])
def test_nonfinite_steps_in_a_row_end_the_run_and_name_their_samples(run_stage):
    run, state = FakeRun(), TrainingState()
    run.nonfinite_updates = {0: 1.0, 1: 0.0, 3: 1.0, 5: 2.0, 6: 0.0}  # steps 2 and 4 attempt no update
    with pytest.raises(UserError, match="2 steps in a row had a gradient that is not finite.* are in kept-6"):
        run_stage(run, state)
    assert (state.step, state.nonfinite_steps) == (6, 2)
    assert run.forced == [1, 4, 5, 6]


def test_imitation_walks_through_the_data():
    run, state = FakeRun(done_at=3), TrainingState(data_position=4)
    imitate(run, state)
    assert (state.step, state.data_position, state.version, state.stage_done) == (3, 10, 3, True)
    assert [call for call in run.calls if call[0] == "take"] == [("take", 4), ("take", 6), ("take", 8)]
    assert [e.advantage for e in run.learned[0]] == [0.0, 0.0]


def test_a_demonstration_is_the_label_or_the_target():
    careless = Target(answer_type=AnswerType.NUMBER, value=2)
    assert sft.demonstration_text(sample(1, label=careless), "label") is careless
    assert sft.demonstration_text(sample(1, label=careless), "target") is NUMBER
    with pytest.raises(UserError, match="sample 7 has no label to imitate"):
        sft.demonstration_text(sample(7), "label")


def test_group_rewards_are_in_totals_advantages_and_metrics():
    def first_is_best(group, step):
        scores = tuple(score(count=1.0, order=float(i == 0)) for i, _ in enumerate(group.scores))
        return replace(group, scores=scores)

    run = FakeRun(rewards=(1.0, 1.0))
    train(run, TrainingState(), steps=1, add_group_rewards=first_is_best)
    assert [experience.advantage for experience in run.learned[0]] == [0.5, -0.5] * 2
    metrics, _ = run.logged[0]
    assert (metrics["reward/mean"], metrics["reward/term/order"]) == (1.5, 0.5)
