"""Forced rethinking: finished responses are continued after a trigger that the policy did not write.

    first response, POLICY | trigger, FORCED | continuation, POLICY

The words in capitals are the parts' authors, who decide what is trained: tokens by FORCED are context. The parts are
joined as token ids and never re-tokenized, so each token keeps the log-probability it was sampled with. The last answer
of the whole response counts.

Source: VL-Rethinker, arXiv:2504.08837, section 3.2 "Forced Rethinking". The paper forces a share of all rollouts after
they end and keeps continuations whose answer is correct. Departures are options, listed at `RethinkConfig`, and a few
that `mmrl/config/schema/presets.yaml` names; by default every continuation stays in its group, so that group means are
not biased by the selection.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mmrl.algo.correctness import terms_reach
from mmrl.config.schema import RethinkConfig
from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.steps.base import Place, RolloutContext, add_metrics, with_rollouts
from mmrl.rollout.steps.tools import ends_in_call
from mmrl.types import Author, FinishReason, Rollout, RolloutBatch, Segment, UserError
from mmrl.utils.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedRethink:
    """Continues some first responses after a trigger; `RethinkConfig` says which, and what becomes of the results."""

    options: RethinkConfig
    context: RolloutContext
    trigger_ids: tuple[tuple[int, ...], ...]  # token ids of each of `options.triggers`, in order
    # Number of rethink steps before this one. They may have continued a response and dropped the continuation; with
    # this number, the next one of the same response has random numbers of its own.
    repeat: int = 0

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with the continuations that are kept in place of their first responses.

        Raises:
            UserError: none of the terms that decide whether a response is correct applies to a sample.
        """
        begun = self._begin(batch, step)
        continued = self._continue(begun, step)
        kept = self._select_kept(continued)
        metrics = self._count_outcomes(continued.values(), len(kept))
        return add_metrics(replace(batch, groups=with_rollouts(batch.groups, kept)), metrics)

    def _begin(self, batch: RolloutBatch, step: int) -> dict[Place, Rollout]:
        """Choose which first responses are continued; return the kept part of each, followed by a trigger."""
        correct = self._are_correct(list(chain.from_iterable(batch.groups)))
        begun: dict[Place, Rollout] = {}
        start = 0  # index in `correct` of the group's first response
        for group_index, group in enumerate(batch.groups):
            for position, rng in self._draw_positions(group, step):
                begun[group_index, position] = self._force_trigger(group[position], correct[start + position], rng)
            start += len(group)
        return begun

    def _continue(self, begun: Mapping[Place, Rollout], step: int) -> dict[Place, Rollout]:
        """Let the policy write on after the triggers, in one large request to the engine; judge the whole responses."""
        sampling_params = replace(self.context.sampling_params, max_new_tokens=self.options.max_new_tokens)
        if self.options.temperature is not None:
            sampling_params = replace(sampling_params, temperature=self.options.temperature)
        rollouts = list(begun.values())
        extended = self.context.sampler.extend(rollouts, sampling_params, step=step, repeat=self.repeat)
        continued = {}
        for place, rollout, correct in zip(begun, extended, self._are_correct(extended), strict=True):
            continued[place] = replace(rollout, is_correct=correct)
        return continued

    def _select_kept(self, continued: Mapping[Place, Rollout]) -> dict[Place, Rollout]:
        """Return the continuations that replace their first responses."""
        options, kept = self.options, {}
        num_kept_of: Counter[int] = Counter()  # by index of the group
        for (group_index, position), rollout in continued.items():
            wanted = options.keep == "all" or rollout.is_correct
            long_enough = len(rollout.segments[-1].token_ids) >= options.min_new_tokens
            has_room = options.max_kept_per_group is None or num_kept_of[group_index] < options.max_kept_per_group
            if wanted and long_enough and has_room:
                num_kept_of[group_index] += 1
                kept[group_index, position] = rollout
        return kept

    def _are_correct(self, rollouts: Sequence[Rollout]) -> list[bool]:
        """Return for each rollout whether all terms of `options.correct` that apply reach `options.threshold`."""
        verdicts = []
        for rollout, score in zip(rollouts, self.context.scorer.score_eval(rollouts), strict=True):
            verdict = terms_reach(score.values_by_term, self.options.correct, self.options.threshold)
            if verdict is None:
                sample = rollout.prompt.sample
                raise UserError(
                    f"no term of `correct: [{', '.join(self.options.correct)}]` says whether sample {sample.id!r} of "
                    f"task {sample.task!r} is right; there is {', '.join(score.terms)}"
                )
            verdicts.append(verdict)
        return verdicts

    def _draw_positions(self, group: Sequence[Rollout], step: int) -> list[tuple[int, random.Random]]:
        """Return the positions of the responses of a group that are continued, each with its random numbers."""
        drawn: list[tuple[float, int, random.Random]] = []
        for position, rollout in enumerate(group):
            # A response with tool results may be longer than `max_new_tokens`.
            longest = self.context.sampling_params.max_new_tokens - self.options.min_free_tokens
            fits = not self.options.min_free_tokens or rollout.num_tokens <= longest
            # A response that was cut by its length limit, or waits for a tool, has not finished thinking, so it cannot
            # be made to rethink. A trigger after a call would also keep a later `tools` step from answering the call.
            is_finished = rollout.finish_reason is not FinishReason.LENGTH and not ends_in_call(rollout)
            # Chance derives from the response, not from a shared stream: whether it is continued must not depend on how
            # many others were tried before it, or a resumed run would differ.
            sample_id = rollout.prompt.sample.id
            rng = random.Random(derive_seed(self.context.seed, self.options.name, step, sample_id, rollout.index))
            if fits and is_finished and rng.random() < self.options.fraction:
                drawn.append((rng.random(), position, rng))
        # Keep the lowest second random numbers; keeping the first responses would favour low indices.
        drawn = sorted(drawn)[: self.options.max_attempts_per_group]
        return sorted((position, rng) for _, position, rng in drawn)

    def _force_trigger(self, first_response: Rollout, correct: bool, rng: random.Random) -> Rollout:
        """Return the kept part of a first response, without its EOS, followed by a trigger drawn by weight."""
        num_kept = first_response.num_tokens - (first_response.finish_reason is FinishReason.EOS)
        if rng.random() < self.options.cut_answer_fraction:
            num_kept = min(num_kept, self._count_tokens_before_answer(first_response))
        candidates, weights = [], []
        for token_ids, trigger in zip(self.trigger_ids, self.options.triggers, strict=True):
            if trigger.only in ("any", "correct" if correct else "incorrect"):
                candidates.append(token_ids)
                weights.append(trigger.weight)
        forced = rng.choices(candidates, weights)[0]
        kept: list[Segment] = []
        num_left = num_kept
        for segment in first_response.segments:
            num_taken = min(num_left, len(segment.token_ids))
            if num_taken:
                kept.append(segment.cut(num_taken))
            num_left -= num_taken
        # Log-probability 0.0: the policy did not sample these tokens, so there is none to compute a ratio from.
        trigger_segment = Segment(token_ids=forced, logprobs=(0.0,) * len(forced), author=Author.FORCED)
        segments, parent_index = (*kept, trigger_segment), first_response.index
        return replace(first_response, segments=segments, parent_index=parent_index, first_is_correct=correct)

    def _count_tokens_before_answer(self, first_response: Rollout) -> int:
        """Return how many tokens precede the answer that counts, or all of them if there is no answer.

        Only text after the last tool result or trigger is searched: an answer before it does not count.
        """
        start = len(self.context.processor.text_before_continuation(first_response) or "")
        answer_offset = self.context.processor.response_format.find_last_answer(first_response.text[start:])
        if answer_offset is None:
            return first_response.num_tokens
        token_ids = [token for segment in first_response.segments for token in segment.token_ids]
        # The text begins with `response_opening`, which is part of the prompt and not of these tokens.
        opening = len(self.context.processor.encoder.response_opening)
        before = first_response.text[opening : start + answer_offset]
        return count_tokens_before(token_ids, before, self.context.processor.decode)

    def _count_outcomes(self, continued: Collection[Rollout], num_kept: int) -> dict[str, float]:
        """Return counts of all continuations by verdict before and after, of kept ones, new tokens and truncations."""
        # All names are there, also with a count of 0: metrics files then have the same columns at every step.
        moves = ("correct_to_correct", "correct_to_incorrect", "incorrect_to_correct", "incorrect_to_incorrect")
        counts: dict[str, float] = dict.fromkeys(moves, 0.0)
        counts |= {"attempted": len(continued), "kept": num_kept, "new_tokens": 0, "truncated": 0}
        for rollout in continued:
            before = "correct" if rollout.first_is_correct else "incorrect"
            after = "correct" if rollout.is_correct else "incorrect"
            counts[f"{before}_to_{after}"] += 1
            counts["new_tokens"] += len(rollout.segments[-1].token_ids)
            counts["truncated"] += rollout.finish_reason is FinishReason.LENGTH
        return {f"{self.options.name}/{name}": count for name, count in counts.items()}


def count_tokens_before(token_ids: Sequence[int], text: str, decode: Callable[[Sequence[int]], str]) -> int:
    """Return the largest number of leading tokens whose text is a prefix of `text`; no token is cut in two.

    `text` must be a prefix of what all `token_ids` spell.
    """
    count = bisect_right(range(len(token_ids) + 1), len(text), key=lambda n: len(decode(token_ids[:n]))) - 1
    # A character may be spread over several tokens. Some of these decode to a replacement character, which has the
    # length of the character but not its text.
    while not text.startswith(decode(token_ids[:count])):
        count -= 1
    return count


def tokenize_trigger(text: str, processor: PromptProcessor, banned_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the token ids of a trigger.

    Raises:
        UserError: it has no token, or contains a token that no response may contain.
    """
    token_ids: list[int] = processor.tokenizer(text, add_special_tokens=False).input_ids
    if not token_ids:
        raise UserError(f"the trigger {text!r} has no token; write words")
    forbidden = {*banned_token_ids, *processor.tokenizer.all_special_ids}.intersection(token_ids)
    if forbidden:
        token = processor.tokenizer.convert_ids_to_tokens(min(forbidden))
        raise UserError(f"the trigger {text!r} contains {token!r}, which no response may contain; take it out")
    return tuple(token_ids)
