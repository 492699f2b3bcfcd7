"""Opening images: pixels of every format and mode, damaged files, limits, allowed folders, cache."""

import io
import os
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from factories import write_file
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from processors import make_media_cache

from mmrl.types import ImageRef, MediaError

PNG_START, JPEG_END = b"\x89PNG\r\n\x1a\n", b"\xff\xd9"
ADAM7 = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]


@pytest.fixture
def write(tmp_path):
    """Write bytes, or an image in a format, and return the reference."""

    def write(content, name="picture.png", **options):
        if isinstance(content, Image.Image):
            content = encoded(content, **options)
        return write_file(tmp_path / name, content)

    return write


def open_image(ref, **limits):
    """Open an image. The check before the first step must come to the same size, or to the same error."""
    try:
        image = make_media_cache(**limits).get_image(ref)
    except MediaError as error:
        with pytest.raises(MediaError, match=re.escape(str(error))):
            make_media_cache(**limits).check_image(ref)
        raise
    assert make_media_cache(**limits).check_image(ref) == image.size
    return image


def encoded(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(width, height, channels=3):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8))


def png_of(chunks):
    """A PNG of these chunks, with good CRCs."""
    content = PNG_START
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return content


def png_chunks(content):
    """Name and data of each chunk."""
    position, chunks = len(PNG_START), []
    while position < len(content):
        length = int.from_bytes(content[position : position + 4])
        chunks.append((content[position + 4 : position + 8], content[position + 8 : position + 8 + length]))
        position += 12 + length
    return chunks


def empty_png(width, height, depth=8):
    """A PNG whose header claims pixels that it does not have."""
    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return png_of([(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")])


def change_data(content, change):
    """A PNG with its compressed pixel data changed, and good CRCs."""
    return png_of([(name, change(data) if name == b"IDAT" else data) for name, data in png_chunks(content)])


def change_pixels(content, change):
    return change_data(content, lambda data: zlib.compress(change(zlib.decompress(data))))


def flip(content, position):
    damaged = bytearray(content)
    damaged[position] ^= 1
    return bytes(damaged)


def interlaced(png):
    """The same PNG, of 8 bits, with its rows in the seven passes of Adam7."""
    chunks = png_chunks(png)
    width, height = struct.unpack(">II", chunks[0][1][:8])
    pixels = np.asarray(Image.open(io.BytesIO(png))).reshape(height, width, -1)
    rows = b""
    for left, top, across, down in ADAM7:
        rows += b"".join(b"\0" + row.tobytes() for row in pixels[top::down, left::across] if row.size)
    others = [chunk for chunk in chunks[1:-1] if chunk[0] != b"IDAT"]
    header = (b"IHDR", chunks[0][1][:12] + b"\1")
    return png_of([header, *others, (b"IDAT", zlib.compress(rows)), chunks[-1]])


def test_transparency_is_laid_over_white(write):
    pixels = np.zeros((1, 3, 4), dtype=np.uint8)
    pixels[0, :, 3] = (0, 128, 255)
    assert np.asarray(open_image(write(Image.fromarray(pixels))))[0, :, 0].tolist() == [255, 127, 0]


def test_the_orientation_of_the_camera_is_applied(write):
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned a quarter clockwise
    image = open_image(write(noise(16, 8), exif=exif))
    assert np.array_equal(np.asarray(image), np.rot90(np.asarray(noise(16, 8)), k=-1))


JPEG_KINDS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
    "optimized": {"optimize": True, "quality": 95, "subsampling": 0},
}
GOOD = {
    **{f"JPEG {name}": ("JPEG", "RGB", options) for name, options in JPEG_KINDS.items()},
    "JPEG 4:2:2": ("JPEG", "RGB", {"subsampling": 1, "progressive": True, "restart_marker_blocks": 2}),
    "JPEG 4:1:1": ("JPEG", "RGB", {"subsampling": "4:1:1"}),
    "JPEG grey": ("JPEG", "L", {"progressive": True}),
    "JPEG CMYK": ("JPEG", "CMYK", {}),
    "JPEG of RGB components": ("JPEG", "RGB", {"keep_rgb": True}),
    "JPEG with a big profile": ("JPEG", "RGB", {"icc_profile": bytes(200_000)}),
    "JPEG comment": ("JPEG", "RGB", {"comment": b"\xff\xd9 is an end, \xff\xda a scan"}),
    "camera file with several images": ("MPO", "RGB", {"save_all": True}),
    **{f"PNG {mode}": ("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "PNG of 2 bits": ("PNG", "P", {"bits": 2}),
    "PNG with a transparent color": ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    "PNG with a transparent palette entry": ("PNG", "P", {"transparency": 0}),
    "PNG with text and profile": ("PNG", "RGB", {"icc_profile": bytes(9000), "dpi": (72, 72), "compress_level": 0}),
    "WEBP": ("WEBP", "RGBA", {"quality": 70}),
    "WEBP lossless": ("WEBP", "RGBA", {"lossless": True}),
    "GIF": ("GIF", "P", {"interlace": 1}),
    "BMP": ("BMP", "RGB", {}),
}


@pytest.mark.parametrize("trailer", [b"", b"after the end"])
@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_has_the_pixels_that_pillow_gives(write, name, trailer):
    format_, mode, options = GOOD[name]
    image = noise(45, 31, 4).convert("RGB").convert(mode)
    if format_ in ("JPEG", "MPO", "WEBP"):
        exif = Image.Exif()
        exif[0x0112] = 8  # shown turned a quarter counter-clockwise
        options = options | {"exif": exif}
    if format_ == "MPO":
        options = options | {"append_images": [image]}
    ref = write(encoded(image, format_, **options) + trailer)
    plain = ImageOps.exif_transpose(Image.open(ref.path)).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", plain.size, "white"), plain).convert("RGB")
    assert np.array_equal(np.asarray(open_image(ref)), np.asarray(expected))


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (5, 2), (8, 8), (45, 31)])
def test_an_interlaced_png_has_the_pixels_of_a_plain_one(write, mode, size):
    plain = encoded(noise(*size).convert(mode))
    pixels = open_image(write(plain, "plain.png")).tobytes()
    assert open_image(write(interlaced(plain), "interlaced.png")).tobytes() == pixels


@pytest.mark.parametrize("end", [0, 30, 60, -40])
@pytest.mark.parametrize("format_", ["PNG", "JPEG"])
def test_a_truncated_file_is_refused(write, format_, end):
    ref = write(encoded(noise(64, 64), format_)[:end])
    with pytest.raises(MediaError, match=r"picture\.png: (empty|damaged|not a)"):
        open_image(ref)


PNG_DAMAGE = {
    "CRC of the pixel data": (lambda png: flip(png, -13), "the CRC of chunk 'IDAT' at byte"),
    "CRC of another chunk": (lambda png: flip(png, png.index(b"tEXt") + 8), "the CRC of chunk 'tEXt' at byte"),
    "bad deflate": (lambda png: change_data(png, lambda d: flip(d, len(d) // 2)), "the pixel data does not inflate"),
    "no checksum": (lambda png: change_data(png, lambda d: d[:-4]), "the pixel data is cut off before its checksum"),
    "two headers": (lambda png: png_of([png_chunks(png)[0], *png_chunks(png)]), "begin with a header, or has two"),
    "rows missing": (lambda png: change_pixels(png, lambda rows: rows[:-1]), "inflates to .* the header says"),
    "rows too many": (lambda png: change_pixels(png, lambda rows: rows + b"x"), "or more bytes, the header says"),
    "no end": (lambda png: png[:-12], "cut off at byte .*, before the last chunk"),
    "end cut": (lambda png: png[:-2], "cut off at byte .*, before the last chunk"),
}


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize("damage", PNG_DAMAGE)
def test_a_damaged_png_is_refused(write, damage, interlace):
    note = PngInfo()
    note.add_text("note", "hello")
    content = encoded(noise(40, 30), pnginfo=note)
    content = interlaced(content) if interlace else content
    apply, words = PNG_DAMAGE[damage]
    assert open_image(write(content)).size == (40, 30)
    with pytest.raises(MediaError, match=rf"picture\.png: damaged \(.*{words}"):
        open_image(write(apply(content)))


def scan_start(jpeg):
    """Return the index at which the coded data of the last scan begins."""
    header = jpeg.rindex(b"\xff\xda") + 2
    return header + int.from_bytes(jpeg[header : header + 2])


def cut_scan(jpeg, share):
    """A JPEG cut within its last scan and closed with the marker of its end."""
    start = scan_start(jpeg)
    return jpeg[: start + int(share * (len(jpeg) - 2 - start))].rstrip(b"\xff") + JPEG_END


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_cut_in_its_scan_and_closed_is_refused(write, kind, mode):
    jpeg = encoded(noise(64, 48).convert(mode), "JPEG", **JPEG_KINDS[kind])
    for share in (0.0, 0.3, 0.9):
        with pytest.raises(MediaError, match=r"photo\.jpg: damaged \(Corrupt JPEG data: .*; restore or remove it"):
            open_image(write(cut_scan(jpeg, share), "photo.jpg"))
    without_last_bytes = jpeg[:-4].rstrip(b"\xff") + JPEG_END
    with pytest.raises(MediaError, match="premature end of data|the last scans of a progressive JPEG are missing"):
        open_image(write(without_last_bytes, "photo.jpg"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda jpeg: jpeg[: scan_start(jpeg) + 100] + jpeg[scan_start(jpeg) + 4000 :], "premature end of data"),
        (lambda jpeg: jpeg[:-2] + b"\x55" * 40 + jpeg[-2:], "extraneous bytes before marker 0xd9"),
        (lambda jpeg: jpeg[: scan_start(jpeg) + 100] + b"\xff\x00" * 40 + jpeg[-2:], "bad Huffman code|premature"),
        (lambda jpeg: jpeg[:-2], "Premature end of JPEG file"),
    ],
)
def test_a_jpeg_with_a_damaged_scan_is_refused(write, damage, words):
    with pytest.raises(MediaError, match=rf"photo\.jpg: damaged \(.*({words})"):
        open_image(write(damage(encoded(noise(160, 120), "JPEG")), "photo.jpg"))


def test_a_progressive_jpeg_without_its_last_scan_is_refused(write):
    jpeg = encoded(noise(64, 48), "JPEG", progressive=True)
    third_last_scan = jpeg.rindex(b"\xff\xda", 0, jpeg.rindex(b"\xff\xda"))
    tables_of_the_last = jpeg.index(b"\xff\xc4", third_last_scan)
    with pytest.raises(MediaError, match="the last scans of a progressive JPEG are missing"):
        open_image(write(jpeg[:tables_of_the_last] + JPEG_END, "photo.jpg"))


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}, {"quality": 80, "alpha": True}], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_webp_cut_and_closed_is_refused(write, options, share):
    content = bytearray(encoded(noise(64, 48, 4 if "alpha" in options else 3), "WEBP", **options))
    chunk = content.index(b"VP8L" if "lossless" in options else b"VP8 ")
    content = content[: chunk + 8 + int(share * (len(content) - chunk - 8)) // 2 * 2]
    struct.pack_into("<I", content, 4, len(content) - 8)
    struct.pack_into("<I", content, chunk + 4, len(content) - chunk - 8)
    with pytest.raises(MediaError, match=r"photo\.webp: damaged"):
        open_image(write(bytes(content), "photo.webp"))


TWO_FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (8, 8), "red")]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"This is a text.\n", "not a PNG, JPEG, WEBP, BMP, GIF image; convert"),
        (b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>', "not a PNG"),
        (encoded(Image.new("RGB", (4, 4)), "TIFF"), "not a PNG"),
        (encoded(Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16))), "16 or more bits per channel"),
        (empty_png(1, 1, depth=16), "16 or more bits per channel"),
        *((encoded(Image.new("RGB", (8, 8)), name, **TWO_FRAMES), "animated") for name in ("GIF", "PNG", "WEBP")),
        # Refused by its header, before it is decoded:
        (empty_png(60_000, 60_000), "so many pixels that it may be a decompression bomb; shrink it"),
        (empty_png(11_000, 11_000), "11000x11000 pixels exceed max_pixels=100,000,000"),
        (empty_png(1, 5000), "1x5000 has one side more than 200 times as long as the other"),
        (empty_png(8000, 8000), r"8000x8000 pixels in \d+ bytes are more than 2000 bytes of pixels per byte"),
    ],
)
def test_a_file_that_is_not_a_still_image_of_8_bits_within_the_limits_is_refused(write, content, words):
    with pytest.raises(MediaError, match=rf"picture\.png: .*({words})"):
        open_image(write(content))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_png_is_checked_without_being_decoded_unless_it_may_fail(write, monkeypatch, mode):
    monkeypatch.setattr("mmrl.media.image._decode", lambda image, content: pytest.fail("it was decoded"))
    content = encoded(noise(9, 7).convert(mode))
    assert make_media_cache().check_image(write(content)) == (9, 7)
    unknown_filter = change_pixels(content, lambda rows: b"\5" + rows[1:])
    for other in (interlaced(content), encoded(noise(9, 7).convert("P")), unknown_filter):
        with pytest.raises(pytest.fail.Exception, match="decoded"):
            make_media_cache().check_image(write(other))


def test_an_image_at_the_limits_of_shape_and_compression_is_opened(write, monkeypatch):
    assert open_image(write(noise(1, 200))).size == (1, 200)
    content = encoded(Image.new("RGB", (800, 800)), optimize=True)
    ratio = 3 * 800 * 800 // len(content)
    monkeypatch.setattr("mmrl.media.checks.MAX_DECOMPRESSION_RATIO", ratio + 1)
    assert open_image(write(content)).size == (800, 800)
    monkeypatch.setattr("mmrl.media.checks.MAX_DECOMPRESSION_RATIO", ratio)
    with pytest.raises(MediaError, match=rf"are more than {ratio} bytes of pixels per byte"):
        open_image(write(content))


def test_a_file_over_the_size_limit_or_changed_is_refused(write):
    ref = write(noise(20, 20))
    with pytest.raises(MediaError, match=r"bytes exceed max_image_bytes=100; shrink it or raise the limit"):
        open_image(ref, max_image_bytes=100)
    write(noise(21, 20))
    with pytest.raises(MediaError, match="changed since it was referenced"):
        open_image(ref)


def test_a_file_outside_the_roots_is_refused_by_every_path(write, tmp_path):
    outside = write(noise(4, 4), "outside.png")
    inner = tmp_path.resolve() / "inner"
    write_file(inner / "own.png", Path(outside.path).read_bytes())
    (inner / "link.png").symlink_to(outside.path)
    (tmp_path / "alias").symlink_to(inner)
    for path in (outside.path, inner / "link.png", inner / ".." / "outside.png", "/proc/self/environ"):
        with pytest.raises(MediaError, match=rf"lies outside data\.media_roots \({inner}\)"):
            open_image(ImageRef(path=str(path), sha256=outside.sha256), root=inner)
    for path in (inner / "own.png", tmp_path / "alias" / "own.png"):
        assert open_image(ImageRef(path=str(path), sha256=outside.sha256), root=inner).size == (4, 4)


def test_paths_that_lead_to_no_file_are_refused(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    os.mkfifo(tmp_path / "pipe.png")
    for path, words in {
        "a.png": "leads nowhere|cannot be read",
        "c\0.png": "leads nowhere|cannot be read",
        "pipe.png": "not a file",  # not waited for
        "none.png": "no such file",
        "": "not a file",
    }.items():
        with pytest.raises(MediaError, match=words):
            open_image(ImageRef(path=str(tmp_path / path), sha256=""))


def test_the_cache_keeps_the_images_used_last_while_they_fit(write, tmp_path):
    refs = [write(noise(10, 10), name=f"{number}.png") for number in range(3)]
    cache = make_media_cache(max_bytes=600)  # two of them
    first, second = cache.get_image(refs[0]), cache.get_image(refs[1])
    assert cache.get_image(refs[0]) is first
    cache.get_image(refs[2])  # the second leaves
    assert cache.get_image(refs[0]) is first
    assert cache.get_image(refs[1]) is not second
    (tmp_path / "1.png").unlink()
    assert cache.get_image(refs[1]).size == (10, 10)
    assert make_media_cache(max_bytes=10).get_image(refs[0]).size == (10, 10)
