"""Forced rethinking: who goes on, where the trigger goes, what counts; every splice is made of token ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from scoring import judge_of, term

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
def world(tiny):
    return tiny()


@pytest.fixture(scope="module")
def drafts(world):
    """Groups of responses that ended themselves, one of each group aside; with EOS after a token or more."""
    prompts = [world.processor.build(sample) for sample in world.samples[:3]]
    groups = world.sampler().generate(prompts, GROUP, replace(world.law, max_new_tokens=5), step=0)
    return RolloutBatch(groups=tuple((*map(partial_end(world), group[1:]), group[0]) for group in groups))


def partial_end(world):
    def ended(rollout):
        (segment,) = rollout.segments
        ids = (*segment.token_ids[: 1 + rollout.index % 4], world.eos_id)
        segment = replace(segment, token_ids=ids, logprobs=(-1.0,) * len(ids))
        return world.processor.parse_rollout(replace(rollout, segments=(segment,), finish_reason=FinishReason.EOS))

    return ended


def rethink(world, *, stop=(), **options) -> ForcedRethink:
    options = {"max_new_tokens": 4, "triggers": (RethinkTriggerConfig(text=" Wait."),), **options}
    settings = RethinkConfig(kind="rethink", correct=("even",), **options)
    kit = RolloutContext(
        sampler=world.sampler(),
        scorer=judge_of(term(even)),
        processor=world.processor,
        sampling_params=replace(world.law, stop=stop),
        group_size=GROUP,
        groups_per_step=1,
        seed=0,
        tool_runner=ToolRunner(partial(load_tool, Path.cwd())),
    )
    (step,) = build_pipeline((GenerateConfig(kind="generate"), settings), kit).steps
    return step


def verdicts(world, rollouts):
    return CorrectnessCheck(scorer=judge_of(term(even)), correct_terms=("even",), threshold=1.0)(rollouts)


def test_a_second_look_is_draft_trigger_and_what_the_policy_adds(world, drafts):
    found = rethink(world, temperature=0.7)(drafts, step=0)
    forced = tokenize_trigger(" Wait.", world.processor, world.law.banned_token_ids)
    for before, after in zip(drafts.groups, found.groups, strict=True):
        assert after[-1] is before[-1] or after[-1].parent_index == before[-1].index
        for draft, second in zip(before[:-1], after[:-1], strict=True):
            kept, trigger, new = second.segments
            assert (kept.token_ids, kept.logprobs) == (
                draft.segments[0].token_ids[:-1],
                draft.segments[0].logprobs[:-1],
            )  # no EOS
            assert (trigger.token_ids, trigger.author) == (forced, Author.FORCED)
            assert new.author is Author.POLICY
            assert (new.sampling_params.temperature, new.sampling_params.max_new_tokens) == (0.7, 4)
            assert (second.index, second.parent_index, second.sampling_params) == (
                draft.index,
                draft.index,
                draft.sampling_params,
            )
            assert second.text == draft.text + " Wait." + world.processor.decode(new.token_ids)
            assert [second.is_correct] == verdicts(world, [second])


def test_a_verdict_ends_where_the_response_goes_on(world, drafts):
    second = rethink(world)(drafts, step=0).groups[0][0]
    assert second.is_correct is not None
    (longer,) = world.sampler().extend([second], world.law, step=0)
    assert longer.is_correct is None


def test_it_is_what_sampling_such_a_rollout_further_gives(world, drafts):
    """No round trip through text, and nothing but the draft decides: neither its siblings nor the other groups."""
    step = rethink(world)
    whole = step(drafts, step=5)
    alone = step(RolloutBatch(groups=(drafts.groups[1][2:4],)), step=5)
    for one, of_all in zip(alone.groups[0], whole.groups[1][2:4], strict=True):
        assert (one.text, one.parent_index) == (of_all.text, of_all.parent_index)
        for mine, theirs in zip(one.segments, of_all.segments, strict=True):
            assert (mine.token_ids, mine.author) == (theirs.token_ids, theirs.author)
            assert mine.logprobs == pytest.approx(
                theirs.logprobs, abs=1e-5
            )  # sums depend on the batch in the last digits
    other = step(drafts, step=6)
    assert other.groups[1] != whole.groups[1]


def test_a_truncated_draft_and_one_without_room_stay(world, drafts):
    cut = RolloutBatch(groups=(tuple(replace(draft, finish_reason=FinishReason.LENGTH) for draft in drafts.groups[0]),))
    assert rethink(world)(cut, step=0).groups == cut.groups
    room = world.law.max_new_tokens - 3
    found = rethink(world, min_free_tokens=room)(drafts, step=0)
    for before, after in zip(drafts.groups, found.groups, strict=True):
        for draft, second in zip(before[:-1], after[:-1], strict=True):
            assert (second is draft) == (draft.num_tokens > 3)


@pytest.mark.parametrize("which", ["correct", "incorrect"])
def test_only_drafts_of_a_verdict_take_part(world, drafts, which):
    found = rethink(world, only=which)(drafts, step=0)
    for before, after in zip(drafts.groups, found.groups, strict=True):
        right = verdicts(world, before)
        for draft, second, ok in zip(before[:-1], after[:-1], right[:-1], strict=True):
            assert (second is not draft) == (ok == (which == "correct"))


def test_only_groups_within_the_band_take_part(world, drafts):
    shares = [sum(verdicts(world, group)) / len(group) for group in drafts.groups]
    assert len(set(shares)) > 1
    found = rethink(world, accuracy_range=(min(shares), min(shares)))(drafts, step=0)
    for share, before, after in zip(shares, drafts.groups, found.groups, strict=True):
        assert (before != after) == (share == min(shares))


def test_a_fraction_goes_on_and_no_more_of_a_group_than_allowed(world, drafts):
    many = RolloutBatch(groups=tuple(group[:-1] for group in drafts.groups))
    attempted = [rethink(world, fraction=0.5)(many, step=step).metrics["rethink/attempted"] for step in range(12)]
    assert 0.4 < sum(attempted) / (12 * 21) < 0.6
    assert len(set(attempted)) > 1
    found = rethink(world, max_attempts_per_group=2)(many, step=0)
    assert found.metrics["rethink/attempted"] == 6
    again = rethink(world, max_attempts_per_group=2)(many, step=1)
    assert [places(many, found), places(many, again)] != [[[0, 1]] * 3] * 2  # not always the first ones


def places(before, after):
    return [
        [i for i, (a, b) in enumerate(zip(*groups, strict=True)) if a is not b]
        for groups in zip(before.groups, after.groups, strict=True)
    ]


@pytest.mark.parametrize("keep", ["all", "correct", "improved"])
def test_what_counts_and_the_account_of_all_that_was_tried(world, drafts, keep):
    everything = rethink(world)(drafts, step=0)
    found = rethink(world, keep=keep)(drafts, step=0)
    tally, kept = Counter(), 0
    for before, seconds, after in zip(drafts.groups, everything.groups, found.groups, strict=True):
        was, ends = verdicts(world, before), verdicts(world, seconds)
        for draft, second, result, a, b in zip(before, seconds, after, was, ends, strict=True):
            if second is draft:
                continue
            tally[f"rethink/{'correct' if a else 'incorrect'}_to_{'correct' if b else 'incorrect'}"] += 1
            good = {"all": True, "correct": b, "improved": b and not a}[keep]
            assert result == (second if good else draft)
            kept += good
    assert min(tally.values()) > 0 and len(tally) == 4
    assert {name: found.metrics[name] for name in tally} == tally
    assert found.metrics["rethink/kept"] == kept
    assert found.metrics["rethink/attempted"] == tally.total()
    new = [r.segments[-1] for g in everything.groups for r in g if r.parent_index is not None]
    assert found.metrics["rethink/new_tokens"] == sum(len(segment.token_ids) for segment in new)


def test_second_looks_may_stand_beside_their_drafts(world, drafts):
    replaced = rethink(world, max_kept_per_group=3)(drafts, step=0)
    added = rethink(world, max_kept_per_group=3, mode="add")(drafts, step=0)
    for before, inplace, after in zip(drafts.groups, replaced.groups, added.groups, strict=True):
        assert after[:GROUP] == before
        assert len(after) == GROUP + 3
        assert [r.index for r in after[GROUP:]] == [GROUP, GROUP + 1, GROUP + 2]
        for second in after[GROUP:]:
            twin = next(r for r in inplace if r.index == second.parent_index)
            assert twin.segments == second.segments


def test_short_second_looks_are_dropped(world, drafts):
    found = rethink(world, min_new_tokens=4, stop=("e", "t"))(drafts, step=0)
    seconds = [r for group in found.groups for r in group if r.parent_index is not None]
    assert 0 < len(seconds) < found.metrics["rethink/attempted"]
    assert {len(r.segments[-1].token_ids) for r in seconds} == {4}


def test_triggers_are_drawn_by_weight_and_by_verdict_where_they_say_so(world, drafts):
    triggers = (
        RethinkTriggerConfig(text=" one", weight=3.0),
        RethinkTriggerConfig(text=" two", only="correct"),
        RethinkTriggerConfig(text=" three", only="incorrect"),
    )
    counts = Counter()
    for turn in range(10):
        found = rethink(world, triggers=triggers)(drafts, step=turn)
        for before, after in zip(drafts.groups, found.groups, strict=True):
            for ok, second in zip(verdicts(world, before), after, strict=True):
                if second.parent_index is not None:
                    counts[ok, world.processor.decode(second.segments[1].token_ids)] += 1
    assert counts.keys() == {(True, " one"), (True, " two"), (False, " one"), (False, " three")}
    assert 0.65 < (counts[True, " one"] + counts[False, " one"]) / counts.total() < 0.85


def answered(world, text, *, ended=True):
    """A draft that says this."""
    prompt = world.processor.build(world.samples[0])
    ids = (*world.processor.tokenizer(text).input_ids, *([world.eos_id] if ended else []))
    (rollout,) = world.sampler().generate([prompt], 1, world.law, step=0)[0]
    segment = replace(rollout.segments[0], token_ids=ids, logprobs=(-1.0,) * len(ids))
    return world.processor.parse_rollout(replace(rollout, segments=(segment,), finish_reason=FinishReason.EOS))


@pytest.mark.parametrize(
    ("draft", "kept"),
    [
        ("Three, I say.<answer>3</answer>", "Three, I say."),
        ("<answer>2</answer> no<answer>3</answer>", "<answer>2</answer> no"),
        ("<answer>3</answer>", ""),
        ("no answer at all", "no answer at all"),
        ("<answer>never closed", "<answer>never closed"),
    ],
)
def test_the_last_answer_can_be_cut_off(world, draft, kept):
    rollout = answered(world, draft)
    found = rethink(world, cut_answer_fraction=1.0)(RolloutBatch(groups=((rollout,),)), step=0)
    ((second,),) = found.groups
    assert second.segments[-2].author is Author.FORCED
    before = [token for segment in second.segments[:-2] for token in segment.token_ids]
    assert world.processor.decode(before) == kept
    assert tuple(before) == rollout.segments[0].token_ids[: len(before)]
    assert all(segment.token_ids for segment in second.segments)


@pytest.mark.parametrize(("last", "kept"), [("So<answer>3</answer>", "So"), ("No idea.", "No idea.")])
def test_what_a_tool_says_is_no_answer_to_cut_off(world, last, kept):
    draft, reply, rest = answered(world, "Hm.", ended=False), "<answer>7</answer>", answered(world, last)
    told = Segment(
        token_ids=world.processor.tokenize(reply),
        logprobs=(0.0,) * len(world.processor.tokenize(reply)),
        author=Author.ENVIRONMENT,
    )
    segments = (*draft.segments, told, *rest.segments)
    rollout = world.processor.parse_rollout(replace(draft, segments=segments))
    ((second,),) = rethink(world, cut_answer_fraction=1.0)(RolloutBatch(groups=((rollout,),)), step=0).groups
    before = [token for segment in second.segments[:-2] for token in segment.token_ids]
    assert world.processor.decode(before) == f"Hm.{reply}{kept}"


def test_a_cut_never_divides_a_token():
    """Tokens of several characters, one of which begins before the place and ends behind it."""
    words = ["Well", "; so", " <ans", "wer>", "3"]
    decode = lambda ids: "".join(words[i] for i in ids)  # noqa: E731
    text = decode(range(5))
    at = text.index("<")
    assert (
        count_tokens_before(range(5), text[:at], decode) == 2
    )  # "Well; so": the blank before `<` is in a token with it
    assert [count_tokens_before(range(5), text[:n], decode) for n in (0, 4, 5, len(text))] == [0, 1, 1, 5]


def test_a_cut_never_divides_a_character(world):
    ids = world.processor.tokenizer("é€😀<answer>").input_ids
    text = world.processor.decode(ids)
    for n in range(len(text) + 1):
        count = count_tokens_before(ids, text[:n], world.processor.decode)
        assert text[:n].startswith(world.processor.decode(ids[:count]))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "comes to no token"),
        ("Wait<|im_start|>", r"'<\|im_start\|>', which no response"),
        ("a<|im_end|>", "im_end"),
    ],
)
def test_triggers_that_cannot_be_said_are_refused(world, text, complaint):
    with pytest.raises(UserError, match=complaint):
        tokenize_trigger(text, world.processor, world.law.banned_token_ids)


def test_a_sample_that_nothing_judges_is_named(world, drafts):
    blind = CorrectnessCheck(scorer=judge_of(term(even)), correct_terms=("accuracy",), threshold=1.0)
    with pytest.raises(UserError, match=r"correct: \[accuracy\].* says whether sample .* is right; there is even"):
        blind(drafts.groups[0])


THINKS = ResponseFormat(thinking="required")
BOXED = ResponseFormat(thinking="optional", style="boxed")
JSON = ResponseFormat(thinking="optional", style="json")


@pytest.mark.parametrize(
    ("grammar", "draft", "text", "value", "thought", "problems"),
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
def test_behind_a_trigger_the_last_answer_counts(grammar, draft, text, value, thought, problems):
    answer = grammar.parse_continuation(draft, text, AnswerType.NUMBER)
    assert (answer.value, answer.thinking, answer.problems) == (value, thought, problems)
    if value is not None and "3" in draft:
        assert grammar.parse(draft + text, AnswerType.NUMBER).value is None  # without a trigger, two answers are none
