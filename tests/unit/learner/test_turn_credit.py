"""Advantages of turns in the loss: each token has that of its turn, and nothing else changes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from learning import KeepGradients, make_learner, make_off_policy_experiences, replace_segments
from selection import select_all

from mmrl.algo.advantages import compute_advantages
from mmrl.algo.credit import compute_turn_advantages
from mmrl.config.schema import AdvantageConfig, LossConfig
from mmrl.learner.tokens import iter_trained_tokens
from mmrl.types import Author, Group, Rollout, Score, Segment, TrainingState, Turn


@pytest.fixture(scope="module")
def episodes(tiny):
    """Responses of two turns, with an observation between; the second turn was written in two parts."""
    made = []
    for experience in make_off_policy_experiences(tiny, group_size=3):
        (segment,) = experience.rollout.segments
        if len(segment.token_ids) < 4:
            continue

        def part(start, stop, segment=segment):
            ids, logprobs = segment.token_ids[start:stop], segment.logprobs[start:stop]
            return replace(segment, token_ids=ids, logprobs=logprobs)

        shown = Segment(token_ids=(40, 41, 42), logprobs=(0.0,) * 3, author=Author.ENVIRONMENT)
        made.append(replace_segments(experience, part(0, 2), shown, part(2, 3), part(3, None)))
    assert len(made) > 6
    return made


def gradients(tiny, experiences, **options):
    tiny.policy.model.zero_grad()
    metrics = make_learner(tiny, optimizer=KeepGradients(), **options).step(experiences, step=0)
    found = {name: parameter.grad.clone() for name, parameter in tiny.policy.trainable.items()}
    tiny.policy.model.zero_grad()
    return found, metrics


def with_turns(experiences, *advantages):
    return [replace(experience, turn_advantages=advantages) for experience in experiences]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_advantages_of_all_turns_are_that_of_the_rollout(tiny, episodes, level):
    """To the bit for ratios of tokens; GSPO's ratio is another, as it is that of a turn."""
    shared = [replace(experience, turn_advantages=(experience.advantage,) * 2) for experience in episodes]
    expected, _ = gradients(tiny, episodes, importance_ratio_level=level)
    found, _ = gradients(tiny, shared, importance_ratio_level=level)
    same = [torch.equal(found[name], expected[name]) for name in expected]
    assert all(same) if level == "token" else not all(same)


def test_each_token_has_the_advantage_of_its_turn(tiny, episodes):
    options = LossConfig()
    for experience in with_turns(episodes, 2.0, -3.0):
        tokens = list(iter_trained_tokens(experience, options))
        assert [token.advantage for token in tokens] == [2.0] * 2 + [-3.0] * (len(tokens) - 2)
        assert [token.turn for token in tokens] == [0] * 2 + [1] * (len(tokens) - 2)


def test_gradient_is_the_sum_of_those_of_the_turns_and_ignores_micro_batches(tiny, episodes):
    first, _ = gradients(tiny, with_turns(episodes, 2.0, 0.0))
    second, _ = gradients(tiny, with_turns(episodes, 0.0, -3.0))
    both, _ = gradients(tiny, with_turns(episodes, 2.0, -3.0))
    cut, _ = gradients(tiny, with_turns(episodes, 2.0, -3.0), micro_batch_groups=1)
    for name, gradient in both.items():
        torch.testing.assert_close(first[name] + second[name], gradient, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(cut[name], gradient, atol=1e-6, rtol=1e-4)


def test_ratio_of_a_sequence_is_that_of_a_turn(tiny, episodes):
    """Against the geometric mean over the tokens of a turn, written out."""
    learner = make_learner(tiny, optimizer=KeepGradients(), importance_ratio_level="sequence")
    experiences = with_turns(episodes, 1.0, -1.0)
    learner.step(experiences, step=0)
    compared = 0
    for index, values in learner.token_values(range(len(experiences))).items():
        rollout = experiences[index].rollout
        recorded = [lp for s in rollout.segments if s.author is Author.POLICY for lp in s.logprobs]
        log_ratios = [now - old for now, old in zip(values.logprobs, recorded, strict=True)]
        for turn in (slice(0, 2), slice(2, None)):
            mean = sum(log_ratios[turn]) / len(log_ratios[turn])
            expected = [torch.tensor(mean).exp().item()] * len(log_ratios[turn])
            assert list(values.ratios[turn]) == pytest.approx(expected, rel=1e-4)
            compared += 1
    assert compared == 2 * len(experiences)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_one_turn_has_the_gradient_of_broadcast(tiny, level):
    """From rewards to the gradient: `to_go`, and `gigpo` without a weight for steps, of episodes that end at once."""
    experiences = make_off_policy_experiences(tiny, group_size=3)
    groups: dict[str, list[Rollout]] = {}
    for experience in experiences:
        rollout = replace(experience.rollout, turns=(Turn(action="a", state="s"),))
        groups.setdefault(rollout.prompt.digest, []).append(rollout)

    def credited(credit, **options):
        advantage = AdvantageConfig(credit=credit, **options)
        scored = []
        for number, rollouts in enumerate(groups.values()):
            totals = [0.1 * (number + 1) * rollout.index for rollout in rollouts]
            scores = tuple(Score(terms={}, total=total, by_turn=(total,)) for total in totals)
            scored.append(Group(prompt=rollouts[0].prompt, rollouts=tuple(rollouts), scores=scores))
        turns = None if credit == "broadcast" else partial(compute_turn_advantages, options=advantage)
        advantages = partial(compute_advantages, options=advantage, weights={})
        selector = select_all(advantages, compute_turn_advantages=turns, stale_old_logprobs=None)
        return selector.select(scored, TrainingState()).experiences

    shared = credited("broadcast")
    assert {experience.turn_advantages for experience in shared} == {None}
    expected, _ = gradients(tiny, shared, importance_ratio_level=level)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for other in (credited("to_go"), credited("gigpo", step_weight=0.0)):
        assert {len(experience.turn_advantages) for experience in other} == {1}
        found, _ = gradients(tiny, other, importance_ratio_level=level)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("forced_first", [False, True])
def test_forced_text_does_not_end_a_turn(episodes, forced_first):
    """It belongs to the turn around it: before the first token, within a turn, before and after what is shown."""
    forced = Segment(token_ids=(50, 51), logprobs=(0.0,) * 2, author=Author.FORCED)
    for experience in with_turns(episodes, 2.0, -3.0):
        first, shown, *second = experience.rollout.segments
        parts = [forced] * forced_first + [first, forced, first, forced, shown, forced, *second]
        tokens = list(iter_trained_tokens(replace_segments(experience, *parts), LossConfig()))
        assert [token.advantage for token in tokens] == [2.0] * 4 + [-3.0] * (len(tokens) - 4)
        assert [token.turn for token in tokens] == [0] * 4 + [1] * (len(tokens) - 4)


@pytest.mark.parametrize("advantages", [(1.0,), (1.0, 2.0, 3.0)])
def test_another_number_of_turns_is_an_error(episodes, advantages):
    (experience,) = with_turns(episodes[:1], *advantages)
    with pytest.raises(ValueError, match=r"sample .*, rollout .*advantages of turns"):
        list(iter_trained_tokens(experience, LossConfig()))
