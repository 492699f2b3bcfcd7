"""Opening images: pixels of every format and mode, damaged files, limits, allowed folders, cache."""

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.cache import MediaCache
from mmrl.media.image import MediaError
from mmrl.media.image import open_image as open_under
from mmrl.types import ImageRef, MediaPolicy, UserError

ANYWHERE = MediaPolicy(roots=(Path("/"),))


def open_image(ref, limits):
    return open_under(ref, ANYWHERE.roots, limits)


@pytest.fixture
def keep(tmp_path):
    """Write bytes, or an image in a format, and return the reference."""

    def keep(content, name="picture.png", **options):
        if isinstance(content, Image.Image):
            buffer = io.BytesIO()
            content.save(buffer, **({"format": "PNG"} | options))
            content = buffer.getvalue()
        (tmp_path / name).write_bytes(content)
        return ImageRef(path=str(tmp_path / name), sha256=hashlib.sha256(content).hexdigest())

    return keep


def noise(width, height, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)


def huge_png(width, height):
    """A PNG whose header claims a size that its few bytes of data do not have."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def test_an_rgb_picture_comes_back_exactly(keep):
    array = noise(20, 10)
    picture = open_image(keep(Image.fromarray(array)), MediaLimitsConfig())
    assert (picture.mode, picture.size) == ("RGB", (20, 10))
    assert (np.asarray(picture) == array).all()


def test_cmyk_becomes_rgb(keep):
    picture = open_image(keep(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), format="JPEG"), MediaLimitsConfig())
    red, green, blue = np.asarray(picture)[4, 4].astype(int)
    assert red > 200
    assert max(green, blue) < 60


def test_transparency_is_laid_over_white(keep):
    array = np.zeros((1, 3, 4), dtype=np.uint8)
    array[0, :, 3] = (0, 128, 255)
    red = np.asarray(open_image(keep(Image.fromarray(array)), MediaLimitsConfig()))[0, :, 0]
    assert red.tolist() == [255, 127, 0]


def test_palette_transparency_is_laid_over_white(keep):
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    picture = open_image(keep(palette, transparency=0), MediaLimitsConfig())
    assert np.asarray(picture).tolist() == [[[255, 255, 255], [0, 0, 255]]]


def test_the_camera_orientation_is_applied(keep):
    array = noise(16, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned a quarter clockwise
    picture = open_image(keep(Image.fromarray(array), exif=exif), MediaLimitsConfig())
    assert picture.size == (8, 16)
    assert (np.asarray(picture) == np.rot90(array, k=-1)).all()


@pytest.mark.parametrize("keepable", [0, 30, 60, -40])
@pytest.mark.parametrize("format_", ["PNG", "JPEG"])
def test_a_truncated_file_is_refused(keep, format_, keepable):
    whole = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(whole, format_)
    ref = keep(whole.getvalue()[:keepable])
    with pytest.raises(MediaError, match=r"picture\.png: (empty|damaged|not a)"):
        open_image(ref, MediaLimitsConfig())


def png_chunks(content):
    """Name and data of each chunk."""
    position, chunks = 8, []
    while position < len(content):
        length = int.from_bytes(content[position : position + 4])
        chunks.append((content[position + 4 : position + 8], content[position + 8 : position + 8 + length]))
        position += 12 + length
    return chunks


def png_of(chunks):
    """A PNG of these chunks, with good CRCs."""
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return content


def with_pixel_data(content, change):
    """A PNG whose inflated pixel data was changed, with good CRCs; `change` returns what to deflate."""
    chunks = png_chunks(content)
    data = zlib.decompress(b"".join(data for name, data in chunks if name == b"IDAT"))
    others = [chunk for chunk in chunks if chunk[0] != b"IDAT"]
    return png_of([*others[:-1], (b"IDAT", zlib.compress(change(data))), others[-1]])


def flip(content, position):
    damaged = bytearray(content)
    damaged[position] ^= 1
    return bytes(damaged)


PNG_DAMAGE = {
    "CRC of the pixel data": (lambda png: flip(png, -13), "the CRC of chunk 'IDAT' at byte"),
    "CRC of another chunk": (lambda png: flip(png, png.index(b"tEXt") + 8), "the CRC of chunk 'tEXt' at byte"),
    "bad deflate": (
        lambda png: png_of([(n, flip(d, len(d) // 2) if n == b"IDAT" else d) for n, d in png_chunks(png)]),
        "the pixel data does not inflate",
    ),
    "no checksum": (
        lambda png: png_of([(n, d[:-4] if n == b"IDAT" else d) for n, d in png_chunks(png)]),
        "the pixel data is cut off before its checksum",
    ),
    "two headers": (
        lambda png: png_of([png_chunks(png)[0], *png_chunks(png)]),
        "it does not begin with a header, or has two",
    ),
    "rows missing": (lambda png: with_pixel_data(png, lambda data: data[:-1]), "inflates to .* the header says"),
    "half missing": (lambda png: with_pixel_data(png, lambda data: data[: len(data) // 2]), "inflates to .* bytes"),
    "rows too many": (lambda png: with_pixel_data(png, lambda data: data + b"x"), "or more bytes, the header says"),
    "no end": (lambda png: png[:-12], "cut off at byte .*, before the last chunk"),
    "end cut": (lambda png: png[:-2], "cut off at byte .*, before the last chunk"),
}


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("damage", PNG_DAMAGE)
def test_a_damaged_png_is_refused_by_name(keep, damage, interlaced):
    note = PngInfo()
    note.add_text("note", "hello")
    buffer = io.BytesIO()
    Image.fromarray(noise(40, 30)).save(buffer, "PNG", pnginfo=note)
    content = interlace(buffer.getvalue()) if interlaced else buffer.getvalue()
    apply, message = PNG_DAMAGE[damage]
    assert open_image(keep(content), MediaLimitsConfig()).size == (40, 30)
    with pytest.raises(MediaError, match=rf"picture\.png: damaged \(.*{message}"):
        open_image(keep(apply(content)), MediaLimitsConfig())


def interlace(png):
    """Return the same PNG with its rows in the seven passes of Adam7."""
    chunks = png_chunks(png)
    width, height, depth, color_type = struct.unpack(">IIBB", chunks[0][1][:10])
    pixels = np.asarray(Image.open(io.BytesIO(png))).reshape(height, width, -1)
    assert depth == 8
    assert pixels.shape[2] == {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color_type]
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    rows = b""
    for left, top, across, down in passes:
        part = pixels[top::down, left::across]
        rows += b"".join(b"\0" + row.tobytes() for row in part if row.size)
    header = chunks[0][1][:12] + b"\1"
    others = [chunk for chunk in chunks[1:] if chunk[0] != b"IDAT"]
    return png_of([(b"IHDR", header), *others[:-1], (b"IDAT", zlib.compress(rows)), others[-1]])


def scan_start(jpeg):
    """Return the index at which the coded data of the last scan begins."""
    header = jpeg.rindex(b"\xff\xda") + 2
    return header + int.from_bytes(jpeg[header : header + 2])


def cut(jpeg, share):
    """The file cut within its last scan and closed again with the marker of its end."""
    start = scan_start(jpeg)
    return jpeg[: start + int(share * (len(jpeg) - 2 - start))].rstrip(b"\xff") + b"\xff\xd9"


def between_scans(jpeg):
    """A progressive file without its last scan, and the tables for it."""
    third_last = jpeg.rindex(b"\xff\xda", 0, jpeg.rindex(b"\xff\xda"))
    tables = jpeg.index(b"\xff\xc4", third_last)
    return jpeg[:tables] + b"\xff\xd9"


PREMATURE = "premature end of data segment"
JPEG_KINDS = {
    "baseline": {},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
    "optimized": {"optimize": True, "quality": 95, "subsampling": 0},
}


@pytest.mark.parametrize("kind", JPEG_KINDS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_cut_in_its_scan_and_closed_is_refused(keep, kind, mode):
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 48)).convert(mode).save(buffer, "JPEG", **JPEG_KINDS[kind])
    for share in (0.0, 0.3, 0.9):
        with pytest.raises(MediaError, match=r"photo\.jpg: damaged \(Corrupt JPEG data: .*; restore or remove it"):
            open_image(keep(cut(buffer.getvalue(), share), "photo.jpg"), MediaLimitsConfig())
    last_bytes = buffer.getvalue()[:-4].rstrip(b"\xff") + b"\xff\xd9"
    with pytest.raises(MediaError, match=f"{PREMATURE}|the last scans of a progressive JPEG are missing"):
        open_image(keep(last_bytes, "photo.jpg"), MediaLimitsConfig())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda jpeg: jpeg[: scan_start(jpeg) + 100] + jpeg[scan_start(jpeg) + 4000 :], PREMATURE),
        (lambda jpeg: jpeg[:-2] + b"\x55" * 40 + jpeg[-2:], "extraneous bytes before marker 0xd9"),
        (lambda jpeg: jpeg[: scan_start(jpeg) + 100] + b"\xff\x00" * 40 + jpeg[-2:], "bad Huffman code|premature"),
        (lambda jpeg: jpeg[:-2], "Premature end of JPEG file"),
    ],
)
def test_a_jpeg_with_a_damaged_scan_is_refused(keep, damage, message):
    buffer = io.BytesIO()
    Image.fromarray(noise(160, 120)).save(buffer, "JPEG")
    with pytest.raises(MediaError, match=rf"photo\.jpg: damaged \(.*({message})"):
        open_image(keep(damage(buffer.getvalue()), "photo.jpg"), MediaLimitsConfig())


def test_a_progressive_jpeg_without_its_last_scans_is_refused(keep):
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 48)).save(buffer, "JPEG", progressive=True)
    with pytest.raises(MediaError, match="the last scans of a progressive JPEG are missing"):
        open_image(keep(between_scans(buffer.getvalue()), "photo.jpg"), MediaLimitsConfig())


@pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 80}, {"quality": 80, "alpha": True}], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_webp_cut_and_closed_is_refused(keep, options, share):
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 48, 4 if "alpha" in options else 3)).save(buffer, "WEBP", **options)
    content = bytearray(buffer.getvalue())
    chunk = content.index(b"VP8L" if "lossless" in options else b"VP8 ")
    content = content[: chunk + 8 + int(share * (len(content) - chunk - 8)) // 2 * 2]
    struct.pack_into("<I", content, 4, len(content) - 8)
    struct.pack_into("<I", content, chunk + 4, len(content) - chunk - 8)
    with pytest.raises(MediaError, match=r"photo\.webp: damaged"):
        open_image(keep(bytes(content), "photo.webp"), MediaLimitsConfig())


HONEST = {
    **{f"JPEG {name}": ("JPEG", "RGB", options) for name, options in JPEG_KINDS.items()},
    "JPEG 4:2:2": ("JPEG", "RGB", {"subsampling": 1, "progressive": True, "restart_marker_blocks": 2}),
    "JPEG 4:1:1": ("JPEG", "RGB", {"subsampling": "4:1:1"}),
    "JPEG grey": ("JPEG", "L", {"progressive": True}),
    "JPEG CMYK": ("JPEG", "CMYK", {}),
    "JPEG of RGB components": ("JPEG", "RGB", {"keep_rgb": True}),
    "JPEG with a big profile": ("JPEG", "RGB", {"icc_profile": bytes(200_000)}),
    "JPEG comment": ("JPEG", "RGB", {"comment": b"\xff\xd9 is an end, \xff\xda a scan"}),
    "camera file with several pictures": ("MPO", "RGB", {"save_all": True}),
    **{f"PNG {mode}": ("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "PNG of 2 bits": ("PNG", "P", {"bits": 2}),
    "PNG tRNS": ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    "PNG with text and profile": ("PNG", "RGB", {"icc_profile": bytes(9000), "dpi": (72, 72), "compress_level": 0}),
    "WEBP": ("WEBP", "RGBA", {"quality": 70}),
    "WEBP lossless": ("WEBP", "RGBA", {"lossless": True}),
    "GIF": ("GIF", "P", {"interlace": 1}),
    "BMP": ("BMP", "RGB", {}),
}


@pytest.mark.parametrize("trailer", [b"", b"after the end"])
@pytest.mark.parametrize("name", HONEST)
def test_a_good_file_has_the_pixels_that_pillow_gives(keep, name, trailer):
    format_, mode, options = HONEST[name]
    image = Image.fromarray(noise(45, 31, 4)).convert("RGB").convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 8  # shown turned a quarter counter-clockwise
    if format_ in ("JPEG", "MPO", "WEBP"):
        options = options | {"exif": exif}
    if format_ == "MPO":
        options = options | {"append_images": [image]}
    ref = keep(image, format=format_, **options)
    ref = keep(Path(ref.path).read_bytes() + trailer)
    plain = ImageOps.exif_transpose(Image.open(ref.path)).convert("RGBA")
    expected = Image.alpha_composite(Image.new("RGBA", plain.size, "white"), plain).convert("RGB")
    assert np.array_equal(np.asarray(open_image(ref, MediaLimitsConfig())), np.asarray(expected))


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("size", [(1, 1), (2, 5), (5, 2), (8, 8), (45, 31)])
def test_an_interlaced_png_has_its_pixels(keep, mode, size):
    plain = keep(Image.fromarray(noise(*size)).convert(mode), "plain.png")
    mixed = keep(interlace(Path(plain.path).read_bytes()), "mixed.png")
    assert open_image(mixed, MediaLimitsConfig()).tobytes() == open_image(plain, MediaLimitsConfig()).tobytes()


def sixteen_bit_png():
    deep = bytearray(huge_png(1, 1))
    deep[24] = 16
    deep[29:33] = struct.pack(">I", zlib.crc32(bytes(deep[12:29])))
    return bytes(deep)


def animation(format_):
    content = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("blue", "red")]
    frames[0].save(content, format_, save_all=True, append_images=frames[1:])
    return content.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("photo.jpg", b"This is a text.\n", r"photo\.jpg: not a PNG, JPEG, WEBP, BMP, GIF image; convert"),
        ("drawing.png", b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>', r"drawing\.png: not a PNG"),
        ("grey.png", Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16)), "16 or more bits per channel"),
        ("colour.png", sixteen_bit_png(), "16 or more bits per channel"),
        *((f"a.{format_}", animation(format_), "animated") for format_ in ("GIF", "PNG", "WEBP")),
    ],
)
def test_files_that_are_not_8_bit_still_images_are_refused(keep, name, content, message):
    with pytest.raises(MediaError, match=message):
        open_image(keep(content, name), MediaLimitsConfig())


def test_a_format_off_the_list_is_refused(keep):
    with pytest.raises(MediaError, match="not a PNG"):
        open_image(keep(Image.new("RGB", (4, 4)), format="TIFF"), MediaLimitsConfig())


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (60_000, 60_000, "exceeds limit|exceed max_pixels"),
        (11_000, 11_000, "11000x11000 pixels exceed max_pixels=100,000,000"),
        (1, 5000, "1x5000 has one side more than 200 times as long as the other"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_size_over_the_limits_is_refused_before_decoding(keep, width, height, message):
    with pytest.raises(MediaError, match=message):
        open_image(keep(huge_png(width, height)), MediaLimitsConfig())


def blank_ref(keep, side):
    """A one-colour PNG: about a thousand bytes of pixels for each of its own."""
    ref = keep(Image.new("RGB", (side, side)), optimize=True)
    return ref, 3 * side * side / Path(ref.path).stat().st_size


def test_an_expansion_over_the_limit_is_refused_before_decoding(keep, monkeypatch):
    ref, expansion = blank_ref(keep, 800)
    monkeypatch.setattr("mmrl.media.image.MAX_DECOMPRESSION_RATIO", int(expansion) + 1)
    assert open_image(ref, MediaLimitsConfig()).size == (800, 800)
    monkeypatch.setattr("mmrl.media.image.MAX_DECOMPRESSION_RATIO", int(expansion))
    message = rf"800x800 pixels in [\d,]+ bytes are more than {int(expansion)} bytes of pixels per byte"
    with pytest.raises(MediaError, match=message):
        open_image(ref, MediaLimitsConfig())


def test_a_huge_size_in_a_tiny_file_is_refused_by_its_expansion(keep):
    with pytest.raises(MediaError, match=r"8000x8000 pixels in \d+ bytes are more than 2000 bytes of pixels per byte"):
        open_image(keep(huge_png(8000, 8000)), MediaLimitsConfig())


def test_a_file_over_the_limit_is_refused(keep):
    with pytest.raises(MediaError, match=r"bytes exceed max_image_bytes=100; shrink it or raise the limit"):
        open_image(keep(Image.fromarray(noise(20, 20))), MediaLimitsConfig(max_image_bytes=100))


def test_a_file_that_changed_is_refused(keep):
    ref = keep(Image.new("RGB", (4, 4)))
    keep(Image.new("RGB", (4, 4), "red"))
    with pytest.raises(MediaError, match="changed since it was referenced"):
        open_image(ref, MediaLimitsConfig())


def test_an_aspect_ratio_at_the_limit_is_allowed(keep):
    assert open_image(keep(Image.fromarray(noise(1, 200))), MediaLimitsConfig()).size == (1, 200)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(MediaError, match=r"pipe\.png: not a file"):
        open_image(ImageRef(path=str(tmp_path / "pipe.png"), sha256=""), MediaLimitsConfig())


def test_a_file_outside_the_roots_is_refused_however_it_is_named(keep, tmp_path):
    outside = keep(Image.new("RGB", (4, 4)), name="outside.png")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link.png").symlink_to(outside.path)
    (tmp_path / "alias").symlink_to(inner)
    roots = (inner.resolve(),)
    for path in (outside.path, inner / "link.png", inner / ".." / "outside.png", "/proc/self/environ"):
        with pytest.raises(MediaError, match=rf"lies outside data\.media_roots \({roots[0]}\)"):
            open_under(ImageRef(path=str(path), sha256=outside.sha256), roots, MediaLimitsConfig())
    with pytest.raises(MediaError, match=r"outside data\.media_roots \(none\)"):
        open_under(outside, (), MediaLimitsConfig())
    (inner / "own.png").write_bytes(Path(outside.path).read_bytes())
    for path in (inner / "own.png", tmp_path / "alias" / "own.png"):
        assert open_under(ImageRef(path=str(path), sha256=outside.sha256), roots, MediaLimitsConfig()).size == (4, 4)


def test_links_in_a_circle_and_impossible_names_are_refused(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    for path in (str(tmp_path / "a.png"), "a\0.png"):
        with pytest.raises(MediaError, match="leads nowhere|cannot be read"):
            open_image(ImageRef(path=path, sha256=""), MediaLimitsConfig())


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path, problem in [(tmp_path / "none.png", "no such file"), (tmp_path, "not a file")]:
        with pytest.raises(UserError, match=f"{path}: {problem}"):
            open_image(ImageRef(path=str(path), sha256=""), MediaLimitsConfig())


def test_the_cache_decodes_an_image_once_while_it_fits(keep, tmp_path):
    refs = [keep(Image.fromarray(noise(10, 10) // shade), name=f"{shade}.png") for shade in (1, 2, 3)]
    store = MediaCache(ANYWHERE, MediaLimitsConfig(), max_bytes=600)  # two of them
    first, second = store.get_image(refs[0]), store.get_image(refs[1])
    assert store.get_image(refs[0]) is first
    store.get_image(refs[2])  # the second leaves: it was used longest ago
    assert store.get_image(refs[0]) is first
    assert store.get_image(refs[1]) is not second
    (tmp_path / "1.png").unlink()
    assert store.get_image(refs[1]).size == (10, 10)


def test_an_image_larger_than_the_cache_is_still_opened(keep):
    store = MediaCache(ANYWHERE, MediaLimitsConfig(), max_bytes=10)
    ref = keep(Image.fromarray(noise(10, 10)))
    assert store.get_image(ref).size == store.get_image(ref).size == (10, 10)
