"""Sums of handwritten digits, and demonstrations that look twice."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, DatasetContext, UserError
from mmrl_datasets.generators.digit_sums import sums

ROOT = Path(__file__).parents[3]
GRAMMAR = ResponseFormat(thinking="optional", stop_at_answer=True)
WORDS = "\n\nWait, let me check."


@pytest.fixture
def place(tmp_path):
    return DatasetContext(work_dir=tmp_path / "work", base_dir=tmp_path, seed=0)


def test_the_answer_is_the_sum_of_what_is_written(place):
    for sample in sums(place, split="train", size=20, length=3, rethink_prob=0.5):
        assert sample.target.value == sum(int(thing["name"]) for thing in sample.meta["things"])
        assert len(sample.meta["things"]) == 3


def test_a_second_answer_spells_the_digits_and_is_right_whatever_came_first(place):
    seen = Counter()
    for sample in sums(place, split="train", size=200, rethink_prob=0.5):
        first, words, second = sample.response.partition(WORDS)
        first_response = GRAMMAR.parse(first, AnswerType.NUMBER)
        assert not first_response.problems
        if not words:
            seen["once"] += 1
            assert first_response.value == sample.target.value
            continue
        seen["right first" if first_response.value == sample.target.value else "wrong first"] += 1
        answer = GRAMMAR.parse_continuation(first, words + second, AnswerType.NUMBER)
        assert (answer.value, answer.problems) == (sample.target.value, ())
        assert answer.thinking == " + ".join(thing["name"] for thing in sample.meta["things"])
    assert abs(seen["once"] - 100) < 29  # four standard deviations
    assert abs(seen["right first"] - seen["wrong first"]) < 40


def test_an_annotator_may_repeat_the_first_answer(place):
    seen = Counter()
    for sample in sums(place, split="train", size=200, rethink_prob=1.0, repeat_prob=0.6):
        first, _, second = sample.response.partition(WORDS)
        looks = "<think>" in second
        assert looks or second == first
        assert sample.meta["looks"] == looks
        seen[looks] += 1
    assert abs(seen[True] - 80) < 28  # four standard deviations


def test_pictures_and_questions_do_not_depend_on_who_answers(place):
    def asked(**options):
        return [(s.id, s.parts, s.target) for s in sums(place, split="test", size=6, seed=1, **options)]

    assert asked(rethink_prob=1.0, first_wrong_prob=1.0, repeat_prob=0.5, rethink_text=" No.") == asked()
    assert asked() == [(s.id, s.parts, s.target) for s in islice(sums(place, split="test", size=None, seed=1), 6)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rethink_prob": 1.5}, "rethink_prob=1.5 must lie between 0 and 1"),
        ({"first_wrong_prob": -0.1}, "first_wrong_prob=-0.1 must lie between"),
        ({"repeat_prob": 2.0}, "repeat_prob=2.0 must lie between"),
        ({"length": 5}, "image_px=48 must be at least 60"),
        ({"split": "dev"}, "dev"),
    ],
)
def test_impossible_options_are_refused(options, message, place):
    with pytest.raises(UserError, match=message):
        next(sums(place, **{"split": "train", "size": 1, **options}))


def test_the_yaml_of_the_card_makes_samples(place):
    card = (ROOT / "datasets/cards/digit_sums.md").read_text(encoding="utf-8")
    args = YAML(typ="safe").load(card.split("```yaml\n")[1].split("```")[0])["args"]
    assert len(list(sums(place, **args | {"size": 2}))) == 2
