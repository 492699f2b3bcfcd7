"""Scoring: weights, conditions, evaluation, failures of rewards and their policies, checks before training."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from scoring import COUNT, FIND, GRAMMAR, check_samples, constant, make_scorer, rollout, scored, term

from mmrl import types
from mmrl.answer import ResponseFormat
from mmrl.config import load_config
from mmrl.scoring import RewardError
from mmrl.scoring.coverage import find_coverage_gaps
from mmrl.scoring.term_checks import check_terms
from mmrl.scoring.trial import RewardTrial
from mmrl_rewards import box, choice, format, jigsaw, maths, number, text
from mmrl_rewards.contract import reward

ORIGINAL = types.CoordinateSystem.PX_ORIGINAL
QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
RIGHT, WRONG = rollout("<answer>3</answer>"), rollout("<answer>4</answer>", index=1)


def make_target(value, answer_type, coordinate_system=None):
    return types.Target(answer_type=answer_type, value=value, coordinate_system=coordinate_system)


@reward(name="picky")
def picky(response, sample) -> float:
    """Returns 1 for correct answers, is unscorable without an answer, and raises on wrong ones."""
    if response.answer.value is None:
        raise types.Unscorable("no answer")
    return 1.0 / (response.answer.value == sample.target.value)


def test_the_total_is_the_weighted_sum_of_the_terms():
    scorer = make_scorer(term(number.exact, weight=2.0), term(format.tags, weight=0.5))
    assert scored(scorer, RIGHT).total == 2.5
    wrong = scored(scorer, WRONG)
    assert wrong.total == 0.5
    assert wrong.terms == {
        "number": types.RewardValue(0.0, "4, expected 3"),
        "format": types.RewardValue(1.0, "as asked"),
    }
    assert scored(scorer, rollout("3")).total == 0.0


def test_terms_apply_by_task():
    scorer = make_scorer(
        term(number.exact, when={"task": ["count"]}), term(box.iou, when={"task": ["find"]}), term(format.tags)
    )
    assert set(scored(scorer, RIGHT).terms) == {"number", "format"}
    assert set(scored(scorer, rollout("<answer>[0, 0, 5, 5]</answer>", FIND)).terms) == {"iou", "format"}


def test_terms_apply_by_columns_of_meta():
    hard = replace(COUNT, meta={"source": "geo", "level": 5})
    by_source = term(number.exact, "by source", when={"source": ["geo", "clevr"], "task": ["count"]})
    by_level = term(number.exact, "by level", when={"level": ["4", "5"]})
    scorer = make_scorer(by_source, by_level, term(format.tags))
    assert set(scored(scorer, rollout("", hard)).terms) == {"by source", "by level", "format"}
    assert set(scored(scorer, RIGHT).terms) == {"format"}  # it has no such columns


def test_a_box_is_compared_in_the_original_frame():
    score = scored(make_scorer(term(box.iou)), rollout("<answer>[0, 0, 5, 5]</answer>", FIND))
    assert score.total == 1.0
    assert score.terms["iou"].reason == "IoU 1.00: [0, 0, 10, 10] vs [0, 0, 10, 10] px_original"


def test_evaluation_leaves_out_what_only_shapes_training():
    scorer = make_scorer(term(number.exact), term(format.tags, training_only=True))
    assert scored(scorer, RIGHT).total == 2.0
    assert [score.total for score in scorer.score_eval([RIGHT, WRONG])] == [1.0, 0.0]
    with pytest.raises(types.UserError, match=r"'c1' of task 'count', in evaluation"):
        make_scorer(term(format.tags, training_only=True)).score_eval([RIGHT])


def test_scorer_keeps_the_order_of_groups_and_siblings():
    scorer = make_scorer(term(number.exact))
    siblings = [rollout(f"<answer>{n}</answer>", index=n) for n in (2, 3)]
    groups = scorer.score_groups([siblings, siblings[::-1]], step=0)
    assert [group.totals for group in groups] == [(0.0, 1.0), (1.0, 0.0)]
    assert groups[0].rollouts == tuple(siblings)
    assert groups[0].prompt is siblings[0].prompt


def test_no_term_for_a_sample_is_the_users_mistake():
    with pytest.raises(types.UserError, match="no reward term applies to sample 'c1' of task 'count': see `when`"):
        scored(make_scorer(term(box.iou, when={"task": ["find"]})), RIGHT)


def test_two_terms_may_not_share_a_name():
    with pytest.raises(types.UserError, match="two reward terms are named 'number'"):
        check_terms([term(number.exact), term(number.exact, args={"tolerance": 1})], "sum")


@pytest.mark.parametrize(
    "result", [None, float("nan"), float("inf"), -0.1, 1.1, "1", (1.0, "x"), types.RewardValue(2.0, "x"), 1j]
)
def test_a_result_that_is_not_a_number_of_the_range_is_refused_by_name(result):
    with pytest.raises(RewardError) as caught:
        scored(make_scorer(term(constant(result))), rollout("<answer>3</answer>" + " " * 10_000))
    message = str(caught.value)
    value = result.value if isinstance(result, types.RewardValue) else result
    assert f"reward 'odd' on sample 'c1' (task 'count'): returned {value!r}, not a number from 0 to 1" in message
    assert "<answer>3</answer>" in message
    assert len(message) < 400


def test_a_reason_is_text_and_of_a_length_that_a_person_reads():
    with pytest.raises(RewardError, match="gave the reason 3, which is not a string"):
        scored(make_scorer(term(constant(types.RewardValue(1.0, 3)))), RIGHT)
    assert (
        len(scored(make_scorer(term(constant(types.RewardValue(1.0, "x" * 10**7)))), RIGHT).terms["odd"].reason) == 2003
    )


@pytest.mark.parametrize("result", [True, 1, 1.0, types.RewardValue(1.0, "")])
def test_numbers_and_booleans_are_scores(result):
    score = scored(make_scorer(term(constant(result))), rollout(""))
    assert score.terms["odd"] == types.RewardValue(1.0, "")
    assert type(score.total) is float


@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), RecursionError("oops"), SystemExit("oops")])
def test_a_bug_in_a_reward_ends_the_run_and_is_named_with_its_place(error):
    with pytest.raises(RewardError, match=r"reward 'odd' on sample 'c1' .*: raised \w+: oops \(scoring.py:\d+\)"):
        scored(make_scorer(term(constant(error))), rollout(""))


def test_keyboard_interrupts_pass_through():
    with pytest.raises(KeyboardInterrupt):
        scored(make_scorer(term(constant(KeyboardInterrupt()))), RIGHT)


def test_stop_ends_the_run_when_a_reward_abstains():
    scorer = make_scorer(term(constant(types.Unscorable("broken"))), on_missing_score="stop")
    with pytest.raises(RewardError, match=r"reward 'odd' on sample 'c1' \(task 'count'\): broken"):
        scored(scorer, rollout(""))


def test_skip_drops_the_rollouts_whose_reward_failed():
    silent = rollout("", index=2)
    (group,) = make_scorer(term(number.exact), term(picky), on_error="skip").score_groups(
        [[WRONG, RIGHT, silent]], step=0
    )
    assert group.rollouts == (RIGHT,)
    assert group.totals == (2.0,)
    assert group.dropped[1] == (silent, {"picky": types.Failure(types.FailureKind.UNSCORABLE, "no answer")})
    assert group.dropped[0].rollout is WRONG
    failure = group.dropped[0].failures["picky"]
    assert failure.kind is types.FailureKind.ERROR
    assert failure.reason.startswith("raised ZeroDivisionError: float division by zero (test_scorer.py:")
    assert group.all_rollouts == (RIGHT, WRONG, silent)


def test_skip_group_drops_the_siblings_too_and_no_other_group():
    silent = rollout("", index=1)
    scorer = make_scorer(term(picky), on_missing_score="skip_group")
    skipped, kept = scorer.score_groups([[RIGHT, silent], [RIGHT, RIGHT]], step=0)
    assert (skipped.rollouts, skipped.scores) == ((), ())
    assert skipped.prompt is RIGHT.prompt
    assert [(skip.rollout, list(skip.failures)) for skip in skipped.dropped] == [(RIGHT, []), (silent, ["picky"])]
    assert kept.totals == (1.0, 1.0)


@pytest.mark.parametrize(("options", "value"), [({}, -1.0), ({"fallback": 0.25}, 0.25)])
def test_fallback_counts_the_fallback_of_the_term_and_records_the_failure(options, value):
    broken = constant(types.Unscorable("no verdict"), low=-1.0)
    score = scored(make_scorer(term(broken, weight=2.0, **options), on_missing_score="fallback"), RIGHT)
    assert score.terms == {"odd": types.RewardValue(value, "fallback: no verdict")}
    assert score.total == 2.0 * value
    assert score.failures == {"odd": types.Failure(types.FailureKind.UNSCORABLE, "no verdict")}


def test_errors_and_unscorable_samples_have_separate_policies():
    scorer = make_scorer(term(picky), on_error="fallback", on_missing_score="skip")
    (group,) = scorer.score_groups([[RIGHT, WRONG, rollout("", index=2)]], step=0)
    assert group.totals == (1.0, 0.0)
    assert len(group.dropped) == 1


@pytest.mark.parametrize("policy", ["skip", "skip_group", "fallback"])
def test_evaluation_scores_every_rollout(policy):
    scores = make_scorer(term(picky), on_missing_score=policy).score_eval([RIGHT, rollout("")])
    assert [score.total for score in scores] == [1.0, 0.0]
    assert scores[1].failures.keys() == {"picky"}
    with pytest.raises(RewardError, match="raised ZeroDivisionError"):
        make_scorer(term(picky), on_missing_score=policy).score_eval([WRONG])


def test_check_accepts_sound_samples():
    scorer = make_scorer(term(number.exact, when={"task": ["count"]}), term(box.iou, when={"task": ["find"]}))
    check_samples(scorer, [COUNT, FIND], ResponseFormat(thinking="required"))


@pytest.mark.parametrize(
    ("fn", "target", "words"),
    [
        (box.iou, make_target((10, 0, 0, 10), types.AnswerType.BOX, ORIGINAL), "inverted or empty"),
        (box.iou, make_target((float("nan"), 0, 0, 1), types.AnswerType.BOX, ORIGINAL), "not a box"),
        (box.iou, make_target((0, 0, 10, 10), types.AnswerType.BOX), "coordinate system"),
        (box.iou, make_target(3, types.AnswerType.NUMBER), "the target is a number, this reward compares a box"),
        (text.exact, make_target("", types.AnswerType.TEXT), "empty answer"),
        (text.exact, make_target(" \u3000", types.AnswerType.TEXT), "empty"),
        (text.exact, make_target(None, types.AnswerType.TEXT), "not text"),
        (number.exact, make_target("three", types.AnswerType.NUMBER), "not a number"),
        (choice.exact, make_target("AB", types.AnswerType.CHOICE), "not one letter"),
        (jigsaw.exact, make_target([1, 1], types.AnswerType.PERMUTATION), "not each of 1 to 2 once"),
        (maths.equal, make_target("", types.AnswerType.LATEX), "empty answer"),
        (format.tags, make_target("a</answer>", types.AnswerType.TEXT), "cannot be written as an answer"),
    ],
)
def test_check_names_a_sample_with_an_unusable_target_whatever_the_policy(fn, target, words):
    sample = replace(FIND, id="x", target=target)
    scorer = make_scorer(term(fn), on_missing_score="fallback")
    with closing(scorer), pytest.raises(types.UserError, match=f"sample 'x' .*{words}"):
        check_samples(scorer, [sample], GRAMMAR)


def test_a_trial_lists_samples_that_a_reward_abstains_on_and_continues():
    found = {}
    trial = RewardTrial(make_scorer(term(box.iou)), GRAMMAR)
    for abstained in trial.check_in_batches([FIND, COUNT, replace(FIND, id="f2")]):
        found |= abstained
    assert list(found) == ["c1"]
    assert "on sample 'c1' (task 'count'): the target is a number, this reward compares a box" in found["c1"]


def test_check_reaches_what_only_a_right_answer_reaches():
    @reward(name="fragile")
    def fragile(response, sample) -> float:
        return 0.0 if response.answer.value is None else 7.0

    with pytest.raises(RewardError, match=r"reward 'fragile' on sample 'c1' .*: returned 7\.0"):
        check_samples(make_scorer(term(fragile), on_error="fallback"), [COUNT], GRAMMAR)


def test_check_reaches_what_only_a_wrong_answer_reaches():
    scorer = make_scorer(term(number.exact), term(picky))
    with pytest.raises(RewardError, match=r"'picky' on sample 'c1' .*ZeroDivisionError.*test_scorer.py:\d+.*<answer>"):
        RewardTrial(scorer, GRAMMAR).check_wrong_answers([COUNT])
    (warning,) = RewardTrial(make_scorer(term(picky), on_error="skip"), GRAMMAR).check_wrong_answers([COUNT] * 3)
    assert "raised ZeroDivisionError" in warning
    sound = make_scorer(term(number.exact), term(box.iou, when={"task": ["find"]}))
    boxed = ResponseFormat(thinking="required", style="boxed")
    assert RewardTrial(sound, boxed).check_wrong_answers([COUNT, FIND]) == []


def test_check_asks_a_service_once():
    asked = []

    @reward(name="remote", uses_service=True)
    def remote(response, sample) -> float:
        asked.append(response.text)
        if len(asked) > 1:
            raise types.Unscorable("no more money")
        return 0.5

    trial = RewardTrial(make_scorer(term(remote), term(number.exact, requires="remote")), GRAMMAR)
    for samples, evaluation in (([COUNT] * 3, False), ([COUNT], True)):
        assert not any(trial.check_in_batches(samples, evaluation=evaluation))
    assert trial.check_wrong_answers([COUNT]) == []
    assert asked == ["<answer>How many?</answer>"]
    with pytest.raises(RewardError, match="no more money"):
        check_samples(make_scorer(term(remote)), [COUNT], GRAMMAR)


def test_a_service_without_the_option_that_makes_it_costly_is_asked_about_every_sample():
    asked = []

    @reward(name="drawn", uses_service=True, costly_with="model")
    def drawn(response, sample, *, model: str | None = None) -> float:
        asked.append(model)
        return 0.5

    for args in ({}, {"model": "dino"}):
        check_samples(make_scorer(term(drawn, args=args)), [COUNT] * 3, GRAMMAR)
    assert asked == [None] * 6 + ["dino"]
    with pytest.raises(types.UserError, match="costly_with 'size' is not one of its options"):
        reward(name="drawn", costly_with="size")(drawn.fn)


def coverage_gaps(*terms, samples=(COUNT, FIND), overrides=()):
    config = load_config(QUICKSTART, overrides).config
    return list(find_coverage_gaps(config, make_scorer(*terms), samples))


def test_values_of_when_that_no_sample_has_are_named():
    style, judging = term(format.tags), term(text.exact)
    assert coverage_gaps(style, term(number.exact, when={"task": ["count", "find"]})) == []
    assert coverage_gaps(style, judging, term(number.exact, when={"task": ["cuont", "find"]})) == [
        "reward term 'number': `when` names task 'cuont', which no sample has; did you mean 'count'?"
    ]
    assert coverage_gaps(judging, term(number.exact, when={"taks": ["count"]})) == [
        "reward term 'number': `when` names taks 'count', which no sample has; there is no such column"
    ]
    assert coverage_gaps(judging, overrides=["stages.rl.when={task: [ocr]}"]) == [
        "stage 'rl': `when` names task 'ocr', which no sample has; there is count, find"
    ]
    tagged = replace(COUNT, meta={"level": 5})
    both = term(number.exact, when={"task": ["find"], "level": ["5"]})
    assert coverage_gaps(judging, both, samples=[tagged, FIND]) == [
        "reward term 'number' applies to none of the samples: see its `when`"
    ]


def test_samples_whose_answer_no_reward_judges_are_counted():
    style, typo = term(format.tags), term(number.exact, when={"task": ["cuont"]})
    assert coverage_gaps(style, typo, term(box.iou, when={"task": ["find"]}))[1:] == [
        "no reward judges the answers of 1 samples of task 'count': only format applies to them; see `when` of the "
        "other terms"
    ]
    group_reward = "rewards.group_rewards=[{fn: 'mmrl.algo.group_rewards:kimi_length', args: {correct: [count]}}]"
    assert coverage_gaps(style, overrides=[group_reward]) == []
