"""A step's experiences, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmrl.policy.batch import group_by_prompt
from mmrl.types import Experience


def pack_micro_batches(
    experiences: Sequence[Experience], *, max_groups: int, max_tokens: int, shared_prefix: bool
) -> list[list[list[Experience]]]:
    """Cut experiences into micro-batches of groups that share a prompt, short completions first.

    A group beyond the budget of tokens is split, and its prompt repeated; a sequence that is longer alone goes alone.
    """
    packs: list[list[list[Experience]]] = []
    for group in sorted(group_by_prompt(experiences), key=lambda group: sum(e.rollout.num_tokens for e in group)):
        for part in _split_group(group, max_tokens, shared_prefix=shared_prefix):
            last = packs[-1] if packs else []
            if (
                last
                and len(last) < max_groups
                and _count_forward_tokens([*last, part], shared_prefix=shared_prefix) <= max_tokens
            ):
                last.append(part)
            else:
                packs.append([part])
    return packs


def _split_group(group: Sequence[Experience], max_tokens: int, *, shared_prefix: bool) -> Iterator[list[Experience]]:
    part: list[Experience] = []
    for experience in group:
        if part and _count_forward_tokens([[*part, experience]], shared_prefix=shared_prefix) > max_tokens:
            yield part
            part = []
        part.append(experience)
    yield part


def _count_forward_tokens(groups: Sequence[Sequence[Experience]], *, shared_prefix: bool) -> int:
    """Tokens that a forward pass over these groups runs, padding included."""
    prompts = [len(group[0].rollout.prompt.token_ids) for group in groups]
    completions = [[experience.rollout.num_tokens for experience in group] for group in groups]
    if shared_prefix:
        return sum(prompts) + sum(map(sum, completions))
    longest = max(prompt + max(lengths) for prompt, lengths in zip(prompts, completions, strict=True))
    return longest * sum(map(len, completions))
