"""Forced rethinking: a finished response goes on behind words it did not choose, and its last answer counts.

    draft of the policy | trigger, forced | second look of the policy

The splice is made of token ids; no token is written and read again. What is trained follows from who wrote a token, so
the trigger is context and nothing else.

Source: VL-Rethinker, arXiv:2504.08837, section 3.2 "Forced Rethinking". Departures are options: see `ContinueWith`.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from mmrl.algo.seeds import derive
from mmrl.config.schema import ContinueWith
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Judge, Sampler
from mmrl.rollout.pipeline import told
from mmrl.types import Answers, Author, Finish, Rollout, SamplingLaw, Segment, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Tells which rollouts are right: all of the reward terms `correct` that apply reach `threshold`."""

    judge: Judge
    correct: tuple[str, ...]
    threshold: float

    def __call__(self, rollouts: Sequence[Rollout]) -> list[bool]:
        """One verdict per rollout, in order.

        Raises:
            UserError: none of the terms applies to a sample.
        """
        verdicts = []
        for rollout, score in zip(rollouts, self.judge.evaluate(rollouts), strict=True):
            values = [score.terms[name].value for name in self.correct if name in score.terms]
            if not values:
                sample = rollout.prompt.sample
                raise UserError(
                    f"no term of `correct: [{', '.join(self.correct)}]` says whether sample {sample.id!r} of task "
                    f"{sample.task!r} is right; there is {', '.join(score.terms)}"
                )
            verdicts.append(min(values) >= self.threshold)
        return verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rethink:
    """The step. `law` is that of the second look, `triggers` has the ids of each of the options' triggers."""

    options: ContinueWith
    sampler: Sampler
    is_right: Verdict
    law: SamplingLaw
    longest_draft: int | None
    triggers: tuple[tuple[int, ...], ...]
    processor: QwenProcessor
    seed: int

    def __call__(self, answers: Answers, *, step: int) -> Answers:
        """The answers with second looks in place of drafts, or beside them, and a count of what came of them."""
        right = iter(self.is_right([draft for group in answers.groups for draft in group]))
        verdicts = [[next(right) for _ in group] for group in answers.groups]
        attempts = [
            attempt
            for g, (group, row) in enumerate(zip(answers.groups, verdicts, strict=True))
            for attempt in self._attempts(g, group, row, step)
        ]
        seconds = self.sampler.extend([attempt.begun for attempt in attempts], self.law, step=step)
        ends = self.is_right(seconds)
        looks = [
            _Look(attempt, replace(second, right=end), end)
            for attempt, second, end in zip(attempts, seconds, ends, strict=True)
        ]
        groups, kept = [], 0
        for g, group in enumerate(answers.groups):
            good = [look for look in looks if look.attempt.group == g and self._counts(look)]
            good = good[: self.options.kept_per_group]
            kept += len(good)
            groups.append(self._placed(group, good))
        return told(replace(answers, groups=tuple(groups)), self._account(looks, kept))

    def _attempts(self, g: int, group: Sequence[Rollout], right: Sequence[bool], step: int) -> Iterator[_Attempt]:
        """Which drafts of a group go on. Chance derives from the draft, so it does not matter who else takes part."""
        low, high = self.options.band
        if not group or not low <= fmean(right) <= high:
            return
        drawn = []
        for place, (draft, ok) in enumerate(zip(group, right, strict=True)):
            chance = random.Random(derive(self.seed, self.options.name, step, draft.prompt.sample.id, draft.index))
            if self._may(draft, ok) and chance.random() < self.options.fraction:
                drawn.append((chance.random(), place, chance))
        for _, place, chance in sorted(sorted(drawn)[: self.options.attempts_per_group], key=lambda lot: lot[1]):
            yield _Attempt(g, place, self._begun(group[place], right[place], chance), right[place])

    def _may(self, draft: Rollout, right: bool) -> bool:
        wanted = self.options.which == "any" or right == (self.options.which == "right")
        short = self.longest_draft is None or draft.num_tokens <= self.longest_draft
        return wanted and short and draft.finish is not Finish.LENGTH

    def _begun(self, draft: Rollout, right: bool, chance: random.Random) -> Rollout:
        """What is kept of a draft, and the trigger."""
        count = draft.num_tokens - (draft.finish is Finish.EOS)
        if chance.random() < self.options.cut_fraction:
            count = min(count, self._without_answer(draft))
        verdict = ("any", "right" if right else "wrong")
        fitting = [
            (ids, trigger.weight)
            for ids, trigger in zip(self.triggers, self.options.triggers, strict=True)
            if trigger.verdict in verdict
        ]
        (forced,) = chance.choices([ids for ids, _ in fitting], [weight for _, weight in fitting])
        trigger = Segment(ids=forced, logps=(0.0,) * len(forced), author=Author.TRIGGER)
        return replace(draft, segments=(*_first(draft.segments, count), trigger), parent=draft.index)

    def _without_answer(self, draft: Rollout) -> int:
        """How many tokens stand before the answer that counts: behind a tool or a trigger, if one has spoken."""
        before = len(self.processor.draft_of(draft) or "")
        at = self.processor.grammar.answer_at(draft.text[before:])
        if at is None:
            return draft.num_tokens
        ids = [token for segment in draft.segments for token in segment.ids]
        return tokens_before(ids, draft.text[: before + at], self.processor.decode)

    def _counts(self, look: _Look) -> bool:
        if len(look.second.segments[-1].ids) < self.options.min_new_tokens:
            return False
        improved = look.right and not look.attempt.was_right
        return {"all": True, "correct": look.right, "improved": improved}[self.options.keep]

    def _placed(self, group: Sequence[Rollout], good: Sequence[_Look]) -> tuple[Rollout, ...]:
        if self.options.place == "replace":
            seconds = {look.attempt.place: look.second for look in good}
            return tuple(seconds.get(place, draft) for place, draft in enumerate(group))
        free = max((rollout.index for rollout in group), default=-1) + 1
        return (*group, *(replace(look.second, index=free + extra) for extra, look in enumerate(good)))

    def _account(self, looks: Sequence[_Look], kept: int) -> dict[str, float]:
        words = {True: "right", False: "wrong"}
        name = self.options.name
        counts = Counter({f"{name}/{a}_to_{b}": 0.0 for a in words.values() for b in words.values()})
        counts.update(f"{name}/{words[look.attempt.was_right]}_to_{words[look.right]}" for look in looks)
        return {
            **counts,
            f"{name}/attempted": len(looks),
            f"{name}/kept": kept,
            f"{name}/new_tokens": sum(len(look.second.segments[-1].ids) for look in looks),
            f"{name}/truncated": sum(look.second.finish is Finish.LENGTH for look in looks),
        }


class _Attempt(NamedTuple):
    """A draft that goes on: where it stands, and what there is of its second look."""

    group: int
    place: int
    begun: Rollout
    was_right: bool


class _Look(NamedTuple):
    """A second look, and whether it ended right."""

    attempt: _Attempt
    second: Rollout
    right: bool


def tokens_before(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int:
    """How many of `ids` spell no more than `text`, with which their own text begins: no token is cut in two."""
    count = bisect_right(range(len(ids) + 1), len(text), key=lambda n: len(decode(ids[:n]))) - 1
    while not text.startswith(decode(ids[:count])):  # the last of them may hold a part of a character
        count -= 1
    return count


def trigger_ids(text: str, processor: QwenProcessor, banned: Sequence[int]) -> tuple[int, ...]:
    """A trigger as tokens.

    Raises:
        UserError: it comes to nothing, or to a token that responses must not contain.
    """
    ids: list[int] = processor.tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise UserError(f"the trigger {text!r} comes to no token; write words")
    if stray := {*banned, *processor.tokenizer.all_special_ids}.intersection(ids):
        token = processor.tokenizer.convert_ids_to_tokens(min(stray))
        raise UserError(f"the trigger {text!r} contains {token!r}, which no response may contain; take it out")
    return tuple(ids)


def _first(segments: Sequence[Segment], count: int) -> Iterator[Segment]:
    """The first `count` tokens, as segments; none of them empty."""
    for segment in segments:
        if part := min(count, len(segment.ids)):
            yield replace(segment, ids=segment.ids[:part], logps=segment.logps[:part])
        count -= part
