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

from mmrl.algo.seeds import derive_seed
from mmrl.config.schema import RethinkConfig
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import RewardScorer, Sampler
from mmrl.rollout.pipeline import with_metrics
from mmrl.types import Author, FinishReason, Rollout, RolloutBatch, SamplingParams, Segment, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessCheck:
    """Tells which rollouts are right: all of the reward terms `correct` that apply reach `threshold`."""

    scorer: RewardScorer
    correct_terms: tuple[str, ...]
    threshold: float

    def __call__(self, rollouts: Sequence[Rollout]) -> list[bool]:
        """One verdict per rollout, in order.

        Raises:
            UserError: none of the terms applies to a sample.
        """
        verdicts = []
        for rollout, score in zip(rollouts, self.scorer.score_eval(rollouts), strict=True):
            values = [score.terms[name].value for name in self.correct_terms if name in score.terms]
            if not values:
                sample = rollout.prompt.sample
                raise UserError(
                    f"no term of `correct: [{', '.join(self.correct_terms)}]` says whether sample {sample.id!r} of task "
                    f"{sample.task!r} is right; there is {', '.join(score.terms)}"
                )
            verdicts.append(min(values) >= self.threshold)
        return verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedRethink:
    """The step. `law` is that of the second look, `triggers` has the ids of each of the options' triggers."""

    options: RethinkConfig
    sampler: Sampler
    is_correct: CorrectnessCheck
    sampling_params: SamplingParams
    max_first_response_tokens: int | None
    trigger_ids: tuple[tuple[int, ...], ...]
    processor: QwenProcessor
    seed: int

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """The answers with second looks in place of drafts, or beside them, and a count of what came of them."""
        right = iter(self.is_correct([draft for group in batch.groups for draft in group]))
        verdicts = [[next(right) for _ in group] for group in batch.groups]
        attempts = [
            attempt
            for g, (group, row) in enumerate(zip(batch.groups, verdicts, strict=True))
            for attempt in self._draw_attempts(g, group, row, step)
        ]
        seconds = self.sampler.extend([attempt.prefix for attempt in attempts], self.sampling_params, step=step)
        ends = self.is_correct(seconds)
        looks = [
            Continuation(attempt, replace(second, is_correct=end), end)
            for attempt, second, end in zip(attempts, seconds, ends, strict=True)
        ]
        groups, kept = [], 0
        for g, group in enumerate(batch.groups):
            good = [look for look in looks if look.attempt.group_index == g and self._is_kept(look)]
            good = good[: self.options.max_kept_per_group]
            kept += len(good)
            groups.append(self._merge_into_group(group, good))
        return with_metrics(replace(batch, groups=tuple(groups)), self._count_outcomes(looks, kept))

    def _draw_attempts(
        self, group_index: int, group: Sequence[Rollout], correct: Sequence[bool], step: int
    ) -> Iterator[_Attempt]:
        """Which drafts of a group go on. Chance derives from the draft, so it does not matter who else takes part."""
        low, high = self.options.accuracy_range
        if not group or not low <= fmean(correct) <= high:
            return
        drawn = []
        for place, (draft, ok) in enumerate(zip(group, correct, strict=True)):
            chance = random.Random(derive_seed(self.seed, self.options.name, step, draft.prompt.sample.id, draft.index))
            if self._may_continue(draft, ok) and chance.random() < self.options.fraction:
                drawn.append((chance.random(), place, chance))
        for _, place, chance in sorted(sorted(drawn)[: self.options.max_attempts_per_group], key=lambda lot: lot[1]):
            yield _Attempt(
                group_index, place, self._force_trigger(group[place], correct[place], chance), correct[place]
            )

    def _may_continue(self, first_response: Rollout, correct: bool) -> bool:
        wanted = self.options.only == "any" or correct == (self.options.only == "correct")
        short = self.max_first_response_tokens is None or first_response.num_tokens <= self.max_first_response_tokens
        return wanted and short and first_response.finish_reason is not FinishReason.LENGTH

    def _force_trigger(self, first_response: Rollout, correct: bool, rng: random.Random) -> Rollout:
        """What is kept of a draft, and the trigger."""
        count = first_response.num_tokens - (first_response.finish_reason is FinishReason.EOS)
        if rng.random() < self.options.cut_answer_fraction:
            count = min(count, self._count_tokens_before_answer(first_response))
        verdict = ("any", "correct" if correct else "incorrect")
        fitting = [
            (ids, trigger.weight)
            for ids, trigger in zip(self.trigger_ids, self.options.triggers, strict=True)
            if trigger.only in verdict
        ]
        (forced,) = rng.choices([ids for ids, _ in fitting], [weight for _, weight in fitting])
        trigger = Segment(token_ids=forced, logprobs=(0.0,) * len(forced), author=Author.FORCED)
        return replace(
            first_response,
            segments=(*_take_tokens(first_response.segments, count), trigger),
            parent_index=first_response.index,
        )

    def _count_tokens_before_answer(self, first_response: Rollout) -> int:
        """How many tokens stand before the answer that counts: behind a tool or a trigger, if one has spoken."""
        before = len(self.processor.first_response_text(first_response) or "")
        at = self.processor.grammar.find_last_answer(first_response.text[before:])
        if at is None:
            return first_response.num_tokens
        ids = [token for segment in first_response.segments for token in segment.token_ids]
        return count_tokens_before(ids, first_response.text[: before + at], self.processor.decode)

    def _is_kept(self, continuation: Continuation) -> bool:
        if len(continuation.rollout.segments[-1].token_ids) < self.options.min_new_tokens:
            return False
        improved = continuation.correct and not continuation.attempt.was_correct
        return {"all": True, "correct": continuation.correct, "improved": improved}[self.options.keep]

    def _merge_into_group(self, group: Sequence[Rollout], kept: Sequence[Continuation]) -> tuple[Rollout, ...]:
        if self.options.mode == "replace":
            seconds = {look.attempt.position: look.rollout for look in kept}
            return tuple(seconds.get(place, draft) for place, draft in enumerate(group))
        free = max((rollout.index for rollout in group), default=-1) + 1
        return (*group, *(replace(look.rollout, index=free + extra) for extra, look in enumerate(kept)))

    def _count_outcomes(self, continuations: Sequence[Continuation], num_kept: int) -> dict[str, float]:
        words = {True: "correct", False: "incorrect"}
        name = self.options.name
        counts = Counter({f"{name}/{a}_to_{b}": 0.0 for a in words.values() for b in words.values()})
        counts.update(f"{name}/{words[look.attempt.was_correct]}_to_{words[look.correct]}" for look in continuations)
        return {
            **counts,
            f"{name}/attempted": len(continuations),
            f"{name}/kept": num_kept,
            f"{name}/new_tokens": sum(len(look.rollout.segments[-1].token_ids) for look in continuations),
            f"{name}/truncated": sum(look.rollout.finish_reason is FinishReason.LENGTH for look in continuations),
        }


class _Attempt(NamedTuple):
    """A draft that goes on: where it stands, and what there is of its second look."""

    group_index: int
    position: int
    prefix: Rollout
    was_correct: bool


class Continuation(NamedTuple):
    """A second look, and whether it ended right."""

    attempt: _Attempt
    rollout: Rollout
    correct: bool


def count_tokens_before(ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int:
    """How many of `ids` spell no more than `text`, with which their own text begins: no token is cut in two."""
    count = bisect_right(range(len(ids) + 1), len(text), key=lambda n: len(decode(ids[:n]))) - 1
    while not text.startswith(decode(ids[:count])):  # the last of them may hold a part of a character
        count -= 1
    return count


def tokenize_trigger(text: str, processor: QwenProcessor, banned: Sequence[int]) -> tuple[int, ...]:
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


def _take_tokens(segments: Sequence[Segment], count: int) -> Iterator[Segment]:
    """The first `count` tokens, as segments; none of them empty."""
    for segment in segments:
        if part := min(count, len(segment.token_ids)):
            yield replace(segment, token_ids=segment.token_ids[:part], logprobs=segment.logprobs[:part])
        count -= part
