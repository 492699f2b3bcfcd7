"""Selection, metrics, records, replay and checkpoints keep the advantages of turns apart."""

from dataclasses import replace
from functools import partial

import pytest
from factories import make_group, make_prompt, make_rollout, make_sample
from scoring import make_scorer, term
from selection import select_all

from mmrl.algo.advantages import compute_advantages
from mmrl.algo.credit import compute_turn_advantages
from mmrl.algo.group_metrics import compute_step_metrics
from mmrl.algo.replay import ReplaySettings
from mmrl.checkpoint.json_codec import dumps, loads
from mmrl.config.schema import AdvantageConfig, ReplayConfig
from mmrl.log.rollout_records import list_step_records
from mmrl.types import Author, Failure, FailureKind, Score, Segment, TrainingState, Turn
from mmrl_rewards import environment

SHOWN = Segment(token_ids=(7,), logprobs=(0.0,), author=Author.ENVIRONMENT)


def play(prompt, index, rewards, states="abcdef"):
    """An episode: a token of the policy for each turn, and one of the environment between two of them."""
    rollout = make_rollout(prompt, index, str(index), num_tokens=1)
    segments = rollout.segments + (SHOWN, *rollout.segments) * (len(rewards) - 1)
    turns = [Turn(action="a", state=state, reward=reward) for state, reward in zip(states, rewards, strict=False)]
    return replace(rollout, segments=segments, turns=tuple(turns))


def group(name, *rows):
    """A group of episodes, from the rewards of their turns."""
    prompt = make_prompt(make_sample(id=name))
    scores = [Score(terms={}, total=sum(row), by_turn=tuple(row)) for row in rows]
    return make_group(prompt, [play(prompt, index, row) for index, row in enumerate(rows)], scores)


def selector(advantage, **settings):
    turns = {"discount": 1.0} if advantage else {}
    options = AdvantageConfig(scale="none", **turns, **advantage)
    broadcast = partial(compute_advantages, options=options, weights={})
    turns_of = partial(compute_turn_advantages, options=options) if advantage else None
    return select_all(broadcast, compute_turn_advantages=turns_of, **settings)


# Equal totals, so the rollouts have no advantage, but the second turns do; then turns whose mean is 0.
EQUAL_TOTALS, NO_MEAN = group("a", (1.0, 0.0), (0.0, 1.0)), group("b", (-2.0, 1.0), (0.0, 0.0))


def test_groups_have_a_signal_if_one_of_their_turns_has():
    selected = selector({"credit": "to_go"}).select(
        [EQUAL_TOTALS, NO_MEAN, group("c", (0.0,), (0.0,))], TrainingState()
    )
    assert [e.turn_advantages for e in selected.experiences[:4]] == [(0.0, -0.5), (0.0, 0.5), (-0.5, 0.5), (0.5, -0.5)]
    assert selected.advantages == ((-0.25, 0.25), (0.0, 0.0), (0.0, 0.0))
    metrics = compute_step_metrics(selected.groups, selected.experiences_by_group)
    assert metrics["groups/nonzero_advantage_frac"] == pytest.approx(2 / 3)
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-0.5, 0.5)
    assert selected.has_signal


def test_records_hold_the_advantages_of_turns_also_of_what_is_replayed_or_not_drawn():
    options = ReplayConfig(resample_fresh=True, without_replacement=False)
    replay = ReplaySettings(options=options, rollouts_per_step=1, seed=("s",))
    selected = selector({"credit": "to_go"}, replay=replay).select([NO_MEAN], TrainingState())
    assert len(selected.experiences) == 1  # of two; the other is recorded all the same
    old = replace(selected.experiences[0], rollout=play(make_prompt(make_sample(id="old")), 0, (0.0, 0.0)))
    selected = replace(selected, experiences=(*selected.experiences, old), replayed=(old,))
    outcomes = [record.outcome for record in list_step_records(selected, max_groups=9, version=0, has_gradient=bool)]
    assert [outcome["turn_advantages"] for outcome in outcomes[:2]] == [(-0.5, 0.5), (0.5, -0.5)]
    assert outcomes[2]["turn_advantages"] == old.turn_advantages
    assert [outcome["advantage"] for outcome in outcomes] == [0.0] * 3


def test_broadcast_records_no_advantages_of_turns():
    selected = selector({}).select([NO_MEAN], TrainingState())
    outcomes = [record.outcome for record in list_step_records(selected, max_groups=9, version=0, has_gradient=bool)]
    assert [outcome["advantage"] for outcome in outcomes] == [-0.5, 0.5]
    assert all("turn_advantages" not in outcome for outcome in outcomes)
    metrics = compute_step_metrics(selected.groups, selected.experiences_by_group)
    assert (metrics["advantage/min"], metrics["advantage/max"]) == (-0.5, 0.5)


@pytest.mark.parametrize("credit", ["to_go", "gigpo"])
def test_a_dropped_sibling_is_compared_with_nobody(credit):
    """The others have the advantages that they would have if it had never been sampled."""
    prompt, rows = make_prompt(make_sample(id="d")), [(0.0, 0.5), (0.25, 0.0), (0.125, 0.25, 0.5)]
    siblings = [play(prompt, index, row) for index, row in enumerate(rows)]
    failure = Failure(FailureKind.CRASH, "the process ended")
    failed = replace(play(prompt, 3, (1.0,)), failure=failure)
    judge = make_scorer(term(environment.total))
    (whole, rest) = judge.score_groups([[siblings[0], failed, *siblings[1:]], siblings], step=0)
    assert [dropped.rollout.index for dropped in whole.dropped] == [3]
    select = selector({"credit": credit}).select
    selected, expected = (select([scored], TrainingState()) for scored in (whole, rest))
    assert selected.experiences == expected.experiences
    assert {len(set(experience.turn_advantages)) > 1 for experience in selected.experiences} == {True}
    assert len(list_step_records(selected, max_groups=9, version=0, has_gradient=bool)) == 4


def test_failed_episode_is_evaluated_with_a_reward_for_each_turn():
    prompt = make_prompt(make_sample(id="e"))
    failed = replace(play(prompt, 0, (1.0, 1.0)), failure=Failure(FailureKind.TIMEOUT, "no answer"))
    (score,) = make_scorer(term(environment.total, fallback=0.25)).score_eval([failed])
    assert score.by_turn == (0.0, score.total) and score.total == 0.25


def test_advantages_of_turns_survive_a_checkpoint_and_are_replayed_alike():
    replay = ReplaySettings(options=ReplayConfig(capacity=8), rollouts_per_step=4, seed=("s",))
    select = selector({"credit": "gigpo", "step_weight": 0.5}, replay=replay).select
    state = TrainingState()
    select([EQUAL_TOTALS, NO_MEAN, group("c", (0.5, 0.0), (0.1, 0.7))], state)
    text = dumps(state)
    resumed = loads(text, TrainingState)
    assert resumed == state and dumps(resumed) == text
    assert {len(experience.turn_advantages) for experience in resumed.replay_buffer} == {2}
    quiet = [group("q", (0.0,), (0.0,))]
    for each in (state, resumed):
        each.step, each.version = 1, 1
    whole, again = select(quiet, state), select(quiet, resumed)
    assert whole.replayed and whole.replayed == again.replayed
    assert [experience.turn_advantages for experience in whole.replayed].count(None) == 0
    assert dumps(state) == dumps(resumed)
