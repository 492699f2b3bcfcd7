"""The story: what a step does in order, what it tells, and when it refuses to go on."""

from dataclasses import replace

import pytest
from selection import select_all

from mmrl.algo.step_metrics import compute_step_metrics
from mmrl.training import rl, sft
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

LAW = SamplingParams(max_new_tokens=4)
NUMBER = Target(answer_type=AnswerType.NUMBER, value=1)


def sample(i, task="t", label=None):
    return Sample(id=str(i), task=task, parts=("?",), target=NUMBER, label=label)


def ask(sample_):
    return Prompt(
        sample=sample_,
        token_ids=(1,),
        grids=(),
        resize_maps=(),
        coordinate_system=CoordinateSystem.NORM_1,
        digest=sample_.id,
    )


def answer(prompt, index, tokens=2, finish=FinishReason.EOS):
    segment = Segment(token_ids=(5,) * tokens, logprobs=(-1.0,) * tokens, author=Author.POLICY)
    nothing = Answer(text=None, thinking=None, value=None)
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(segment,),
        text="",
        answer=nothing,
        finish_reason=finish,
        sampling_params=LAW,
    )


def score(**terms):
    return Score(terms={name: RewardValue(value, "") for name, value in terms.items()}, total=sum(terms.values()))


class World:
    """Every port at once, writing down what it is asked."""

    def __init__(self, rewards=(0.0, 1.0), done_at=None):
        self.rewards, self.done_at, self.calls, self.told, self.learned = rewards, done_at, [], [], []
        self.dropped, self.shown = {}, []

    def take(self, cursor, count):
        self.calls.append(("take", cursor))
        return [sample(cursor + i, label=NUMBER) for i in range(count)]

    def ask(self, sample_):
        return ask(sample_)

    def build_demonstration(self, prompt, lesson, *, thinks, learn):
        return answer(prompt, 0)

    def answer(self, prompts, *, step, pending=()):
        self.calls.append(("answer", step))
        return RolloutBatch(groups=tuple((answer(prompt, 0), answer(prompt, 1)) for prompt in prompts))

    def sync(self, version):
        self.calls.append(("sync", version))

    def judge(self, rollouts, *, step, probes=()):
        self.calls.append(("judge", step))
        return [Group(prompt=r[0].prompt, rollouts=tuple(r), scores=self.scores()) for r in rollouts]

    def scores(self):
        return tuple(score(count=reward) for reward in self.rewards)

    def learn(self, experiences, *, step):
        self.calls.append(("learn", step))
        self.learned.append(experiences)
        update = {"learner/nonfinite_updates": self.dropped[step]} if step in self.dropped else {}
        return {"learner/loss": 0.25, **update}

    def show(self, state, groups, advantages, *, at_all_events):
        self.calls.append(("show", state.step))
        self.shown += [state.step] * at_all_events
        return f"kept-{state.step}"

    def tell(self, state, metrics, times):
        self.calls.append(("tell", state.step))
        self.told.append((metrics, times))

    def passed(self, state):
        return state.step == self.done_at

    def keep(self, state):
        self.calls.append(("keep", state.step))


def centred(groups):
    means = [sum(group.totals) / max(len(group.totals), 1) for group in groups]
    return [[total - mean for total in group.totals] for group, mean in zip(groups, means, strict=True)]


def train(world, state, *, steps=3, max_barren_steps=2, shape=lambda group, step: group, chooser=None):
    plan = rl.RlSettings(
        num_steps=steps,
        prompts_per_round=2,
        add_group_rewards=shape,
        max_steps_without_signal=max_barren_steps,
        max_nonfinite_steps=2,
    )
    ports = ("source", "asker", "program", "sampler", "judge", "learner", "teller", "gate", "keeper")
    rl.run_rl_stage(
        plan, rl.RlComponents(**dict.fromkeys(ports, world), selector=chooser or select_all(centred)), state
    )


def test_a_step_is_its_verbs_in_order():
    world, state = World(), TrainingState(step=4, data_position=8, version=6)
    train(world, state, steps=5)
    steps = [("take", 8), ("answer", 4), ("judge", 4), ("learn", 4), ("sync", 7), ("show", 5), ("tell", 5), ("keep", 5)]
    assert world.calls == steps
    assert (state.step, state.data_position, state.version, state.steps_without_signal) == (5, 10, 7, 0)
    metrics, times = world.told[0]
    assert metrics["learner/loss"] == 0.25
    assert times.keys() == {"time/prompt_s", "time/rollout_s", "time/score_s", "time/select_s", "time/learn_s"}


def test_a_rollout_teaches_its_own_advantage():
    world = World(rewards=(0.25, 1.0))
    train(world, TrainingState(), steps=1)
    found = [(e.rollout.prompt.sample.id, e.rollout.index, e.advantage) for e in world.learned[0]]
    assert found == [("0", 0, -0.375), ("0", 1, 0.375), ("1", 0, -0.375), ("1", 1, 0.375)]


def test_a_stage_ends_at_its_goal():
    world, state = World(done_at=2), TrainingState()
    train(world, state, steps=10)
    assert (state.step, state.stage_done) == (2, True)
    train(world, state, steps=10)  # and stays ended
    assert state.step == 2


def test_barren_steps_in_a_row_are_refused():
    state = TrainingState()
    with pytest.raises(
        UserError, match="2 steps in a row had no group to learn from: in each, all rollouts of a group"
    ):
        train(World(rewards=(0.5, 0.5)), state, steps=10)
    assert state.step == 2
    resumed = TrainingState(step=1, steps_without_signal=1)
    with pytest.raises(UserError):
        train(World(rewards=(0.5, 0.5)), resumed, steps=10)
    assert resumed.step == 2


def test_one_informative_group_ends_the_row():
    class Seldom(World):
        def judge(self, rollouts, *, step, probes=()):
            first, *rest = super().judge(rollouts, step=step)
            self.rewards = (0.0, 1.0) if len(self.told) % 2 else (0.5, 0.5)
            return [replace(first, scores=self.scores()), *rest]

        def scores(self):
            return tuple(score(count=reward) for reward in self.rewards)

    state = TrainingState()
    train(Seldom(rewards=(0.5, 0.5)), state, steps=6)
    assert (state.step, state.steps_without_signal) == (6, 0)


def test_metrics_of_a_step_by_hand():
    a, b = ask(sample("a", task="count")), ask(sample("b", task="find"))
    groups = [
        Group(
            prompt=a,
            rollouts=(answer(a, 0, tokens=1), answer(a, 1, tokens=2, finish=FinishReason.LENGTH)),
            scores=(score(count=1.0, format=0.5), score(count=0.0, format=0.5)),
        ),
        Group(
            prompt=b,
            rollouts=(answer(b, 0, tokens=3), answer(b, 1, tokens=4)),
            scores=(score(iou=0.25), score(iou=0.25)),
        ),
    ]
    assert compute_step_metrics(groups, [(0.5, -0.5), (0.0, 0.0)]) == {
        "reward/mean": 0.625,
        "reward/task/count": 1.0,
        "reward/task/find": 0.25,
        "reward/term/count": 0.5,
        "reward/term/format": 0.5,
        "reward/term/iou": 0.25,
        "groups/nonzero_advantage_frac": 0.5,
        "rollout/response_tokens_mean": 2.5,
        "rollout/truncated_frac": 0.25,
    }


class Skipping(World):
    """Judges the first group's first `judged` rollouts, and nothing else."""

    def __init__(self, judged):
        super().__init__()
        self.judged = judged

    def judge(self, rollouts, *, step, probes=()):
        group, *others = super().judge(rollouts, step=step)
        failures = {"count": RewardFailure(RewardErrorKind.TIMEOUT, "took more than 1 s")}
        return [self.only(group, self.judged, failures), *(self.only(other, 0, {}) for other in others)]

    def only(self, group, count, failures):
        skipped = tuple(Dropped(rollout, failures) for rollout in group.rollouts[count:])
        return replace(group, rollouts=group.rollouts[:count], scores=group.scores[:count], dropped=skipped)


def test_skipped_rollouts_teach_nothing_and_are_counted():
    world, state = Skipping(2), TrainingState()
    train(world, state, steps=1)
    assert [(e.rollout.prompt.sample.id, e.advantage) for e in world.learned[0]] == [("0", -0.5), ("0", 0.5)]
    assert state.steps_without_signal == 0
    metrics, _ = world.told[0]
    assert metrics["reward/dropped"] == 2
    assert metrics["reward/mean"] == 0.5  # of what was judged
    assert metrics["rollout/response_tokens_mean"] == 2.0  # of everything
    assert metrics["groups/nonzero_advantage_frac"] == 0.5


def test_a_step_of_which_nothing_could_be_judged_goes_by():
    world, state = Skipping(0), TrainingState()
    train(world, state, steps=1)
    assert world.learned == [()]
    assert state.steps_without_signal == 1
    metrics, _ = world.told[0]
    assert metrics["reward/count/timeouts"] == 2  # the other group's rollouts only went along
    assert metrics["reward/dropped"] == 4
    assert "reward/mean" not in metrics
    with pytest.raises(UserError, match="or could not be judged"):
        train(world, state, steps=2)


def imitate(world, state):
    ports = ("source", "asker", "learner", "teller", "gate", "keeper")
    options = {"imitate": "label", "learn": "response", "thought_dropout": 0.0, "salt": (0, "cold")}
    plan = sft.SftSettings(num_steps=9, batch_size=2, max_nonfinite_steps=2, **options)
    sft.run_sft_stage(plan, sft.SftComponents(**dict.fromkeys(ports, world)), state)


@pytest.mark.parametrize("run", [lambda world, state: train(world, state, steps=9), imitate])
def test_bad_steps_in_a_row_are_refused_and_their_samples_named(run):
    world, state = World(), TrainingState()
    world.dropped = {0: 1.0, 1: 0.0, 3: 1.0, 5: 2.0, 6: 0.0}  # steps 2 and 4 attempt no update
    with pytest.raises(UserError, match="2 steps in a row had a gradient that is not finite.* are in kept-6"):
        run(world, state)
    assert (state.step, state.nonfinite_steps) == (6, 2)
    assert world.shown == [1, 4, 5, 6]


def test_imitation_walks_the_data_and_tells():
    world, state = World(done_at=3), TrainingState(data_position=4)
    imitate(world, state)
    assert (state.step, state.data_position, state.version, state.stage_done) == (3, 10, 3, True)
    assert [call for call in world.calls if call[0] == "take"] == [("take", 4), ("take", 6), ("take", 8)]
    assert [e.advantage for e in world.learned[0]] == [0.0, 0.0]


def test_a_lesson_is_the_label_or_the_target():
    careless = Target(answer_type=AnswerType.NUMBER, value=2)
    assert sft.demonstration_text(sample(1, label=careless), "label") is careless
    assert sft.demonstration_text(sample(1, label=careless), "target") is NUMBER
    with pytest.raises(UserError, match="sample 7 has no label to imitate"):
        sft.demonstration_text(sample(7), "label")


def test_what_rollouts_earn_beside_their_siblings_is_in_totals_advantages_and_metrics():
    def first_is_best(group, step):
        scores = tuple(score(count=1.0, order=float(i == 0)) for i, _ in enumerate(group.scores))
        return replace(group, scores=scores)

    world = World(rewards=(1.0, 1.0))
    train(world, TrainingState(), steps=1, shape=first_is_best)
    assert [experience.advantage for experience in world.learned[0]] == [0.5, -0.5] * 2
    metrics, _ = world.told[0]
    assert (metrics["reward/mean"], metrics["reward/term/order"]) == (1.5, 0.5)
