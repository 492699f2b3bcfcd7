"""Forced rethinking: which responses are continued, where the trigger goes, which continuations count."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scoring import make_scorer, term

from mmrl.answer import ResponseFormat
from mmrl.config.schema import GenerateConfig, RethinkConfig, RethinkTriggerConfig
from mmrl.rollout.pipeline import build_pipeline
from mmrl.rollout.steps.base import RolloutContext
from mmrl.rollout.steps.rethink import CorrectnessCheck, ForcedRethink, count_tokens_before, tokenize_trigger
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.scoring.registry import load_tool
from mmrl.types import AnswerType, Author, FinishReason, RolloutBatch, Segment, UserError
from mmrl_rewards.contract import reward

GROUP = 8


@reward(name="even", low=0.0, high=1.0)
def even(response, sample) -> float:
    """A verdict that any text has, that of a model of random weights too."""
    return float(sum(map(ord, response.text)) % 2 == 0)


@pytest.fixture(scope="module")
def tiny(make_tiny):
    return make_tiny()


@pytest.fixture(scope="module")
def first_responses(tiny):
    """Groups of responses that ended themselves, one of each group aside; with EOS after a token or more."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3]]
    groups = tiny.sampler().generate(prompts, GROUP, replace(tiny.params, max_new_tokens=5), step=0)
    return RolloutBatch(groups=tuple((*map(end_early(tiny), group[1:]), group[0]) for group in groups))


def end_early(tiny):
    def ended(rollout):
        (segment,) = rollout.segments
        ids = (*segment.token_ids[: 1 + rollout.index % 4], tiny.eos_id)
        segment = replace(segment, token_ids=ids, logprobs=(-1.0,) * len(ids))
        return tiny.processor.parse_rollout(replace(rollout, segments=(segment,), finish_reason=FinishReason.EOS))

    return ended


def rethink(tiny, *, stop=(), **options) -> ForcedRethink:
    options = {"max_new_tokens": 4, "triggers": (RethinkTriggerConfig(text=" Wait."),), **options}
    settings = RethinkConfig(kind="rethink", correct=("even",), **options)
    context = RolloutContext(
        sampler=tiny.sampler(),
        scorer=make_scorer(term(even)),
        processor=tiny.processor,
        sampling_params=replace(tiny.params, stop=stop),
        group_size=GROUP,
        groups_per_step=1,
        seed=0,
        tool_runner=ToolRunner(partial(load_tool, Path.cwd())),
    )
    (step,) = build_pipeline((GenerateConfig(kind="generate"), settings), context).steps
    return step


def verdicts(tiny, rollouts):
    return CorrectnessCheck(scorer=make_scorer(term(even)), correct_terms=("even",), threshold=1.0)(rollouts)


def test_a_continuation_is_first_response_then_trigger_then_new_tokens(tiny, first_responses):
    found = rethink(tiny, temperature=0.7)(first_responses, step=0)
    forced = tokenize_trigger(" Wait.", tiny.processor, tiny.params.banned_token_ids)
    for before, after in zip(first_responses.groups, found.groups, strict=True):
        assert after[-1] is before[-1] or after[-1].parent_index == before[-1].index
        for first_response, continuation in zip(before[:-1], after[:-1], strict=True):
            kept, trigger, new = continuation.segments
            assert (kept.token_ids, kept.logprobs) == (
                first_response.segments[0].token_ids[:-1],
                first_response.segments[0].logprobs[:-1],
            )  # no EOS
            assert (trigger.token_ids, trigger.author) == (forced, Author.FORCED)
            assert new.author is Author.POLICY
            assert (new.sampling_params.temperature, new.sampling_params.max_new_tokens) == (0.7, 4)
            assert (continuation.index, continuation.parent_index, continuation.sampling_params) == (
                first_response.index,
                first_response.index,
                first_response.sampling_params,
            )
            assert continuation.text == first_response.text + " Wait." + tiny.processor.decode(new.token_ids)
            assert [continuation.is_correct] == verdicts(tiny, [continuation])


def test_extending_a_continuation_clears_its_verdict(tiny, first_responses):
    continuation = rethink(tiny)(first_responses, step=0).groups[0][0]
    assert continuation.is_correct is not None
    (longer,) = tiny.sampler().extend([continuation], tiny.params, step=0)
    assert longer.is_correct is None


def test_a_continuation_depends_on_its_first_response_alone(tiny, first_responses):
    """Tokens are not decoded and encoded again, and neither siblings nor other groups change the result."""
    step = rethink(tiny)
    whole = step(first_responses, step=5)
    alone = step(RolloutBatch(groups=(first_responses.groups[1][2:4],)), step=5)
    for one, of_all in zip(alone.groups[0], whole.groups[1][2:4], strict=True):
        assert (one.text, one.parent_index) == (of_all.text, of_all.parent_index)
        for mine, theirs in zip(one.segments, of_all.segments, strict=True):
            assert (mine.token_ids, mine.author) == (theirs.token_ids, theirs.author)
            assert mine.logprobs == pytest.approx(
                theirs.logprobs, abs=1e-5
            )  # sums depend on the batch in the last digits
    other = step(first_responses, step=6)
    assert other.groups[1] != whole.groups[1]


def test_truncated_responses_and_long_ones_are_not_continued(tiny, first_responses):
    cut = RolloutBatch(
        groups=(
            tuple(
                replace(first_response, finish_reason=FinishReason.LENGTH)
                for first_response in first_responses.groups[0]
            ),
        )
    )
    assert rethink(tiny)(cut, step=0).groups == cut.groups
    room = tiny.params.max_new_tokens - 3
    found = rethink(tiny, min_free_tokens=room)(first_responses, step=0)
    for before, after in zip(first_responses.groups, found.groups, strict=True):
        for first_response, continuation in zip(before[:-1], after[:-1], strict=True):
            assert (continuation is first_response) == (first_response.num_tokens > 3)


def test_fraction_and_attempts_per_group_are_limits(tiny, first_responses):
    many = RolloutBatch(groups=tuple(group[:-1] for group in first_responses.groups))
    attempted = [rethink(tiny, fraction=0.5)(many, step=step).metrics["rethink/attempted"] for step in range(12)]
    assert 0.4 < sum(attempted) / (12 * 21) < 0.6
    assert len(set(attempted)) > 1
    found = rethink(tiny, max_attempts_per_group=2)(many, step=0)
    assert found.metrics["rethink/attempted"] == 6
    again = rethink(tiny, max_attempts_per_group=2)(many, step=1)
    assert [places(many, found), places(many, again)] != [[[0, 1]] * 3] * 2  # not always the first ones


def places(before, after):
    return [
        [i for i, (a, b) in enumerate(zip(*groups, strict=True)) if a is not b]
        for groups in zip(before.groups, after.groups, strict=True)
    ]


@pytest.mark.parametrize("keep", ["all", "correct"])
def test_keep_selects_continuations_and_all_attempts_are_counted(tiny, first_responses, keep):
    everything = rethink(tiny)(first_responses, step=0)
    found = rethink(tiny, keep=keep)(first_responses, step=0)
    tally, kept = Counter(), 0
    for before, continuations, after in zip(first_responses.groups, everything.groups, found.groups, strict=True):
        was, ends = verdicts(tiny, before), verdicts(tiny, continuations)
        for first_response, continuation, result, a, b in zip(before, continuations, after, was, ends, strict=True):
            if continuation is first_response:
                continue
            tally[f"rethink/{'correct' if a else 'incorrect'}_to_{'correct' if b else 'incorrect'}"] += 1
            good = b or keep == "all"
            assert result == (continuation if good else first_response)
            kept += good
    assert min(tally.values()) > 0 and len(tally) == 4
    assert {name: found.metrics[name] for name in tally} == tally
    assert found.metrics["rethink/kept"] == kept
    assert found.metrics["rethink/attempted"] == tally.total()
    new = [r.segments[-1] for g in everything.groups for r in g if r.parent_index is not None]
    assert found.metrics["rethink/new_tokens"] == sum(len(segment.token_ids) for segment in new)


def test_short_continuations_are_dropped(tiny, first_responses):
    found = rethink(tiny, min_new_tokens=4, stop=("e", "t"))(first_responses, step=0)
    continuations = [r for group in found.groups for r in group if r.parent_index is not None]
    assert 0 < len(continuations) < found.metrics["rethink/attempted"]
    assert {len(r.segments[-1].token_ids) for r in continuations} == {4}


def test_triggers_are_drawn_by_weight_and_verdict(tiny, first_responses):
    triggers = (
        RethinkTriggerConfig(text=" one", weight=3.0),
        RethinkTriggerConfig(text=" two", only="correct"),
        RethinkTriggerConfig(text=" three", only="incorrect"),
    )
    counts = Counter()
    for turn in range(10):
        found = rethink(tiny, triggers=triggers)(first_responses, step=turn)
        for before, after in zip(first_responses.groups, found.groups, strict=True):
            for ok, continuation in zip(verdicts(tiny, before), after, strict=True):
                if continuation.parent_index is not None:
                    counts[ok, tiny.processor.decode(continuation.segments[1].token_ids)] += 1
    assert counts.keys() == {(True, " one"), (True, " two"), (False, " one"), (False, " three")}
    assert 0.65 < (counts[True, " one"] + counts[False, " one"]) / counts.total() < 0.85


def answered(tiny, text, *, ended=True):
    """Return a first response with this text."""
    prompt = tiny.processor.build(tiny.samples[0])
    ids = (*tiny.processor.tokenizer(text).input_ids, *([tiny.eos_id] if ended else []))
    (rollout,) = tiny.sampler().generate([prompt], 1, tiny.params, step=0)[0]
    segment = replace(rollout.segments[0], token_ids=ids, logprobs=(-1.0,) * len(ids))
    return tiny.processor.parse_rollout(replace(rollout, segments=(segment,), finish_reason=FinishReason.EOS))


def tokens_before_trigger(continuation):
    """Return the tokens of all segments but the trigger and what the policy added to it."""
    tokens = []
    for segment in continuation.segments[:-2]:
        tokens += segment.token_ids
    return tokens


@pytest.mark.parametrize(
    ("first_response", "kept"),
    [
        ("Three, I say.<answer>3</answer>", "Three, I say."),
        ("<answer>2</answer> no<answer>3</answer>", "<answer>2</answer> no"),
        ("<answer>3</answer>", ""),
        ("no answer at all", "no answer at all"),
        ("<answer>never closed", "<answer>never closed"),
    ],
)
def test_the_last_answer_can_be_cut_off(tiny, first_response, kept):
    rollout = answered(tiny, first_response)
    found = rethink(tiny, cut_answer_fraction=1.0)(RolloutBatch(groups=((rollout,),)), step=0)
    ((continuation,),) = found.groups
    assert continuation.segments[-2].author is Author.FORCED
    before = tokens_before_trigger(continuation)
    assert tiny.processor.decode(before) == kept
    assert tuple(before) == rollout.segments[0].token_ids[: len(before)]
    assert all(segment.token_ids for segment in continuation.segments)


@pytest.mark.parametrize(("last", "kept"), [("So<answer>3</answer>", "So"), ("No idea.", "No idea.")])
def test_an_answer_in_a_tool_result_is_not_cut_off(tiny, last, kept):
    first_response, reply, rest = answered(tiny, "Hm.", ended=False), "<answer>7</answer>", answered(tiny, last)
    told = Segment(
        token_ids=tiny.processor.tokenize(reply),
        logprobs=(0.0,) * len(tiny.processor.tokenize(reply)),
        author=Author.ENVIRONMENT,
    )
    segments = (*first_response.segments, told, *rest.segments)
    rollout = tiny.processor.parse_rollout(replace(first_response, segments=segments))
    ((continuation,),) = rethink(tiny, cut_answer_fraction=1.0)(RolloutBatch(groups=((rollout,),)), step=0).groups
    before = tokens_before_trigger(continuation)
    assert tiny.processor.decode(before) == f"Hm.{reply}{kept}"


def test_a_cut_never_divides_a_token():
    """Tokens of several characters, one of which begins before the place and ends after it."""
    words = ["Well", "; so", " <ans", "wer>", "3"]
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    text = decode(range(5))
    at = text.index("<")
    assert (
        count_tokens_before(range(5), text[:at], decode) == 2
    )  # "Well; so": the blank before `<` is in a token with it
    assert [count_tokens_before(range(5), text[:n], decode) for n in (0, 4, 5, len(text))] == [0, 1, 1, 5]


def test_a_cut_never_divides_a_character(tiny):
    ids = tiny.processor.tokenizer("é€😀<answer>").input_ids
    text = tiny.processor.decode(ids)
    for n in range(len(text) + 1):
        count = count_tokens_before(ids, text[:n], tiny.processor.decode)
        assert text[:n].startswith(tiny.processor.decode(ids[:count]))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "comes to no token"),
        ("Wait<|im_start|>", r"'<\|im_start\|>', which no response"),
        ("a<|im_end|>", "im_end"),
    ],
)
def test_triggers_with_forbidden_tokens_are_refused(tiny, text, complaint):
    with pytest.raises(UserError, match=complaint):
        tokenize_trigger(text, tiny.processor, tiny.params.banned_token_ids)


def test_a_sample_without_applicable_reward_term_is_named(tiny, first_responses):
    blind = CorrectnessCheck(scorer=make_scorer(term(even)), correct_terms=("accuracy",), threshold=1.0)
    with pytest.raises(UserError, match=r"correct: \[accuracy\].* says whether sample .* is right; there is even"):
        blind(first_responses.groups[0])


THINKS = ResponseFormat(thinking="required")
BOXED = ResponseFormat(thinking="optional", style="boxed")
JSON = ResponseFormat(thinking="optional", style="json")


@pytest.mark.parametrize(
    ("response_format", "first_response", "text", "value", "thinking", "problems"),
    [
        (ResponseFormat(), "<answer>3</answer>", " Wait.<answer>4</answer>", 4, None, ()),
        (ResponseFormat(), "<answer>3</answer>", " Wait.", None, None, ("no answer tag",)),
        (
            ResponseFormat(),
            "<answer>3</answer>",
            " Wait.<answer>4</answer><answer>5</answer>",
            None,
            None,
            ("two answers",),
        ),
        (ResponseFormat(), "<answer>3</answer>", "<answer>4</answer> so", None, None, ("text after the answer",)),
        (THINKS, "<think>a</think><answer>3</answer>", " Hm<answer>4</answer>", 4, "a", ()),
        (THINKS, "<think>a</think>", "<think>Wait, b</think><answer>4</answer>", 4, "Wait, b", ()),
        (THINKS, "<answer>3</answer>", " Wait<answer>4</answer>", 4, None, ("no thinking",)),
        (BOXED, r"So \boxed{3}.", r" Wait, it is \boxed{4}.", 4, None, ()),
        (BOXED, r"So \boxed{3}.", " Wait.", None, None, (r"no \boxed answer",)),
        (JSON, '{"answer": 3}', ' Wait. {"think": "b", "answer": 4}', 4, "b", ()),
    ],
)
def test_behind_a_trigger_the_last_answer_counts(response_format, first_response, text, value, thinking, problems):
    answer = response_format.parse_continuation(first_response, text, AnswerType.NUMBER)
    assert (answer.value, answer.thinking, answer.problems) == (value, thinking, problems)
    if value is not None and "3" in first_response:
        assert (
            response_format.parse(first_response + text, AnswerType.NUMBER).value is None
        )  # without a trigger, two answers are none
