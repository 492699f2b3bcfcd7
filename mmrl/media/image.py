"""The only opener of picture files: everything is checked before it is decoded, and nothing is repaired in silence."""

from __future__ import annotations

import hashlib
import io
import struct
from pathlib import Path
from typing import Final

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.GifImagePlugin import GifImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mmrl.config.schema import Limits
from mmrl.types import ImageRef, UserError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
EIGHT_BIT: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
PNG_DEPTH: Final = 24  # where a PNG says its bits per channel
WHITE: Final = (255, 255, 255, 255)


class MediaError(UserError):
    """A picture that cannot or may not be used; the message names the file, the reason and what to do."""


def open_image(ref: ImageRef, limits: Limits) -> Image.Image:
    """The picture a reference means: RGB, 8 bits, upright (EXIF orientation applied), transparency over white.

    Raises:
        MediaError: missing, unreadable, changed since it was referenced, over a limit, not a still picture of a known
            format, deeper than 8 bits, or damaged.
    """
    content = _read(ref, limits)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
            _check_header(picture, content, ref.path, limits)
            picture.load()
            return _upright_rgb(picture)
    except UnidentifiedImageError as error:
        raise MediaError(f"{ref.path}: not a {', '.join(FORMATS)} picture; convert or remove it") from error
    except Image.DecompressionBombError as error:
        raise MediaError(f"{ref.path}: {error}; shrink it") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:  # from decoders, on damaged files
        raise MediaError(f"{ref.path}: damaged ({error}); restore or remove it") from error


def _read(ref: ImageRef, limits: Limits) -> bytes:
    path = Path(ref.path)
    try:
        if not path.is_file():
            problem = "not a file" if path.exists() else "no such file"
            raise MediaError(f"{path}: {problem}; correct the path or restore the picture")
        size = path.stat().st_size
        if size > limits.max_bytes:
            raise MediaError(
                f"{path}: {size:,} bytes exceed max_bytes={limits.max_bytes:,}; shrink it or raise the limit"
            )
        content = path.read_bytes()
    except OSError as error:
        raise MediaError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    if not content:
        raise MediaError(f"{path}: empty file; restore or remove it")
    digest = hashlib.sha256(content).hexdigest()
    if digest != ref.sha256:
        raise MediaError(
            f"{path}: changed since it was referenced ({digest[:12]} is not {ref.sha256[:12]}); restore it"
        )
    return content


def _check_header(picture: Image.Image, content: bytes, path: str, limits: Limits) -> None:
    """Judge by the header alone; Pillow has decoded nothing yet."""
    width, height = picture.size
    if width * height > limits.max_pixels:
        raise MediaError(
            f"{path}: {width}x{height} pixels exceed max_pixels={limits.max_pixels:,}; shrink it or raise the limit"
        )
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(f"{path}: {width}x{height} is longer than max_aspect={limits.max_aspect} allows; crop it")
    if isinstance(picture, GifImageFile | PngImageFile | WebPImageFile) and picture.is_animated:
        raise MediaError(f"{path}: animated; save the frame you mean as a still picture")
    deep_png = picture.format == "PNG" and content[PNG_DEPTH] > 8  # Pillow would cut such colours to 8 bits unasked
    if deep_png or picture.mode not in EIGHT_BIT:
        raise MediaError(f"{path}: 16 or more bits per channel (mode {picture.mode}); convert it to 8 bits")


def _upright_rgb(picture: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(picture)
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    layer = upright.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, WHITE), layer).convert("RGB")
