"""Forced rethinking: which responses are continued, where the trigger goes, which continuations count."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from samplers import make_pipeline, reworded
from scoring import make_scorer, term
from tool_calls import call, responses

from mmrl.answer import ResponseFormat
from mmrl.config.schema import RethinkConfig, RethinkTriggerConfig, ToolConfig, ToolsConfig
from mmrl.rollout.steps.rethink import ForcedRethink, count_tokens_before, tokenize_trigger
from mmrl.rollout.tools.executor import ToolRunner
from mmrl.types import AnswerType, Author, FinishReason, RolloutBatch, Segment, UserError
from mmrl_rewards.contract import reward

GROUP = 8
WAIT = RethinkTriggerConfig(text=" Wait.")


@reward(name="even", low=0.0, high=1.0)
def even(response, sample) -> float:
    """A verdict that any text has, also that of a model of random weights."""
    return float(sum(map(ord, response.text)) % 2 == 0)


@pytest.fixture(scope="module")
def batch(tiny):
    """Three groups: seven responses each that end with EOS after one to four tokens, then one that was truncated."""

    def ended(rollout):
        (segment,) = rollout.segments
        ids = (*segment.token_ids[: 1 + rollout.index % 4], tiny.eos_id)
        segment = replace(segment, token_ids=ids, logprobs=(-1.0,) * len(ids))
        return tiny.processor.parse_rollout(replace(rollout, segments=(segment,), finish_reason=FinishReason.EOS))

    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:3]]
    groups = tiny.sampler().generate(prompts, GROUP, replace(tiny.params, max_new_tokens=5), step=0)
    return RolloutBatch(groups=tuple((*map(ended, group[1:]), group[0]) for group in groups))


def make_rethink(tiny, *, stop=(), **options) -> ForcedRethink:
    settings = RethinkConfig(
        kind="rethink", **{"correct": ("even",), "max_new_tokens": 4, "triggers": (WAIT,), **options}
    )
    params = replace(tiny.params, stop=stop)
    pipeline = make_pipeline(tiny, settings, scorer=make_scorer(term(even)), sampling_params=params)
    return pipeline.steps[0]


def is_correct(rollouts):
    return [even(rollout, None) == 1.0 for rollout in rollouts]


def side_by_side(*batches):
    """Each rollout of the first batch with those that stand in its place in the others, after rollout steps."""
    for groups in zip(*(batch.groups for batch in batches), strict=True):
        yield from zip(*groups, strict=True)


def test_continuation_is_first_response_then_trigger_then_new_tokens(tiny, batch):
    found = make_rethink(tiny, temperature=0.7)(batch, step=0)
    forced = tokenize_trigger(" Wait.", tiny.processor, tiny.params.banned_token_ids)
    for first, continuation in side_by_side(batch, found):
        if first.finish_reason is FinishReason.LENGTH:
            assert continuation is first
            continue
        kept, trigger, new = continuation.segments
        assert kept.token_ids == first.segments[0].token_ids[:-1]  # no EOS
        assert kept.logprobs == first.segments[0].logprobs[:-1]
        assert (trigger.token_ids, trigger.author) == (forced, Author.FORCED)
        assert new.author is Author.POLICY
        assert (new.sampling_params.temperature, new.sampling_params.max_new_tokens) == (0.7, 4)
        assert (continuation.index, continuation.parent_index) == (first.index, first.index)
        assert continuation.sampling_params == first.sampling_params
        assert continuation.text == first.text + " Wait." + tiny.processor.decode(new.token_ids)
        assert [continuation.is_correct] == is_correct([continuation])


def test_extending_a_continuation_clears_its_verdict(tiny, batch):
    continuation = make_rethink(tiny)(batch, step=0).groups[0][0]
    assert continuation.is_correct is not None
    (longer,) = tiny.sampler().extend([continuation], tiny.params, step=0)
    assert longer.is_correct is None


def test_continuation_depends_only_on_its_first_response_and_the_step(tiny, batch):
    rethink_step = make_rethink(tiny)
    of_all = rethink_step(batch, step=5)
    of_two = rethink_step(RolloutBatch(groups=(batch.groups[1][2:4],)), step=5)
    for alone, among_all in zip(of_two.groups[0], of_all.groups[1][2:4], strict=True):
        assert (alone.text, alone.parent_index) == (among_all.text, among_all.parent_index)
        for segment, same in zip(alone.segments, among_all.segments, strict=True):
            assert (segment.token_ids, segment.author) == (same.token_ids, same.author)
            # Sums depend on the batch in the last digits.
            assert segment.logprobs == pytest.approx(same.logprobs, abs=1e-5)
    assert rethink_step(batch, step=6).groups[1] != of_all.groups[1]


def test_a_second_rethink_step_does_not_repeat_what_the_first_dropped(tiny, batch):
    """With the same trigger, both continue the same tokens."""
    drops = RethinkConfig(kind="rethink", correct=("even",), max_new_tokens=4, triggers=(WAIT,), keep="correct")
    again = RethinkConfig(kind="rethink", name="again", correct=("even",), max_new_tokens=4, triggers=(WAIT,))
    first_step, second_step = make_pipeline(tiny, drops, again, scorer=make_scorer(term(even))).steps
    after_first = first_step(batch, step=0)
    after_second = second_step(after_first, step=0)
    # With `keep: all`, the first step shows what it drops.
    attempts = make_rethink(tiny)(batch, step=0)
    num_dropped = 0
    for response, attempt, kept, last in side_by_side(batch, attempts, after_first, after_second):
        if attempt is not response and kept is response:
            num_dropped += 1
            assert last.segments[:2] == attempt.segments[:2]
            assert last.segments[2].token_ids != attempt.segments[2].token_ids
    assert num_dropped > 3


def test_responses_without_room_are_not_continued(tiny, batch):
    found = make_rethink(tiny, min_free_tokens=tiny.params.max_new_tokens - 3)(batch, step=0)
    for first, result in side_by_side(batch, found):
        if first.finish_reason is not FinishReason.LENGTH:
            assert (result is first) == (first.num_tokens > 3)


def test_a_call_is_answered_and_not_continued(tiny):
    """A trigger after the call would keep the tools step, which comes next, from seeing it."""
    with closing(ToolRunner(Path())) as runner:
        tool = ToolConfig(fn="mmrl.rollout.tools.builtin:check_answer")
        steps = (
            RethinkConfig(kind="rethink", correct=("even",), max_new_tokens=4),
            ToolsConfig(kind="tools", tools=(tool,), max_turns=1, timeout_s=60.0),
        )
        pipeline = make_pipeline(tiny, *steps, scorer=make_scorer(term(even)), tool_runner=runner)
        found = responses(tiny, call("check_answer", answer="3"), "No call.")
        for rollout_step in pipeline.steps:
            found = rollout_step(found, step=0)
    ((calling, plain),) = found.groups
    assert [segment.author for segment in calling.segments] == [Author.POLICY, Author.ENVIRONMENT, Author.POLICY]
    assert [segment.author for segment in plain.segments] == [Author.POLICY, Author.FORCED, Author.POLICY]
    assert (found.metrics["rethink/attempted"], found.metrics["tools/calls"]) == (1, 1)


def test_fraction_and_attempts_per_group_are_limits(tiny, batch):
    ended = RolloutBatch(groups=tuple(group[:-1] for group in batch.groups))
    attempted = [make_rethink(tiny, fraction=0.5)(ended, step=step).metrics["rethink/attempted"] for step in range(12)]
    assert 0.4 < sum(attempted) / (12 * 21) < 0.6
    assert len(set(attempted)) > 1
    places = []
    for step in (0, 1):
        found = make_rethink(tiny, max_attempts_per_group=2)(ended, step=step)
        assert found.metrics["rethink/attempted"] == 6
        places.append([first is result for first, result in side_by_side(ended, found)])
    assert places[0] != places[1]  # not always the first ones


@pytest.mark.parametrize("keep", ["all", "correct"])
@pytest.mark.parametrize("max_kept", [None, 2])
def test_keep_selects_continuations_and_every_attempt_is_counted(tiny, batch, keep, max_kept):
    everything = make_rethink(tiny)(batch, step=0)
    found = make_rethink(tiny, keep=keep, max_kept_per_group=max_kept)(batch, step=0)
    counts, num_kept, new_tokens = Counter(), 0, 0
    for group, continuations, results in zip(batch.groups, everything.groups, found.groups, strict=True):
        kept_in_group = 0
        for first, continuation, result in zip(group, continuations, results, strict=True):
            if continuation is first:
                continue
            was_correct, ends_correct = is_correct([first, continuation])
            was, ends = ("correct" if verdict else "incorrect" for verdict in (was_correct, ends_correct))
            counts[f"rethink/{was}_to_{ends}"] += 1
            new_tokens += len(continuation.segments[-1].token_ids)
            is_kept = (ends_correct or keep == "all") and kept_in_group < (max_kept or GROUP)
            kept_in_group += is_kept
            assert result == (continuation if is_kept else first)
        num_kept += kept_in_group
    assert min(counts.values()) > 0 and len(counts) == 4
    counts |= {"rethink/kept": num_kept, "rethink/attempted": counts.total(), "rethink/new_tokens": new_tokens}
    assert {name: found.metrics[name] for name in counts} == counts


def test_short_continuations_are_dropped(tiny, batch):
    found = make_rethink(tiny, min_new_tokens=4, stop=("e", "t"))(batch, step=0)
    continuations = [result for _, result in side_by_side(batch, found) if result.parent_index is not None]
    assert 0 < len(continuations) < found.metrics["rethink/attempted"]
    assert {len(rollout.segments[-1].token_ids) for rollout in continuations} == {4}


def test_triggers_are_drawn_by_weight_and_verdict(tiny, batch):
    triggers = (
        RethinkTriggerConfig(text=" one", weight=3.0),
        RethinkTriggerConfig(text=" two", only="correct"),
        RethinkTriggerConfig(text=" three", only="incorrect"),
    )
    counts = Counter()
    for step in range(10):
        for first, continuation in side_by_side(batch, make_rethink(tiny, triggers=triggers)(batch, step=step)):
            if continuation.parent_index is not None:
                counts[is_correct([first])[0], tiny.processor.decode(continuation.segments[1].token_ids)] += 1
    assert counts.keys() == {(True, " one"), (True, " two"), (False, " one"), (False, " three")}
    assert 0.65 < (counts[True, " one"] + counts[False, " one"]) / counts.total() < 0.85


@pytest.fixture(scope="module")
def plain(tiny):
    """One response, whose text tests replace."""
    return tiny.sampler().generate([tiny.processor.build(tiny.samples[0])], 1, tiny.params, step=0)[0][0]


def text_before_trigger(tiny, rollout):
    rethink_step = make_rethink(tiny, cut_answer_fraction=1.0)
    ((continuation,),) = rethink_step(RolloutBatch(groups=((rollout,),)), step=0).groups
    assert continuation.segments[-2].author is Author.FORCED
    assert all(segment.token_ids for segment in continuation.segments)
    return tiny.processor.decode([token for segment in continuation.segments[:-2] for token in segment.token_ids])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Three, I say.<answer>3</answer>", "Three, I say."),
        ("<answer>2</answer> no<answer>3</answer>", "<answer>2</answer> no"),
        ("<answer>3</answer>", ""),
        ("no answer at all", "no answer at all"),
        ("<answer>never closed", "<answer>never closed"),
    ],
)
def test_last_answer_can_be_cut_off(tiny, plain, text, kept):
    assert text_before_trigger(tiny, reworded(tiny, plain, text, FinishReason.EOS)) == kept


@pytest.mark.parametrize(("last", "kept"), [("So<answer>3</answer>", "So"), ("No idea.", "No idea.")])
def test_answer_in_a_tool_result_is_not_cut_off(tiny, plain, last, kept):
    ids = tiny.processor.tokenize("<answer>7</answer>")
    result = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT)
    calling, ended = reworded(tiny, plain, "Hm."), reworded(tiny, plain, last, FinishReason.EOS)
    rollout = replace(ended, segments=(*calling.segments, result, *ended.segments))
    assert text_before_trigger(tiny, tiny.processor.parse_rollout(rollout)) == f"Hm.<answer>7</answer>{kept}"


def test_cut_never_divides_a_token():
    words = ["Well", "; so", " <ans", "wer>", "3"]

    def decode(ids):
        return "".join(words[index] for index in ids)

    text = decode(range(5))
    assert count_tokens_before(range(5), text[: text.index("<")], decode) == 2  # the blank before `<` is in a token
    assert [count_tokens_before(range(5), text[:n], decode) for n in (0, 4, 5, len(text))] == [0, 1, 1, 5]


def test_cut_never_divides_a_character(tiny):
    ids = tiny.processor.tokenizer("é€😀<answer>").input_ids
    text = tiny.processor.decode(ids)
    for n in range(len(text) + 1):
        count = count_tokens_before(ids, text[:n], tiny.processor.decode)
        assert text[:n].startswith(tiny.processor.decode(ids[:count]))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no token"), ("Wait<|im_start|>", r"'<\|im_start\|>', which no"), ("a<|im_end|>", "im_end")],
)
def test_trigger_with_forbidden_tokens_is_refused(tiny, text, message):
    with pytest.raises(UserError, match=message):
        tokenize_trigger(text, tiny.processor, tiny.params.banned_token_ids)


def test_sample_that_no_term_judges_is_named(tiny, batch):
    with pytest.raises(UserError, match=r"correct: \[accuracy\].* sample .*; there is even"):
        make_rethink(tiny, correct=("accuracy",))(batch, step=0)


THINKS = ResponseFormat(thinking="required")
BOXED = ResponseFormat(thinking="optional", style="boxed")
JSON = ResponseFormat(thinking="optional", style="json")


@pytest.mark.parametrize(
    ("response_format", "first", "text", "value", "thinking", "problems"),
    [
        (ResponseFormat(), "<answer>3</answer>", " Wait.<answer>4</answer>", 4, None, ()),
        (ResponseFormat(), "<answer>3</answer>", " Wait.", None, None, ("no answer tag",)),
        (ResponseFormat(), "<answer>3</answer>", "<answer>4</answer><answer>5</answer>", None, None, ("two answers",)),
        (ResponseFormat(), "<answer>3</answer>", "<answer>4</answer> so", None, None, ("text after the answer",)),
        (THINKS, "<think>a</think><answer>3</answer>", " Hm<answer>4</answer>", 4, "a", ()),
        (THINKS, "<think>a</think>", "<think>Wait, b</think><answer>4</answer>", 4, "Wait, b", ()),
        (THINKS, "<answer>3</answer>", " Wait<answer>4</answer>", 4, None, ("no thinking",)),
        (BOXED, r"So \boxed{3}.", r" Wait, it is \boxed{4}.", 4, None, ()),
        (BOXED, r"So \boxed{3}.", " Wait.", None, None, (r"no \boxed answer",)),
        (JSON, '{"answer": 3}', ' Wait. {"think": "b", "answer": 4}', 4, "b", ()),
    ],
)
def test_last_answer_counts_after_a_trigger(response_format, first, text, value, thinking, problems):
    answer = response_format.parse_continuation(first, text, AnswerType.NUMBER)
    assert (answer.value, answer.thinking, answer.problems) == (value, thinking, problems)
    if value is not None and "3" in first:  # without a trigger, two answers are none
        assert response_format.parse(first + text, AnswerType.NUMBER).value is None
