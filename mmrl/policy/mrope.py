"""M-RoPE position ids of a prompt, used alike in generation and learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mmrl.types import UserError

Grid = tuple[int, int, int]
"""Time, height and width of an image or video, in patches. Time counts pairs of frames; an image has 1."""


class PlaceholderRun(NamedTuple):
    """Adjacent placeholder tokens that stand for one image, or for a video or a part of it."""

    grid: Grid
    time_step: float = 1.0
    """Positions from one pair of frames to the next."""


def mrope_positions(
    ids: Sequence[int], runs: Mapping[int, Sequence[PlaceholderRun]], *, merge_size: int
) -> torch.Tensor:
    """Return the time, height and width position of each token of a prompt, int64 [3, P] for P tokens.

    Text advances all three together. A placeholder token takes its time, row and column, and the text after it goes on
    from the largest position so far plus one. A completion therefore starts at `positions.max() + 1`.

    Source: Qwen2-VL, arXiv:2409.12191v2, section 2.1 "Multimodal Rotary Position Embedding"; times in seconds as in
    Qwen2.5-VL, arXiv:2502.13923v1, section 2.1.2, rounded down. Departure from transformers 5: there, text after a
    video goes on from the larger side of its frames and overlaps the later frames' times.

    Args:
        ids: token ids of the prompt.
        runs: the runs in reading order, by the id of their placeholder token.
        merge_size: patches per side that one placeholder token stands for.

    Raises:
        UserError: the placeholder tokens in `ids` do not fit the grids of `runs`.
    """
    parts: list[torch.Tensor] = []
    position, column = 0, 0
    remaining = {placeholder: list(expected) for placeholder, expected in runs.items()}
    while column < len(ids):
        placeholder = ids[column]
        if placeholder not in remaining:
            parts.append(torch.full((3, 1), position))
            position, column = position + 1, column + 1
            continue
        if not remaining[placeholder]:
            raise UserError(f"token {column} is placeholder {placeholder}, but all its grids are used up")
        block = _run_positions(remaining[placeholder].pop(0), merge_size) + position
        end = column + block.shape[1]
        if len(ids) < end or any(token != placeholder for token in ids[column:end]):
            raise UserError(f"{block.shape[1]} tokens {placeholder} must stand from token {column} on, and do not")
        parts.append(block)
        position, column = int(block.max()) + 1, end
    unused = sum(map(len, remaining.values()))
    if unused:
        raise UserError(f"{unused} of {sum(map(len, runs.values()))} media have no placeholder tokens in the prompt")
    return torch.cat(parts, dim=1)


def _run_positions(run: PlaceholderRun, merge_size: int) -> torch.Tensor:
    """Return the positions of one run, counted from 0, int64 [3, tokens of the run]."""
    time, height, width = run.grid
    times = (torch.arange(time, dtype=torch.float64) * run.time_step).long()
    axes = torch.meshgrid(times, torch.arange(height // merge_size), torch.arange(width // merge_size), indexing="ij")
    return torch.stack(axes).reshape(3, -1)
