"""Chat templates that end a prompt with an opened thought, take options, or cannot be used."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
from processors import make_prompt_processor

from mmrl.answer import ResponseFormat
from mmrl.scoring.scorer import make_response
from mmrl.types import Author, Segment, UserError
from mmrl_rewards.format import tags

# The end of the templates of Qwen3.5-4B and larger, and of Qwen3.5-0.8B and 2B, which have the opposite default. The
# template of Qwen3-VL-Thinking ends with OPEN, without an option.
THINKS = "{% if enable_thinking is defined and enable_thinking is false %}CLOSED{% else %}OPEN{% endif %}"
ANSWERS = "{% if enable_thinking is defined and enable_thinking is true %}OPEN{% else %}CLOSED{% endif %}"
GENERATION = "<|im_start|>assistant\n"
OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


@pytest.fixture
def chat(tiny):
    """`chat.processor` makes a processor with another end of its chat template; `chat.sample` has no media."""
    known = tiny.processor.encoder

    def processor(ending, *, chat=None, template=None, eos=None, **response_format):
        hf_processor = copy.copy(known.hf_processor)
        end = GENERATION + ending.replace("OPEN", OPEN).replace("CLOSED", CLOSED)
        hf_processor.chat_template = template or hf_processor.chat_template.replace(GENERATION, end)
        if eos:
            hf_processor.tokenizer = copy.deepcopy(hf_processor.tokenizer)
            hf_processor.tokenizer.eos_token = eos
        return make_prompt_processor(known.family, hf_processor, ResponseFormat(**response_format), chat=chat or {})

    return SimpleNamespace(processor=processor, sample=tiny.samples[2])


@pytest.mark.parametrize(
    ("ending", "options", "opening"),
    [
        (THINKS, {}, OPEN),
        (THINKS, {"enable_thinking": True}, OPEN),
        (THINKS, {"enable_thinking": False}, ""),
        (ANSWERS, {}, ""),
        (ANSWERS, {"enable_thinking": True}, OPEN),
        ("OPEN", {}, OPEN),
        ("", {}, ""),
    ],
)
def test_the_opening_of_a_response_is_read_from_the_rendered_prompt(chat, ending, options, opening):
    encoder = chat.processor(ending, chat=options, thinking="required").encoder
    assert encoder.response_opening == opening
    assert encoder.render_chat(chat.sample).endswith(GENERATION + (opening or (CLOSED if ending else "")))


def test_tokens_of_a_response_follow_the_opened_thought_and_its_text_includes_it(chat):
    processor = chat.processor(THINKS, thinking="required")
    demonstration = processor.build_demonstration(processor.build(chat.sample), "<think>two</think><answer>2</answer>")
    assert demonstration.text == "<think>\ntwo</think><answer>2</answer>"
    assert demonstration.answer.thinking == "\ntwo" and not demonstration.answer.problems
    assert processor.decode_segments(demonstration.segments) == "two</think><answer>2</answer>"
    parsed = processor.parse_rollout(demonstration)
    assert (parsed.text, parsed.answer) == (demonstration.text, demonstration.answer)

    # A forced continuation keeps the thought of the first response.
    first = replace(demonstration.segments[0], author=Author.POLICY)
    first = replace(first, token_ids=first.token_ids[:-1], logprobs=first.logprobs[:-1])
    ids = processor.tokenize(" wait <answer>3</answer>")
    forced = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.FORCED)
    continued = processor.parse_rollout(replace(demonstration, segments=(first, forced)))
    assert processor.text_before_continuation(continued) == "<think>\ntwo</think><answer>2</answer>"
    assert continued.text.startswith("<think>\ntwo</think>")
    assert continued.answer.thinking == "\ntwo" and not continued.answer.problems


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_white_space_after_the_tag_is_not_doubled(chat, between):
    """The text of a sampled response has the line break of the prompt; imitated, it does not get a second one."""
    processor = chat.processor(THINKS, thinking="required")
    response = f"<think>{between}two</think><answer>2</answer>"
    demonstration = processor.build_demonstration(processor.build(chat.sample), response)
    expected = response if between else "<think>\ntwo</think><answer>2</answer>"
    assert demonstration.text == processor.parse_rollout(demonstration).text == expected


@pytest.mark.parametrize(
    ("response_format", "reason"),
    [
        ({"thinking": "none"}, "response_format.thinking is none"),
        ({"thinking": "required", "think_tag": "reason"}, "response_format.think_tag is reason"),
        ({"thinking": "required", "style": "json"}, "response_format.style is json"),
    ],
)
def test_an_opened_thought_that_the_response_format_does_not_ask_for_is_refused(chat, response_format, reason):
    with pytest.raises(UserError, match=rf"{reason}; set model.chat: \{{enable_thinking: false\}}"):
        chat.processor(THINKS, **response_format)
    assert not chat.processor(THINKS, chat={"enable_thinking": False}, **response_format).encoder.response_opening


def test_the_format_of_a_response_counts_from_the_opened_thought(chat):
    """Qwen3-VL-Thinking never writes the opening tag itself; an engine's tokens begin inside the thought."""
    processor = chat.processor("OPEN", thinking="required")
    prompt = processor.build(chat.sample)
    demonstration = processor.build_demonstration(prompt, "<think>two</think><answer>2</answer>")
    values = {}
    for written in ("two</think><answer>2</answer>", "two<answer>2</answer>", "<think>two</think><answer>2</answer>"):
        ids = processor.tokenize(written)
        segment = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.POLICY)
        rollout = processor.parse_rollout(replace(demonstration, segments=(segment,)))
        values[written] = tags(make_response(rollout), chat.sample).value
    assert list(values.values()) == [1.0, 0.0, 0.0]
    with pytest.raises(UserError, match="the chat template does not read `enable_thinking`"):
        chat.processor("OPEN", chat={"enable_thinking": False}, thinking="required")


def test_a_demonstration_without_the_opened_thought_is_refused(chat):
    processor = chat.processor(THINKS, thinking="optional")
    with pytest.raises(UserError, match="the chat template opens a thought, and the response '<answer>2</answer>' has"):
        processor.build_demonstration(processor.build(chat.sample), "<answer>2</answer>")


RAISES = "{{ raise_exception('Unexpected effort: ' + effort) }}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"template": RAISES, "chat": {"effort": "high"}}, "with model.chat .*'high'.*: Unexpected effort: high; "),
        ({"template": "{{ messages + 1 }}"}, "model.path: the chat template refuses a question: "),
        ({"template": "{{ messages[7].role }}"}, "model.path: the chat template refuses a question: "),
        ({"template": "{{ 1 / 0 }}"}, "model.path: the chat template refuses a question: "),
        ({"template": "{% if %}"}, "model.path: the chat template refuses a question: "),
        ({"chat": {"enable_thought": False}}, "model.chat: the chat template does not read `enable_thought`"),
        ({"eos": "<|endoftext|>"}, r"end of sequence is '<\|endoftext\|>', .* ends a turn with '<\|im_end\|>"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(chat, options, words):
    with pytest.raises(UserError, match=words):
        chat.processor("", thinking="required", **options)
