"""M-RoPE position ids of a prompt, used alike in generation and learning.

Letters: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mmrl.types import UserError

Grid = tuple[int, int, int]


class PlaceholderRun(NamedTuple):
    """Placeholder tokens that follow each other: a grid of patches, and how far apart its times lie in positions."""

    grid: Grid
    time_step: float = 1.0


def mrope_positions(
    ids: Sequence[int], runs: Mapping[int, Sequence[PlaceholderRun]], *, merge_size: int
) -> torch.Tensor:
    """Time, height and width position of each token, int64 [3, P]; `runs` are given by placeholder id, in order.

    Text advances all three together; a placeholder token takes its time, row and column, and the text after it goes on
    from the largest position so far plus one. A completion therefore starts at `positions.max() + 1`.

    Source: Qwen2-VL, arXiv:2409.12191v2, section 2.1 "Multimodal Rotary Position Embedding"; times in seconds as in
    Qwen2.5-VL, arXiv:2502.13923v1, section 2.1.2, rounded down. Departure from transformers 5: there, text after a
    video goes on from the larger side of its frames and overlaps the later frames' times.

    Raises:
        UserError: the placeholder tokens in `ids` are not what the grids (in patches) call for.
    """
    parts: list[torch.Tensor] = []
    start, token = 0, 0
    waiting = {placeholder: list(expected) for placeholder, expected in runs.items()}
    while token < len(ids):
        placeholder = ids[token]
        if placeholder not in waiting:
            parts.append(torch.full((3, 1), start))
            start, token = start + 1, token + 1
            continue
        if not waiting[placeholder]:
            raise UserError(f"token {token} is placeholder {placeholder}, but all its grids are used up")
        block = _run_positions(waiting[placeholder].pop(0), merge_size) + start
        end = token + block.shape[1]
        if any(other != placeholder for other in ids[token:end]) or len(ids) < end:
            raise UserError(f"{block.shape[1]} tokens {placeholder} must stand from token {token} on, and do not")
        parts.append(block)
        start, token = int(block.max()) + 1, end
    if left := sum(map(len, waiting.values())):
        raise UserError(f"{left} of {sum(map(len, runs.values()))} media have no placeholder tokens in the prompt")
    return torch.cat(parts, dim=1)


def _run_positions(run: PlaceholderRun, merge_size: int) -> torch.Tensor:
    """Positions of one run from 0 on, int64 [3, tokens]."""
    time, height, width = run.grid
    times = (torch.arange(time, dtype=torch.float64) * run.time_step).long()
    axes = torch.meshgrid(times, torch.arange(height // merge_size), torch.arange(width // merge_size), indexing="ij")
    return torch.stack(axes).reshape(3, -1)
