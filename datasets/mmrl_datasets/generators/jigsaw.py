"""Jigsaw puzzles of real photographs: put shuffled tiles in order, or say where one tile lies from another.

`order` and `relation` cut built-in photographs, and all tiles look different, so there is one correct answer. `pair`
cuts whole pictures of a folder.

Options that `order` and `relation` share, besides the ones of all generators (see the package):
    rows, columns: number of tiles down and across, at most 100 tiles and 4000 pixels a side.
    tile_px: side of a square tile. A multiple of the model's merged patch (28 pixels for Qwen2-VL and Qwen2.5-VL, 32
        for Qwen3-VL) keeps every visual token within one tile.
    margin_fraction: fraction of a tile's side that is blanked at each of its edges, 0 to 0.4, so that matching edges do
        not give the answer away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Final, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from mmrl.types import AnswerType, DatasetContext, ImageRef, Sample, Target, UserError
from mmrl.utils.digests import file_digest
from mmrl_datasets.choices import format_choices
from mmrl_datasets.generators import common, drawing
from mmrl_datasets.generators.common import Count, Pixels, Size
from mmrl_datasets.generators.photos import Split, load_scene_photos, random_crop

TilePixels = Annotated[Pixels, Field(ge=8)]
MarginFraction = Annotated[float, Field(ge=0.0, le=0.4)]

MIN_DIFFERENCE: Final = 8.0  # least mean absolute difference between two tiles of a puzzle, in grey levels (0 to 255)
BLANK_LEVEL: Final = 128  # grey level of the blanked edges of tiles
RELATIONS: Final[Mapping[tuple[int, int], tuple[str, str]]] = {
    (-1, 0): ("to the left", "directly to the left of"),
    (1, 0): ("to the right", "directly to the right of"),
    (0, -1): ("above", "directly above"),
    (0, 1): ("below", "directly below"),
    (-1, -1): ("above and to the left", "on the upper left of"),
    (1, -1): ("above and to the right", "on the upper right of"),
    (-1, 1): ("below and to the left", "on the lower left of"),
    (1, 1): ("below and to the right", "on the lower right of"),
}
"""Directions in which one tile lies from another, -1, 0 or 1 to the right and down, in the words of `relation` and of
`pair`. `relation` asks for the second of two tiles from the first, `pair` for the first from the second."""


def order(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    rows: Count = 2,
    columns: Count = 2,
    tile_px: TilePixels = 28,
    margin_fraction: MarginFraction = 0.0,
    separate_images: bool = False,
    answer: Literal["tiles", "places"] = "tiles",
    allow_identity: bool = False,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "jigsaw": the permutation that puts shuffled tiles in order; each is equally likely.

    Tiles are numbered from 1, row by row as they are shown. Places are numbered likewise in the photograph.

    Options:
        separate_images: show every tile as a separate image instead of one shuffled image.
        answer: `tiles`: value[i] is the number of the tile that belongs at place i + 1, as in Visual Jigsaw (Wu et al.
            2025) and in the backward direction of Jigsaw-R1 (Wang et al. 2025). `places`: value[i] is the place where
            tile i + 1 belongs, the forward direction of Jigsaw-R1. Each is the inverse of the other.
        allow_identity: allow tiles that happen to lie in order already.
    """
    _check_puzzle(rows, columns, tile_px)
    count = rows * columns
    if count == 2 and not allow_identity:
        raise UserError("two tiles can be shuffled in one way only: cut more of them, or set `allow_identity: true`")
    photos = load_scene_photos(split, max(rows, columns) * tile_px)
    question = _question_text(rows, columns, answer, separate_images=separate_images)

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        tiles = _cut_tiles(rngs.pixels, photos, rows, columns, tile_px, margin_fraction)
        # places[i] is the place, counted from 0, where the i-th tile shown belongs.
        places = rngs.layout.permutation(count)
        while not allow_identity and (places == np.arange(count)).all():
            places = rngs.layout.permutation(count)
        shown = [tiles[place] for place in places]
        value = places if answer == "places" else np.argsort(places)
        if not separate_images:
            shown = [_join_tiles(shown, columns)]
        return common.RenderedSample(
            parts=(*map(Image.fromarray, shown), question),
            target=Target(answer_type=AnswerType.PERMUTATION, value=tuple(int(index) + 1 for index in value)),
            meta={"rows": rows, "columns": columns},
        )

    return common.generate_samples(context, "jigsaw", split, render, size=size, seed=seed)


def relation(
    context: DatasetContext,
    *,
    split: Split,
    size: Size,
    rows: Count = 2,
    columns: Count = 2,
    tile_px: TilePixels = 28,
    margin_fraction: MarginFraction = 0.0,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "relation": where the second of two neighbouring tiles lies from the first.

    The question has 2 options when the photograph is cut in one direction only, otherwise 8, as in the pairs of
    Jigsaw-R1. Each option and each letter is correct equally often.
    """
    _check_puzzle(rows, columns, tile_px)
    photos = load_scene_photos(split, max(rows, columns) * tile_px)
    possible = {name: (x, y) for (x, y), (name, _) in RELATIONS.items() if abs(x) < columns and abs(y) < rows}

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        tiles = _cut_tiles(rngs.pixels, photos, rows, columns, tile_px, margin_fraction)
        name = drawing.choose(rngs.layout, list(possible))
        right, down = possible[name]
        # Drawn among the tiles that have a neighbour on that side.
        column = int(rngs.layout.integers(max(0, -right), columns - max(0, right)))
        row = int(rngs.layout.integers(max(0, -down), rows - max(0, down)))
        pair = tiles[row * columns + column], tiles[(row + down) * columns + column + right]
        options, letter = common.shuffle_options(rngs.layout, list(possible), name)
        question = "These are two neighbouring tiles of one photograph. Where does the second lie from the first?"
        return common.RenderedSample(
            parts=(*map(Image.fromarray, pair), question + format_choices(options)),
            target=Target(answer_type=AnswerType.CHOICE, value=letter),
            meta={"relation": name},
        )

    return common.generate_samples(context, "relation", split, render, size=size, seed=seed)


def pair(
    context: DatasetContext,
    *,
    split: Split = "train",
    size: Size,
    pictures: str,
    rows: Count = 2,
    columns: Count = 1,
    seed: int | None = None,
) -> Iterator[Sample]:
    """Yield samples of task "pair_3x1", or another size: how two of a picture's shuffled tiles belong together.

    The question has 2 options when a picture is cut in one direction only, otherwise 8. Half of the pictures are cut
    into `columns` x `rows`. Tiles of a picture may look the same.

    Options:
        pictures: folder of .jpg and .png files, relative to the config and inside `data.media_roots`. Each sample draws
            one of them.
    """
    count = _count_tiles(rows, columns)
    folder = context.base_dir / pictures
    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in (".jpg", ".png"))
    if not files:
        raise UserError(f"pictures={pictures!r}: {folder} holds no .jpg or .png")

    def render(rngs: common.SampleRngs) -> common.RenderedSample:
        grid = (rows, columns) if rngs.layout.random() < 0.5 else (columns, rows)
        tiles = _cut_picture(context, drawing.choose(rngs.pixels, files), *grid)
        # places[i] is the place, counted from 0, where the i-th tile shown belongs.
        places = rngs.layout.permutation(count)
        first, second = map(int, rngs.layout.choice(count, 2, replace=False))
        down, right = np.sign(np.subtract(divmod(places[first], grid[1]), divmod(places[second], grid[1])))
        possible = [words for (x, y), (_, words) in RELATIONS.items() if abs(x) < grid[1] and abs(y) < grid[0]]
        options, letter = common.shuffle_options(rngs.layout, possible, RELATIONS[int(right), int(down)][1])
        choices = format_choices(f"{first + 1} is {words} {second + 1}" for words in options)
        shown = Image.fromarray(_join_tiles([tiles[place] for place in places], grid[1]))
        return common.RenderedSample(
            parts=(shown, _pair_question(*grid, first + 1, second + 1) + choices),
            target=Target(answer_type=AnswerType.CHOICE, value=letter),
            meta={"grid": f"{grid[0]}x{grid[1]}"},
        )

    return common.generate_samples(context, f"pair_{rows}x{columns}", split, render, size=size, seed=seed)


def _count_tiles(rows: int, columns: int) -> int:
    if rows * columns < 2:
        raise UserError(f"rows={rows} and columns={columns} leave nothing to shuffle: cut two tiles or more")
    common.check_cost(rows * columns, 100, "tiles", rows=rows, columns=columns)
    return rows * columns


def _check_puzzle(rows: int, columns: int, tile_px: int) -> None:
    # Every two tiles are compared: 0.3 s for 100 of them. Photographs that are cut into 4000 pixels take gigabytes.
    _count_tiles(rows, columns)
    longest = max(rows, columns) * tile_px
    common.check_cost(longest, 4_000, "pixels a side", rows=rows, columns=columns, tile_px=tile_px)


def _cut_tiles(
    rng: np.random.Generator, photos: Sequence[Image.Image], rows: int, columns: int, side: int, margin_fraction: float
) -> list[NDArray[np.uint8]]:
    """Cut a random crop of a random photograph into tiles, row by row, that all differ by `MIN_DIFFERENCE`.

    Returns:
        The tiles, uint8 [side, side, 3] each.
    """
    margin_px = round(margin_fraction * side)
    inner = slice(margin_px, side - margin_px)
    for _ in range(drawing.MAX_DRAWS):
        crop = np.asarray(random_crop(rng, drawing.choose(rng, photos), columns * side, rows * side))
        tiles = []
        for y, x in product(range(0, rows * side, side), range(0, columns * side, side)):
            tile = np.full((side, side, 3), BLANK_LEVEL, np.uint8)
            tile[inner, inner] = crop[y : y + side, x : x + side][inner, inner]
            tiles.append(tile)
        # Compared with their blanked edges, as they are shown. Integers, because uint8 would wrap around below 0.
        if all(np.abs(a.astype(int) - b).mean() >= MIN_DIFFERENCE for a, b in combinations(tiles, 2)):
            return tiles
    raise UserError(f"no photograph has {rows} x {columns} tiles that all look different; use fewer or larger tiles")


def _cut_picture(context: DatasetContext, path: Path, rows: int, columns: int) -> list[NDArray[np.uint8]]:
    """Return the tiles of a picture, row by row, uint8 [height, width, 3]; what does not divide evenly is cut off."""
    if context.media_opener is None:
        raise UserError("pictures cannot be opened here: read this source in a run or with mmrl data")
    picture = context.media_opener.read_image(ImageRef(path=str(path), sha256=file_digest(path)), None)
    height, width = picture.shape[0] // rows, picture.shape[1] // columns
    if not height or not width:
        raise UserError(f"{path}: is too small to be cut into {rows} x {columns}; remove it")
    corners = product(range(0, rows * height, height), range(0, columns * width, width))
    return [picture[y : y + height, x : x + width] for y, x in corners]


def _join_tiles(tiles: Sequence[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    """Return one image of tiles of one size, row by row."""
    return np.vstack([np.hstack(tiles[start : start + columns]) for start in range(0, len(tiles), columns)])


def _pair_question(rows: int, columns: int, first: int, second: int) -> str:
    """Return the question of Jigsaw-R1 (utils/prompt.py) about two positions, without its options."""
    ends = {1: ("top", "bottom"), rows * columns: ("left", "right")}.get(columns, ("top-left", "bottom-right"))
    grid = "\n".join(" ".join(map(str, row)) for row in np.arange(1, rows * columns + 1).reshape(rows, columns))
    return (
        f"The input image is divided into {rows}x{columns} patches that have been randomly permuted from their "
        f"original positions. Your task is to solve this {rows}x{columns} jigsaw puzzle and reconstruct the original "
        f"image.\n\nConsider a {rows}x{columns} grid, where each number represents a position index ranging from 1 "
        f"({ends[0]}) to {rows * columns} ({ends[1]}):\n\n```\n{grid}\n```\n\nFor patches currently at positions "
        f"{first} and {second}, determine their relative position in the original image.\n\n"
        f"Select the correct answer from the following {2 if 1 in (rows, columns) else 8} choices:\n"
    )


def _question_text(rows: int, columns: int, answer: str, *, separate_images: bool) -> str:
    shown = "These are the tiles" if separate_images else "The picture shows the tiles"
    numbered = "in the order shown" if separate_images else "row by row as they lie now"
    wanted = (
        "For each place in the photograph, row by row, give the number of the tile that belongs there."
        if answer == "tiles"
        else "For each tile in turn, give the number of its place in the photograph, counted row by row."
    )
    return (
        f"{shown} of a photograph that was cut into {rows} x {columns} (rows x columns) and shuffled. "
        f"They are numbered from 1 to {rows * columns}, {numbered}. {wanted}"
    )
