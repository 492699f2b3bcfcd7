"""Conversations with tool calls: the assistant's words become the response, replies of tools are left out."""

from __future__ import annotations

import json

import pytest
from factories import make_context
from PIL import Image

from mmrl.types import UserError
from mmrl_datasets.readers import chat

COLUMNS = {"turns": "talk", "images": "images", "answer": "gold"}
CALL = '<think>Closer.</think><tool_call>{"name": "zoom", "arguments": {"box": [1, 2, 30, 40]}}</tool_call>'
ASKED = {"role": "user", "content": "<image>What does it say?"}
CALLS = {"role": "assistant", "content": CALL}
SHOWN = {"role": "user", "content": "<tool_response>\n<image></tool_response>"}
TOLD = {"role": "tool", "content": [{"type": "text", "text": "Here: "}, {"type": "image"}]}
ANSWERS = {"role": "assistant", "content": "<answer>7</answer>"}


@pytest.fixture
def talk(tmp_path):
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (48, 48), "red").save(tmp_path / name)
    place = make_context(tmp_path)

    def talk(turns, images=("a.png",), columns=COLUMNS, **options):
        row = {"talk": turns, "images": list(images), "gold": "7"}
        (tmp_path / "talk.json").write_text(json.dumps([row]))
        settings = {"path": "talk.json", "columns": columns, "answer_type": "number", "exchange": "calls", **options}
        (sample,) = chat.rows(place, **settings)
        return sample

    return talk


@pytest.mark.parametrize(
    ("turns", "images"),
    [
        ([ASKED, CALLS, SHOWN, ANSWERS], ("a.png", "b.png")),
        ([ASKED, CALLS, SHOWN, ANSWERS], ("a.png",)),  # what was shown is not in the column
        ([{**ASKED, "content": "What does it say?"}, CALLS, TOLD, ANSWERS], ("a.png", "b.png")),
        ([{"from": "human", "value": "What?"}, {"from": "gpt", "value": CALL}, {"from": "observation", "value": "8"},
          {"from": "gpt", "value": "<answer>7</answer>"}], ("a.png",)),
    ],
)  # fmt: skip
def test_all_that_the_assistant_says_is_the_response(talk, turns, images):
    sample = talk(turns, images)
    assert sample.response == f"{CALL}<answer>7</answer>"
    assert sample.target.value == 7
    assert [ref.path.rpartition("/")[2] for ref in sample.images] == ["a.png"]
    assert sample.parts[-1] in ("What does it say?", "What?")


def test_it_may_call_several_times_and_never(talk):
    twice = talk([ASKED, CALLS, SHOWN, CALLS, TOLD, ANSWERS], ("a.png", "b.png", "c.png"))
    assert twice.response == CALL * 2 + "<answer>7</answer>"
    assert len(twice.images) == 1
    assert talk([ASKED, ANSWERS]).response == "<answer>7</answer>"


@pytest.mark.parametrize(
    ("turns", "images", "reason"),
    [
        ([ASKED, ANSWERS, SHOWN, ANSWERS], ("a.png",), "turn 2 of the conversation ends in no <tool_call>"),
        ([ASKED, CALLS, SHOWN], ("a.png",), "the assistant does not have the last word"),
        ([ASKED], ("a.png",), "the assistant does not have the last word"),
        ([TOLD, CALLS, SHOWN, ANSWERS], ("a.png",), "the tool speaks where the user should"),
        ([ASKED, CALLS, CALLS, ANSWERS], ("a.png",), "the assistant speaks where the user should"),
        ([ASKED, CALLS, SHOWN, {"role": "assistant", "content": []}], ("a.png",), "turn 4 of the conversation must be"),
        ([{**ASKED, "content": "?"}, CALLS, SHOWN, ANSWERS], ("a.png",), "tools show 1 images in this conversation"),
        ([ASKED, CALLS, SHOWN, ANSWERS], ("a.png", "b.png", "c.png"), "<image> 1 times, and there are 2 images"),
    ],
)
def test_bad_traces(talk, turns, images, reason):
    assert reason in talk(turns, images).reason


def test_a_tool_speaks_only_where_calls_are_read(talk):
    assert "the tool speaks where the user should" in talk([ASKED, CALLS, TOLD, ANSWERS], exchange="first").reason


def test_the_answer_needs_a_column(talk):
    with pytest.raises(UserError, match="answer"):
        talk([ASKED, ANSWERS], columns={"turns": "talk"})
