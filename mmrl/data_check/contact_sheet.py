"""Draw samples as one image: the resized media with the answer drawn in, and below them question and answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from mmrl.data_check.sample_view import SampleView, format_size, targets_by_role
from mmrl.types import ContentPart, ImageRef

# Lengths are in pixels.
_CARD_WIDTH: Final = 720
_PAD: Final = 24
_GAP: Final = 12
_CONTENT_WIDTH: Final = _CARD_WIDTH - 2 * _PAD
# Smaller images are enlarged up to this side by a whole factor, so that pixels stay squares; larger ones shrink.
_IMAGE_SIDE: Final = 420
# Side of a video's frame; four of them fit in a row.
_FRAME_SIDE: Final = 155
# Distance between lines of text, in font sizes.
_LINE_HEIGHT: Final = 1.35
_MAX_TEXT_CHARS: Final = 1500
_BACKGROUND_COLOR, _BORDER_COLOR, _TEXT_COLOR, _MUTED_COLOR = "#ffffff", "#d5dae1", "#1f2933", "#69707d"
_ROLE_COLORS: Final = {"answer": "#12b76a", "label": "#f79009"}
_POINT_RADIUS: Final = 6

Mark = tuple[str, tuple[float, ...]]
"""A role (`answer` or `label`) and a box (x1, y1, x2, y2) or point (x, y), in pixels of the resized image."""
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont


def draw_contact_sheet(views: Sequence[SampleView]) -> Image.Image:
    """Draw one card for each sample, in two columns if there are more than two."""
    cards = list(map(_draw_card, views))
    columns = 1 if len(cards) < 3 else 2
    rows = [cards[start : start + columns] for start in range(0, len(cards), columns)]
    return _stack_rows(rows, columns * (_CARD_WIDTH + _PAD) + _PAD, "#eef1f5", margin=_PAD, gap=_PAD)


def _draw_card(view: SampleView) -> Image.Image:
    sample = view.sample
    num_visual = sum(media.num_tokens for media in view.media)
    summary = f"task {sample.task}  ·  {len(view.prompt.token_ids)} tokens, {num_visual} of them visual"
    blocks = [_draw_text(sample.id, 22), _draw_text(summary, 14, _MUTED_COLOR), *_draw_media(view)]
    blocks.append(_draw_text(_question_text(sample.parts), 17))
    for role, target in targets_by_role(sample):
        coordinates = f" ({target.coordinate_system})" if target.coordinate_system else ""
        blocks.append(_draw_text(f"{role}: {target.value}{coordinates}", 17, _ROLE_COLORS[role]))
    # A block without content is one pixel high.
    rows = [[block] for block in blocks if block.height > 1]
    card = _stack_rows(rows, _CARD_WIDTH, _BACKGROUND_COLOR, margin=_PAD, gap=_GAP)
    ImageDraw.Draw(card).rectangle((0, 0, card.width - 1, card.height - 1), outline=_BORDER_COLOR)
    return card


def _question_text(parts: Sequence[ContentPart]) -> str:
    """Return the question, with ` [image 0] ` in place of an image, numbered as its caption is."""
    text = ""
    number = 0
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            text += f" [{'image' if isinstance(part, ImageRef) else 'video'} {number}] "
            number += 1
    return text


def _draw_media(view: SampleView) -> Iterator[Image.Image]:
    """Yield a block with all images, then one with the frames of each video, with marks and captions."""
    image_tiles: list[Image.Image] = []
    video_blocks: list[Image.Image] = []
    for number, media in enumerate(view.media):
        marks = list(view.target_marks(number))
        if media.layout.frame_times:
            tiles = []
            for frame, second in zip(media.frames, media.layout.frame_times, strict=True):
                tiles.append(_add_caption(_draw_marks(frame, marks, _FRAME_SIDE), f"video {number}: {second:.2f} s"))
            video_blocks.append(_arrange_tiles(tiles))
        else:
            resize_map = media.layout.resize_map
            sizes = f"{format_size(resize_map.original)} to {format_size(resize_map.resized)}"
            image = _draw_marks(media.frames[0], marks, _IMAGE_SIDE)
            image_tiles.append(_add_caption(image, f"image {number}: {sizes}, {media.num_tokens} tokens"))
    yield _arrange_tiles(image_tiles)
    yield from video_blocks


def _draw_marks(image: Image.Image, marks: Sequence[Mark], side: int) -> Image.Image:
    """Return an image at about `side` pixels with boxes and points drawn in."""
    longest = max(image.size)
    factor = side // longest if longest <= side else min(side, _CONTENT_WIDTH) / longest
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    canvas = image.resize(size, Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.LANCZOS)
    for role, values in marks:
        scaled, colour = [value * factor for value in values], _ROLE_COLORS[role]
        if len(scaled) == 2:
            x, y = scaled
            circle = (x - _POINT_RADIUS, y - _POINT_RADIUS, x + _POINT_RADIUS, y + _POINT_RADIUS)
            ImageDraw.Draw(canvas).ellipse(circle, colour, "white", 2)
            continue
        x1, y1, x2, y2 = scaled
        # The lines lie around the box, so that nothing in it is hidden; the white one makes the other visible anywhere.
        for width, line_colour in ((4, "white"), (3, colour)):
            left, top = max(0, x1 - width), max(0, y1 - width)
            right, bottom = min(canvas.width - 1, x2 + width - 1), min(canvas.height - 1, y2 + width - 1)
            rectangle = (left, top, max(left, right), max(top, bottom))
            ImageDraw.Draw(canvas).rectangle(rectangle, None, line_colour, width)
    return canvas


def _add_caption(image: Image.Image, caption: str) -> Image.Image:
    text = _draw_text(caption, 13, _MUTED_COLOR, max(image.width, _FRAME_SIDE))
    tile = Image.new("RGB", (max(image.width, text.width), image.height + 4 + text.height), _BACKGROUND_COLOR)
    tile.paste(image, (0, 0))
    tile.paste(text, (0, image.height + 4))
    return tile


def _arrange_tiles(tiles: Sequence[Image.Image]) -> Image.Image:
    """Put tiles side by side, as many in a row as fit."""
    rows: list[list[Image.Image]] = []
    for tile in tiles:
        if rows and sum(placed.width + _GAP for placed in rows[-1]) + tile.width <= _CONTENT_WIDTH:
            rows[-1].append(tile)
        else:
            rows.append([tile])
    return _stack_rows(rows, _CONTENT_WIDTH, _BACKGROUND_COLOR, margin=0, gap=_GAP)


def _stack_rows(
    rows: Sequence[Sequence[Image.Image]], width: int, colour: str, *, margin: int, gap: int
) -> Image.Image:
    """Return one image with the images of each row side by side, and the rows below each other."""
    heights = [max(map(attrgetter("height"), row)) for row in rows]
    # Pillow makes no image without pixels.
    sheet = Image.new("RGB", (width, max(1, sum(heights) + gap * (len(rows) - 1) + 2 * margin)), colour)
    top = margin
    for row, height in zip(rows, heights, strict=True):
        left = margin
        for image in row:
            sheet.paste(image, (left, top))
            left += image.width + gap
        top += height + gap
    return sheet


def _draw_text(text: str, font_px: int, colour: str = _TEXT_COLOR, width: int = _CONTENT_WIDTH) -> Image.Image:
    font = ImageFont.load_default(font_px)
    if len(text) > _MAX_TEXT_CHARS:
        text = f"{text[:_MAX_TEXT_CHARS]} ..."
    lines: list[str] = []
    for paragraph in text.strip().splitlines():
        lines += _wrap_text(paragraph, font, width)
    block = Image.new("RGB", (width, max(1, round(len(lines) * font_px * _LINE_HEIGHT))), _BACKGROUND_COLOR)
    draw = ImageDraw.Draw(block)
    for number, line in enumerate(lines):
        draw.text((0, number * font_px * _LINE_HEIGHT), line, colour, font)
    return block


def _wrap_text(paragraph: str, font: Font, width: int) -> Iterator[str]:
    """Yield lines that fit, broken at spaces or within a word that is longer than a line."""
    line = ""
    for word in paragraph.split():
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= width:
            line = longer
            continue
        if line:
            yield line
        line = ""
        # A word that is longer than a line is broken between letters.
        for letter in word:
            if line and font.getlength(line + letter) > width:
                yield line
                line = ""
            line += letter
    yield line
