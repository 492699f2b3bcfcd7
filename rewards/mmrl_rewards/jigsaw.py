"""Rewards for putting things in order: the tiles of an image or the frames of a video.

Tiles and places are numbered from 1, tiles in the order they are shown and places row by row. An answer of form `tiles`
lists for each place the tile that belongs there. One of form `places` lists for each tile its place. Each form is the
inverse permutation of the other. An answer that is not a permutation earns nothing, so naming one place for all tiles
cannot be correct once.

The chance level is the mean value, over random orders, of an answer that ignores the image, such as the given order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import BadAnswer, answer_value, rescale_above, reward, target_value

GridSide = Annotated[int, Field(ge=1)]  # number of rows or columns
PermutationForm = Literal["tiles", "places"]  # forms of an answer, see above


@reward(name="jigsaw_exact", answer_types=(AnswerType.PERMUTATION,))
def exact(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the order is correct everywhere, else 0. Chance level: 1 / n! for n things.

    Source: the exact reward of Jigsaw-R1 (arXiv:2505.23590). Departures: none.
    Unscorable: the target is not a permutation of two or more things.
    """
    order, target = _read_orders(response, sample)
    correct = order == target
    return RewardValue(float(correct), "in order" if correct else f"not in order: {len(target)} things")


@reward(name="jigsaw", answer_types=(AnswerType.PERMUTATION,))
def positions(response: Response, sample: Sample, *, above_chance: bool = False) -> RewardValue:
    """Return the fraction r of tiles in their correct places. Chance level: c = 1 / n.

    With `above_chance`, the value is max(0, (r - c) / (1 - c)).

    Source: the partial reward of Jigsaw-R1 (arXiv:2505.23590).
    Departures: an answer that is not a permutation earns 0.
    Unscorable: the target is not a permutation of two or more things.
    """
    order, target = _read_orders(response, sample)
    correct = sum(a == b for a, b in zip(order, target, strict=True))
    chance = 1 / len(target) if above_chance else 0.0
    return RewardValue(rescale_above(correct / len(target), chance), f"{correct} of {len(target)} in place")


@reward(name="jigsaw_neighbours", answer_types=(AnswerType.PERMUTATION,))
def neighbours(
    response: Response,
    sample: Sample,
    *,
    answer: PermutationForm = "tiles",
    grid: tuple[GridSide, GridSide] | None = None,
    above_chance: bool = False,
) -> RewardValue:
    """Return the fraction r of neighbouring places whose tiles are neighbours in the image, in the same direction.

    The answer's image has h = rows * (columns - 1) horizontal and v = columns * (rows - 1) vertical pairs of
    neighbouring places. Chance level: c = (h^2 + v^2) / ((h + v) * n * (n - 1)) for n tiles. With `above_chance`, the
    value is max(0, (r - c) / (1 - c)). `grid` is (rows, columns). If it is null, `sample.meta` holds `rows` and
    `columns`.

    Source: the connections of Jigsaw-R1 (arXiv:2505.23590).
    Departures: neighbours are counted in the image as the answer arranges it, for both forms of an answer, so that the
    correct answer always earns 1.
    Unscorable: the target is not a permutation of two or more tiles, or the grid has another number of tiles.
    """
    target = _read_target(sample)
    rows, columns = grid or (sample.meta.get("rows"), sample.meta.get("columns"))
    # `type`, since True is an int to isinstance.
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1 or rows * columns != len(target):
        raise Unscorable(f"{rows!r:.40} rows and {columns!r:.40} columns do not hold the target's {len(target)} tiles")
    order, _ = _read_orders(response, sample)
    # For each place, the correct place, from 0, of the tile that the answer puts there.
    tile_at = order if answer == "tiles" else _invert(order)
    place_of = _invert(target) if answer == "tiles" else target
    origins = [place_of[tile - 1] - 1 for tile in tile_at]
    correct = 0
    for place, origin in enumerate(origins):
        # A place at the end of a row has no neighbour to the right, and a tile at the start of a row has none to the
        # left in the original image.
        if (place + 1) % columns and origins[place + 1] == origin + 1 and origins[place + 1] % columns:
            correct += 1
        if place + columns < len(origins) and origins[place + columns] == origin + columns:
            correct += 1
    num_tiles, horizontal, vertical = len(target), rows * (columns - 1), columns * (rows - 1)
    pairs = horizontal + vertical
    chance = (horizontal**2 + vertical**2) / (pairs * num_tiles * (num_tiles - 1)) if above_chance else 0.0
    reason = f"{correct} of {pairs} neighbours in {rows} x {columns}"
    return RewardValue(rescale_above(correct / pairs, chance), reason)


@reward(name="order", answer_types=(AnswerType.PERMUTATION,))
def order(
    response: Response, sample: Sample, *, answer: PermutationForm = "tiles", above_chance: bool = True
) -> RewardValue:
    """Return Kendall's tau, max(0, 2 r - 1), where r is the fraction of pairs in the correct order.

    It suits things in a row, such as frames of a video. Chance level of r: 1 / 2, which tau subtracts. Without
    `above_chance`, the value is r.

    Source: Kendall 1938, A new measure of rank correlation. Departures: negative values become 0.
    Unscorable: the target is not a permutation of two or more things.
    """
    given, target = _read_orders(response, sample)
    correct_order = target
    if answer == "tiles":
        given, correct_order = _invert(given), _invert(target)
    answer_ranks, target_ranks = np.array(given), np.array(correct_order)
    answer_after = answer_ranks[:, None] > answer_ranks[None, :]
    target_after = target_ranks[:, None] > target_ranks[None, :]
    pairs = len(target) * (len(target) - 1) // 2
    # Each pair is True in one of the two triangles of `target_after`, so it is counted once.
    correct = int((answer_after & target_after).sum())
    value = rescale_above(correct / pairs, 0.5 if above_chance else 0.0)
    return RewardValue(value, f"{correct} of {pairs} pairs in the right order")


def _read_target(sample: Sample) -> Sequence[int]:
    """Return the target's permutation, of two or more things."""
    target: tuple[int, ...] = target_value(sample, AnswerType.PERMUTATION)
    if len(target) < 2:
        raise Unscorable(f"the target {target} leaves nothing to put in order")
    return target


def _read_orders(response: Response, sample: Sample) -> tuple[Sequence[int], Sequence[int]]:
    """Return the answer's permutation and the target's, which have the same length."""
    target = _read_target(sample)
    order = answer_value(response)
    if len(order) != len(target):
        raise BadAnswer(f"orders {len(order)} things, expected {len(target)}")
    return order, target


def _invert(permutation: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation of the numbers from 1 to its length."""
    inverse: list[int] = (np.argsort(permutation) + 1).tolist()
    return inverse
