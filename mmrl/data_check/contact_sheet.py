"""Views of samples as a picture: the resized media with the answer drawn in, the question and the answer beneath."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from mmrl.data_check.sample_view import SampleView
from mmrl.types import ContentPart, ImageRef, Target

_CARD_WIDTH: Final = 720
_PAD: Final = 24
_GAP: Final = 12
_CONTENT_WIDTH: Final = _CARD_WIDTH - 2 * _PAD
_IMAGE_SIDE: Final = 420  # smaller pictures are enlarged by whole factors, pixel by pixel; larger ones shrunk
_FRAME_SIDE: Final = 155  # four frames of a video in a row
_LINE_HEIGHT: Final = 1.35
_MAX_TEXT_CHARS: Final = 1500
_BACKGROUND_COLOR, _BORDER_COLOR, _TEXT_COLOR, _MUTED_COLOR = "#ffffff", "#d5dae1", "#1f2933", "#69707d"
_ROLE_COLORS: Final = {"answer": "#12b76a", "label": "#f79009"}
_POINT_RADIUS: Final = 6

Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def draw_contact_sheet(views: Sequence[SampleView]) -> Image.Image:
    """A card per view, in two columns where there are more than two."""
    cards = [_draw_card(view) for view in views]
    columns = 1 if len(cards) < 3 else 2
    rows = [cards[start : start + columns] for start in range(0, len(cards), columns)]
    heights = [max(card.height for card in row) for row in rows]
    paper = Image.new("RGB", (columns * (_CARD_WIDTH + _PAD) + _PAD, sum(heights) + _PAD * (len(rows) + 1)), "#eef1f5")
    top = _PAD
    for row, height in zip(rows, heights, strict=True):
        for column, card in enumerate(row):
            paper.paste(card, (_PAD + column * (_CARD_WIDTH + _PAD), top))
        top += height + _PAD
    return paper


def _draw_card(view: SampleView) -> Image.Image:
    sample = view.sample
    visual = sum(medium.num_tokens for medium in view.media)
    blocks = [
        _draw_text(sample.id, 22),
        _draw_text(
            f"task {sample.task}  ·  {len(view.prompt.token_ids)} tokens, {visual} of them visual", 14, _MUTED_COLOR
        ),
        *_draw_media(view),
        _draw_text("".join(_question_pieces(sample.parts)), 17),
        *(
            _draw_text(f"{role}: {_format_target(target)}", 17, _ROLE_COLORS[role])
            for role, target in (("answer", sample.target), ("label", sample.label))
            if target is not None
        ),
    ]
    blocks = [block for block in blocks if block.height > 1]
    card = Image.new(
        "RGB", (_CARD_WIDTH, sum(block.height + _GAP for block in blocks) + 2 * _PAD - _GAP), _BACKGROUND_COLOR
    )
    ImageDraw.Draw(card).rectangle((0, 0, card.width - 1, card.height - 1), outline=_BORDER_COLOR)
    top = _PAD
    for block in blocks:
        card.paste(block, (_PAD, top))
        top += block.height + _GAP
    return card


def _question_pieces(parts: Sequence[ContentPart]) -> Iterator[str]:
    """The question with the media by number, as the tiles are."""
    number = 0
    for part in parts:
        if isinstance(part, str):
            yield part
        else:
            yield f" [{'image' if isinstance(part, ImageRef) else 'video'} {number}] "
            number += 1


def _format_target(target: Target) -> str:
    frame = f" ({target.coordinate_system})" if target.coordinate_system else ""
    return f"{target.value}{frame}"


def _draw_media(view: SampleView) -> Iterator[Image.Image]:
    """Pictures side by side, then each video's frames, with marks and captions."""
    pictures: list[Image.Image] = []
    videos: list[list[Image.Image]] = []
    for number, medium in enumerate(view.media):
        resize, marks = medium.layout.resize_map, list(view.target_marks(number))
        if medium.layout.frame_times:
            frames = zip(medium.frames, medium.layout.frame_times, strict=True)
            videos.append(
                [_add_caption(_draw_marks(f, marks, _FRAME_SIDE), f"video {number}: {s:.2f} s") for f, s in frames]
            )
        else:
            sizes = f"{_format_size(resize.original)} to {_format_size(resize.resized)}, {medium.num_tokens} tokens"
            pictures.append(_add_caption(_draw_marks(medium.frames[0], marks, _IMAGE_SIDE), f"image {number}: {sizes}"))
    yield from (_arrange_tiles(tiles) for tiles in (pictures, *videos))


def _draw_marks(picture: Image.Image, marks: Sequence[tuple[str, tuple[float, ...]]], side: int) -> Image.Image:
    """The picture at about `side` pixels, boxes (x1, y1, x2, y2) and points (x, y) drawn in."""
    longest = max(picture.size)
    factor = side // longest if longest <= side else min(side, _CONTENT_WIDTH) / longest
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    shown = picture.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(shown)
    for role, values in marks:
        spots = [value * factor for value in values]
        if len(spots) == 2:
            x, y = spots
            draw.ellipse(
                (x - _POINT_RADIUS, y - _POINT_RADIUS, x + _POINT_RADIUS, y + _POINT_RADIUS),
                _ROLE_COLORS[role],
                "white",
                2,
            )
            continue
        x1, y1, x2, y2 = spots
        for grown, colour in ((4, "white"), (3, _ROLE_COLORS[role])):  # around the box, so that nothing in it is hidden
            left, top = max(0, x1 - grown), max(0, y1 - grown)
            right, bottom = min(shown.width - 1, x2 + grown - 1), min(shown.height - 1, y2 + grown - 1)
            draw.rectangle((left, top, max(left, right), max(top, bottom)), None, colour, grown)
    return shown


def _add_caption(picture: Image.Image, caption: str) -> Image.Image:
    words = _draw_text(caption, 13, _MUTED_COLOR, max(picture.width, _FRAME_SIDE))
    tile = Image.new("RGB", (max(picture.width, words.width), picture.height + 4 + words.height), _BACKGROUND_COLOR)
    tile.paste(picture, (0, 0))
    tile.paste(words, (0, picture.height + 4))
    return tile


def _arrange_tiles(tiles: Sequence[Image.Image]) -> Image.Image:
    """Tiles side by side, as many as fit in a row."""
    rows: list[list[Image.Image]] = []
    for tile in tiles:
        if rows and sum(other.width + _GAP for other in rows[-1]) + tile.width <= _CONTENT_WIDTH:
            rows[-1].append(tile)
        else:
            rows.append([tile])
    heights = [max(tile.height for tile in row) for row in rows]
    block = Image.new("RGB", (_CONTENT_WIDTH, max(1, sum(heights) + _GAP * (len(rows) - 1))), _BACKGROUND_COLOR)
    top = 0
    for row, height in zip(rows, heights, strict=True):
        left = 0
        for tile in row:
            block.paste(tile, (left, top))
            left += tile.width + _GAP
        top += height + _GAP
    return block


def _draw_text(words: str, size: int, colour: str = _TEXT_COLOR, width: int = _CONTENT_WIDTH) -> Image.Image:
    font = ImageFont.load_default(size)
    words = words if len(words) <= _MAX_TEXT_CHARS else f"{words[:_MAX_TEXT_CHARS]} ..."
    lines = [line for paragraph in words.strip().splitlines() for line in _wrap_text(paragraph, font, width)]
    block = Image.new("RGB", (width, max(1, round(len(lines) * size * _LINE_HEIGHT))), _BACKGROUND_COLOR)
    draw = ImageDraw.Draw(block)
    for number, line in enumerate(lines):
        draw.text((0, number * size * _LINE_HEIGHT), line, colour, font)
    return block


def _wrap_text(paragraph: str, font: Font, width: int) -> Iterator[str]:
    """Lines that fit, broken at spaces, or within a word that is longer than a line."""
    line = ""
    for word in paragraph.split():
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= width:
            line = longer
            continue
        if line:
            yield line
        *full, line = _split_word(word, font, width)
        yield from full
    yield line


def _split_word(word: str, font: Font, width: int) -> list[str]:
    """A word in pieces that fit, letter by letter."""
    pieces = [""]
    for letter in word:
        if pieces[-1] and font.getlength(pieces[-1] + letter) > width:
            pieces.append("")
        pieces[-1] += letter
    return pieces


def _format_size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
