"""The tokens that a loss is computed from: a table for each micro-batch, and counts over a whole update.

Suffixes of tensor names as in `mmrl.policy.batch`: N trained tokens, the rows of a `TokenTable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.config.schema import LossConfig
from mmrl.types import TRAINED_AUTHORS, Author, Experience
from mmrl.utils.torch_transfer import send, send_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Trained tokens, a row each; the tokens of a response are adjacent. Every column is a tensor [N].

    Python branches on the columns `is_policy_N`, `is_demonstration_N` and `in_sft_loss_N`, so they stay in CPU memory.
    All others are on the device.
    """

    experiences: Sequence[Experience]  # the responses that `response_N` refers to, with or without tokens in the table
    response_N: Tensor  # index of the token's response among `experiences`, int64
    is_policy_N: Tensor  # True if the policy sampled the token, bool
    is_demonstration_N: Tensor  # True if the token is part of a demonstration, bool
    in_sft_loss_N: Tensor  # True if `loss.sft_loss` trains on the token, bool
    # Index of the token's turn over all responses, int64. A response is one turn unless its turns have their own
    # advantages. With `importance_ratio_level: sequence`, the tokens of a turn share a ratio.
    turn_N: Tensor
    advantages_N: Tensor  # advantage of the response or turn, float32
    fixed_lengths_N: Tensor  # length that `aggregation: fixed` divides by, float32
    staleness_N: Tensor  # policy versions between sampling and learning, int64; differs within a partial rollout
    # True if the old log-prob, the ratio's denominator, is the recorded one; False if the recomputed one; bool.
    # It depends on the kind of rollout:
    # - on-policy: `loss.old_logprobs` decides;
    # - replayed: `replay.old_logprobs` decides;
    # - sampled by older weights (asynchronous or partial rollouts): recorded, but recomputed with
    #   `loss.rollout_correction`, which requires `loss.old_logprobs: recomputed`;
    # - in a group that was carried over from an earlier step: recorded.
    # Any other choice than that of `loss.old_logprobs` arrives as `Experience.old_logprobs_source`.
    old_is_recorded_N: Tensor
    # Log-prob that the sampler recorded, float32 in nats as all that follow; 0 in a demonstration.
    recorded_logprobs_N: Tensor
    # Log-prob that the learner computed before the first update of the step; read only if
    # `Objective.needs_recomputed_logprobs`.
    recomputed_logprobs_N: Tensor
    current_logprobs_N: Tensor  # log-prob under the policy as it is now, with gradient
    entropies_N: Tensor  # entropy of the policy's next-token distribution, with gradient
    reference_logprobs_N: Tensor | None  # log-prob under the reference; None without a KL penalty

    def select(self, mask_N: Tensor) -> TokenTable:
        """Return the rows where a mask in CPU memory is True."""
        if mask_N.all():
            return self
        selected: dict[str, Tensor] = {}
        rows = mask_N.nonzero().squeeze(-1)
        device_rows = send(rows, self.response_N.device)
        for column in fields(self):
            values = getattr(self, column.name)
            if isinstance(values, Tensor):
                selected[column.name] = values[rows if values.device == rows.device else device_rows]
        return replace(self, **selected)  # type: ignore[arg-type]  # mypy takes any column for any field


class LossDenominators(NamedTuple):
    """Counts over all micro-batches of an update and all ranks, which the loss and its metrics divide by.

    They are counted before the first micro-batch runs, so the gradient does not depend on micro-batches.
    """

    policy_tokens: int  # sampled by the policy, with a gradient or not: the loss is a mean over all of them
    policy_tokens_with_gradient: int  # those of experiences with a gradient: metrics are means over these
    policy_tokens_with_gradient_by_staleness: tuple[int, int]  # of the current policy version, and of the one before it
    responses: int  # responses with a segment sampled by the policy
    demonstration_tokens: int
    sft_loss_tokens: int  # tokens sampled by the policy that `loss.sft_loss` trains on


class LossColumns(NamedTuple):
    """Values that the loss used for a micro-batch's sampled tokens. Every column is a detached tensor [N]."""

    experiences: Sequence[Experience]  # the responses that `response_N` refers to
    response_N: Tensor  # index of the token's response among `experiences`, int64
    columns: tuple[Tensor, ...]  # the columns of `TokenValues`, in its order


def make_token_table(
    experiences: Sequence[Experience],
    options: LossConfig,
    *,
    current_logprobs_N: Tensor,
    entropies_N: Tensor,
    recomputed_logprobs_N: Tensor,
    reference_logprobs_N: Tensor | None,
) -> TokenTable:
    """Return the trained tokens of a micro-batch, in the order of its experiences.

    `TokenTable` explains the arguments.
    """
    device = current_logprobs_N.device
    bools = partial(torch.tensor, dtype=torch.bool)  # torch would make float32 of an empty list
    # Each token, its response and its turn.
    tokens: list[TrainedToken] = []
    responses: list[int] = []
    turns: list[int] = []
    num_turns = 0
    for response, experience in enumerate(experiences):
        response_tokens = list(iter_trained_tokens(experience, options))
        tokens += response_tokens
        responses += [response] * len(response_tokens)
        turns += [num_turns + token.turn for token in response_tokens]
        num_turns += len(experience.turn_advantages or (0,))
    # The log-probs are those of `mmrl.policy.batch._logprob_tokens`, which walks the same segments.
    if len(tokens) != len(current_logprobs_N):
        raise ValueError(f"{len(current_logprobs_N)} log-probs for {len(tokens)} trained tokens")
    response_N = torch.tensor(responses, dtype=torch.int64)
    # All tokens of a response share these two.
    sources = [experience.old_logprobs_source or options.old_logprobs for experience in experiences]
    lengths = [options.fixed_length or experience.rollout.sampling_params.max_new_tokens for experience in experiences]
    return TokenTable(
        experiences=experiences,
        response_N=send(response_N, device),
        is_policy_N=bools([token.author is Author.POLICY for token in tokens]),
        is_demonstration_N=bools([token.author is Author.DEMONSTRATION for token in tokens]),
        in_sft_loss_N=bools([token.in_sft_loss for token in tokens]),
        turn_N=send_numbers(turns, device),
        advantages_N=send(torch.tensor([token.advantage for token in tokens]), device),
        fixed_lengths_N=send(torch.tensor(lengths, dtype=torch.float32)[response_N], device),
        staleness_N=send_numbers([token.staleness for token in tokens], device),
        old_is_recorded_N=send(bools([source == "recorded" for source in sources])[response_N], device),
        recorded_logprobs_N=send(torch.tensor([token.recorded_logprob for token in tokens]), device),
        recomputed_logprobs_N=recomputed_logprobs_N,
        current_logprobs_N=current_logprobs_N,
        entropies_N=entropies_N,
        reference_logprobs_N=reference_logprobs_N,
    )


class TrainedToken(NamedTuple):
    """A token of a response that the model is trained on, sampled by the policy or demonstrated."""

    author: Author
    staleness: int  # policy versions since it was sampled
    recorded_logprob: float
    in_sft_loss: bool
    advantage: float
    turn: int  # number of the turn, from 0, if turns have advantages of their own; else 0


def iter_trained_tokens(experience: Experience, options: LossConfig) -> Iterator[TrainedToken]:
    """Yield the trained tokens of an experience.

    `loss.sft_loss` trains on the policy's tokens after a trigger if the continuation was correct; with `on: response`,
    on all of them if the advantage is positive. Source of the default: VL-Rethinker, arXiv:2504.08837.
    """
    segments, turn_advantages = experience.rollout.segments, experience.turn_advantages
    turns = [0] * len(segments) if turn_advantages is None else number_turns(experience)
    # A rollout is as stale as its oldest token.
    versions = [segment.version for segment in segments if segment.author is Author.POLICY]
    current_version = min(versions, default=0) + experience.staleness
    whole_response = options.sft_loss.on == "response"
    after_trigger = whole_response
    for segment, turn in zip(segments, turns, strict=True):
        # The trigger opens the imitated part but is FORCED, so it is not trained itself.
        after_trigger = after_trigger or segment.author is Author.FORCED
        if segment.author not in TRAINED_AUTHORS:
            continue
        advantage = experience.advantage if turn_advantages is None else turn_advantages[turn]
        imitated = advantage > 0.0 if whole_response else bool(experience.rollout.is_correct)
        is_policy = segment.author is Author.POLICY
        in_sft_loss = options.sft_loss.coef > 0.0 and imitated and after_trigger and is_policy
        staleness = current_version - segment.version
        for logprob in segment.logprobs:
            yield TrainedToken(segment.author, staleness, logprob, in_sft_loss, advantage, turn)


def number_turns(experience: Experience) -> list[int]:
    """Return for each segment the number of the policy's turn that it is in or after, from 0; -1 before the first.

    A turn that partial rollouts continued, or that text was forced into, has several segments.

    Raises:
        ValueError: the experience has another number of turns with advantages.
    """
    numbers: list[int] = []
    number, begins_turn = -1, True
    for segment in experience.rollout.segments:
        if segment.author is Author.ENVIRONMENT:
            begins_turn = True
        elif segment.author is Author.POLICY:
            number += begins_turn
            begins_turn = False
        numbers.append(number)
    if number + 1 != len(experience.turn_advantages or ()):
        owner = f"sample {experience.rollout.prompt.sample.id}, rollout {experience.rollout.index}"
        raise ValueError(f"{owner}: {number + 1} turns do not fit the advantages of turns {experience.turn_advantages}")
    return numbers
