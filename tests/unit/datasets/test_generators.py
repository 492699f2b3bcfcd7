"""Generators: determinism, splits and options of all; targets of text, jigsaws and choices agree with pixels."""

import hashlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from generated import is_uniform, options_of, pixels, right_option
from PIL import Image, ImageDraw, ImageFont
from ruamel.yaml import YAML

from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.image import open_image
from mmrl.media.pixel_reader import PixelReader
from mmrl.types import AnswerType, DatasetContext, MediaPolicy, UserError
from mmrl.utils.plugins import load_plugin
from mmrl_datasets import save_png
from mmrl_datasets.choices import LETTERS
from mmrl_datasets.generators import charts, jigsaw, multiple_choice, printed_text, scenes, shape_videos
from mmrl_datasets.generators.digit_sums import sums
from mmrl_datasets.generators.drawing import COLOURS, PRINT_PAPER_GREY
from mmrl_datasets.generators.photos import SPLITS
from mmrl_datasets.generators.tiny_digits import corner_digits

ROOT = Path(__file__).parents[3]
GENERATORS = [
    *(scenes.counting, scenes.grounding, scenes.digits, printed_text.text, multiple_choice.shapes, sums, corner_digits),
    *(jigsaw.order, jigsaw.relation, charts.charts),
    *(shape_videos.direction, shape_videos.appearance_count, shape_videos.visible_span),
]


def load_generator(name, **options):
    """Load a generator as a config does, which checks its options."""
    return load_plugin(f"mmrl_datasets.generators.{name}", ROOT, options, role="data source", parameters=("context",))


def facts(sample):
    """Everything of a sample except the paths of its files."""
    texts = [part for part in sample.parts if isinstance(part, str)]
    return sample.id, texts, [ref.sha256 for ref in sample.media], sample.target, sample.response, sample.meta


# All of them


@pytest.mark.parametrize("size", [(1, 1), (48, 48), (73, 74), (74, 74), (200, 10)])
def test_a_saved_image_has_the_pixels_that_were_drawn(tmp_path, size):
    """74 x 74 pixels are the first that are compressed."""
    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    ref = save_png(Image.fromarray(noise), tmp_path, "a")
    opened = open_image(ref, (tmp_path.resolve(),), MediaLimitsConfig())
    assert np.array_equal(np.asarray(opened), noise)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_a_saved_image_keeps_its_transparency(tmp_path, mode):
    image = Image.new(mode, (8, 8), 0)
    if mode != "RGBA":
        image.info["transparency"] = 0 if mode == "L" else (0, 0, 0)
    opened = open_image(save_png(image, tmp_path, "a"), (tmp_path.resolve(),), MediaLimitsConfig())
    assert opened.getcolors() == [(64, (255, 255, 255))]


@pytest.mark.parametrize("generate", GENERATORS)
def test_samples_depend_on_seed_split_and_index_alone(generate, context, tmp_path):
    elsewhere = DatasetContext(work_dir=tmp_path / "elsewhere", base_dir=tmp_path, seed=5)
    many = [facts(sample) for sample in generate(context, split="train", size=6)]
    assert [facts(sample) for sample in generate(elsewhere, split="train", size=3, seed=0)] == many[:3]
    assert [facts(sample) for sample in itertools.islice(generate(context, split="train", size=None), 6)] == many
    assert [facts(sample)[2:] for sample in generate(elsewhere, split="train", size=3)] != [m[2:] for m in many[:3]]
    assert len({name for name, *_ in many}) == len({tuple(media) for _, _, media, *_ in many}) == 6


@pytest.mark.parametrize("generate", [printed_text.text, shape_videos.visible_span])
@pytest.mark.slow
def test_another_process_makes_the_same_bytes(generate, context):
    code = (
        "import pathlib; from mmrl.types import DatasetContext\n"
        f"from {generate.__module__} import {generate.__name__} as g\n"
        f"p = pathlib.Path({str(context.work_dir)!r}) / 'again'\n"
        "print(*[s.media[0].sha256 for s in g(DatasetContext(work_dir=p, base_dir=p, seed=0), split='test', size=2)])"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [sample.media[0].sha256 for sample in generate(context, split="test", size=2)] == again


@pytest.mark.parametrize("generate", GENERATORS)
def test_media_are_files_with_the_stated_digest_and_damaged_ones_are_written_again(generate, context):
    (sample,) = generate(context, split="validation", size=1)
    assert sample.id == f"{sample.task}/validation/000000"
    files = [Path(ref.path) for ref in sample.media]
    assert {file.parent for file in files} == {context.work_dir / f"{sample.task}-validation"}
    before = [(file.stat().st_mtime_ns, file.read_bytes()) for file in files]
    assert [hashlib.sha256(content).hexdigest() for _, content in before] == [ref.sha256 for ref in sample.media]
    assert list(generate(context, split="validation", size=1)) == [sample]
    assert [(file.stat().st_mtime_ns, file.read_bytes()) for file in files] == before, "intact files are left alone"
    files[0].write_bytes(b"damaged")
    assert list(generate(context, split="validation", size=1)) == [sample]
    assert [file.read_bytes() for file in files] == [content for _, content in before]
    assert set(files[0].parent.iterdir()) == set(files), "no partial file stays behind"


SHORT_VIDEO = {"image_px": 32, "frames": 4, "distractors": 0}


@pytest.mark.parametrize(
    ("generate", "options", "train_size"),
    [
        (scenes.counting, {}, 1500),
        (scenes.grounding, {"max_objects": 1}, 1500),
        (printed_text.text, {"min_length": 3, "length": 3}, 400),
        (multiple_choice.shapes, {"max_objects": 1}, 400),
        (charts.charts, {"months": 3, "max_value": 25}, 400),
        (shape_videos.direction, SHORT_VIDEO, 150),
        (shape_videos.appearance_count, SHORT_VIDEO | {"max_count": 1}, 150),
        (shape_videos.visible_span, SHORT_VIDEO, 150),
    ],
)
@pytest.mark.slow
def test_no_composition_is_in_two_splits(generate, options, train_size, context):
    def composition(sample):
        if generate is printed_text.text:
            return sample.target.value
        if "things" in sample.meta:
            return frozenset((thing["name"], tuple(thing["box"])) for thing in sample.meta["things"])
        return repr(sample.meta)

    seen = {
        split: {composition(sample) for sample in generate(context, split=split, size=size, **options)}
        for split, size in [("train", train_size), ("validation", train_size // 4), ("test", train_size // 4)]
    }
    assert all(len(compositions) > 10 for compositions in seen.values())
    for one, other in itertools.combinations(SPLITS, 2):
        assert not seen[one] & seen[other]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("scenes:counting", {"split": "dev"}, "'split' = 'dev'"),
        ("scenes:counting", {"size": 0}, "'size' = 0"),
        ("scenes:counting", {"background": float("nan")}, "'background' = nan"),
        ("scenes:counting", {"label_miss_prob": 1.5}, "'label_miss_prob' = 1.5"),
        ("scenes:counting", {"image_px": 10_001}, "'image_px' = 10001"),
        ("scenes:counting", {"image_px": 10_000}, "crops of 10000 pixels a side take photographs of .* more than"),
        ("scenes:counting", {"colours": ["red", "mauve"]}, "colour 'mauve' is unknown"),
        ("scenes:counting", {"colours": ["red"]}, "two or more"),
        ("scenes:counting", {"colours": ["red", "red", "blue"]}, "two or more"),
        ("scenes:grounding", {"image_px": 50}, "image_px=50"),
        ("scenes:grounding", {"max_objects": 7}, "max_objects=7 exceeds the 6 objects"),
        ("scenes:grounding", {"label_pad_px": -1}, "'label_pad_px' = -1"),
        ("scenes:digits", {"length": 1, "min_length": 2}, "length=1 must be at least 2"),
        ("scenes:digits", {"length": 5}, "image_px=48 must be at least 60"),
        ("digit_sums:sums", {"length": 5}, "image_px=48 must be at least 60"),
        ("tiny_digits:corner_digits", {"image_px": 90}, "image_px=90 must be at least 96"),
        ("printed_text:text", {"min_length": 1}, "'min_length' = 1"),
        ("printed_text:text", {"length": 5}, "image_px=48 must be at least 60"),
        ("printed_text:text", {"rotation": 90.0}, "'rotation' = 90.0"),
        ("printed_text:text", {"contrast": 0.0}, "'contrast' = 0.0"),
        ("multiple_choice:shapes", {"options": 5}, "'options' = 5"),
        ("multiple_choice:shapes", {"topics": ["weather"]}, "'topics' = .*'colour', 'place' or 'count'"),
        ("multiple_choice:shapes", {"topics": []}, "'topics' = "),
        ("jigsaw:order", {"rows": 1, "columns": 1}, "nothing to shuffle"),
        ("jigsaw:order", {"rows": 1}, "allow_identity: true"),
        ("jigsaw:order", {"margin_fraction": 0.5}, "'margin_fraction' = 0.5"),
        ("charts:charts", {"chart": "radar"}, "'chart' = 'radar'"),
        ("charts:charts", {"months": 5}, "months=5 must lie between 3 and 4"),
        ("charts:charts", {"max_value": 52}, "max_value=52 must be a multiple"),
        ("charts:charts", {"max_value": 15}, "6 of them or more"),
        ("charts:charts", {"step": 1}, "step=1 of max_value=50 is too small to see"),
        ("charts:charts", {"step": 1, "max_value": 10**15}, "step=1 of max_value=1000000000000000 is too small to see"),
        ("charts:charts", {"chart": "pie", "months": 5}, "a pie has no months=5"),
        ("charts:charts", {"chart": "pie", "step": 30}, "divides 100"),
        ("shape_videos:direction", {"image_px": 33}, "must be even"),
        ("shape_videos:direction", {"frames": 40}, "too many to move"),
        ("shape_videos:direction", {"distractors": 4}, "'distractors' = 4"),
        ("shape_videos:appearance_count", {"max_count": 5}, "frames=8 must be at least 10"),
        # Each of these is in its range, and together they would take hours or all memory.
        ("shape_videos:visible_span", {"image_px": 640, "frames": 10_000}, "frames=10000 and image_px=640 take"),
        ("jigsaw:order", {"rows": 10, "columns": 11}, "rows=10 and columns=11 take 110 tiles together, more than 100"),
        ("jigsaw:relation", {"rows": 1, "columns": 50, "tile_px": 500}, "rows=1 and columns=50 and tile_px=500 take"),
        ("printed_text:text", {"image_px": 1000, "length": 80}, "length=80 and image_px=1000 take 80,000,000 pixels"),
    ],
)
def test_impossible_options_are_refused_before_the_first_sample(name, options, message, context):
    with pytest.raises(UserError, match=message):
        load_generator(name, **({"split": "train", "size": 1} | options))(context)


@pytest.mark.parametrize(
    "card", ["printed_text", "jigsaw", "multiple_choice", "charts", "shape_videos", "digit_sums", "tiny_digits"]
)
def test_the_yaml_of_the_card_makes_samples(card, context):
    text = (ROOT / "datasets" / "cards" / f"{card}.md").read_text(encoding="utf-8")
    source = YAML(typ="safe").load(text.split("```yaml\n")[1].split("```")[0])
    name = source["fn"].removeprefix("mmrl_datasets.generators.")
    assert len(list(load_generator(name, **source["args"] | {"size": 2})(context))) == 2


# Printed text


def rendering(text, weight):
    """Draw a text large and crop it to its ink."""
    font = ImageFont.load_default(size=32)
    sheet = Image.new("L", (40 * len(text), 60))
    ImageDraw.Draw(sheet).text((5, 5), text, fill=255, font=font, stroke_width=weight, stroke_fill=255)
    return sheet.crop(sheet.getbbox())


def test_the_target_is_the_text_in_the_image(context):
    texts = [f"{number:02d}" for number in range(100)]
    candidates = [(text, rendering(text, weight)) for text in texts for weight in (0, 1, 2)]
    right = 0
    for sample in printed_text.text(context, split="train", size=40, characters="digits", length=2, background=0.0):
        x1, y1, x2, y2 = sample.meta["box"]
        ink = 1 - pixels(sample.images[0])[y1:y2, x1:x2, 0] / PRINT_PAPER_GREY
        stretched = [np.asarray(drawn.resize(ink.shape[::-1], Image.Resampling.BOX)) / 255 for _, drawn in candidates]
        errors = [np.abs(drawn * ink.max() - ink).sum() for drawn in stretched]
        right += candidates[int(np.argmin(errors))][0] == sample.target.value
    assert right >= 38


@pytest.mark.parametrize("characters", ["words", "digits", "mixed"])
def test_lengths_are_uniform_and_characters_unambiguous(characters, context):
    samples = printed_text.text(context, split="train", size=150, characters=characters, min_length=2)
    texts = [sample.target.value for sample in samples]
    assert is_uniform([len(text) for text in texts], [2, 3, 4])
    assert not set("Il1O0o") & set("".join(texts)) or characters != "mixed"
    assert all(text.isdigit() for text in texts) == (characters == "digits")


def test_ink_stays_in_its_box_whatever_the_rotation(context):
    for sample in printed_text.text(context, split="train", size=30, rotation=30.0, image_px=64, background=0.0):
        rows, columns = np.nonzero((pixels(sample.images[0]) != PRINT_PAPER_GREY).any(axis=-1))
        x1, y1, x2, y2 = sample.meta["box"]
        assert x1 <= columns.min() <= columns.max() < x2 <= 64
        assert y1 <= rows.min() <= rows.max() < y2 <= 64


def test_contrast_and_noise_have_the_stated_strength(context):
    options = {"split": "train", "size": 20, "background": 0.0, "length": 3}
    plain, faint, noisy = (
        [pixels(s.images[0]) for s in printed_text.text(context, **options, **more)]
        for more in ({}, {"contrast": 0.2}, {"noise": 0.25})
    )
    for full, weak, grainy in zip(plain, faint, noisy, strict=True):
        assert np.abs((PRINT_PAPER_GREY - weak) - 0.2 * (PRINT_PAPER_GREY - full)).max() <= 2
        assert 12 < (grainy - full)[full == PRINT_PAPER_GREY].std() < 18  # 0.25 of 64, less what is clipped at white


# Multiple choice


def seen(sample):
    """Find colour, form and quarter of every shape from the pixels."""
    image, found = pixels(sample.images[0]), []
    for corner, (right, down) in multiple_choice.CORNERS.items():
        quarter = image[24 * down : 24 * down + 24, 24 * right : 24 * right + 24]
        for name, colour in COLOURS.items():
            rows, columns = np.nonzero((quarter == colour).all(axis=-1))
            if len(rows) > 20:
                fill = len(rows) / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))
                found.append((name, "square" if fill > 0.95 else "disc" if fill > 0.62 else "triangle", corner))
    return found


def truths(question, things):
    """Every right answer to a question about these things."""
    if question.startswith("How many"):
        return [str(len(things))]
    if question.startswith("What colour"):
        return [colour for colour, form, _ in things if f" {form}?" in question]
    return [corner for colour, _, corner in things if f" {colour} " in question]


@pytest.mark.parametrize("none_of_these", [False, True])
def test_the_letter_is_the_one_right_option(none_of_these, context):
    letters = []
    for sample in multiple_choice.shapes(context, split="train", size=240, background=0.0, none_of_these=none_of_these):
        (right,) = truths(sample.parts[-1], seen(sample))
        options = options_of(sample)
        assert list(options) == list("ABCD")
        assert len(set(options.values())) == 4
        assert right_option(sample) == (right if right in options.values() else multiple_choice.NONE_OF_THESE)
        letters.append(sample.target.value)
    assert is_uniform(letters, "ABCD")


def test_wrong_options_come_from_the_scene(context):
    plausible = 0
    for sample in multiple_choice.shapes(context, split="train", size=60, topics=["colour"], options=2, max_objects=4):
        (wrong,) = [text for letter, text in options_of(sample).items() if letter != sample.target.value]
        colours = [thing["name"].split()[0] for thing in sample.meta["things"]]
        plausible += wrong in colours
        assert wrong in colours or len(colours) == 1
    assert plausible > 30


# Jigsaws


def assembled(tiles, rows, columns):
    return np.vstack([np.hstack(tiles[row * columns : (row + 1) * columns]) for row in range(rows)])


def tiles_of(image, rows, columns):
    return [tile for strip in np.vsplit(image, rows) for tile in np.hsplit(strip, columns)]


def seams(tiles, rows, columns):
    """Sum of the grey-level steps across all seams of an arrangement of tiles."""
    image, side = assembled(tiles, rows, columns), len(tiles[0])
    across = np.abs(np.diff(image, axis=1))[:, side - 1 :: side].sum()
    return across + np.abs(np.diff(image, axis=0))[side - 1 :: side].sum()


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (1, 3), (3, 1)])
def test_the_target_order_restores_the_photograph(rows, columns, context):
    mended, count = 0, rows * columns
    for sample in jigsaw.order(context, split="train", size=50, rows=rows, columns=columns):
        assert sample.target.answer_type is AnswerType.PERMUTATION
        assert sorted(sample.target.value) == list(range(1, count + 1))
        tiles = tiles_of(pixels(sample.images[0]), rows, columns)
        best = min(itertools.permutations(range(count)), key=lambda at: seams([tiles[i] for i in at], rows, columns))
        mended += tuple(i + 1 for i in best) == sample.target.value
    assert mended >= 43


def test_tiles_apart_are_the_same_tiles_in_the_same_order(context):
    options = {"split": "test", "size": 8, "rows": 2, "columns": 3}
    separate = jigsaw.order(context, **options, separate_images=True)
    for one, many in zip(jigsaw.order(context, **options), separate, strict=True):
        assert one.target == many.target
        assert len(many.images) == 6
        tiles = [pixels(ref) for ref in many.images]
        assert (assembled(tiles, 2, 3) == pixels(one.images[0])).all()
        assert tiles[0].shape == (28, 28, 3)


def test_places_are_the_inverse_of_tiles(context):
    options = {"split": "train", "size": 30, "rows": 2, "columns": 3}
    inverse = jigsaw.order(context, **options, answer="places")
    for tiles, places in zip(jigsaw.order(context, **options), inverse, strict=True):
        assert tiles.images[0].sha256 == places.images[0].sha256
        assert all(places.target.value[tile - 1] == spot for spot, tile in enumerate(tiles.target.value, start=1))


def test_permutations_are_uniform_and_the_identity_optional(context):
    every = list(itertools.permutations((1, 2, 3)))
    for identity, possible in [(True, every), (False, every[1:])]:
        options = {"rows": 1, "columns": 3, "tile_px": 8, "allow_identity": identity}
        assert is_uniform([s.target.value for s in jigsaw.order(context, split="train", size=240, **options)], possible)


def test_tiles_look_different_and_masks_hide_their_seams(context):
    for sample in jigsaw.order(context, split="train", size=20, margin_fraction=0.25, tile_px=16):
        tiles = tiles_of(pixels(sample.images[0]), 2, 2)
        assert all(np.abs(a - b).mean() >= jigsaw.MIN_DIFFERENCE for a, b in itertools.combinations(tiles, 2))
        for tile in tiles:
            rim = np.ones((16, 16), bool)
            rim[4:12, 4:12] = False
            assert (tile[rim] == jigsaw.BLANK_LEVEL).all()
            assert np.ptp(tile[~rim]) > 0


@pytest.mark.parametrize(("rows", "columns", "ways"), [(1, 2, 2), (3, 1, 2), (2, 2, 8)])
def test_relations_and_letters_are_uniform(rows, columns, ways, context):
    samples = list(jigsaw.relation(context, split="train", size=200, rows=rows, columns=columns, tile_px=8))
    assert is_uniform([sample.target.value for sample in samples], LETTERS[:ways])
    assert is_uniform([right_option(sample) for sample in samples], set(options_of(samples[0]).values()))
    assert all(len(options_of(sample)) == ways for sample in samples)


def test_the_target_relation_is_where_the_seam_fits(context):
    straight = fits = 0
    for sample in jigsaw.relation(context, split="train", size=120):
        first, second = (pixels(ref) for ref in sample.images)
        seams_of = {"to the right": first[:, -1] - second[:, 0], "to the left": second[:, -1] - first[:, 0]}
        seams_of |= {"below": first[-1] - second[0], "above": second[-1] - first[0]}
        breaks = {way: np.abs(steps).sum() for way, steps in seams_of.items()}
        if right_option(sample) in breaks:
            straight += 1
            fits += min(breaks, key=breaks.get) == right_option(sample)
    assert straight > 40
    assert fits >= 0.8 * straight


@pytest.fixture
def pictures(tmp_path):
    """A context that opens pictures, and a folder of two, whose pixels say where they are."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    y, x = np.mgrid[:61, :92].astype(np.uint8)
    for blue, name in ((0, "a.jpg"), (255, "b.PNG")):
        # Written without loss, whatever the name says: readers look at the bytes.
        Image.fromarray(np.dstack([x, y, np.full_like(x, blue)])).save(folder / name, format="PNG")
    (folder / "readme.txt").write_text("not a picture")
    policy = MediaPolicy(roots=(tmp_path.resolve(),))
    return DatasetContext(
        work_dir=tmp_path / "work", base_dir=tmp_path, seed=0, media_policy=policy, media_opener=PixelReader(policy)
    )


def describe(first, second):
    """Return the words of Jigsaw-R1 for the direction of one place, (x, y) of its corner, from another."""
    side = "left" if first[0] < second[0] else "right"
    height = "upper" if first[1] < second[1] else "lower"
    if first[1] == second[1]:
        return f"directly to the {side} of"
    if first[0] == second[0]:
        return "directly above" if height == "upper" else "directly below"
    return f"on the {height} {side} of"


@pytest.mark.parametrize(("rows", "columns", "ways"), [(3, 1, 2), (4, 1, 2), (2, 2, 8), (3, 2, 8)])
def test_pairs_say_where_tiles_lie_in_the_picture(rows, columns, ways, pictures):
    samples = list(jigsaw.pair(pictures, size=60, pictures="pictures", rows=rows, columns=columns))
    shapes = {f"{rows}x{columns}", f"{columns}x{rows}"}
    assert {sample.meta["grid"] for sample in samples} == shapes
    assert {sample.id.partition("/")[0] for sample in samples} == {f"pair_{rows}x{columns}"}
    blues = set()
    for sample in samples:
        down, across = map(int, sample.meta["grid"].split("x"))
        shown = pixels(sample.images[0])
        height, width = 61 // down, 92 // across
        assert shown.shape == (down * height, across * width, 3)
        corners = []
        for top, left in itertools.product(range(0, shown.shape[0], height), range(0, shown.shape[1], width)):
            x, y, blue = map(int, shown[top, left])
            tile = shown[top : top + height, left : left + width]
            assert (tile[..., 0] == np.arange(x, x + width)).all()
            assert (tile[..., 1] == np.arange(y, y + height)[:, None]).all()
            corners.append((x, y))
            blues.add(blue)
        places = itertools.product(range(0, across * width, width), range(0, down * height, height))
        assert sorted(corners) == sorted(places)
        options = dict(re.findall(r"^([A-H])\. (.*)$", sample.parts[1], re.MULTILINE))
        assert len(set(options.values())) == ways and f"following {ways} choices" in sample.parts[1]
        first, words, second = re.fullmatch(r"(\d+) is (.*) (\d+)", options[sample.target.value]).groups()
        assert f"positions {first} and {second}," in sample.parts[1]
        assert words == describe(corners[int(first) - 1], corners[int(second) - 1])
    assert blues == {0, 255}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows": 1, "columns": 1}, "nothing to shuffle"),
        ({"rows": 10, "columns": 11}, "110 tiles"),
        ({"pictures": "work"}, "holds no .jpg or .png"),
        ({"rows": 100}, "too small to be cut into"),
    ],
)
def test_pairs_that_cannot_be_made_are_refused(options, words, pictures):
    with pytest.raises(UserError, match=words):
        list(jigsaw.pair(pictures, **{"size": 4, "pictures": "pictures", **options}))


def test_a_picture_outside_the_roots_or_damaged_is_refused(pictures, tmp_path):
    with pytest.raises(UserError, match="cannot be opened here"):
        next(jigsaw.pair(pictures._replace(media_opener=None), size=1, pictures="pictures"))
    elsewhere = PixelReader(MediaPolicy(roots=(tmp_path / "work",)))
    with pytest.raises(UserError, match="outside data.media_roots"):
        next(jigsaw.pair(pictures._replace(media_opener=elsewhere), size=1, pictures="pictures"))
    for path in (tmp_path / "pictures").iterdir():
        path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UserError, match=r"pictures/[ab]"):
        next(jigsaw.pair(pictures, size=1, pictures="pictures"))
