"""Charts and videos: values read from pixels, and shapes tracked in decoded frames, equal the target."""

import ctypes
import io
import itertools
import sys

import av
import numpy as np
import pytest
from generated import is_uniform, pixels, right_option
from PIL import Image, ImageDraw, ImageFont
from skimage.morphology import erosion

from mmrl.config.schema import MediaLimitsConfig, VideoConfig
from mmrl.media.cache import MediaCache
from mmrl.media.video import FrameSampling
from mmrl.types import MediaPolicy, VideoRef
from mmrl_datasets.generators import charts, shape_videos
from mmrl_datasets.generators.drawing import COLOURS, SHAPE_COLOURS
from mmrl_datasets.media_files import RenderedVideo, encode_mp4

STEP = 5  # the charts' default; a labelled line is at every second one
M_PERTURB = -6  # of malloc.h


# Charts


def rows_of(image, colour, width):
    """Rows in which a colour fills more than `width` pixels."""
    return np.nonzero((image == colour).all(axis=-1).sum(axis=1) > width)[0]


def columns_of(mask):
    """Runs of columns in which a mask holds something, as first and last."""
    filled = np.nonzero(mask.any(axis=0))[0]
    return [(run[0], run[-1]) for run in np.split(filled, np.nonzero(np.diff(filled) > 1)[0] + 1)]


def height_to_value(image, row):
    """Convert a row to a value of the axis. The base line has most ink; labelled lines are 2 steps apart."""
    (base,) = rows_of(image, charts.CHART_INK, 60)
    lines = rows_of(image, charts.LINE_COLOR, 30)
    pitch = (base - lines[0]) / len(lines)
    return round((base - row) / pitch * 2) * STEP


def bars(image):
    mask = (image == charts.MARK_COLOR).all(axis=-1)
    return [((x1 + x2) / 2, height_to_value(image, np.nonzero(mask[:, x1])[0][0])) for x1, x2 in columns_of(mask)]


def points(image):
    """Squares of 5 x 5 pixels survive an erosion, lines do not."""
    mask = erosion((image == charts.MARK_COLOR).all(axis=-1), np.ones((5, 5)))
    return [(x, height_to_value(image, np.nonzero(mask[:, x])[0][0])) for x, _ in columns_of(mask)]


def slices(image):
    """Shares of the slices along a circle near the rim, clockwise from the top."""
    angles = np.linspace(0, 2 * np.pi, 7200, endpoint=False)
    centre = (image.shape[0] - 1) / 2
    x, y = (centre + 0.44 * image.shape[0] * np.array([np.sin(angles), -np.cos(angles)])).round().astype(int)
    nearest = np.abs(image[y, x][:, None] - np.array(charts.SLICE_COLORS)).sum(axis=-1).argmin(axis=1)
    return [round((nearest == i).mean() * 100 / STEP) * STEP for i in range(nearest.max() + 1)]


def label_is(image, centre, name):
    """Return whether the month's name is below the axis, in the middle of its column."""
    (base,) = rows_of(image, charts.CHART_INK, 60)
    sheet = Image.new("RGB", (image.shape[1], image.shape[0]), charts.CHART_BACKGROUND)
    font = ImageFont.load_default(size=charts.FONT_PX)
    ImageDraw.Draw(sheet).text((centre, base + 3), name, fill=charts.CHART_INK, font=font, anchor="mt")
    window = np.s_[base + 2 :, int(centre) - 10 : int(centre) + 11]
    return (np.asarray(sheet)[window] == image[window]).all()


def answer(sample, values):
    """Answer the question from the values of the months."""
    asked = [month for month in charts.MONTHS if month in sample.parts[-1].split("\n")[0]]
    match sample.task:
        case "chart_value":
            return values[asked[0]]
        case "chart_difference":
            return abs(values[asked[0]] - values[asked[1]])
        case "chart_largest":
            return max(values, key=values.get)
        case "chart_month":
            return next(month for month, value in values.items() if f" {value}?" in sample.parts[-1])


ANSWER_TYPES = {"value": "number", "difference": "number", "largest": "choice", "month": "text"}


@pytest.mark.parametrize("ask", ANSWER_TYPES)
@pytest.mark.parametrize(("chart", "read"), [("bar", bars), ("line", points)])
def test_values_read_off_the_axis_give_the_answer(chart, read, ask, context):
    for sample in charts.charts(context, split="train", size=25, chart=chart, ask=ask):
        image = pixels(sample.images[0])
        months = [entry["month"] for entry in sample.meta["values"]]
        numbers = [charts.MONTHS.index(month) for month in months]
        assert all((a + 1) % 12 == b for a, b in itertools.pairwise(numbers))
        found = read(image)
        assert len(found) == len(months) == 4
        assert all(label_is(image, centre, month) for (centre, _), month in zip(found, months, strict=True))
        values = dict(zip(months, [value for _, value in found], strict=True))
        assert sample.target.answer_type == ANSWER_TYPES[ask]
        assert (right_option(sample) if ask == "largest" else sample.target.value) == answer(sample, values)


@pytest.mark.parametrize("ask", ANSWER_TYPES)
def test_shares_of_a_pie_give_the_answer(ask, context):
    for sample in charts.charts(context, split="train", size=15, chart="pie", ask=ask, months=3):
        shares = slices(pixels(sample.images[0]))
        assert sum(shares) == 100
        values = dict(zip([entry["month"] for entry in sample.meta["values"]], shares, strict=True))
        assert (right_option(sample) if ask == "largest" else sample.target.value) == answer(sample, values)


def test_answers_of_charts_are_uniform(context):
    def targets(ask):
        return [s.target.value for s in charts.charts(context, split="train", size=250, ask=ask)]

    assert is_uniform(targets("value"), range(5, 51, 5))
    assert is_uniform(targets("difference"), range(5, 46, 5))
    assert is_uniform(targets("largest"), "ABCD")
    assert is_uniform(targets("month"), charts.MONTHS)


def test_the_smallest_step_that_is_let_through_can_be_seen(context):
    for sample in charts.charts(context, split="train", size=10, step=2, max_value=50, image_px=128):
        image = pixels(sample.images[0])
        (base,) = rows_of(image, charts.CHART_INK, 60)
        mask = (image == charts.MARK_COLOR).all(axis=-1)
        heights = [base - np.nonzero(mask[:, x1])[0][0] for x1, _ in columns_of(mask)]
        values = [entry["value"] for entry in sample.meta["values"]]
        assert np.argsort(heights).tolist() == np.argsort(values).tolist()
        assert all(abs(height - value * 104 / 50) <= 1 for height, value in zip(heights, values, strict=True))


# Videos


def frames_of(sample):
    (ref,) = sample.media
    assert isinstance(ref, VideoRef)
    with av.open(ref.path) as container:
        return [frame.to_ndarray(format="rgb24").astype(int) for frame in container.decode(video=0)]


def track(sample):
    """Centre of the asked colour in each frame; None where the shape is not visible."""
    colour = next(name for name in SHAPE_COLOURS if f" {name} " in sample.parts[-1])
    middles = []
    for frame in frames_of(sample):
        rows, columns = np.nonzero(np.abs(frame - COLOURS[colour]).sum(axis=-1) < 120)
        middles.append((columns.mean(), rows.mean()) if len(rows) > 15 else None)
    return middles


@pytest.mark.parametrize("diagonals", [False, True])
def test_the_shape_moves_the_way_it_is_said_to(diagonals, context):
    options = {"diagonals": diagonals, "background": 0.0, "distractors": 2}
    for sample in shape_videos.direction(context, split="train", size=24, **options):
        middles = np.array([middle for middle in track(sample) if middle is not None])  # others never cover it
        assert len(middles) == 8
        right, down = middles[-1] - middles[0]
        ways = [("left", -right), ("right", right), ("up", -down), ("down", down)]
        seen = sorted((way for way, far in ways if far > 7), key=["up", "down", "left", "right"].index)
        assert right_option(sample) == " and ".join(seen)


def test_the_shape_appears_as_often_as_it_is_said_to(context):
    counts = []
    for sample in shape_videos.appearance_count(context, split="train", size=45, background=0.0):
        visible = [middle is not None for middle in track(sample)]
        assert not visible[0]
        assert sum(b and not a for a, b in itertools.pairwise(visible)) == sample.target.value
        counts.append(sample.target.value)
    assert is_uniform(counts, (1, 2, 3))


@pytest.mark.parametrize("fps", [2, 4])
def test_the_shape_is_visible_when_it_is_said_to_be(fps, context):
    for sample in shape_videos.visible_span(context, split="train", size=20, background=0.0, fps=fps, image_px=50):
        visible = [i / fps for i, middle in enumerate(track(sample)) if middle is not None]
        assert sample.target.value == (visible[0], visible[-1] + 1 / fps)
        assert len(visible) / fps == visible[-1] + 1 / fps - visible[0]


def test_answers_of_videos_are_uniform(context):
    small = {"split": "train", "image_px": 32, "frames": 4, "distractors": 0}
    ways = list(shape_videos.direction(context, size=160, **small))
    assert is_uniform([sample.target.value for sample in ways], "ABCD")
    assert is_uniform([right_option(sample) for sample in ways], ("left", "right", "up", "down"))
    spans = [(a / 2, b / 2) for a, b in itertools.combinations(range(5), 2)]
    assert is_uniform([sample.target.value for sample in shape_videos.visible_span(context, size=200, **small)], spans)


@pytest.mark.parametrize(("frames", "fps", "side"), [(8, 2, 64), (16, 4, 96), (6, 3, 32), (12, 2, 48)])
def test_a_model_sees_every_frame_at_the_rate_of_the_video(frames, fps, side, context):
    (sample,) = shape_videos.visible_span(context, split="test", size=1, frames=frames, fps=fps, image_px=side)
    cache = MediaCache(MediaPolicy(roots=(context.work_dir,)), MediaLimitsConfig(), max_bytes=0)
    sampling = FrameSampling(video=VideoConfig(fps=fps, min_pixels=28 * 28, max_pixels=128 * 128), patch_size=14)
    plan = cache.read_video(sample.media[0], sampling).plan
    assert plan.indices == tuple(range(frames))
    assert (plan.fps, plan.total_frames, plan.original_size) == (fps, frames, (side, side))
    default = cache.get_frame_plan(sample.media[0], FrameSampling(video=VideoConfig(), patch_size=14))
    assert default.total_frames == frames
    assert fps != 2 or default.indices == tuple(range(frames)), "the default rate shows the whole video"


def test_frames_survive_encoding_and_bytes_are_the_same_again():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, size=(6, 8, 8, 3), dtype=np.uint8).repeat(8, axis=1).repeat(8, axis=2)
    film = RenderedVideo(frames=[Image.fromarray(block) for block in blocks], fps=2)
    content = encode_mp4(film)
    assert content == encode_mp4(film)
    with av.open(io.BytesIO(content)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    errors = np.abs(np.stack(decoded).astype(int) - blocks)
    assert len(decoded) == 6
    assert errors.mean() < 6


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is a function of glibc")
@pytest.mark.parametrize("side", [24, 32, 48, 64])
def test_bytes_of_a_video_do_not_depend_on_what_memory_held(side):
    still, flash = Image.new("RGB", (side, side), "grey"), Image.new("RGB", (side, side), "grey")
    flash.paste("red", (8, 8, 20, 20))
    film = RenderedVideo(frames=[still, still, flash, flash, still, still], fps=2)
    content = encode_mp4(film)
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_PERTURB, 256)  # each byte of memory is 255 when it is allocated, as if an earlier owner had left it so
    try:
        assert encode_mp4(film) == content
    finally:
        mallopt(M_PERTURB, 0)
