"""Samples that a supervised stage could not imitate are found before its first step."""

import pytest
from factories import make_config, make_sample

from mmrl.answer import ResponseFormat
from mmrl.data.demonstrations import check_demonstrations
from mmrl.types import UserError

COLD = {"name": "cold", "kind": "sft", "steps": 1, "target_field": "response"}
SAMPLES = [
    make_sample(id="a", response="It is <answer>3</answer>"),
    make_sample(id="b", response="It is three", meta={"part": 1}),
]


def check(**options):
    check_demonstrations(make_config(stages=[{**COLD, **options}]), SAMPLES, ResponseFormat())


def test_a_response_without_an_answer_cannot_train_the_answer_alone():
    with pytest.raises(UserError, match="sample b: its response 'It is three' has no answer, and the stage has `loss_"):
        check(loss_on="answer")
    check()  # the whole response can be imitated
    check(loss_on="answer", when={"part": ["0"]})  # no sample
