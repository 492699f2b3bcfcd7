"""M-RoPE position ids of a prompt, used alike in generation and learning.

Letters: P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.types import UserError

Grid = tuple[int, int, int]


def mrope_positions(ids: Sequence[int], grids: Sequence[Grid], *, image_id: int, merge: int) -> torch.Tensor:
    """Time, height and width position of each token, int64 [3, P].

    Text advances all three together; an image token takes its row and column, and the text after it goes on from the
    largest position so far plus one. A completion therefore starts at `positions.max() + 1`.

    Source: Qwen2-VL, arXiv:2409.12191v2, section 2.1 "Multimodal Rotary Position Embedding".

    Raises:
        UserError: the image tokens in `ids` are not what the grids (in patches) call for.
    """
    parts: list[torch.Tensor] = []
    start, token, remaining = 0, 0, list(grids)
    while token < len(ids):
        if ids[token] != image_id:
            parts.append(torch.full((3, 1), start))
            start, token = start + 1, token + 1
            continue
        if not remaining:
            raise UserError(f"token {token} is an image placeholder, but all {len(grids)} image grids are used up")
        time, height, width = remaining.pop(0)
        rows, columns = height // merge, width // merge
        count = time * rows * columns
        if any(other != image_id for other in ids[token : token + count]) or len(ids) < token + count:
            raise UserError(f"grid {(time, height, width)} needs {count} image tokens from token {token} on")
        axes = torch.meshgrid(torch.arange(time), torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack(axes).reshape(3, count) + start)
        start, token = start + max(time, rows, columns), token + count
    if remaining:
        raise UserError(f"{len(remaining)} of {len(grids)} images have no placeholder tokens in the prompt")
    return torch.cat(parts, dim=1)
