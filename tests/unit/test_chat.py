"""Chat templates with options: a prompt that opens the thought, ends of turns, templates that refuse."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from mmrl.answer import ResponseFormat
from mmrl.config.schema import MediaLimitsConfig, VideoConfig
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.policy.processor import PromptProcessor
from mmrl.types import Author, MediaPolicy, Segment, UserError

# The end of the templates of Qwen3.5-4B and larger, and of Qwen3.5-0.8B and 2B, whose default is the other way round.
THINKS = "{% if enable_thinking is defined and enable_thinking is false %}CLOSED{% else %}OPEN{% endif %}"
ANSWERS = "{% if enable_thinking is defined and enable_thinking is true %}OPEN{% else %}CLOSED{% endif %}"
GENERATION = "<|im_start|>assistant\n"


@pytest.fixture
def make(make_tiny, tmp_path):
    """A processor with another end of its chat template."""
    tiny = make_tiny()

    def build(ending: str, *, chat=None, template=None, eos=None, **response_format) -> PromptProcessor:
        known = copy.copy(tiny.processor.encoder.hf_processor)
        known.chat_template = template or known.chat_template.replace(
            GENERATION, GENERATION + ending.replace("OPEN", "<think>\n").replace("CLOSED", "<think>\n\n</think>\n\n")
        )
        if eos:
            known.tokenizer = copy.deepcopy(known.tokenizer)
            known.tokenizer.eos_token = eos
        store = MediaCache(MediaPolicy(roots=(tmp_path,)), MediaLimitsConfig(), max_bytes=0)
        encoder = PromptEncoder(
            ProcessorBundle(family=tiny.processor.encoder.family, processor=known),
            ResponseFormat(**response_format),
            store,
            video=VideoConfig(),
            add_instruction=False,
            max_prompt_tokens=500,
            chat=chat or {},
        )
        return PromptProcessor(encoder)

    sample = next(sample for sample in tiny.samples if not sample.media)
    return SimpleNamespace(processor=build, sample=sample)


@pytest.mark.parametrize(
    ("ending", "chat", "opening"),
    [
        (THINKS, {}, "<think>\n"),
        (THINKS, {"enable_thinking": True}, "<think>\n"),
        (THINKS, {"enable_thinking": False}, ""),
        (ANSWERS, {}, ""),
        (ANSWERS, {"enable_thinking": True}, "<think>\n"),
        ("", {}, ""),
    ],
)
def test_where_a_response_begins_is_read_from_the_rendered_prompt(make, ending, chat, opening):
    processor = make.processor(ending, chat=chat, thinking="required")
    assert processor.encoder.response_opening == opening
    rendered = processor.encoder.render_chat(make.sample)
    assert rendered.endswith(GENERATION + (opening or ("<think>\n\n</think>\n\n" if ending else "")))


def test_a_response_begins_inside_the_thought(make):
    processor = make.processor(THINKS, thinking="required")
    prompt = processor.build(make.sample)
    demonstration = processor.build_demonstration(prompt, "<think>two</think><answer>2</answer>")
    assert demonstration.text == "<think>\ntwo</think><answer>2</answer>"
    assert demonstration.answer.thinking == "\ntwo" and not demonstration.answer.problems
    # Its tokens are those that the model is to write: the prompt has the tag already.
    assert processor.decode_segments(demonstration.segments) == "two</think><answer>2</answer>"
    sampled = processor.parse_rollout(demonstration)
    assert (sampled.text, sampled.answer) == (demonstration.text, demonstration.answer)


def test_a_continuation_keeps_the_thought_of_the_first_response(make):
    processor = make.processor(THINKS, thinking="required")
    rollout = processor.build_demonstration(processor.build(make.sample), "<think>two</think><answer>2</answer>")
    (first,) = rollout.segments
    first = Segment(token_ids=first.token_ids[:-1], logprobs=first.logprobs[:-1], author=Author.POLICY)
    words = processor.tokenize(" wait <answer>3</answer>")
    forced = Segment(token_ids=words, logprobs=(0.0,) * len(words), author=Author.FORCED)
    continued = processor.parse_rollout(type(rollout)(**{**fields(rollout), "segments": (first, forced)}))
    assert continued.text.startswith("<think>\ntwo</think>")
    assert processor.first_response_text(continued) == "<think>\ntwo</think><answer>2</answer>"
    assert continued.answer.thinking == "\ntwo" and not continued.answer.problems


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_a_thought_is_written_as_it_stands_behind_the_tag(make, between):
    """A sampled response has the line break of the prompt in its text; learned from, it does not get two."""
    processor = make.processor(THINKS, thinking="required")
    response = f"<think>{between}two</think><answer>2</answer>"
    demonstration = processor.build_demonstration(processor.build(make.sample), response)
    expected = response if between else "<think>\ntwo</think><answer>2</answer>"
    assert demonstration.text == processor.parse_rollout(demonstration).text == expected


def fields(frozen):
    return {name: getattr(frozen, name) for name in type(frozen).__dataclass_fields__}


@pytest.mark.parametrize(
    ("response_format", "why"),
    [
        ({"thinking": "none"}, "response_format.thinking is none"),
        ({"thinking": "required", "think_tag": "reason"}, "response_format.think_tag is reason"),
        ({"thinking": "required", "style": "json"}, "response_format.style is json"),
    ],
)
def test_an_opened_thought_that_the_format_does_not_ask_for_is_refused(make, response_format, why):
    with pytest.raises(UserError, match=rf"{why}; set model.chat: \{{enable_thinking: false\}}"):
        make.processor(THINKS, **response_format)
    assert not make.processor(THINKS, chat={"enable_thinking": False}, **response_format).encoder.response_opening


def test_a_demonstration_without_the_thought_is_refused(make):
    processor = make.processor(THINKS, thinking="optional")
    with pytest.raises(UserError, match="the chat template opens a thought, and the response '<answer>2</answer>' has"):
        processor.build_demonstration(processor.build(make.sample), "<answer>2</answer>")


def test_a_template_that_raises_is_named(make):
    template = "{{ raise_exception('Unexpected effort: ' + reasoning_effort) }}"
    with pytest.raises(UserError, match=r"with model.chat .*'high'.*: Unexpected effort: high; correct .*jinja"):
        make.processor("", template=template, chat={"reasoning_effort": "high"})


def test_an_option_that_the_template_does_not_read_is_refused(make):
    with pytest.raises(UserError, match="model.chat: the chat template does not read `enable_thought`; correct it"):
        make.processor(THINKS, chat={"enable_thought": False}, thinking="required")


@pytest.mark.parametrize("template", ["{{ messages + 1 }}", "{{ messages[7].role }}", "{{ 1 / 0 }}", "{% if %}"])
def test_a_template_with_a_mistake_is_named(make, template):
    with pytest.raises(UserError, match="model.path: the chat template refuses a question: "):
        make.processor("", template=template)


def test_a_tokenizer_that_never_ends_a_turn_is_refused(make):
    with pytest.raises(UserError, match=r"end of sequence is '<\|endoftext\|>', .* ends a turn with '<\|im_end\|>"):
        make.processor("", eos="<|endoftext|>")
