"""Drawing rewards: limits of renderers, similarity beyond a blank page, backbones from a folder."""

import json
import multiprocessing
import sys

import numpy as np
import pytest
from ssim import slow_ssim
from waiting import PATIENCE_S

from mmrl.types import UserError
from mmrl_rewards import render
from mmrl_rewards.cases import Case
from mmrl_rewards.contract import bind
from mmrl_rewards.services.renderer import DrawingError, DrawingLimits, decode_png, draw

PAGE = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 90 70">{}</svg>'
BARS = '<rect x="10" y="40" width="15" height="25"/><rect x="35" y="20" width="15" height="45"/>'
BOMB = '<defs><g id="a0"><rect width="1" height="1"/></g>'
BOMB += "".join(f'<g id="a{i + 1}">' + f'<use href="#a{i}"/>' * 10 + "</g>" for i in range(7))
BOMB += '</defs><use href="#a7"/>'


def svg(inside):
    return draw("svg", PAGE.format(inside), side=64, limits=DrawingLimits(cpu_s=1))


def scored(fn, kind, value, answer, **args):
    sample = {"answer_type": kind, "value": value}
    case = {"fn": "", "sample": sample, "response": f"<answer>{answer}</answer>", "expected": 0, "source": ""}
    return bind(fn, args)(*Case.model_validate(case).build())


def test_ssim_equals_the_published_formula():
    rng = np.random.default_rng(0)
    for _ in range(3):
        a = rng.integers(0, 256, (24, 31, 3), dtype=np.uint8)
        b = np.clip(a.astype(int) + rng.integers(-60, 60, a.shape), 0, 255).astype(np.uint8)
        assert render.ssim(a, b) == pytest.approx(slow_ssim(a, b), abs=1e-9)


def test_similarity_beyond_blank_is_zero_for_plain_pages():
    target = np.full((24, 24, 3), 200, dtype=np.uint8)
    target[8:16, 8:16] = 0
    near = target.copy()
    near[8:14, 8:16] = 150
    plain = max(slow_ssim(np.full_like(target, level), target) for level in (255, 200))
    expected = (slow_ssim(near, target) - plain) / (1 - plain)
    assert render.similarity_beyond_blank(near, target, render.ssim) == pytest.approx(expected, abs=1e-9)
    assert 0.1 < expected < 0.9
    assert render.similarity_beyond_blank(target, target, render.ssim) == 1.0
    for level in (0, 90, 200, 255):
        assert render.similarity_beyond_blank(np.full_like(target, level), target, render.ssim) == 0.0


def test_images_of_different_size_are_compared_on_one_page():
    small, large = (np.full((20, width, 3), 255, dtype=np.uint8) for width in (20, 400))
    small[5:15, 5:15] = large[5:15, 5:15] = 0
    assert render.similarity_beyond_blank(large, small, render.ssim) == 1.0
    large[5:15, 200:210] = 0  # a long line of symbols is not made right by the white between them
    assert render.similarity_beyond_blank(large, small, render.ssim) < 0.1


def test_the_nearer_the_drawing_the_more_it_earns():
    moved = [BARS.replace('"10"', f'"{x}"') for x in (10, 11, 13, 25)]
    values = [scored(render.svg, "svg", PAGE.format(BARS), PAGE.format(bars)).value for bars in moved]
    assert 1.0 == values[0] > values[1] > values[2] >= values[3]


def test_text_is_drawn_in_one_font_everywhere():
    words = [svg(f'<text x="5" y="40" font-family="{family}">Total 42</text>') for family in ("serif", "Comic Sans MS")]
    assert (words[0] < 128).mean() > 0.01
    assert (words[0] == words[1]).all()


@pytest.mark.parametrize(
    ("language", "source", "limits", "words"),
    [
        ("svg", PAGE.format('<image href="{file}" width="9" height="9"/>'), {}, "cannot be drawn"),
        ("svg", '<!DOCTYPE svg [<!ENTITY a SYSTEM "file:///etc/passwd">]><svg>&a;</svg>', {}, "cannot be drawn"),
        ("svg", '<svg width="1" height="nan"/>', {}, "cannot be drawn"),
        ("svg", "\ud800", {}, "cannot be drawn"),
        ("svg", PAGE.format(BOMB), {"cpu_s": 5, "memory_mb": 256}, "draw"),
        ("svg", PAGE.format(BARS), {"max_bytes": 50}, "more than 50 bytes when drawn"),
        ("svg", "<svg>" + "x" * 100_000 + "</svg>", {}, "100011 characters, at most 100000"),
        ("latex", r"\rule{1000000em}{1em}", {}, "cannot be drawn"),
        ("latex", r"\text{<a href='file:///etc/passwd'>}", {}, "cannot be drawn"),
        ("latex", "\\sqrt" * 1000 + "x", {}, "cannot be drawn|takes more than 1 s"),  # whichever comes first
        ("latex", "x" * 20_000, {}, "takes more than 1 s"),
    ],
)
def test_what_cannot_be_drawn_is_refused_and_the_next_is_drawn(tmp_path, language, source, limits, words):
    with pytest.raises(DrawingError, match=words):
        draw(language, source.replace("{file}", str(tmp_path)), side=64, limits=DrawingLimits(**{"cpu_s": 1, **limits}))
    assert (svg(BARS) < 128).any()


def dark_pixels(_):
    return (svg(BARS) < 128).sum()


def test_drawing_works_after_a_fork():
    expected = dark_pixels(0)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(dark_pixels, range(2)).get(PATIENCE_S) == [expected] * 2


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"\0" * 30])
def test_bytes_that_are_not_png_are_refused(data):
    with pytest.raises(ValueError, match="no PNG"):
        decode_png(data)


PAINTER = """
import os, sys, time
from PIL import Image
text = open(sys.argv[1], encoding="utf-8").read()
if text == "hang": time.sleep(600)
if text == "spin":
    while True: pass
if text == "fill": open("big", "wb").write(b"x" * 10_000_000)
if text == "fail": sys.exit(3)
image = Image.new("RGB", (40, 30), "white")
image.paste("black", (2, 2, 30 if "SECRET" in os.environ else 4 + len(text), 20))
image.save(sys.argv[2], "PNG")
"""


@pytest.fixture
def painter(tmp_path):
    (tmp_path / "painter.py").write_text(PAINTER)
    command = [sys.executable, str(tmp_path / "painter.py"), "{input}", "{output}"]
    return {"language": "html", "command": command, "timeout_s": 300.0, "cpu_s": 3, "max_bytes": 1_000_000}


@pytest.mark.parametrize(
    ("answer", "value", "reason"),
    [
        ("four", 1.0, "1.00 of the way"),
        ("spin", 0.0, "status -"),
        ("fill", 0.0, "status 1, no picture"),
        ("fail", 0.0, "status 3, no picture"),
        ("x" * 200_000, 0.0, "200000 characters, at most 100000"),
    ],
)
def test_a_command_draws_within_limits(painter, answer, value, reason):
    got = scored(render.page, "text", "four", answer, renderer=painter)
    assert got.value == value
    assert reason in got.reason


def test_a_command_does_not_inherit_the_environment(painter, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    assert scored(render.page, "text", "long", "longer", renderer=painter).value < 0.9


def test_a_command_runs_once_for_one_source_and_is_ended_when_it_hangs(painter, tmp_path):
    renderer = {**painter, "cache": str(tmp_path / "kept")}
    assert scored(render.page, "text", "four", "four", renderer=renderer).value == 1.0
    assert len(list((tmp_path / "kept").rglob("*.reply"))) == 1
    got = scored(render.page, "text", "four", "hang", renderer={**renderer, "timeout_s": 3.0})
    assert got == (0.0, "the drawing takes more than 3 s to draw")
    (tmp_path / "painter.py").unlink()
    assert scored(render.page, "text", "four", "four", renderer=renderer).value == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": []}, "either `endpoint` or `command`"),
        ({"endpoint": {"url": "http://localhost/"}}, "either `endpoint` or `command`"),
        ({"command": ["browser", "{input}"]}, "names neither"),
        ({"language": "cobol"}, "html"),
    ],
)
def test_a_renderer_with_contradictory_options_is_refused(painter, changes, words):
    with pytest.raises(UserError, match=words):
        bind(render.page, {"renderer": {**painter, **changes}})


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A small timm model with random weights, in the layout of its hub."""
    import torch
    from safetensors.torch import save_file

    from mmrl.utils.torch_cpu_compat import tolerate_cuda_builds

    tolerate_cuda_builds()
    import timm

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("backbone")
    model = timm.create_model("test_vit", pretrained=False)
    save_file(model.state_dict(), folder / "model.safetensors")
    config = {"architecture": "test_vit", "num_classes": 1000, "pretrained_cfg": model.pretrained_cfg}
    (folder / "config.json").write_text(json.dumps(config, default=list))
    return str(folder)


def test_a_backbone_from_a_folder_compares_images(backbone):
    def value(inside):
        return scored(render.svg, "svg", PAGE.format(BARS), PAGE.format(inside), encoder=backbone).value

    same, near, far = value(BARS), value(BARS.replace('"10"', '"12"')), value('<circle cx="80" cy="5" r="3"/>')
    assert same == pytest.approx(1.0, abs=1e-6)
    assert same > near > far
    assert value(PAGE.format("")) == 0.0


def slow_band(grey, scale, index):
    """One band of Portilla and Simoncelli's pyramid, with their low passes level by level, subsampled by slicing."""
    height, width = grey.shape
    frequency_y, frequency_x = np.meshgrid(np.fft.fftfreq(height) * 2, np.fft.fftfreq(width) * 2, indexing="ij")
    radius, angle = np.hypot(frequency_y, frequency_x), np.arctan2(frequency_y, frequency_x)
    octave = np.log2(np.where(radius == 0, 1e-9, radius))

    def low_pass(level):
        return np.cos(np.pi / 2 * np.clip(octave + level + 1, 0, 1))

    spectrum = np.fft.fft2(grey) * low_pass(0)
    for level in range(1, scale):
        spectrum = spectrum * low_pass(level)
    high_pass = np.sqrt(1 - low_pass(scale) ** 2)
    facing = np.cos(angle - np.pi * index / 8)
    one_sided = np.where(facing > 0, 2 * facing**7, 0.0)
    return np.fft.ifft2(spectrum * high_pass * one_sided)[:: 2 ** (scale - 1), :: 2 ** (scale - 1)]


def test_cw_ssim_equals_the_published_formula():
    rng = np.random.default_rng(4)
    a = rng.integers(0, 256, (64, 96, 3), dtype=np.uint8)
    b = np.roll(a, 1, axis=1)
    grey = [image @ np.array([0.299, 0.587, 0.114]) for image in (a, b)]
    values = []
    for scale in range(1, 5):
        for index in range(8):
            x, y = (slow_band(image, scale, index) for image in grey)
            windows = []
            for row in range(x.shape[0] - 6):
                for column in range(x.shape[1] - 6):
                    p, q = (band[row : row + 7, column : column + 7] for band in (x, y))
                    above = 2 * abs((p * q.conj()).sum())
                    windows.append(above / ((abs(p) ** 2).sum() + (abs(q) ** 2).sum()))
            values.append(np.mean(windows))
    # The constant in the fraction, and the scale of a band, change it by less than 1e-6.
    assert render.cw_ssim(b, a) == pytest.approx(np.mean(values), abs=1e-5)
    assert render.cw_ssim(a, a) == pytest.approx(1.0)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 60), (150, 2), (200, 1)])
def test_a_table_of_any_shape_looks_like_itself(rows, columns):
    row = " & ".join(["x"] * columns) + r" \\ "
    page = render._draw_table(rf"\begin{{tabular}}{{{'c' * columns}}} {row * rows} \end{{tabular}}")
    assert render.similarity_beyond_blank(page, page, render.cw_ssim) == pytest.approx(1.0)


def test_cw_ssim_tolerates_a_shift_that_ssim_does_not():
    formula = draw("latex", r"\frac{x+1}{2}", side=0, limits=DrawingLimits())
    target = np.pad(formula, ((10, 10), (20, 20), (0, 0)), constant_values=255)
    shifted, far = np.roll(target, 3, axis=1), np.roll(target, 30, axis=1)
    assert render.similarity_beyond_blank(shifted, target, render.ssim) < 0.4
    assert render.similarity_beyond_blank(shifted, target, render.cw_ssim) > 0.8
    assert render.similarity_beyond_blank(far, target, render.cw_ssim) < 0.6
    assert render.similarity_beyond_blank(np.full_like(target, 255), target, render.cw_ssim) == 0.0


@pytest.mark.parametrize("shape", [(11, 11), (11, 300), (31, 57), (1100, 40)])
def test_cw_ssim_takes_images_of_any_size(shape):
    image = np.random.default_rng(5).integers(0, 256, (*shape, 3), dtype=np.uint8)
    assert render.cw_ssim(image, image) == pytest.approx(1.0)
    assert render.cw_ssim(np.full_like(image, 255), image) < 0.3


def test_a_table_is_drawn_as_cells_in_their_places():
    """The frame of each cell lies where a grid of equal columns puts it; spans cover what is below and beside."""
    rows = r"\multirow{2}{*}{A} & \multicolumn{2}{c}{BB} \\ & C & D \\ E & F & G"
    page = render._draw_table(rf"\begin{{tabular}}{{lcc}} {rows} \end{{tabular}}")
    width, height = 6 * (2 + 2), 16  # two letters and a margin to both sides; one row
    assert page.shape == (3 * height + 1, 3 * width + 1, 3)
    black = (page == 0).all(axis=-1)
    for column in range(3):
        for row in range(3):
            top = black[row * height, column * width + 1 : (column + 1) * width].all()
            left = black[row * height + 1 : (row + 1) * height, column * width].all()
            assert top == (row != 1 or column != 0), (row, column)  # A goes on below
            assert left == (row != 0 or column != 2), (row, column)  # BB goes on to the right
    inner = black[1 : 2 * height, 1:width]
    assert inner[:height].any() and not inner[height:].any()  # the letter is at the top of its cell


def test_tables_that_are_too_large_are_not_drawn():
    rows = r"A & B \\ " * 4000
    wide = " & ".join(["x" * 50] * 300)
    for body in (rows * 20, wide + r" \\ " + rows):
        with pytest.raises(DrawingError, match="too many cells|would have 75601 x 64017 pixels"):
            render._draw_table(rf"\begin{{tabular}}{{l}} {body} \end{{tabular}}")
