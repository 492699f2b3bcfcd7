"""Segments of a response, and a reward model that is asked about each."""

import math

import pytest
from serving import reply, served
from waiting import bounded

from mmrl.types import Unscorable
from mmrl_rewards import segments
from mmrl_rewards.cases import Case
from mmrl_rewards.contract import bind

SERVICE = {"retries": 0, "backoff_s": 0.01, "timeout_s": 60.0}


def scored(url, answer, **options):
    sample = {"answer_type": "text", "value": "a kite", "question": "What is it?"}
    case = {"fn": "", "sample": sample, "response": f"<answer>{answer}</answer>", "expected": 0, "source": ""}
    reward = bind(segments.scored, {"scorer": {"url": url, **SERVICE}, **options})
    return reward(*Case.model_validate(case).build())


@pytest.mark.parametrize(
    ("text", "split", "expected"),
    [
        ("A dog. A cat! A bird?", "sentence", ["A dog.", "A cat!", "A bird?"]),
        ('It says "stop." It is 3.5 m high', "sentence", ['It says "stop."', "It is 3.5 m high"]),
        ("A dog, a cat; a bird: 1,000 of them.", "clause", ["A dog,", "a cat;", "a bird:", "1,000 of them."]),
        ("A dog, a cat; a bird.", "sentence", ["A dog, a cat; a bird."]),
        ("- one\n- two\n\n- One", "sentence", ["- one", "- two"]),
        ("猫在左边。狗在右边！", "sentence", ["猫在左边。", "狗在右边！"]),
        ("猫，狗。", "clause", ["猫，", "狗。"]),
        ("... \n!", "sentence", []),
    ],
)
def test_a_text_is_split_at_the_ends_of_sentences_or_clauses(text, split, expected):
    assert segments.split_segments(text, split) == expected


def test_a_long_run_of_full_stops_within_a_word_is_read_in_linear_time():
    with bounded():
        assert len(segments.split_segments("." * 500_000 + "a", "sentence")) == 1


def test_the_value_is_the_mean_of_the_sigmoids_and_each_is_listed():
    scores = {"A kite flies.": 2.0, "A dog drives it.": -3.0, "The sky is blue.": 1000.0}

    def answer(handler, body):
        assert body["question"] == "What is it?"
        reply(handler, {"score": scores[body["response"]]})

    with served(answer) as (url, requests):
        got = scored(url, "A kite flies. A dog drives it.\nThe sky is blue. A kite flies!")
    sigmoids = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(3)), 1.0]
    assert got.value == pytest.approx(sum(sigmoids) / 3)
    assert got.reason == "0.88 0.05 1.00; lowest: 'A dog drives it.'"
    assert len(requests) == 3


def test_a_service_that_fails_for_one_segment_gives_no_value():
    def answer(handler, body):
        reply(handler, {"score": 1.0 if "kite" in body["response"] else "good"})

    with served(answer) as (url, _), pytest.raises(Unscorable):
        scored(url, "A kite. A dog.")
