"""Rewards for putting things in order: tiles of a picture, frames of a video.

Tiles and places are numbered from 1, tiles as they are shown, places row by row. An answer of `tiles` says for each
place which tile belongs there, one of `places` says for each tile where it belongs: each is the inverse of the other.
An answer that is no permutation is worth nothing, so naming one place for all tiles is no way to be right once.

To leave things as they lie earns, on average over random orders, what any other blind answer does: the chance level.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value

GridSide = Annotated[int, Field(ge=1)]
PermutationForm = Literal["tiles", "places"]


@reward(name="jigsaw_exact", answer_types=(AnswerType.PERMUTATION,))
def exact(response: Response, sample: Sample) -> RewardValue:
    """1 if the order is right everywhere, else 0. Chance level: 1 / n! for n things.

    Source: the exact reward of Jigsaw-R1 (arXiv:2505.23590). Departures: none.

    Raises:
        Unscorable: the target is no permutation of two things or more.
    """
    target = _target_permutation(sample)
    if (flaw := _reject_wrong_length(response, target)) is not None:
        return flaw
    right = response.answer.value == target
    return RewardValue(float(right), "in order" if right else f"not in order: {len(target)} things")


@reward(name="jigsaw", answer_types=(AnswerType.PERMUTATION,))
def positions(response: Response, sample: Sample, *, above_chance: bool = False) -> RewardValue:
    """The share of tiles in their places, r; with `above_chance` max(0, (r - c) / (1 - c)). Chance level: c = 1 / n.

    Source: the partial reward of Jigsaw-R1 (arXiv:2505.23590). Departures: only a permutation counts.

    Raises:
        Unscorable: the target is no permutation of two things or more.
    """
    target = _target_permutation(sample)
    if (flaw := _reject_wrong_length(response, target)) is not None:
        return flaw
    right = sum(a == b for a, b in zip(response.answer.value, target, strict=True))
    chance = 1 / len(target) if above_chance else 0.0
    return RewardValue(_rescale_above_chance(right / len(target), chance), f"{right} of {len(target)} in place")


@reward(name="jigsaw_neighbours", answer_types=(AnswerType.PERMUTATION,))
def neighbours(
    response: Response,
    sample: Sample,
    *,
    answer: PermutationForm = "tiles",
    grid: tuple[GridSide, GridSide] | None = None,
    above_chance: bool = False,
) -> RewardValue:
    """The share r of neighbouring places whose tiles are neighbours in the picture, in the same direction.

    There are h = rows * (columns - 1) pairs side by side and v = columns * (rows - 1) on top of each other, in the
    picture put together as the answer says. With `above_chance` max(0, (r - c) / (1 - c)). Chance level:
    c = (h^2 + v^2) / ((h + v) * n * (n - 1)) for n tiles. `grid` is rows and columns; `sample.meta` says them if it is
    null. Source: the connections of Jigsaw-R1 (arXiv:2505.23590). Departures: they are counted in the picture put
    together, whichever way the answer is written, so that the right answer always earns 1.

    Raises:
        Unscorable: the target is no permutation of two tiles or more, or the grid does not hold as many.
    """
    target = _target_permutation(sample)
    rows, columns = _grid_shape(sample, grid, len(target))
    if (flaw := _reject_wrong_length(response, target)) is not None:
        return flaw
    found = _correct_positions(response.answer.value, target, answer)
    sideways = [(i, i + 1) for i in range(len(found)) if (i + 1) % columns]
    down = [(i, i + columns) for i in range(len(found) - columns)]
    right = sum(found[b] == found[a] + 1 and found[b] % columns != 0 for a, b in sideways)
    right += sum(found[b] == found[a] + columns for a, b in down)
    pairs, things = len(sideways) + len(down), len(target)
    chance = (len(sideways) ** 2 + len(down) ** 2) / (pairs * things * (things - 1)) if above_chance else 0.0
    return RewardValue(
        _rescale_above_chance(right / pairs, chance), f"{right} of {pairs} neighbours in {rows} x {columns}"
    )


@reward(name="order", answer_types=(AnswerType.PERMUTATION,))
def order(
    response: Response, sample: Sample, *, answer: PermutationForm = "tiles", above_chance: bool = True
) -> RewardValue:
    """Kendall's tau, 2 r - 1, but at least 0, where r is the share of pairs in the right order: which is before which.

    For things in a row, such as frames of a video. Chance level of r: 1 / 2, which is what tau subtracts; without
    `above_chance` the value is r. Source: Kendall 1938, A new measure of rank correlation. Departures: at least 0.

    Raises:
        Unscorable: the target is no permutation of two things or more.
    """
    target = _target_permutation(sample)
    if (flaw := _reject_wrong_length(response, target)) is not None:
        return flaw
    ranks = np.array([_positions_by_tile(order, answer) for order in (response.answer.value, target)])
    after = ranks[:, :, None] > ranks[:, None, :]
    pairs = len(target) * (len(target) - 1) // 2
    right = int((after[0] & after[1]).sum())  # each pair stands in one of the two triangles
    return RewardValue(
        _rescale_above_chance(right / pairs, 0.5 if above_chance else 0.0),
        f"{right} of {pairs} pairs in the right order",
    )


def _target_permutation(sample: Sample) -> tuple[int, ...]:
    target: tuple[int, ...] = target_value(sample, AnswerType.PERMUTATION)
    if len(target) < 2:
        raise Unscorable(f"the target {target} leaves nothing to put in order")
    return target


def _reject_wrong_length(response: Response, target: Sequence[int]) -> RewardValue | None:
    """Return the value for an answer that is no order of the right length, or None if it is one."""
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    if len(response.answer.value) != len(target):
        return RewardValue(0.0, f"orders {len(response.answer.value)} things, expected {len(target)}")
    return None


def _grid_shape(sample: Sample, grid: tuple[int, int] | None, tiles: int) -> tuple[int, int]:
    rows, columns = grid or (sample.meta.get("rows"), sample.meta.get("columns"))
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1 or rows * columns != tiles:
        raise Unscorable(f"{rows!r:.40} rows and {columns!r:.40} columns do not hold the target's {tiles} tiles")
    return rows, columns


def _correct_positions(given: Sequence[int], target: Sequence[int], answer: PermutationForm) -> list[int]:
    """Where the tile that the answer puts at each place belongs, places counted from 0."""
    tile_at, home = (given, _invert(target)) if answer == "tiles" else (_invert(given), target)
    return [home[tile - 1] - 1 for tile in tile_at]


def _positions_by_tile(given: Sequence[int], answer: PermutationForm) -> Sequence[int]:
    """Return the position of each item."""
    return _invert(given) if answer == "tiles" else given


def _invert(permutation: Sequence[int]) -> list[int]:
    inverse = [0] * len(permutation)
    for place, thing in enumerate(permutation, start=1):
        inverse[thing - 1] = place
    return inverse


def _rescale_above_chance(share: float, chance: float) -> float:
    return max(0.0, (share - chance) / (1.0 - chance))
