"""Views of samples as a picture: the resized media with the answer drawn in, the question and the answer beneath."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from mmrl.data_check.sample_view import View
from mmrl.types import ImageRef, Part, Target

_WIDTH: Final = 720
_PAD: Final = 24
_GAP: Final = 12
_INNER: Final = _WIDTH - 2 * _PAD
_PICTURE_SIDE: Final = 420  # smaller pictures are enlarged by whole factors, pixel by pixel; larger ones shrunk
_FRAME_SIDE: Final = 155  # four frames of a video in a row
_LINE: Final = 1.35
_LONGEST: Final = 1500
_PAPER, _RULE, _INK, _PALE = "#ffffff", "#d5dae1", "#1f2933", "#69707d"
_MARKS: Final = {"answer": "#12b76a", "label": "#f79009"}
_DOT: Final = 6

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def sheet(views: Sequence[View]) -> Image.Image:
    """A card per view, in two columns where there are more than two."""
    cards = [_card(view) for view in views]
    columns = 1 if len(cards) < 3 else 2
    rows = [cards[start : start + columns] for start in range(0, len(cards), columns)]
    heights = [max(card.height for card in row) for row in rows]
    paper = Image.new("RGB", (columns * (_WIDTH + _PAD) + _PAD, sum(heights) + _PAD * (len(rows) + 1)), "#eef1f5")
    top = _PAD
    for row, height in zip(rows, heights, strict=True):
        for column, card in enumerate(row):
            paper.paste(card, (_PAD + column * (_WIDTH + _PAD), top))
        top += height + _PAD
    return paper


def _card(view: View) -> Image.Image:
    sample = view.sample
    visual = sum(medium.tokens for medium in view.media)
    blocks = [
        _text(sample.id, 22),
        _text(f"task {sample.task}  ·  {len(view.prompt.ids)} tokens, {visual} of them visual", 14, _PALE),
        *_shown(view),
        _text("".join(_worded(sample.parts)), 17),
        *(
            _text(f"{role}: {_valued(target)}", 17, _MARKS[role])
            for role, target in (("answer", sample.target), ("label", sample.label))
            if target is not None
        ),
    ]
    blocks = [block for block in blocks if block.height > 1]
    card = Image.new("RGB", (_WIDTH, sum(block.height + _GAP for block in blocks) + 2 * _PAD - _GAP), _PAPER)
    ImageDraw.Draw(card).rectangle((0, 0, card.width - 1, card.height - 1), outline=_RULE)
    top = _PAD
    for block in blocks:
        card.paste(block, (_PAD, top))
        top += block.height + _GAP
    return card


def _worded(parts: Sequence[Part]) -> Iterator[str]:
    """The question with the media by number, as the tiles are."""
    number = 0
    for part in parts:
        if isinstance(part, str):
            yield part
        else:
            yield f" [{'image' if isinstance(part, ImageRef) else 'video'} {number}] "
            number += 1


def _valued(target: Target) -> str:
    frame = f" ({target.frame})" if target.frame else ""
    return f"{target.value}{frame}"


def _shown(view: View) -> Iterator[Image.Image]:
    """Pictures side by side, then each video's frames, with marks and captions."""
    pictures: list[Image.Image] = []
    videos: list[list[Image.Image]] = []
    for number, medium in enumerate(view.media):
        resize, marks = medium.layout.resize, list(view.marks(number))
        if medium.layout.seconds:
            frames = zip(medium.frames, medium.layout.seconds, strict=True)
            videos.append([_captioned(_marked(f, marks, _FRAME_SIDE), f"video {number}: {s:.2f} s") for f, s in frames])
        else:
            sizes = f"{_size(resize.original)} to {_size(resize.resized)}, {medium.tokens} tokens"
            pictures.append(_captioned(_marked(medium.frames[0], marks, _PICTURE_SIDE), f"image {number}: {sizes}"))
    yield from (_tiles(tiles) for tiles in (pictures, *videos))


def _marked(picture: Image.Image, marks: Sequence[tuple[str, tuple[float, ...]]], side: int) -> Image.Image:
    """The picture at about `side` pixels, boxes (x1, y1, x2, y2) and points (x, y) drawn in."""
    longest = max(picture.size)
    factor = side // longest if longest <= side else min(side, _INNER) / longest
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    shown = picture.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(shown)
    for role, values in marks:
        spots = [value * factor for value in values]
        if len(spots) == 2:
            x, y = spots
            draw.ellipse((x - _DOT, y - _DOT, x + _DOT, y + _DOT), _MARKS[role], "white", 2)
            continue
        x1, y1, x2, y2 = spots
        for grown, colour in ((4, "white"), (3, _MARKS[role])):  # around the box, so that nothing in it is hidden
            left, top = max(0, x1 - grown), max(0, y1 - grown)
            right, bottom = min(shown.width - 1, x2 + grown - 1), min(shown.height - 1, y2 + grown - 1)
            draw.rectangle((left, top, max(left, right), max(top, bottom)), None, colour, grown)
    return shown


def _captioned(picture: Image.Image, caption: str) -> Image.Image:
    words = _text(caption, 13, _PALE, max(picture.width, _FRAME_SIDE))
    tile = Image.new("RGB", (max(picture.width, words.width), picture.height + 4 + words.height), _PAPER)
    tile.paste(picture, (0, 0))
    tile.paste(words, (0, picture.height + 4))
    return tile


def _tiles(tiles: Sequence[Image.Image]) -> Image.Image:
    """Tiles side by side, as many as fit in a row."""
    rows: list[list[Image.Image]] = []
    for tile in tiles:
        if rows and sum(other.width + _GAP for other in rows[-1]) + tile.width <= _INNER:
            rows[-1].append(tile)
        else:
            rows.append([tile])
    heights = [max(tile.height for tile in row) for row in rows]
    block = Image.new("RGB", (_INNER, max(1, sum(heights) + _GAP * (len(rows) - 1))), _PAPER)
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for tile in row:
            block.paste(tile, (left, top))
            left += tile.width + _GAP
        top += height + _GAP
    return block


def _text(words: str, size: int, colour: str = _INK, width: int = _INNER) -> Image.Image:
    font = ImageFont.load_default(size)
    words = words if len(words) <= _LONGEST else f"{words[:_LONGEST]} ..."
    lines = [line for paragraph in words.strip().splitlines() for line in _wrapped(paragraph, font, width)]
    block = Image.new("RGB", (width, max(1, round(len(lines) * size * _LINE))), _PAPER)
    draw = ImageDraw.Draw(block)
    for number, line in enumerate(lines):
        draw.text((0, number * size * _LINE), line, colour, font)
    return block


def _wrapped(paragraph: str, font: Font, width: int) -> Iterator[str]:
    """Lines that fit, broken at spaces, or within a word that is longer than a line."""
    line = ""
    for word in paragraph.split():
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= width:
            line = longer
            continue
        if line:
            yield line
        *full, line = _cut(word, font, width)
        yield from full
    yield line


def _cut(word: str, font: Font, width: int) -> list[str]:
    """A word in pieces that fit, letter by letter."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and font.getlength(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def _size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
