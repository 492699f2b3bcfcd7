"""Digit sums and tiny digits: their targets, and the demonstrations of their simulated annotators."""

from collections import Counter

import pytest

from mmrl.answer import ResponseFormat, parse_answer_value
from mmrl.answer.tool_calls import find_final_call, split_turns
from mmrl.types import AnswerType
from mmrl_datasets.generators.digit_sums import sums
from mmrl_datasets.generators.tiny_digits import CORNERS, corner_digits

SUM_FORMAT = ResponseFormat(thinking="optional", stop_at_answer=True)
RETHINK_TEXT = "\n\nWait, let me check."


def questions(samples):
    return [(sample.id, sample.parts, sample.target) for sample in samples]


def test_a_second_answer_is_right_and_spells_out_the_digits(context):
    counts = Counter()
    for sample in sums(context, split="train", size=200, length=3, rethink_prob=0.5):
        digits = [digit["name"] for digit in sample.meta["things"]]
        assert sample.target.value == sum(map(int, digits))
        first, rethinks, second = sample.response.partition(RETHINK_TEXT)
        first_answer = SUM_FORMAT.parse(first, AnswerType.NUMBER)
        assert not first_answer.problems
        if not rethinks:
            counts["once"] += 1
            assert first_answer.value == sample.target.value
            continue
        counts["right first" if first_answer.value == sample.target.value else "wrong first"] += 1
        answer = SUM_FORMAT.parse_continuation(first, rethinks + second, AnswerType.NUMBER)
        assert (answer.value, answer.problems) == (sample.target.value, ())
        assert answer.thinking == " + ".join(digits)
    assert abs(counts["once"] - 100) < 29  # four standard deviations
    assert abs(counts["right first"] - counts["wrong first"]) < 40


def test_repeat_prob_makes_the_second_answer_repeat_the_first_that_often(context):
    counts = Counter()
    for sample in sums(context, split="train", size=200, rethink_prob=1.0, repeat_prob=0.6):
        first, _, second = sample.response.partition(RETHINK_TEXT)
        looks = "<think>" in second
        assert looks or second == first
        assert sample.meta["looks"] == looks
        counts[looks] += 1
    assert abs(counts[True] - 80) < 28  # four standard deviations


def test_images_and_questions_do_not_depend_on_the_demonstration(context):
    options = {"split": "test", "size": 6, "seed": 1}
    rethinking = {"rethink_prob": 1.0, "first_wrong_prob": 1.0, "repeat_prob": 0.5, "rethink_text": " No."}
    assert questions(sums(context, **options, **rethinking)) == questions(sums(context, **options))
    corners = corner_digits(context, **options, mislabel_prob=1.0, resized_px=96)
    assert questions(corners) == questions(corner_digits(context, **options))


def test_the_target_is_the_digit_in_the_asked_corner(context):
    for sample in corner_digits(context, split="train", size=20):
        asked = CORNERS.index(sample.meta["asked"])
        x1, y1, x2, y2 = sample.meta["things"][asked]["box"]
        assert (x1 + x2 > 192, y1 + y2 > 192) == ("right" in CORNERS[asked], "bottom" in CORNERS[asked])
        assert sample.parts[1] == f"Which digit is at the {CORNERS[asked]}?"
        assert sample.target.value == int(sample.meta["things"][asked]["name"])


@pytest.mark.parametrize(("image_px", "digit_px"), [(192, 12), (240, 9), (96, 12)])
def test_a_demonstration_zooms_to_the_digit_that_it_reads(context, image_px, digit_px):
    """The whole digit lies within the zoomed box, measured on the image as the model sees it."""
    options = {"image_px": image_px, "digit_px": digit_px, "mislabel_prob": 1.0}
    for sample in corner_digits(context, split="train", size=20, **options):
        (_, calling), (_, answer) = split_turns(sample.response)
        call = parse_answer_value(AnswerType.TOOL_CALL, find_final_call(calling))
        zoomed = sample.meta["things"][CORNERS.index(sample.meta["looked"])]
        box = [side * image_px / 48 for side in call.arguments["box"]]
        slack = image_px / 48 / 2  # boxes are rounded
        assert all(box[i] - slack <= zoomed["box"][i] and zoomed["box"][i + 2] <= box[i + 2] + slack for i in (0, 1))
        assert call.name == "zoom"
        assert ResponseFormat().parse(answer, AnswerType.NUMBER).value == int(zoomed["name"])


@pytest.mark.parametrize("mislabel_prob", [0.0, 0.6])
def test_mislabel_prob_swaps_left_and_right_that_often(context, mislabel_prob):
    num_right = 0
    for sample in corner_digits(context, split="train", size=200, mislabel_prob=mislabel_prob):
        asked, zoomed = sample.meta["asked"], sample.meta["looked"]
        assert asked.split()[0] == zoomed.split()[0]  # top or bottom
        num_right += asked == zoomed
    assert abs(num_right - 200 * (1 - mislabel_prob)) <= 28 * (mislabel_prob > 0)  # four standard deviations
