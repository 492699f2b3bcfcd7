"""Decode PNG and JPEG files as their formats demand, without repairs.

Pillow does not verify the checksums of a PNG's pixel data, and leaves missing rows black. It hides the warnings of
libjpeg, which fills the rest of a damaged scan with grey. A model would learn from such invented pixels.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Final

import simplejpeg
from PIL import Image

PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"  # the first bytes of a PNG
_CHUNK_BYTES: Final = 12  # bytes of a PNG's chunk besides its data: length, name and CRC
_SMALL_BYTES: Final = 1 << 16  # up to so much pixel data, inflating it again is faster than making a second PNG
_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # values of a pixel, by the colour type in a PNG's header
_PALETTE: Final = 3  # colour type of a PNG whose pixels are indices
_PLAIN_CHUNKS: Final = {b"IHDR", b"IDAT", b"IEND"}
_LAST_FILTER: Final = 4  # highest number of a filter of a PNG's rows, counted from 0
# Passes of an interlaced PNG: the first column and row, and the steps to the next ones (PNG specification, 8.2).
_PASSES: Final = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4)),
    *((0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
_WHOLE_IMAGE: Final = ((0, 0, 1, 1),)

_JPEG_COLORS: Final = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # simplejpeg's names, by Pillow's mode
# A marker that ends the coded data of a scan: no stuffed zero, no restart marker, no fill byte.
_JPEG_MARKER: Final = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")
_PROGRESSIVE_FRAME, _START_OF_SCAN, _END_OF_IMAGE = 0xC2, 0xDA, 0xD9
_COEFFICIENTS: Final = 64  # coefficients of a JPEG's block


def decode_jpeg(image: Image.Image, content: bytes) -> Image.Image:
    """Return the pixels of a JPEG that Pillow has opened, and its metadata; a warning of libjpeg is an error.

    Pillow, which has the same libjpeg-turbo, gives the same pixels.

    Raises:
        ValueError: the scan ends early, continues after the last pixel or holds an undefined code, or scans of a
            progressive file are missing.
    """
    _check_progressive_scans(content)
    pixels = simplejpeg.decode_jpeg(content, _JPEG_COLORS[image.mode], strict=True)
    if image.mode == "CMYK":
        # Files hold inverted amounts of ink, as Adobe writes them; Pillow assumes that, too.
        pixels = 255 - pixels
    decoded = Image.frombytes(image.mode, image.size, pixels.tobytes())
    decoded.info = image.info
    return decoded


def _check_progressive_scans(content: bytes) -> None:
    """Raise a ValueError for a progressive JPEG that ends between two scans, of which libjpeg does not warn."""
    position = 2  # after the marker that begins the file
    # By component, how many of the lowest bits of each coefficient no scan has given so far; 64 before the first scan.
    missing_bits: dict[int, list[int]] = {}
    while marker := _JPEG_MARKER.search(content, position):
        kind, position = marker[1][0], marker.end()
        if kind == _END_OF_IMAGE:
            break
        length = int.from_bytes(content[position : position + 2])
        body = content[position + 2 : position + length]
        position += length
        if kind == _PROGRESSIVE_FRAME:
            missing_bits = {component: [_COEFFICIENTS] * _COEFFICIENTS for component in body[6::3]}
        elif kind == _START_OF_SCAN and missing_bits:
            if len(body) < 6 or not missing_bits.keys() >= set(body[1:-3:2]):
                raise ValueError("the header of a scan is broken")
            first, last, low_bits = body[-3], body[-2], body[-1] & 15
            for component in body[1:-3:2]:
                missing_bits[component][first : last + 1] = [low_bits] * (last + 1 - first)
    if any(any(bits) for bits in missing_bits.values()):
        raise ValueError("the last scans of a progressive JPEG are missing")


def store_png(content: bytes) -> bytes:
    """Return a PNG with its pixel data inflated and stored, after checking all chunks and the length of that data.

    Pillow decodes it to the same pixels, and need not inflate it once more. A small one is returned as it is.

    Raises:
        ValueError: a chunk is cut off or its CRC is wrong, there is no last chunk, or the pixel data does not inflate
            to the bytes that the header demands.
    """
    chunks, scanlines = _inflate_png(content)
    if len(scanlines) <= _SMALL_BYTES:
        return content
    stored = [PNG_SIGNATURE]
    for name, data in chunks:
        if name != b"IDAT":
            stored.append(_make_chunk(name, data))
        elif scanlines:
            stored.append(_make_chunk(name, zlib.compress(scanlines, level=0)))
            scanlines = b""
    return b"".join(stored)


def is_plain_png(content: bytes) -> bool:
    """Check a PNG as `store_png` does; return True if decoding could find no further damage.

    That is the case if it has 8 bits a channel, no optional chunks, no palette, no passes, and only existing filters.
    """
    chunks, scanlines = _inflate_png(content)
    width, _, depth, color_type, _, _, interlaced = struct.unpack(">IIBBBBB", chunks[0][1])
    if interlaced or depth != 8 or color_type == _PALETTE or {name for name, _ in chunks} != _PLAIN_CHUNKS:
        return False
    filters = scanlines[:: 1 + _CHANNELS[color_type] * width]
    return max(filters, default=_LAST_FILTER + 1) <= _LAST_FILTER


def _inflate_png(content: bytes) -> tuple[list[tuple[bytes, memoryview]], bytes]:
    """Return the chunks and the inflated pixel data of a PNG; raises as `store_png`."""
    chunks = read_png_chunks(content)
    names = [name for name, _ in chunks]
    if names[0] != b"IHDR" or names.count(b"IHDR") > 1:
        raise ValueError("it does not begin with a header, or has two")
    expected = _scanline_bytes(bytes(chunks[0][1]))
    inflater = zlib.decompressobj()
    try:
        # One byte more than expected shows that there are too many, and a bomb inflates no further.
        scanlines = inflater.decompress(b"".join(data for name, data in chunks if name == b"IDAT"), expected + 1)
    except zlib.error as error:
        raise ValueError(f"the pixel data does not inflate: {error}") from error
    if len(scanlines) != expected:
        more = "or more " if len(scanlines) > expected else ""
        raise ValueError(f"the pixel data inflates to {len(scanlines):,} {more}bytes, the header says {expected:,}")
    if not inflater.eof:
        raise ValueError("the pixel data is cut off before its checksum")
    return chunks, scanlines


def read_png_chunks(content: bytes) -> list[tuple[bytes, memoryview]]:
    """Return name and data of each chunk of a PNG up to IEND, after checking its CRC; raises ValueError."""
    view = memoryview(content)
    chunks: list[tuple[bytes, memoryview]] = []
    position = len(PNG_SIGNATURE)
    while position + _CHUNK_BYTES <= len(view):
        length, name = struct.unpack_from(">I4s", view, position)
        end = position + _CHUNK_BYTES + length
        if end > len(view):
            break
        if zlib.crc32(view[position + 4 : end - 4]) != int.from_bytes(view[end - 4 : end]):
            raise ValueError(f"the CRC of chunk {name.decode('latin-1')!r} at byte {position:,} is wrong")
        chunks.append((name, view[position + 8 : end - 4]))
        if name == b"IEND":
            return chunks
        position = end
    raise ValueError(f"cut off at byte {len(view):,}, before the last chunk")


def _make_chunk(name: bytes, data: bytes | memoryview) -> bytes:
    return b"".join((struct.pack(">I", len(data)), name, data, struct.pack(">I", zlib.crc32(data, zlib.crc32(name)))))


def _scanline_bytes(header: bytes) -> int:
    """Return the inflated bytes of a PNG's pixel data: one for the filter of each row, and the row's pixels."""
    width, height, depth, color_type, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    bits = depth * _CHANNELS[color_type]
    total = 0
    for left, top, column_step, row_step in _PASSES if interlaced else _WHOLE_IMAGE:
        columns = (width - left + column_step - 1) // column_step
        rows = (height - top + row_step - 1) // row_step
        if columns and rows:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
