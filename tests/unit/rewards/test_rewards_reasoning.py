"""Rewards on the thinking: boxes and reflection against published numbers, and time on long thoughts."""

import random

import pytest
from waiting import bounded

from mmrl.types import CoordinateSystem
from mmrl_rewards import geometry, reasoning
from mmrl_rewards.cases import Case
from mmrl_rewards.contract import bind


def scored(fn, thought, answer, kind="number", value=2, args=None, **case):
    row = {"answer_type": kind, "value": value, "image": [200, 100], **case.pop("sample", {})}
    text = f"<think>{thought}</think><answer>{answer}</answer>"
    built = Case.model_validate(
        {"fn": "", "sample": row, "response": text, "expected": 0, "source": "", **case}
    ).build()
    return bind(fn, args or {})(*built)


@pytest.mark.parametrize(("waits", "total"), [(0, 1.0), (2, 1.1), (3, 0.4), (5, 0.0)])
def test_reflection_gives_the_published_totals_of_a_right_response(waits, total):
    thought = " ".join(f"Wait, is number {i} really one of them?" for i in range(waits))
    assert 1.0 + 0.1 * scored(reasoning.reflection, thought, "2").value == pytest.approx(total)


def test_more_reflections_never_earn_more_than_the_first():
    said = [f"Wait, is number {i} really one of them?" for i in range(12)]
    earned = [scored(reasoning.reflection, " ".join(said[:n]), "2").value for n in range(1, 13)]
    assert earned == sorted(earned, reverse=True)
    assert earned[-1] == -10.0


def test_boxes_equal_counting_by_hand():
    rng = random.Random(0)
    for _ in range(200):
        boxes = [tuple(rng.randint(-5, 210) for _ in range(4)) for _ in range(rng.randint(1, 6))]
        boxes += rng.sample(boxes, k=rng.randint(0, 1))
        given = rng.randint(1, 6)
        valid = {(x1, y1, x2, y2) for x1, y1, x2, y2 in boxes if 0 <= x1 < x2 <= 200 and 0 <= y1 < y2 <= 100}
        valid = {box for box in valid if geometry.area(box) <= 0.9 * 20_000}
        expected = len(valid) / len(boxes) * (given == len(valid))
        got = scored(reasoning.boxes, " and ".join(map(str, map(list, boxes))), str(given))
        assert got.value == pytest.approx(expected)


def test_a_box_means_the_same_in_every_frame():
    for frame, numbers in (
        (CoordinateSystem.PX_ORIGINAL, "20, 10, 100, 50"),
        (CoordinateSystem.NORM_1000, "100, 100, 500, 500"),
    ):
        term = scored(
            reasoning.boxes,
            f"there [{numbers}]",
            f"[{numbers}]",
            kind="box",
            value=[20, 10, 100, 50],
            coordinates=frame,
            sample={"coordinates": "px_original", "resized": [56, 28]},
        )
        assert term.value == pytest.approx(1.0)


@pytest.mark.parametrize("fn", [reasoning.boxes, reasoning.consistency, reasoning.reflection])
@pytest.mark.parametrize("part", ["[1, 2, 3, ", "[1,1,1,1]", "wait ", "9", "( A ", "\ud800\x00", "[" + " " * 50])
def test_a_thought_of_ten_million_characters_is_read(fn, part):
    with bounded():
        scored(fn, part * (10_000_000 // len(part)), "2")
