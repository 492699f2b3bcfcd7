"""Scoring: weights, tasks, evaluation, and what a reward may not do."""

import pytest

from mmrl.answer import Grammar
from mmrl.score import BoundTerm, Judge, RewardError
from mmrl.types import (
    Author,
    Finish,
    Frame,
    ImageRef,
    Kind,
    Prompt,
    ResizeMap,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Size,
    Target,
    Term,
    Unscorable,
    UserError,
)
from mmrl_rewards import box, format, number
from mmrl_rewards.contract import bind, reward

GRAMMAR = Grammar(think="none")
COUNT = Sample(id="c1", task="count", parts=("How many?",), target=Target(kind=Kind.NUMBER, value=3))
FIND = Sample(
    id="f1",
    task="find",
    parts=(ImageRef(path="a.png", sha256=""), "Where?"),
    target=Target(kind=Kind.BOX, value=(0, 0, 10, 10), frame=Frame.PX_ORIGINAL),
)


def rollout(text, sample=COUNT, index=0):
    prompt = Prompt(
        sample=sample,
        ids=(1,),
        grids=(),
        resizes=tuple(ResizeMap(Size(100, 100), Size(50, 50)) for _ in sample.images),
        frame=Frame.PX_RESIZED,
        digest="",
    )
    return Rollout(
        prompt=prompt,
        index=index,
        segments=(Segment(ids=(1, 2), logps=(-1.0, -1.0), author=Author.POLICY),),
        text=text,
        answer=GRAMMAR.parse(text, sample.target.kind),
        finish=Finish.EOS,
        law=SamplingLaw(max_new_tokens=4),
    )


def term(fn, name=None, args=None, **options):
    return BoundTerm(name=name or fn.name, reward=bind(fn, args or {}), **options)


def constant(result, name="odd"):
    @reward(name=name)
    def fn(response, sample) -> float:
        if isinstance(result, Exception):
            raise result
        return result

    return fn


def test_the_total_is_the_weighted_sum_of_the_terms():
    judge = Judge([term(number.exact, weight=2.0), term(format.tags, weight=0.5)])
    assert judge.score(rollout("<answer>3</answer>")).total == 2.5
    wrong = judge.score(rollout("<answer>4</answer>"))
    assert wrong.total == 0.5
    assert wrong.terms == {"number": Term(0.0, "4, expected 3"), "format": Term(1.0, "as asked")}
    assert judge.score(rollout("3")).total == 0.0


def test_terms_apply_by_task():
    judge = Judge([term(number.exact, tasks=("count",)), term(box.iou, tasks=("find",)), term(format.tags)])
    assert set(judge.score(rollout("<answer>3</answer>")).terms) == {"number", "format"}
    assert set(judge.score(rollout("<answer>[0, 0, 5, 5]</answer>", FIND)).terms) == {"iou", "format"}


def test_a_box_is_compared_in_the_original_frame():
    score = Judge([term(box.iou)]).score(rollout("<answer>[0, 0, 5, 5]</answer>", FIND))
    assert score.total == 1.0
    assert score.terms["iou"].reason == "IoU 1.00: [0, 0, 10, 10] vs [0, 0, 10, 10] px_original"


def test_evaluation_leaves_out_what_only_shapes_training():
    judge = Judge([term(number.exact), term(format.tags, train_only=True)])
    right = rollout("<answer>3</answer>")
    assert judge.score(right).total == 2.0
    assert judge.score(right, evaluation=True).total == 1.0
    with pytest.raises(UserError, match=r"'c1' of task 'count', in evaluation"):
        Judge([term(format.tags, train_only=True)]).score(right, evaluation=True)


def test_judge_keeps_the_order_of_groups_and_siblings():
    judge = Judge([term(number.exact)])
    siblings = [rollout(f"<answer>{n}</answer>", index=n) for n in (2, 3)]
    groups = judge.judge([siblings, siblings[::-1]])
    assert [group.totals for group in groups] == [(0.0, 1.0), (1.0, 0.0)]
    assert groups[0].rollouts == tuple(siblings)
    assert groups[0].prompt is siblings[0].prompt


def test_no_term_for_a_sample_is_the_users_mistake():
    with pytest.raises(UserError, match="no reward term applies to sample 'c1' of task 'count'"):
        Judge([term(box.iou, tasks=("find",))]).score(rollout(""))


def test_two_terms_may_not_share_a_name():
    with pytest.raises(UserError, match="two reward terms are named 'number'"):
        Judge([term(number.exact), term(number.exact, args={"tolerance": 1})])
    Judge([term(number.exact), term(number.exact, "near", {"tolerance": 1})])


@pytest.mark.parametrize("result", [None, float("nan"), float("inf"), -0.1, 1.1, "1", (1.0, "x"), Term(2.0, "x"), 1j])
def test_a_result_that_is_no_score_is_refused_by_name(result):
    with pytest.raises(RewardError) as caught:
        Judge([term(constant(result))]).score(rollout("<answer>3</answer>" + " " * 10_000))
    message = str(caught.value)
    value = result.value if isinstance(result, Term) else result
    assert "reward 'odd' on sample 'c1' returned" in message
    assert repr(value) in message
    assert "not a number from 0 to 1" in message
    assert "<answer>3</answer>" in message
    assert len(message) < 400


@pytest.mark.parametrize("result", [True, 1, 1.0, Term(1.0, "")])
def test_any_real_number_is_a_score(result):
    score = Judge([term(constant(result))]).score(rollout(""))
    assert score.terms["odd"] == Term(1.0, "")
    assert type(score.total) is float


def test_a_sample_that_cannot_be_judged_ends_the_run():
    with pytest.raises(RewardError, match=r"reward 'odd' on sample 'c1' \(task 'count'\): broken"):
        Judge([term(constant(Unscorable("broken")))]).score(rollout(""))


def test_a_bug_in_a_reward_is_not_hidden_and_is_named():
    with pytest.raises(ZeroDivisionError) as caught:
        Judge([term(constant(ZeroDivisionError("oops")))]).score(rollout(""))
    assert caught.value.__notes__ == ["in reward 'odd' on sample 'c1'"]


def test_check_passes_sound_samples():
    Judge([term(number.exact, tasks=("count",)), term(box.iou, tasks=("find",))]).check([COUNT, FIND], GRAMMAR)
    Judge([term(number.exact)]).check([COUNT], Grammar(think="required"))


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        (Target(kind=Kind.BOX, value=(10, 0, 0, 10), frame=Frame.PX_ORIGINAL), "sample 'x' .*inverted or empty"),
        (Target(kind=Kind.BOX, value=(float("nan"), 0, 0, 1), frame=Frame.PX_ORIGINAL), "is not a box"),
        (Target(kind=Kind.BOX, value=(0, 0, 10, 10)), "what frame"),
        (Target(kind=Kind.NUMBER, value=3), "the target is a number, this reward compares a box"),
    ],
)
def test_check_finds_a_bad_target_before_training(target, complaint):
    sample = Sample(id="x", task="find", parts=FIND.parts, target=target)
    with pytest.raises(RewardError, match=complaint):
        Judge([term(box.iou)]).check([FIND, sample], GRAMMAR)


def test_check_finds_a_target_that_cannot_be_written():
    sample = Sample(id="x", task="t", parts=("q",), target=Target(kind=Kind.TEXT, value="a</answer>"))
    with pytest.raises(UserError, match=r"sample 'x' .* cannot be written as an answer"):
        Judge([term(format.tags)]).check([sample], GRAMMAR)


def test_check_reaches_what_only_a_right_answer_reaches():
    @reward(name="fragile")
    def fragile(response, sample) -> float:
        return 0.0 if response.answer.value is None else 7.0

    with pytest.raises(RewardError, match=r"reward 'fragile' on sample 'c1' returned 7\.0"):
        Judge([term(fragile)]).check([COUNT], GRAMMAR)
