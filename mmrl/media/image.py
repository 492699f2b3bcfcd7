"""Open image files, and compute the size to resize them to. A file is checked before it is decoded, never repaired."""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.checks import check_dimensions, check_image_size, check_sha256, resolve_media_path, unreadable_error
from mmrl.media.corruptions import corrupt_image
from mmrl.media.strict_decoders import PNG_SIGNATURE, decode_jpeg, is_plain_png, read_png_chunks, store_png
from mmrl.types import ImageRef, MediaError, MediaRangeError, Size

ReadT = TypeVar("ReadT")

IMAGE_FORMATS: Final = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
EIGHT_BIT_MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
PNG_BIT_DEPTH_OFFSET: Final = 24  # offset of the byte in a PNG file that holds the bits per channel
WHITE: Final = (255, 255, 255, 255)


def open_image(ref: ImageRef, roots: Sequence[Path], limits: MediaLimitsConfig) -> Image.Image:
    """Open the image file of a reference: 8-bit RGB, upright (EXIF orientation applied), transparency over white.

    Raises:
        MediaError: outside the roots, missing, unreadable, changed since it was referenced, over a limit, not a still
            image of a known format, deeper than 8 bits, or damaged.
    """
    return _read_image(ref, roots, limits, lambda image, content: _to_upright_rgb(_decode(image, content)))


def check_image(ref: ImageRef, roots: Sequence[Path], limits: MediaLimitsConfig) -> Size:
    """Return the size of an image that `open_image` can open; raises as it does.

    Most PNGs are checked without decoding them, since their checksums show that the pixels are whole.
    """
    return _read_image(ref, roots, limits, _check_pixels)


def open_shown_image(ref: ImageRef, roots: Sequence[Path], limits: MediaLimitsConfig) -> Image.Image:
    """Open an image file, and return the part of it that the reference shows, corrupted as the reference says.

    Raises:
        MediaError: as `open_image` and `crop_image`.
    """
    image = corrupt_image(open_image(ref, roots, limits), ref)
    return image if ref.crop is None else crop_image(image, ref, ref.crop, limits)


def crop_image(
    image: Image.Image, ref: ImageRef, box: tuple[int, int, int, int], limits: MediaLimitsConfig
) -> Image.Image:
    """Return the part of an image inside `box` (left, top, right, bottom, in pixels).

    Raises:
        MediaRangeError: the box is empty, not within the image, or over a limit.
    """
    left, top, right, bottom = box
    if not (0 <= left < right <= image.width and 0 <= top < bottom <= image.height):
        raise MediaRangeError(f"{ref.path}: {box} is not part of its {image.width}x{image.height} pixels")
    try:
        check_dimensions(ref.path, Size(right - left, bottom - top), limits)
    except MediaError as error:
        raise MediaRangeError(str(error)) from error
    return image.crop(box)


@lru_cache(maxsize=4096)  # many images of a dataset have one size
def resized_size(size: Size, *, factor: int, min_pixels: int, max_pixels: float) -> Size:
    """Return the size that an image is resized to, by the rule of the Qwen-VL families and of `qwen_vl_utils`.

    Its sides are multiples of `factor`, its area lies within the limits, and its aspect ratio is nearly kept.
    """
    # qwen-vl-utils imports torchvision, which takes seconds: a process that resizes nothing does not wait for it.
    # Beside a CPU build of torch, that fails unless `tolerate_cuda_builds` has run.
    from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

    tolerate_cuda_builds()
    from qwen_vl_utils.vision_process import smart_resize

    height, width = smart_resize(size.height, size.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)
    return Size(width, height)


def _read_image(
    ref: ImageRef, roots: Sequence[Path], limits: MediaLimitsConfig, read_pixels: Callable[[Image.Image, bytes], ReadT]
) -> ReadT:
    """Check an image file and its header, and return what `read_pixels` makes of it; raises as `open_image`."""
    path = resolve_media_path(ref.path, roots, limits.max_image_bytes, "max_image_bytes")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable_error(ref.path, error) from error
    check_sha256(ref.path, hashlib.sha256(content).hexdigest(), ref.sha256)
    try:
        # Pillow's warning about large images would repeat our own limit.
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),
            Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image,
        ):
            # Pillow has read the header only.
            _check_header(image, content, ref.path, limits)
            return read_pixels(image, content)
    except UnidentifiedImageError as error:
        raise MediaError(f"{ref.path}: {_describe_unidentified(content)}") from error
    except Image.DecompressionBombError as error:
        # Pillow's own message names a limit that is not ours.
        raise MediaError(f"{ref.path}: so many pixels that it may be a decompression bomb; shrink it") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        # Pillow's decoders raise all of these on damaged files.
        raise MediaError(f"{ref.path}: damaged ({error}); restore or remove it") from error


def _describe_unidentified(content: bytes) -> str:
    """Return why Pillow finds no image in a file: it is none, or a PNG with damage before its pixel data."""
    if content.startswith(PNG_SIGNATURE):
        try:
            read_png_chunks(content)
        except ValueError as error:
            return f"damaged ({error}); restore or remove it"
    return f"not a {', '.join(IMAGE_FORMATS)} image; convert or remove it"


def _decode(image: Image.Image, content: bytes) -> Image.Image:
    """Decode the pixels of an image that Pillow has opened; raises what its decoders raise on damaged files."""
    if isinstance(image, JpegImageFile):
        return decode_jpeg(image, content)
    if isinstance(image, PngImageFile):
        stored = store_png(content)
        if stored is not content:
            image = Image.open(io.BytesIO(stored), formats=("PNG",))
    # Pillow's decoders of the other formats are strict: they refuse data that ends early.
    image.load()
    return image


def _check_pixels(image: Image.Image, content: bytes) -> Size:
    """Return the upright size of an image whose pixels can be decoded; raises as `_decode`."""
    if isinstance(image, PngImageFile) and is_plain_png(content):
        return Size(*image.size)
    return Size(*_to_upright_rgb(_decode(image, content)).size)


def _to_upright_rgb(image: Image.Image) -> Image.Image:
    ImageOps.exif_transpose(image, in_place=True)
    # A direct conversion to RGB would show the colours stored under transparent pixels, mostly black.
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, WHITE), layer)
    return image.convert("RGB")


def _check_header(image: Image.Image, content: bytes, path: str, limits: MediaLimitsConfig) -> None:
    """Refuse an image by its header: too large, a decompression bomb, animated, or deeper than 8 bits."""
    check_image_size(path, Size(*image.size), len(content), limits)
    if isinstance(image, GifImageFile | PngImageFile | WebPImageFile) and image.is_animated:
        raise MediaError(f"{path}: animated; save the frame you mean as a still image")
    # Pillow opens a PNG with 16 bits per colour in an 8-bit mode, dropping half of each silently.
    deep_png = image.format == "PNG" and content[PNG_BIT_DEPTH_OFFSET] > 8
    if deep_png or image.mode not in EIGHT_BIT_MODES:
        raise MediaError(f"{path}: 16 or more bits per channel (mode {image.mode}); convert it to 8 bits")
