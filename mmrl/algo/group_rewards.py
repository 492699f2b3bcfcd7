"""Group rewards: reward terms that compare a rollout with the others of its group.

Each function takes a scored group and returns one value for each rollout, which is added to its total by weight. A
response is correct when all reward terms named in `correct` reach `threshold`; totals are never read for that. Lengths
are tokens after the prompt, without padding. No value depends on the order of the rollouts.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from itertools import compress, groupby
from math import cos, pi
from operator import attrgetter
from statistics import fmean, multimode
from typing import Annotated

from pydantic import Field

from mmrl.algo.correctness import terms_reach
from mmrl.config.schema.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt
from mmrl.config.schema.rollout_steps import GREEDY_PROBE, LOOKED_PROBE
from mmrl.types import Author, Group, RewardValue, Rollout, Score, Unscorable, UserError

TermNames = Annotated[tuple[str, ...], Field(min_length=1)]

_WORD = re.compile(r"\w+")
# Coordinates and arguments: two answers that mean the same are hardly ever exactly equal.
TYPES_WITHOUT_EQUALITY = ("box", "boxes", "point", "points", "span", "spans", "action", "tool_call")


def shortest_correct(
    group: Group, *, correct: TermNames, threshold: float = 1.0, longer_than: NonNegativeInt = 100
) -> tuple[RewardValue, ...]:
    """Give 1 to the shortest correct response if it has more than `longer_than` tokens, and 0 to all others.

    Source: Observe-R1 (arXiv:2505.12432), whose code adds 0.2 of it before normalisation. Departure: every shortest
    correct response earns it, where the code takes the first.
    """
    lengths, is_correct = _response_lengths(group), _find_correct(group, group.scores, correct, threshold)
    shortest = min(compress(lengths, is_correct), default=0)
    values = []
    for length, ok in zip(lengths, is_correct, strict=True):
        earned = ok and length == shortest > longer_than
        values.append(RewardValue(float(earned), f"{length} tokens, the shortest correct response has {shortest}"))
    return tuple(values)


def dast(
    group: Group, *, correct: TermNames, threshold: float = 1.0, longest: PositiveInt | None = None
) -> tuple[RewardValue, ...]:
    """Give max(0.5 - 0.5 l, 0.1) to correct and min(0.9 l - 0.1, -0.1) to incorrect responses.

    l = (L - budget) / budget, with L a response's length and budget = p L_correct + (1 - p) L_max. p is the fraction of
    correct responses and L_correct their mean length. Without a correct response the budget is L_max; a budget of 0
    tokens gives 0.

    Source: DAST (arXiv:2503.04472), where L_max is the limit of generation. Departure: without `longest`, L_max is the
    longest response of the group, as in UI-R1-E's code.
    """
    lengths, is_correct = _response_lengths(group), _find_correct(group, group.scores, correct, threshold)
    correct_lengths = list(compress(lengths, is_correct))
    pass_rate = len(correct_lengths) / len(lengths)
    max_length = max(lengths) if longest is None else longest
    # Without a correct response the mean length is undefined, and its factor `pass_rate` is 0.
    budget = pass_rate * fmean(correct_lengths or [0]) + (1.0 - pass_rate) * max_length
    if budget == 0.0:
        return (RewardValue(0.0, "no tokens"),) * len(lengths)
    values = []
    for length, ok in zip(lengths, is_correct, strict=True):
        excess = (length - budget) / budget
        value = max(0.5 - 0.5 * excess, 0.1) if ok else min(0.9 * excess - 0.1, -0.1)
        values.append(RewardValue(value, f"{length} tokens, the budget is {budget:.0f}"))
    return tuple(values)


def kimi_length(group: Group, *, correct: TermNames, threshold: float = 1.0) -> tuple[RewardValue, ...]:
    """Give l to correct and min(0, l) to incorrect responses, l = 0.5 - (L - L_min) / (L_max - L_min).

    L is a response's length, L_min and L_max the extremes of the group; 0 for all if they are equal.

    Source: Kimi k1.5 (arXiv:2501.12599, 2.3.3, length penalty). Departures: none; the paper warms its weight up.
    """
    lengths, is_correct = _response_lengths(group), _find_correct(group, group.scores, correct, threshold)
    low, high = min(lengths), max(lengths)
    if low == high:
        return (RewardValue(0.0, f"all have {low} tokens"),) * len(lengths)
    values = []
    for length, ok in zip(lengths, is_correct, strict=True):
        position = 0.5 - (length - low) / (high - low)
        value = position if ok else min(0.0, position)
        values.append(RewardValue(value, f"{length} tokens, {low} to {high} in the group"))
    return tuple(values)


def dynamic_length(
    group: Group,
    *,
    correct: TermNames,
    threshold: float = 1.0,
    target: PositiveInt = 750,
    limit: PositiveInt = 4096,
) -> tuple[RewardValue, ...]:
    """Give -(1 + cos(pi L / T)) / 2 to incorrect responses of L tokens, -1 to those of 2 T or more, 0 to correct ones.

    T is the mean length of the group's correct responses; an incorrect one of that length loses nothing. In a group
    without a correct response T is `target`, and the value is half as large below T, 0 from T, -1/2 from `limit` on.

    Source: VL-Cogito (arXiv:2507.22607), dynamic length reward; its code has half of it, and 750 tokens in stage 3.
    Departures: none.
    """
    lengths, is_correct = _response_lengths(group), _find_correct(group, group.scores, correct, threshold)
    right = list(compress(lengths, is_correct))
    wanted = max(fmean(right), 1.0) if right else float(target)  # an empty response has a length of 0
    values = []
    for length, ok in zip(lengths, is_correct, strict=True):
        angle = pi * length / wanted
        loss = (1.0 + cos(min(angle, 2.0 * pi))) / 2.0
        if not right:
            loss = 0.5 if length >= max(limit, wanted) else (1.0 + cos(min(angle, pi))) / 4.0
        values.append(RewardValue(0.0 if ok else -loss, f"{length} tokens, an incorrect one needs {wanted:.0f}"))
    return tuple(values)


def blind_contrast(
    group: Group,
    *,
    correct: TermNames,
    probe: str,
    threshold: float = 1.0,
    ratio: NonNegativeFloat = 0.8,
) -> tuple[RewardValue, ...]:
    """Give 1 to each correct response if p >= ratio x p_probe, else 0 to all.

    p is the fraction of correct responses in the group, p_probe the fraction among the responses of `probe`, which
    answer the same question with shuffled frames or without the image.

    Source: T-GRPO of Video-R1 (arXiv:2503.21776), which adds 0.3 of it. Departures: none.

    Raises:
        UserError: the group has no such probe.
    """
    if not group.probes.get(probe):
        raise UserError(
            f"group reward blind_contrast: sample {group.prompt.sample.id!r} has no probe {probe!r}; "
            f"there is {', '.join(group.probes) or 'none'}"
        )
    is_correct = _find_correct(group, group.scores, correct, threshold)
    pass_rate = fmean(is_correct)
    probe_rate = fmean(_find_correct(group, group.probes[probe], correct, threshold))
    earned = pass_rate >= ratio * probe_rate
    reason = f"{pass_rate:.2f} correct, {probe_rate:.2f} with the probe {probe!r}"
    return tuple(RewardValue(float(ok and earned), reason) for ok in is_correct)


def sufficient_parts(group: Group, *, correct: TermNames, threshold: float = 1.0) -> tuple[RewardValue, ...]:
    """Give 1 to each response whose parts, the media that tools showed it, suffice for a correct answer, else 0.

    A rollout step of kind probe with `corruption: looked` answers from the parts alone. Without parts, the value is 0.

    Source: the sufficiency of visual components in SCCM learning (arXiv:2510.23482). Departures: the policy itself
    answers from the parts.

    Raises:
        UserError: the group has no such probe.
    """
    indices = sorted(rollout.index for rollout in group.all_rollouts)
    scores = group.probes.get(LOOKED_PROBE, ())
    if len(scores) != len(indices):
        step = "{kind: probe, corruption: looked}"
        raise UserError(f"group reward sufficient_parts: the rollouts have no answers from parts; add the step {step}")
    suffices = dict(zip(indices, _find_correct(group, scores, correct, threshold), strict=True))
    values = []
    for rollout in group.rollouts:
        num_parts = len(rollout.observations)
        verdict = "suffice" if suffices[rollout.index] else "do not suffice"
        values.append(RewardValue(float(num_parts > 0 and suffices[rollout.index]), f"{num_parts} parts {verdict}"))
    return tuple(values)


def greedy_baseline(group: Group) -> tuple[RewardValue, ...]:
    """Give every response -R_greedy, the total of the greedy response to the same prompt, negated.

    With a weight of 1 the total becomes R - R_greedy. That is ReMax's advantage if `advantage` subtracts nothing more.

    Source: ReMax (arXiv:2310.10505, algorithm 1). Departures: the greedy response is scored as in evaluation, without
    group rewards, schedules and `training_only` terms.

    Raises:
        UserError: no step of kind greedy made a response.
        Unscorable: a reward term failed on the greedy response.
    """
    sample_id = group.prompt.sample.id
    if GREEDY_PROBE not in group.probes:
        raise UserError(f"group reward greedy_baseline, sample {sample_id!r}: add {{kind: greedy}} to rollout_steps")
    score = group.probes[GREEDY_PROBE][0]
    # A term in `decided_by` has the value of its fallback; other failed terms count as the low end of their range.
    failed = [name for name in score.failures if name in score.terms and name not in score.decided_by]
    if failed:
        raise Unscorable(f"the greedy response: {failed[0]}: {score.failures[failed[0]].reason}")
    return (RewardValue(-score.total, f"the greedy response earns {score.total:.3g}"),) * len(group.scores)


def diversity(
    group: Group, *, correct: TermNames, threshold: float = 1.0, words: PositiveInt = 3
) -> tuple[RewardValue, ...]:
    """Give a correct response 1 minus its mean similarity to its siblings, and an incorrect one 0.

    Similarity is Jaccard's index |A & B| / |A | B| of the sets of n-grams of `words` words. A group of one gets 0.

    Source: DRA-GRPO (arXiv:2505.09655), which divides rewards by similarity to the group. Departures: it is a bounded
    term of its own; similarity is Jaccard's index instead of a sentence embedding, and two texts too short for one
    n-gram count as equal; incorrect responses earn nothing, since noise is diverse.
    """
    is_correct = _find_correct(group, group.scores, correct, threshold)
    ngram_sets: list[set[tuple[str, ...]]] = []
    for rollout in group.rollouts:
        tokens = _WORD.findall(rollout.text.casefold())
        ngram_sets.append({tuple(tokens[start : start + words]) for start in range(len(tokens) - words + 1)})
    values = []
    for index, ok in enumerate(is_correct):
        ngrams = ngram_sets[index]
        siblings = [*ngram_sets[:index], *ngram_sets[index + 1 :]]
        # Two texts too short for a single n-gram count as equal; otherwise short wrong guesses would count as diverse.
        similarities = [len(ngrams & other) / len(ngrams | other) if ngrams or other else 1.0 for other in siblings]
        value = 1.0 - fmean(similarities) if ok and similarities else 0.0
        values.append(RewardValue(value, f"unlike {len(siblings)} siblings"))
    return tuple(values)


def majority_vote(group: Group, *, share: Fraction = 0.0) -> tuple[RewardValue, ...]:
    """Give 1 for the most frequent answer, if at least `share` of all rollouts give it, and 0 for any other.

    The target is not read. Texts are compared as `text:exact` does, numbers by value.

    Source: TTRL (arXiv:2504.16084), majority voting as the label. Departures: a tie has no majority, where the code
    takes the first; an answer that cannot be parsed neither votes nor earns.

    Raises:
        UserError: answers are coordinates or actions, of which no two are exactly equal.
    """
    answer_type = group.prompt.sample.target.answer_type
    if answer_type in TYPES_WITHOUT_EQUALITY:
        raise UserError(
            f"group reward majority_vote: no two answers of type {answer_type} are exactly equal; restrict it to other "
            "samples by `when`"
        )
    votes = list(map(_normalized_answer, group.rollouts))
    majority = find_majority(group.rollouts, share=share)
    if majority is None:
        return (RewardValue(0.0, "no majority"),) * len(votes)
    winner = _normalized_answer(majority)
    reason = f"{votes.count(winner)} of {len(votes)} say {winner:.40}"
    return tuple(RewardValue(float(vote == winner), reason) for vote in votes)


def find_majority(rollouts: Sequence[Rollout], *, share: float = 0.0) -> Rollout | None:
    """Return a rollout with the most frequent answer; None on a tie, or if less than `share` of them give it."""
    votes = list(map(_normalized_answer, rollouts))
    winners = multimode(vote for vote in votes if vote is not None)
    is_found = len(winners) == 1 and votes.count(winners[0]) >= share * len(votes)
    return rollouts[votes.index(winners[0])] if is_found else None


def correct_with_tool_media(group: Group, *, correct: TermNames, threshold: float = 1.0) -> tuple[RewardValue, ...]:
    """Give 1 to a correct response that a tool showed an image or video, and 0 to the others.

    Source: the conditional tool reward of DeepEyes (arXiv:2505.14362). Departures: none; the code's weight is 1.2.
    """
    values = []
    for rollout, ok in zip(group.rollouts, _find_correct(group, group.scores, correct, threshold), strict=True):
        num_shown = len(rollout.observations)
        values.append(RewardValue(float(ok and num_shown > 0), f"{num_shown} images or videos shown"))
    return tuple(values)


def curiosity(group: Group, *, target: PositiveFraction = 0.3) -> tuple[RewardValue, ...]:
    """Give max(0, target - s) / s to responses that called a tool, s the fraction of the group that did; 0 to others.

    Source: Pixel Reasoner's code (arXiv:2505.15966), with weight 0.25 / 2 for images and 0.25 / 1.5 for videos.
    Departures: a call counts once a tool has replied to it.
    """
    counts = list(map(_count_tool_calls, group.rollouts))
    calling = fmean(map(bool, counts))
    bonus = max(0.0, target - calling) / calling if calling else 0.0
    values = []
    for count in counts:
        reason = f"{count} calls, {calling:.0%} of the group called"
        values.append(RewardValue(bonus if count else 0.0, reason))
    return tuple(values)


def excess_calls(group: Group, *, free: NonNegativeInt = 1) -> tuple[RewardValue, ...]:
    """Give -1 for every tool call beyond `free`.

    Source: Pixel Reasoner's code (arXiv:2505.15966), with weight 0.05. Departures: a call counts once a tool has
    replied to it.
    """
    counts = list(map(_count_tool_calls, group.rollouts))
    return tuple(RewardValue(float(min(0, free - count)), f"{count} calls, {free} free") for count in counts)


def _count_tool_calls(rollout: Rollout) -> int:
    """Return the number of calls that a tool replied to, refusals included."""
    # A reply with media has several segments in a row, so runs of ENVIRONMENT segments are counted.
    runs = groupby(rollout.segments, key=attrgetter("author"))
    return sum(author is Author.ENVIRONMENT for author, _ in runs)


def _response_lengths(group: Group) -> list[int]:
    return list(map(attrgetter("num_tokens"), group.rollouts))


def _find_correct(group: Group, scores: Sequence[Score], names: Sequence[str], threshold: float) -> list[bool]:
    """Return for each score whether all named reward terms reach the threshold.

    Raises:
        UserError: one of the terms does not apply to the group's sample.
    """
    for score in scores:
        for name in names:
            if name not in score.terms:
                raise UserError(
                    f"a group reward reads the term {name!r}, which does not apply to task "
                    f"{group.prompt.sample.task!r}: see {', '.join(score.terms)}"
                )
    return [bool(terms_reach(score.values_by_term, names, threshold)) for score in scores]


def _normalized_answer(rollout: Rollout) -> str | None:
    """Return a rollout's answer as text that is the same for equal answers; None if it could not be parsed."""
    value = rollout.answer.value
    if value is None:
        return None
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFKC", value).split()).casefold()
    # 3 and 3.0 are the same number, but not the same JSON.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
