"""The opener of pictures: what it makes of odd ones, and what it refuses."""

import hashlib
import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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
    """Writes bytes, or a picture in a format, and returns the reference."""

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


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_every_allowed_format_opens(keep, format_):
    picture = open_image(keep(Image.new("RGB", (8, 6), (200, 30, 30)), format=format_), MediaLimitsConfig())
    assert np.abs(np.asarray(picture).astype(int) - (200, 30, 30)).max() < 12


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_grey_and_palette_pictures_become_rgb(keep, mode):
    picture = open_image(keep(Image.new("RGB", (4, 4), (255, 255, 255)).convert(mode)), MediaLimitsConfig())
    assert (np.asarray(picture) == 255).all()


def test_cmyk_becomes_rgb(keep):
    picture = open_image(keep(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), format="JPEG"), MediaLimitsConfig())
    red, green, blue = np.asarray(picture)[4, 4].astype(int)
    assert red > 200
    assert max(green, blue) < 60


def test_transparency_is_laid_over_white(keep):
    array = np.zeros((1, 3, 4), dtype=np.uint8)
    array[0, :, 3] = (0, 128, 255)
    assert [int(v) for v in np.asarray(open_image(keep(Image.fromarray(array)), MediaLimitsConfig()))[0, :, 0]] == [
        255,
        127,
        0,
    ]


def test_palette_transparency_is_laid_over_white(keep):
    palette = Image.new("P", (2, 1))
    palette.putpalette([0, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    assert np.asarray(open_image(keep(palette, transparency=0), MediaLimitsConfig())).tolist() == [
        [[255, 255, 255], [0, 0, 255]]
    ]


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


def test_text_by_the_name_of_a_picture_is_refused(keep):
    with pytest.raises(MediaError, match=r"photo\.jpg: not a PNG, JPEG, WEBP, BMP, GIF image; convert"):
        open_image(keep(b"This is a text.\n", name="photo.jpg"), MediaLimitsConfig())


def test_a_format_off_the_list_is_refused(keep):
    with pytest.raises(MediaError, match="not a PNG"):
        open_image(keep(Image.new("RGB", (4, 4)), format="TIFF"), MediaLimitsConfig())


def test_sixteen_bit_grey_is_refused_by_name(keep):
    with pytest.raises(MediaError, match="16 or more bits per channel"):
        open_image(keep(Image.fromarray(np.full((4, 4), 40_000, dtype=np.uint16))), MediaLimitsConfig())


def test_sixteen_bit_colour_is_refused_by_name(keep):
    deep = bytearray(huge_png(1, 1))
    deep[24] = 16
    deep[29:33] = struct.pack(">I", zlib.crc32(bytes(deep[12:29])))
    with pytest.raises(MediaError, match="16 or more bits per channel"):
        open_image(keep(bytes(deep)), MediaLimitsConfig())


@pytest.mark.parametrize("format_", ["GIF", "PNG", "WEBP"])
def test_an_animation_is_refused(keep, format_):
    frames = [Image.fromarray(noise(8, 8)), Image.new("RGB", (8, 8), "red")]
    ref = keep(frames[0], format=format_, save_all=True, append_images=frames[1:])
    with pytest.raises(MediaError, match="animated"):
        open_image(ref, MediaLimitsConfig())


@pytest.mark.parametrize(
    ("width", "height", "message"),
    [
        (60_000, 60_000, "exceeds limit|exceed max_pixels"),
        (11_000, 11_000, "11000x11000 pixels exceed max_pixels=100,000,000"),
        (1, 5000, "1x5000 is longer than max_aspect_ratio=200 allows"),
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


def test_an_expansion_over_the_limit_is_refused_before_decoding(keep):
    ref, expansion = blank_ref(keep, 800)
    assert open_image(ref, MediaLimitsConfig(max_decompression_ratio=int(expansion) + 1)).size == (800, 800)
    with pytest.raises(
        MediaError, match=r"800x800 pixels in [\d,]+ bytes exceed max_decompression_ratio=\d+, as decompression"
    ):
        open_image(ref, MediaLimitsConfig(max_decompression_ratio=int(expansion)))


def test_a_huge_size_in_a_tiny_file_is_refused_by_its_expansion(keep):
    with pytest.raises(MediaError, match=r"8000x8000 pixels in \d+ bytes exceed max_decompression_ratio=2000"):
        open_image(keep(huge_png(8000, 8000)), MediaLimitsConfig())


def test_a_file_over_the_limit_is_refused(keep):
    with pytest.raises(MediaError, match=r"bytes exceed max_image_bytes=100; shrink it or raise the limit"):
        open_image(keep(Image.fromarray(noise(20, 20))), MediaLimitsConfig(max_image_bytes=100))


def test_a_file_that_changed_is_refused(keep):
    ref = keep(Image.new("RGB", (4, 4)))
    keep(Image.new("RGB", (4, 4), "red"))
    with pytest.raises(MediaError, match="changed since it was referenced"):
        open_image(ref, MediaLimitsConfig())


def test_the_first_picture_of_a_camera_file_with_several_is_the_picture(keep):
    """Phones put a depth or brightness map behind the photo (MPO); every viewer shows the photo."""
    photo = Image.new("RGB", (16, 16), (200, 30, 30))
    ref = keep(photo, name="phone.jpg", format="MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    with Image.open(ref.path) as picture:
        assert (picture.format, picture.n_frames) == ("MPO", 2)
    assert np.abs(np.asarray(open_image(ref, MediaLimitsConfig())).astype(int) - (200, 30, 30)).max() < 12


def test_a_strip_within_the_limit_opens(keep):
    assert open_image(keep(Image.fromarray(noise(1, 200))), MediaLimitsConfig()).size == (1, 200)


def test_a_vector_graphic_is_refused(keep):
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>'
    with pytest.raises(MediaError, match=r"drawing\.png: not a PNG"):
        open_image(keep(svg, name="drawing.png"), MediaLimitsConfig())


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
        with pytest.raises(MediaError, match=rf"lies outside data\.roots \({roots[0]}\)"):
            open_under(ImageRef(path=str(path), sha256=outside.sha256), roots, MediaLimitsConfig())
    (inner / "own.png").write_bytes(Path(outside.path).read_bytes())
    for path in (inner / "own.png", tmp_path / "alias" / "own.png"):
        assert open_under(ImageRef(path=str(path), sha256=outside.sha256), roots, MediaLimitsConfig()).size == (4, 4)


def test_links_in_a_circle_and_impossible_names_are_refused(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "b.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    for path in (str(tmp_path / "a.png"), "a\0.png"):
        with pytest.raises(MediaError, match="leads nowhere|cannot be read"):
            open_image(ImageRef(path=path, sha256=""), MediaLimitsConfig())


def test_no_roots_permit_nothing(keep):
    with pytest.raises(MediaError, match=r"outside data\.roots \(none\)"):
        open_under(keep(Image.new("RGB", (4, 4))), (), MediaLimitsConfig())


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path, problem in [(tmp_path / "none.png", "no such file"), (tmp_path, "not a file")]:
        with pytest.raises(UserError, match=f"{path}: {problem}"):
            open_image(ImageRef(path=str(path), sha256=""), MediaLimitsConfig())


def test_the_store_decodes_a_picture_once_while_it_fits(keep, tmp_path):
    refs = [keep(Image.fromarray(noise(10, 10) // shade), name=f"{shade}.png") for shade in (1, 2, 3)]
    store = MediaCache(ANYWHERE, MediaLimitsConfig(), max_bytes=600)  # two of them
    first, second = store.get_image(refs[0]), store.get_image(refs[1])
    assert store.get_image(refs[0]) is first
    store.get_image(refs[2])  # the second leaves: it was used longest ago
    assert store.get_image(refs[0]) is first
    assert store.get_image(refs[1]) is not second
    (tmp_path / "1.png").unlink()
    assert store.get_image(refs[1]).size == (10, 10)


def test_a_picture_larger_than_the_store_is_still_opened(keep):
    store = MediaCache(ANYWHERE, MediaLimitsConfig(), max_bytes=10)
    ref = keep(Image.fromarray(noise(10, 10)))
    assert store.get_image(ref).size == store.get_image(ref).size == (10, 10)
