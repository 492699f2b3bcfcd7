"""Conversations in the layouts of LLaVA, ShareGPT, OpenAI and verl, with thinking in tags and with tool calls."""

import json

import pytest
from factories import write_file
from reader_files import check_rejected

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.types import AnswerType, ImageRef, Sample, Target, UserError
from mmrl_datasets.readers import chat


@pytest.fixture
def images(context) -> dict[str, ImageRef]:
    return {name: write_file(context.base_dir / f"{name}.png", name.encode()) for name in "abc"}


@pytest.fixture
def read_chat(context, images):
    def read(*rows, columns, **options):
        (context.base_dir / "talk.json").write_text(json.dumps(rows))
        defaults = {"path": "talk.json", "columns": columns, "answer_type": "text"}
        return list(chat.rows(context, **(defaults | options)))

    return read


LLAVA = {"turns": "conversations", "images": "image", "id": "id"}
QUESTION = {"from": "human", "value": "<image>\nWhat is it?"}
REPLY = {"from": "gpt", "value": "A cat."}


def llava_row(*turns, **columns):
    return {"id": 1, "image": "a.png", "conversations": list(turns), **columns}


def test_conversations_of_llava(read_chat, images):
    plain = {"id": "c2", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]}
    one, other = read_chat(llava_row(QUESTION, REPLY, id="c1", source="coco"), plain, columns=LLAVA)
    assert one == Sample(
        id="talk/train/c1",
        task="talk",
        parts=(images["a"], "\nWhat is it?"),
        target=Target(answer_type=AnswerType.TEXT, value="A cat."),
        meta={"source": "coco"},
    )
    assert (other.parts, other.target.value) == (("1+1?",), "2")


def test_messages_of_openai(read_chat, images):
    content = [
        {"type": "text", "text": "Is "},
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"type": "text", "text": " like "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": "?"},
    ]
    reply = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}, reply]
    (sample,) = read_chat({"messages": messages}, columns={"turns": "messages"})
    assert sample.parts == ("Is ", images["a"], " like ", images["b"], "?")
    assert (sample.target.value, sample.meta) == ("Yes.", {"system": "Be brief."})


@pytest.mark.parametrize("rest", [{}, {"type": None, "image": None, "video": None}])
def test_parts_may_name_no_type(read_chat, images, rest):
    content = [{**rest, "text": "Is this a cat?"}, {**rest, "image": "a.png"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [{**rest, "text": "Yes."}]}]
    (sample,) = read_chat({"messages": messages}, columns={"turns": "messages"})
    assert (sample.parts, sample.target.value) == (("Is this a cat?", images["a"]), "Yes.")


def test_rows_of_verl(read_chat, images):
    row = {
        "data_source": "geo3k",
        "prompt": [{"role": "user", "content": "<image>Find x."}],
        "images": [{"bytes": None, "path": "a.png"}],
        "reward_model": {"style": "rule", "ground_truth": "3"},
    }
    columns = {"turns": "prompt", "images": "images", "answer": "reward_model.ground_truth"}
    (sample,) = read_chat(row, columns=columns, answer_type="number")
    assert sample.parts == (images["a"], "Find x.")
    assert (sample.target.value, sample.meta) == (3, {"data_source": "geo3k", "reward_model": {"style": "rule"}})


def test_a_conversation_may_be_text_and_its_images_in_a_column(read_chat, images):
    """The rows of R1-Reward: its README, 2.3, and the columns of yifanzhang114/R1-Reward-RL at c3243ab."""
    content = [{"type": "text", "text": "Which is better?"}, {"type": "image", "image": "/home/them/cake.jpg"}]
    row = {"message": json.dumps([{"role": "user", "content": content}]), "answer": ["<answer>2</answer>"]}
    columns = {"turns": "message", "answer": "{{ answer[0] | striptags }}"}
    (sample,) = read_chat({**row, "image": "a.png"}, columns={**columns, "images": "image"}, answer_type="number")
    assert (sample.parts, sample.target.value) == (("Which is better?", images["a"]), 2)
    # Without the column, the path within the text counts.
    content[1]["image"] = "b.png"
    row["message"] = json.dumps([{"role": "user", "content": content}])
    (sample,) = read_chat(row, columns=columns, answer_type="number")
    assert sample.parts == ("Which is better?", images["b"])


def test_a_longer_conversation_is_cut_only_with_exchange_first(read_chat):
    row = llava_row(QUESTION, REPLY, {"from": "human", "value": "Sure?"}, {"from": "gpt", "value": "Yes."})
    bad = read_chat(row, columns=LLAVA)
    check_rejected(bad, ["continues after the answer: 4 turns; `exchange: first` cuts it"])
    (good,) = read_chat(row, columns=LLAVA, exchange="first")
    assert good.target.value == "A cat."


# Replies of published cold starts: LLaMA-Factory's ShareGPT rows (data/README.md), R1-V's and Vision-R1's tags,
# Qwen3's empty thought, and LLaVA-CoT-100k (its card: id, image, conversations).
COT = "<SUMMARY>S</SUMMARY>\n\n<CAPTION>C</CAPTION>\n\n<REASONING>R</REASONING>\n\n<CONCLUSION>7</CONCLUSION>"
COT_TAGS = ("SUMMARY", "CAPTION", "REASONING", "CONCLUSION")


@pytest.mark.parametrize(
    ("reply", "options", "thinking", "keeps_response"),
    [
        ("<think>\nT\n</think>\n<answer> 7 </answer>", {}, "\nT\n", False),
        ("<think>\nT\n</think>\n\n7", {}, "\nT\n", False),
        ("<think>\n\n</think>\n\n7", {}, None, False),
        ("<answer>7</answer>", {}, None, False),
        (r"<think>T \boxed{8}</think>So $\boxed{7}$.", {}, r"T \boxed{8}", True),
        (r"3 + 4 is \boxed{7}", {}, None, True),
        ("<reason>T</reason><answer>7</answer>", {"reply_tags": ("reason", "answer")}, "T", False),
        (COT, {"reply_tags": COT_TAGS}, COT.partition("<CONCLUSION>")[0], False),
        ("Seven, so 8 - 1.", {"columns": LLAVA | {"answer": "gold"}}, None, True),
    ],
)
def test_a_reply_is_split_into_thinking_and_answer(read_chat, reply, options, thinking, keeps_response):
    row = llava_row(QUESTION, {"from": "gpt", "value": reply}, gold=7)
    (sample,) = read_chat(row, **{"columns": LLAVA, "answer_type": "number"} | options)
    assert (sample.target.value, sample.thinking) == (7, thinking)
    assert sample.response == (reply if keeps_response else None)


def test_a_reply_in_sections_becomes_a_demonstration_in_the_same_sections(read_chat):
    (sample,) = read_chat(llava_row(QUESTION, {"from": "gpt", "value": COT}), columns=LLAVA, reply_tags=COT_TAGS)
    sections = (ResponseSection("SUMMARY"), ResponseSection("CAPTION"))
    response_format = ResponseFormat(
        thinking="required", think_tag="REASONING", answer_tag="CONCLUSION", sections=sections
    )
    assert response_format.render(sample.target, sample.thinking) == COT


def test_thinking_may_have_a_field_of_its_own(read_chat):
    reply = {"role": "assistant", "content": "Yes.", "reasoning_content": "T"}
    (sample,) = read_chat({"messages": [{"role": "user", "content": "Is it?"}, reply]}, columns={"turns": "messages"})
    assert (sample.target.value, sample.thinking) == ("Yes.", "T")


@pytest.mark.parametrize("reply", [COT, "<think>T</think>7", "<table><tr></tr></table>"])
def test_a_whole_turn_may_be_the_answer(read_chat, reply):
    options = {} if "table" in reply else {"reply_tags": ()}
    (sample,) = read_chat(llava_row(QUESTION, {"from": "gpt", "value": reply}), columns=LLAVA, **options)
    assert (sample.target.value, sample.thinking) == (reply, None)


@pytest.mark.parametrize(
    ("reply", "options", "reason"),
    [
        ("<think>T", {}, "no answer tag, <think> never closed: '<think>T'; correct the reply, or name a column"),
        ("T</think>7", {}, "stray </think>"),
        ("<think>T</think>", {}, "empty answer"),
        ("<think>T</think>So <answer>7</answer>", {}, "text outside the tags"),
        ("<answer>7</answer> or <answer>8</answer>", {}, "two answers"),
        (r"\boxed{7} or \boxed{8}", {}, "two answers"),
        (COT, {}, "begins with <SUMMARY>: set `reply_tags: [SUMMARY, CAPTION, REASONING, CONCLUSION]`"),
        ("7", {"reply_tags": COT_TAGS}, "no CONCLUSION tag"),
        (COT.replace("CAPTION", "REASONING"), {"reply_tags": COT_TAGS}, "no <CAPTION>"),
    ],
)
def test_a_reply_without_the_expected_tags_is_rejected(read_chat, reply, options, reason):
    rows = read_chat(llava_row(QUESTION, {"from": "gpt", "value": reply}), columns=LLAVA, **options)
    check_rejected(rows, [reason])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reply_tags": ("answer",)}, "name the tags of the thinking"),
        ({"reply_tags": ("a(", "b")}, r"'a\('"),
        ({"columns": LLAVA | {"answer": "id"}, "reply_tags": COT_TAGS}, "would have no effect: the answer is in the"),
        ({"columns": LLAVA | {"label": "lable"}}, r"in every row: there is no column 'lable'"),
        ({"columns": {"turns": "conversations"}, "exchange": "calls"}, "answer"),
    ],
)
def test_impossible_options_are_refused(read_chat, options, message):
    row = llava_row({"from": "human", "value": "What?"}, REPLY)
    with pytest.raises(UserError, match=message):
        read_chat(row, **{"columns": LLAVA} | options)


def test_a_table_of_text_alone_may_lack_the_columns_of_media(read_chat):
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    columns = {"turns": "messages", "images": "images", "videos": "videos"}
    (sample,) = read_chat({"messages": turns}, columns=columns)
    assert (sample.parts, sample.target.value) == (("1+1?",), "2")


def openai_turns(*content):
    return [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "It."}]


TEXT, IMAGE = {"type": "text", "text": "?"}, {"type": "image"}


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ("hello", "must be a list of turns"),
        ([], "holds no question"),
        ([QUESTION], "nobody answers"),
        ([REPLY, QUESTION], "the assistant speaks where the user should"),
        ([{"from": "robot", "value": "?"}], "unknown speaker 'robot'"),
        ([{"from": "human", "text": "?"}], "a turn must have from and value"),
        ([3], "a turn must have from and value"),
        ([{"from": "human", "value": "<image><image>?"}, REPLY], "<image> 2 times, and there are 1 images"),
        ([QUESTION, {"from": "gpt", "value": " "}], "answer must be text"),
        (openai_turns({"type": "audio", "audio": "a.wav"}), "a part must be of type text, image_url, image, video_url"),
        (openai_turns({"text": "?", "image": "a.png"}), "a part must be of type text, image_url, image, video_url"),
        (openai_turns(IMAGE), "must say something besides images"),
        (openai_turns(IMAGE, IMAGE, TEXT), "says <image> 2 times, and there"),
        (openai_turns({"type": "image_url", "image_url": "d.png"}, TEXT), "image 'd.png' cannot be read"),
    ],
)
def test_a_bad_conversation_is_rejected_alone(read_chat, turns, reason):
    good, bad = read_chat(llava_row(QUESTION, REPLY), llava_row() | {"id": 2, "conversations": turns}, columns=LLAVA)
    assert isinstance(good, Sample)
    check_rejected([bad], [reason])
    assert "talk.json: row 2: " in bad.reason


# Tool calls: everything that the assistant says is the response, and the replies of tools are left out.

CALL = '<think>Closer.</think><tool_call>{"name": "zoom", "arguments": {"box": [1, 2, 30, 40]}}</tool_call>'
ASKED = {"role": "user", "content": "<image>What does it say?"}
CALLS = {"role": "assistant", "content": CALL}
SHOWN = {"role": "user", "content": "<tool_response>\n<image></tool_response>"}
TOLD = {"role": "tool", "content": [{"type": "text", "text": "Here: "}, {"type": "image"}]}
ANSWERS = {"role": "assistant", "content": "<answer>7</answer>"}
SHAREGPT_CALLS = [
    {"from": "human", "value": "What?"},
    {"from": "gpt", "value": CALL},
    {"from": "observation", "value": "8"},
    {"from": "gpt", "value": "<answer>7</answer>"},
]


@pytest.fixture
def read_calls(read_chat):
    def read(turns, image_names, exchange="calls"):
        row = {"talk": turns, "images": [f"{name}.png" for name in image_names], "gold": "7"}
        columns = {"turns": "talk", "images": "images", "answer": "gold"}
        (result,) = read_chat(row, columns=columns, answer_type="number", exchange=exchange)
        return result

    return read


@pytest.mark.parametrize(
    ("turns", "image_names", "num_calls"),
    [
        ([ASKED, CALLS, SHOWN, ANSWERS], "ab", 1),
        ([ASKED, CALLS, SHOWN, ANSWERS], "a", 1),  # the column lacks the image that the tool showed
        ([{**ASKED, "content": "What does it say?"}, CALLS, TOLD, ANSWERS], "ab", 1),
        (SHAREGPT_CALLS, "a", 1),
        ([ASKED, CALLS, SHOWN, CALLS, TOLD, ANSWERS], "abc", 2),
        ([ASKED, ANSWERS], "a", 0),
    ],
)
def test_everything_that_the_assistant_says_is_the_response(read_calls, turns, image_names, num_calls):
    sample = read_calls(turns, image_names)
    assert sample.response == CALL * num_calls + "<answer>7</answer>"
    assert sample.target.value == 7
    assert [ref.path.rpartition("/")[2] for ref in sample.images] == ["a.png"]
    assert sample.parts[-1] in ("What does it say?", "What?")


@pytest.mark.parametrize(
    ("turns", "image_names", "exchange", "reason"),
    [
        ([ASKED, ANSWERS, SHOWN, ANSWERS], "a", "calls", "turn 2 of the conversation ends in no <tool_call>"),
        ([ASKED, CALLS, SHOWN], "a", "calls", "the assistant does not have the last word"),
        ([ASKED], "a", "calls", "the assistant does not have the last word"),
        ([TOLD, CALLS, SHOWN, ANSWERS], "a", "calls", "the tool speaks where the user should"),
        ([ASKED, CALLS, TOLD, ANSWERS], "a", "first", "the tool speaks where the user should"),
        ([ASKED, CALLS, CALLS, ANSWERS], "a", "calls", "the assistant speaks where the user should"),
        ([ASKED, CALLS, SHOWN, {**CALLS, "content": []}], "a", "calls", "turn 4 of the conversation must be"),
        ([{**ASKED, "content": "?"}, CALLS, SHOWN, ANSWERS], "a", "calls", "tools show 1 images in this conversation"),
        ([ASKED, CALLS, SHOWN, ANSWERS], "abc", "calls", "<image> 1 times, and there are 2 images"),
    ],
)
def test_a_conversation_with_bad_tool_calls_is_rejected(read_calls, turns, image_names, exchange, reason):
    check_rejected([read_calls(turns, image_names, exchange)], [reason])
