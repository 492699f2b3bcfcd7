"""Jigsaw puzzles of real photographs: put shuffled tiles in order, or say where one tile lies from another.

Photographs of one split share no pixel with another's, and no two tiles of a puzzle look alike, so that there is one
right answer. A sample depends on the seed, the split and its index alone.

Options both share:
    split: train, validation or test.
    size: number of samples; null never ends.
    rows, columns: into how many tiles the photograph is cut.
    tile_px: side of a square tile. A multiple of the model's merged patch (28 pixels for Qwen2-VL and Qwen2.5-VL, 32
        for Qwen3-VL) keeps every visual token within one tile.
    mask: how much of a tile's side is blanked at each of its edges, 0 to 0.4: seams no longer give the answer away.
    seed: fixes the samples whatever the run's seed, which is taken when None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mmrl.types import AnswerType, DatasetContext, Sample, Target, UserError
from mmrl_datasets.generators.common import (
    RenderedSample,
    SampleRngs,
    check_at_least,
    check_one_of,
    generate_samples,
    shuffle_options,
)
from mmrl_datasets.generators.drawing import MAX_DRAWS
from mmrl_datasets.generators.photos import load_scene_photos, parse_split, random_crop
from mmrl_datasets.readers.row_to_sample import format_choices

MIN_DIFFERENCE: Final = 8.0  # mean absolute difference of two tiles, in grey levels of 255
BLANK_LEVEL: Final = 128
RELATIONS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(  # columns to the right, rows down
    {
        "to the left": (-1, 0),
        "to the right": (1, 0),
        "above": (0, -1),
        "below": (0, 1),
        "above and to the left": (-1, -1),
        "above and to the right": (1, -1),
        "below and to the left": (-1, 1),
        "below and to the right": (1, 1),
    }
)


class _TileGrid(NamedTuple):
    """How a photograph is cut; `rim` pixels are blanked at each edge of a tile."""

    rows: int
    columns: int
    tile_px: int
    margin_px: int


def order(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    rows: int = 2,
    columns: int = 2,
    tile_px: int = 28,
    mask: float = 0.0,
    apart: bool = False,
    answer: Literal["tiles", "places"] = "tiles",
    identity: bool = False,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "jigsaw": the permutation that puts shuffled tiles in order; every permutation equally often.

    Tiles and places are numbered from 1, row by row: `tiles` as they are shown, `places` in the photograph.

    Options:
        apart: show every tile as a picture of its own instead of one shuffled picture.
        answer: `tiles`: value[i] is the number of the tile that belongs at place i + 1, as in Visual Jigsaw (Wu et al.
            2025) and in Jigsaw-R1's backward direction (Wang et al. 2025). `places`: value[i] is the place where tile
            i + 1 belongs, Jigsaw-R1's forward direction. Each is the inverse of the other.
        identity: whether tiles may happen to lie in order.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_at_least(1, size=size)
    grid = _make_grid(rows, columns, tile_px, mask)
    check_one_of(("tiles", "places"), answer=answer)
    count = rows * columns
    if count == 2 and not identity:
        raise UserError("two tiles can be shuffled in one way only: cut more of them, or set `identity: true`")
    scenes = load_scene_photos(part, max(rows, columns) * tile_px)

    def draw(dice: SampleRngs) -> RenderedSample:
        tiles = _cut_tiles(dice.pixels, scenes, grid)
        belongs = dice.layout.permutation(count)  # of each tile shown, the place counted from 0
        while not identity and (belongs == np.arange(count)).all():
            belongs = dice.layout.permutation(count)
        shown = [tiles[i] for i in belongs]
        value = belongs if answer == "places" else np.argsort(belongs)
        pictures = map(Image.fromarray, shown if apart else [_assemble_tiles(shown, columns)])
        return RenderedSample(
            parts=(*pictures, _question_text(rows, columns, apart, answer)),
            target=Target(answer_type=AnswerType.PERMUTATION, value=tuple(int(i) + 1 for i in value)),
            meta={"rows": rows, "columns": columns},
        )

    return generate_samples(place, "jigsaw", part, draw, size=size, seed=seed)


def relation(
    place: DatasetContext,
    *,
    split: str,
    size: int | None,
    rows: int = 2,
    columns: int = 2,
    tile_px: int = 28,
    mask: float = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Task "relation": where the second of two neighbouring tiles lies from the first, as one of 2 or 8 options.

    There are 2 when the photograph is cut one way only, 8 otherwise, as in Jigsaw-R1's pairs; each is right equally
    often, and so is each letter.

    Raises:
        UserError: an option is out of range.
    """
    part = parse_split(split)
    check_at_least(1, size=size)
    grid = _make_grid(rows, columns, tile_px, mask)
    scenes = load_scene_photos(part, max(rows, columns) * tile_px)
    possible = [name for name, (right, down) in RELATIONS.items() if abs(right) < columns and abs(down) < rows]

    def draw(dice: SampleRngs) -> RenderedSample:
        tiles = _cut_tiles(dice.pixels, scenes, grid)
        name = possible[int(dice.layout.integers(len(possible)))]
        right, down = RELATIONS[name]
        x = int(dice.layout.integers(max(0, -right), columns - max(0, right)))
        y = int(dice.layout.integers(max(0, -down), rows - max(0, down)))
        pair = tiles[y * columns + x], tiles[(y + down) * columns + x + right]
        options, letter = shuffle_options(dice.layout, possible, name)
        question = "These are two neighbouring tiles of one photograph. Where does the second lie from the first?"
        return RenderedSample(
            parts=(*map(Image.fromarray, pair), question + format_choices(options)),
            target=Target(answer_type=AnswerType.CHOICE, value=letter),
            meta={"relation": name},
        )

    return generate_samples(place, "relation", part, draw, size=size, seed=seed)


def _make_grid(rows: int, columns: int, tile_px: int, mask: float) -> _TileGrid:
    check_at_least(1, rows=rows, columns=columns)
    check_at_least(8, tile_px=tile_px)
    if rows * columns < 2:
        raise UserError(f"rows={rows} and columns={columns} leave nothing to shuffle: cut two tiles or more")
    if not 0.0 <= mask <= 0.4:
        raise UserError(f"mask={mask} must lie between 0 and 0.4")
    return _TileGrid(rows, columns, tile_px, margin_px=round(mask * tile_px))


def _cut_tiles(rng: np.random.Generator, scenes: Sequence[Image.Image], grid: _TileGrid) -> list[NDArray[np.uint8]]:
    """Tiles of a random patch of a random photograph, row by row, each different from every other."""
    side = grid.tile_px
    for _ in range(MAX_DRAWS):
        scene = scenes[int(rng.integers(len(scenes)))]
        patch = np.asarray(random_crop(rng, scene, grid.columns * side, grid.rows * side))
        corners = product(range(0, grid.rows * side, side), range(0, grid.columns * side, side))
        tiles = [_blank_margin(patch[y : y + side, x : x + side], grid.margin_px) for y, x in corners]
        if all(np.abs(a.astype(int) - b).mean() >= MIN_DIFFERENCE for a, b in combinations(tiles, 2)):
            return tiles
    raise UserError(
        f"no photograph has {grid.rows} x {grid.columns} tiles that all look different; use fewer or larger tiles"
    )


def _blank_margin(tile: NDArray[np.uint8], rim: int) -> NDArray[np.uint8]:
    inner = slice(rim, len(tile) - rim)
    rimmed = np.full_like(tile, BLANK_LEVEL)
    rimmed[inner, inner] = tile[inner, inner]
    return rimmed


def _assemble_tiles(tiles: Sequence[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    return np.vstack([np.hstack(tiles[start : start + columns]) for start in range(0, len(tiles), columns)])


def _question_text(rows: int, columns: int, apart: bool, answer: str) -> str:
    shown = "These are the tiles" if apart else "The picture shows the tiles"
    numbered = "in the order shown" if apart else "row by row as they lie now"
    wanted = (
        "For each place in the photograph, row by row, give the number of the tile that belongs there."
        if answer == "tiles"
        else "For each tile in turn, give the number of its place in the photograph, counted row by row."
    )
    return (
        f"{shown} of a photograph that was cut into {rows} x {columns} (rows x columns) and shuffled. "
        f"They are numbered from 1 to {rows * columns}, {numbered}. {wanted}"
    )
