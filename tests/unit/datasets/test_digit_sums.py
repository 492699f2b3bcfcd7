"""Sums of handwritten digits, and demonstrations that look twice."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType
from mmrl_datasets.generators.digit_sums import sums

ROOT = Path(__file__).parents[3]
GRAMMAR = ResponseFormat(thinking="optional", stop_at_answer=True)
WORDS = "\n\nWait, let me check."


def test_the_target_is_the_sum_of_the_digits(place):
    for sample in sums(place, split="train", size=20, length=3, rethink_prob=0.5):
        assert sample.target.value == sum(int(thing["name"]) for thing in sample.meta["things"])
        assert len(sample.meta["things"]) == 3


def test_a_second_answer_is_right_and_spells_out_the_digits(place):
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


def test_images_and_questions_do_not_depend_on_the_demonstration(place):
    def asked(**options):
        return [(s.id, s.parts, s.target) for s in sums(place, split="test", size=6, seed=1, **options)]

    assert asked(rethink_prob=1.0, first_wrong_prob=1.0, repeat_prob=0.5, rethink_text=" No.") == asked()
    assert asked() == [(s.id, s.parts, s.target) for s in islice(sums(place, split="test", size=None, seed=1), 6)]
