"""What a response earns by comparison with its siblings: one value per rollout of a group, added to its total.

Whether a response is right is read from named reward terms, never from the total: all of `correct` must reach
`threshold`. Lengths are in tokens after the prompt, never padded. No value depends on the order of the siblings.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from statistics import fmean
from typing import Annotated

from pydantic import Field

from mmrl.config.schema import GroupRewardConfig
from mmrl.types import AnswerType, Author, Group, RewardValue, Rollout, Score, UserError

TermNames = Annotated[tuple[str, ...], Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]

_WORD = re.compile(r"\w+")
_TYPES_WITHOUT_EQUALITY = frozenset(
    {
        AnswerType.BOX,
        AnswerType.BOXES,
        AnswerType.POINT,
        AnswerType.POINTS,
        AnswerType.SPAN,
        AnswerType.SPANS,
        AnswerType.ACTION,
        AnswerType.TOOL_CALL,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundGroupReward:
    """A function of groups with its options settled, and how it counts."""

    name: str
    compute: Callable[[Group], Sequence[RewardValue]]
    options: GroupRewardConfig


def add_group_rewards(group: Group, step: int, *, group_rewards: Sequence[BoundGroupReward]) -> Group:
    """The group with every term that concerns it added to its scores: named beside the rewards, and in the totals by
    the weight at `step`.

    Raises:
        UserError: a term is named like another, or cannot judge this group.
    """
    for term in group_rewards:
        if group.rollouts and term.options.applies_to(group.prompt.sample):
            weight = term.options.weight_at(step)
            pairs = zip(group.scores, term.compute(group), strict=True)
            group = replace(group, scores=tuple(_add_term(score, term.name, weight, value) for score, value in pairs))
    return group


def shortest_correct(
    group: Group, *, correct: TermNames, threshold: float = 1.0, longer_than: NonNegativeInt = 100
) -> tuple[RewardValue, ...]:
    """1 for the shortest right response if it has more than `longer_than` tokens, else 0.

    Source: Observe-R1 (arXiv:2505.12432), whose code adds 0.2 of it before normalisation. Departure: right responses of
    equal length share it, where the code takes the first. 0 for all where none is right.
    """
    right = _find_correct(group, correct, threshold)
    best = min((rollout.num_tokens for rollout, ok in zip(group.rollouts, right, strict=True) if ok), default=0)
    return tuple(
        RewardValue(float(ok and n == best > longer_than), f"{n} tokens, the shortest right response has {best}")
        for n, ok in zip(_response_lengths(group), right, strict=True)
    )


def dast(
    group: Group, *, correct: TermNames, threshold: float = 1.0, longest: PositiveInt | None = None
) -> tuple[RewardValue, ...]:
    """max(0.5 - 0.5 l, 0.1) if right, min(0.9 l - 0.1, -0.1) if wrong, with l = (L - budget) / budget.

    budget = p L_right + (1 - p) L_max, p the share of right responses and L_right their mean length. Source: DAST
    (arXiv:2503.04472); L_max is `longest`, there the limit of generation; without it the longest of the
    group, as in UI-R1-E's code. With no right response the budget is L_max. A budget of 0 tokens pays 0.
    """
    lengths, right = _response_lengths(group), _find_correct(group, correct, threshold)
    of_right = [n for n, ok in zip(lengths, right, strict=True) if ok]
    share = len(of_right) / len(lengths)
    most = max(lengths) if longest is None else longest
    budget = share * fmean(of_right or [0]) + (1.0 - share) * most
    if budget == 0.0:
        return tuple(RewardValue(0.0, "no tokens at all") for _ in lengths)
    excess = [(n - budget) / budget for n in lengths]
    return tuple(
        RewardValue(
            max(0.5 - 0.5 * e, 0.1) if ok else min(0.9 * e - 0.1, -0.1), f"{n} tokens, the budget is {budget:.0f}"
        )
        for n, e, ok in zip(lengths, excess, right, strict=True)
    )


def kimi_length(group: Group, *, correct: TermNames, threshold: float = 1.0) -> tuple[RewardValue, ...]:
    """L if right, min(0, l) if wrong, with l = 0.5 - (L - L_min) / (L_max - L_min); 0 if all are equally long.

    Source: Kimi k1.5 (arXiv:2501.12599, 2.3.3, length penalty), L_min and L_max over the group. Departures: none; the
    paper warms its weight up.
    """
    lengths, right = _response_lengths(group), _find_correct(group, correct, threshold)
    low, high = min(lengths), max(lengths)
    if low == high:
        return tuple(RewardValue(0.0, f"all have {n} tokens") for n in lengths)
    places = [0.5 - (n - low) / (high - low) for n in lengths]
    return tuple(
        RewardValue(place if ok else min(0.0, place), f"{n} tokens, {low} to {high} in the group")
        for n, place, ok in zip(lengths, places, right, strict=True)
    )


def blind_contrast(
    group: Group,
    *,
    correct: TermNames,
    probe: str,
    threshold: float = 1.0,
    ratio: Annotated[float, Field(ge=0.0)] = 0.8,
) -> tuple[RewardValue, ...]:
    """1 for each right response if p >= ratio x p', else 0: p the share of right ones here, p' that of the probe.

    A probe answers the same question without what is to be looked at: shuffled frames, no picture. Source: T-GRPO of
    Video-R1 (arXiv:2503.21776), which adds 0.3 of it. Departures: none. 0 for all where none is right.

    Raises:
        UserError: the group has no such probe.
    """
    if not group.probes.get(probe):
        raise UserError(
            f"group term contrast: sample {group.prompt.sample.id!r} has no probe {probe!r}; "
            f"there is {', '.join(group.probes) or 'none'}"
        )
    right = _find_correct(group, correct, threshold)
    blind = fmean(_is_correct(score, correct, threshold, group) for score in group.probes[probe])
    pays = fmean(right) >= ratio * blind
    reason = f"{fmean(right):.2f} right, {blind:.2f} with the probe {probe!r}"
    return tuple(RewardValue(float(ok and pays), reason) for ok in right)


def diversity(
    group: Group, *, correct: TermNames, threshold: float = 1.0, words: PositiveInt = 3
) -> tuple[RewardValue, ...]:
    """For a right response 1 - mean over its siblings of J, for a wrong one 0; J = |A & B| / |A | B| of word n-grams.

    Source: DRA-GRPO (arXiv:2505.09655), which divides rewards by likeness to the group. Departures: a bounded term of
    its own; likeness is Jaccard's index of n-grams, not a sentence embedding, and two texts too short for one are
    alike; wrong ones earn nothing, since noise is diverse. 0 for a group of one.
    """
    right = _find_correct(group, correct, threshold)
    grams = [_word_ngrams(rollout.text, words) for rollout in group.rollouts]
    values = []
    for i, (own, ok) in enumerate(zip(grams, right, strict=True)):
        likeness = [_jaccard(own, other) for j, other in enumerate(grams) if j != i]
        values.append(
            RewardValue(1.0 - fmean(likeness) if ok and likeness else 0.0, f"unlike {len(likeness)} siblings")
        )
    return tuple(values)


def majority_vote(group: Group, *, share: Fraction = 0.0) -> tuple[RewardValue, ...]:
    """1 if the answer is the one most siblings give and at least `share` of all rollouts give it, else 0.

    No target is read. Source: TTRL (arXiv:2504.16084), majority voting as the label. Departures: a tie elects
    nobody, where the code takes the first; what cannot be parsed neither votes nor earns. Texts are compared as
    `text:exact` does, numbers by value.

    Raises:
        UserError: answers are coordinates or actions, of which no two agree exactly.
    """
    kind = group.prompt.sample.target.answer_type
    if kind in _TYPES_WITHOUT_EQUALITY:
        raise UserError(f"group term self_vote: no two answers of kind {kind} are the same; set its `when`")
    ballots = [_normalized_answer(rollout) for rollout in group.rollouts]
    ranked = Counter(ballot for ballot in ballots if ballot is not None).most_common(2)
    tied = len(ranked) == 2 and ranked[0][1] == ranked[1][1]
    elected = ranked[0][0] if ranked and not tied and ranked[0][1] >= share * len(ballots) else None
    reason = "no majority" if elected is None else f"{ranked[0][1]} of {len(ballots)} say {elected:.40}"
    return tuple(RewardValue(float(elected is not None and ballot == elected), reason) for ballot in ballots)


def correct_with_tool_media(group: Group, *, correct: TermNames, threshold: float = 1.0) -> tuple[RewardValue, ...]:
    """1 for a right response that a tool showed a picture or video, else 0.

    Source: the conditional tool reward of DeepEyes (arXiv:2505.14362). Departures: none; the code's weight is 1.2.
    """
    right = _find_correct(group, correct, threshold)
    return tuple(
        RewardValue(float(ok and bool(rollout.observations)), f"{len(rollout.observations)} pictures or videos shown")
        for rollout, ok in zip(group.rollouts, right, strict=True)
    )


def curiosity(group: Group, *, target: Annotated[float, Field(gt=0.0, le=1.0)] = 0.3) -> tuple[RewardValue, ...]:
    """max(0, target - s) / s for a response that called a tool, s being the share of the group that did; 0 for others.

    Source: Pixel Reasoner's code (arXiv:2505.15966), with weight 0.25 / 2 for pictures and 0.25 / 1.5 for videos.
    Departures: a call counts once a tool has answered it.
    """
    calls = [_count_tool_calls(rollout) for rollout in group.rollouts]
    share = fmean(count > 0 for count in calls)
    bonus = max(0.0, target - share) / share if share else 0.0
    return tuple(
        RewardValue(bonus if count else 0.0, f"{count} calls, {share:.0%} of the group called") for count in calls
    )


def excess_calls(group: Group, *, free: NonNegativeInt = 1) -> tuple[RewardValue, ...]:
    """-1 for every call of a tool beyond `free`.

    Source: Pixel Reasoner's code (arXiv:2505.15966), with weight 0.05. Departures: as for `curiosity`.
    """
    calls = [_count_tool_calls(rollout) for rollout in group.rollouts]
    return tuple(RewardValue(float(min(0, free - count)), f"{count} calls, {free} free") for count in calls)


def _count_tool_calls(rollout: Rollout) -> int:
    """Calls that a tool answered, with words of refusal perhaps: a reply is one, however many segments it has."""
    return [author for author, _ in groupby(segment.author for segment in rollout.segments)].count(Author.ENVIRONMENT)


def _add_term(score: Score, name: str, weight: float, value: RewardValue) -> Score:
    if name in score.terms:
        raise UserError(f"two reward terms are named {name!r}; give the group term another `name`")
    return replace(score, terms={**score.terms, name: value}, total=score.total + weight * value.value)


def _response_lengths(group: Group) -> list[int]:
    return [rollout.num_tokens for rollout in group.rollouts]


def _find_correct(group: Group, names: Sequence[str], threshold: float) -> list[bool]:
    return [_is_correct(score, names, threshold, group) for score in group.scores]


def _is_correct(score: Score, names: Sequence[str], threshold: float, group: Group) -> bool:
    for name in names:
        if name not in score.terms:
            task = group.prompt.sample.task
            known = ", ".join(score.terms)
            raise UserError(
                f"a group term reads the term {name!r}, which says nothing about task {task!r}: see {known}"
            )
    return all(score.terms[name].value >= threshold for name in names)


def _word_ngrams(text: str, words: int) -> frozenset[tuple[str, ...]]:
    found = _WORD.findall(text.casefold())
    return frozenset(_sliding_windows(found, words))


def _sliding_windows(found: Sequence[str], words: int) -> Iterator[tuple[str, ...]]:
    return (tuple(found[i : i + words]) for i in range(len(found) - words + 1))


def _jaccard(a: frozenset[tuple[str, ...]], b: frozenset[tuple[str, ...]]) -> float:
    union = len(a | b)
    return len(a & b) / union if union else 1.0


def _normalized_answer(rollout: Rollout) -> str | None:
    """The answer in a form that equal answers share."""
    value = rollout.answer.value
    if value is None:
        return None
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFKC", value).split()).casefold()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
