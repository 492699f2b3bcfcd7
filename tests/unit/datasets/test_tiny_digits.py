"""Digits too small to be read, and demonstrations that look at a part of the picture."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from mmrl.answer import ResponseFormat, parse_answer_value
from mmrl.answer.tool_calls import find_final_call, split_turns
from mmrl.types import AnswerType
from mmrl_datasets.generators.tiny_digits import CORNERS, corner_digits

ROOT = Path(__file__).parents[3]


def test_the_target_is_the_digit_in_the_asked_corner(place):
    for sample in corner_digits(place, split="train", size=20):
        asked = CORNERS.index(sample.meta["asked"])
        x1, y1, x2, y2 = sample.meta["things"][asked]["box"]
        assert (x1 + x2 > 192, y1 + y2 > 192) == ("right" in CORNERS[asked], "bottom" in CORNERS[asked])
        assert sample.parts[1] == f"Which digit is at the {CORNERS[asked]}?"
        assert sample.target.value == int(sample.meta["things"][asked]["name"])


@pytest.mark.parametrize(("image_px", "digit_px"), [(192, 12), (240, 9), (96, 12)])
def test_a_demonstration_zooms_to_the_digit_it_reads(place, image_px, digit_px):
    """The whole digit lies within the box that is looked at, measured on the picture as the model sees it."""
    for sample in corner_digits(place, split="train", size=20, image_px=image_px, digit_px=digit_px, mislabel_prob=1.0):
        (_, said), (_, answer) = split_turns(sample.response)
        call = parse_answer_value(AnswerType.TOOL_CALL, find_final_call(said))
        looked = sample.meta["things"][CORNERS.index(sample.meta["looked"])]
        box = [side * image_px / 48 for side in call.arguments["box"]]
        slack = image_px / 48 / 2  # boxes are rounded
        assert all(box[i] - slack <= looked["box"][i] and looked["box"][i + 2] <= box[i + 2] + slack for i in (0, 1))
        assert call.name == "zoom"
        assert ResponseFormat().parse(answer, AnswerType.NUMBER).value == int(looked["name"])


def test_mislabel_prob_swaps_left_and_right_that_often(place):
    def seen(mislabel_prob):
        made = list(corner_digits(place, split="train", size=200, mislabel_prob=mislabel_prob))
        for sample in made:
            asked, looked = (sample.meta[which].split() for which in ("asked", "looked"))
            assert asked[0] == looked[0]  # top or bottom
        return Counter(sample.meta["asked"] == sample.meta["looked"] for sample in made)

    assert seen(0.0) == {True: 200}
    assert abs(seen(0.6)[True] - 200 * 0.4) < 28  # four standard deviations


def test_images_and_questions_do_not_depend_on_the_demonstration(place):
    def asked(size=4, **options):
        return [
            (s.id, s.parts, s.target)
            for s in islice(corner_digits(place, split="test", size=size, seed=1, **options), 4)
        ]

    assert asked(mislabel_prob=1.0, resized_px=96) == asked() == asked(size=None)
