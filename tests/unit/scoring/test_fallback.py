"""Terms that decide where another abstains, and terms that apply to some rollouts alone."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest
from factories import make_rollout
from scoring import COUNT, FIND, GRAMMAR, as_read, check_samples, constant, make_scorer, rollout, scored, term

from mmrl.algo.group_metrics import compute_blind_gaps, compute_reward_metrics
from mmrl.config.schema import GroupRewardConfig
from mmrl.log.rollout_records import list_scored_records
from mmrl.scoring import RewardError
from mmrl.scoring.build import load_reward_terms
from mmrl.scoring.coverage import find_coverage_gaps
from mmrl.scoring.term_checks import check_terms
from mmrl.types import Author, FinishReason, Segment, Unscorable, UserError
from mmrl_rewards import format, number
from mmrl_rewards.contract import bind, reward

ANY = rollout("<answer>3</answer>")
ABSTAINS = Unscorable("no rule for this")


@reward(name="rule")
def rule(response, sample) -> float:
    """Decides about numbers alone."""
    if not response.answer.text.isdigit():
        raise Unscorable("no number")
    return float(response.answer.text == "3")


def counted(name, value=0.5, **options):
    """A term of a constant, and the responses that it was called for."""
    calls = []

    @reward(name=name)
    def fn(response, sample) -> float:
        calls.append(response.text)
        if isinstance(value, Exception):
            raise value
        return value

    return term(fn, **options), calls


def answers(*texts):
    return [rollout(f"<answer>{text}</answer>", index=index) for index, text in enumerate(texts)]


@pytest.fixture
def judged():
    """Three scored rollouts; about the second the rule abstains, of weight 2, and its fallback says 0.5."""
    judge, calls = counted("judge")
    scorer = make_scorer(term(rule, weight=2.0, fallback="judge"), judge)
    (group,) = scorer.score_groups([answers("3", "a few", "4")], step=0)
    return SimpleNamespace(scorer=scorer, group=group, calls=calls)


def test_the_fallback_is_asked_only_where_the_rule_abstains(judged):
    assert judged.calls == ["<answer>a few</answer>"]


def test_what_the_fallback_decides_counts_as_the_value_of_the_term_also_in_evaluation(judged):
    assert judged.group.totals == (2.0, 1.0, 0.0) and not judged.group.dropped
    second = judged.group.scores[1]
    assert set(second.terms) == {"rule"} and second.decided_by == {"rule": "judge"}
    assert second.terms["rule"] == (0.5, "judge decides: ")
    assert judged.scorer.term_weights == {"rule": 2.0}
    assert judged.scorer.score_eval(answers("3", "a few", "4")) == judged.group.scores


def test_metrics_count_what_the_fallback_decides_under_the_term(judged):
    metrics = compute_reward_metrics([judged.group])
    assert metrics["reward/rule/fallback"] == metrics["reward/rule/unscorable"] == 1
    assert "reward/term/judge" not in metrics and metrics["reward/term/rule"] == 0.5


def test_records_name_the_fallback_that_decided(judged):
    fields = [record.outcome["terms"]["rule"] for record in list_scored_records([judged.group])]
    assert [entry.get("decided_by") for entry in fields] == [None, "judge", None]
    assert [entry["contribution"] for entry in fields] == [2.0, 1.0, 0.0]


def test_a_chain_ends_at_the_first_that_decides_and_a_shared_judge_is_asked_once():
    judge, calls = counted("judge", 0.25)
    chain = {"first": "second", "second": "judge", "other": "judge"}
    terms = [*(term(constant(ABSTAINS, name=name), fallback=other) for name, other in chain.items()), judge]
    score = scored(make_scorer(*terms), ANY)
    assert score.total == 0.5 and len(calls) == 1
    assert score.decided_by == {"first": "judge", "second": "judge", "other": "judge"}
    assert set(score.failures) == {"first", "second", "other"}


def test_blind_gap_counts_what_a_fallback_decided_with_and_without_the_media():
    judge = term(reward(name="judge")(lambda response, sample: 0.5 if "many" in response.text else 0.25))
    scorer = make_scorer(term(rule, fallback="judge"), judge)
    groups = scorer.score_groups([answers("3", "a few")], step=0, probes=[{"grey": answers("4", "many")}])
    assert compute_blind_gaps(groups) == {"probe/blind_gap/grey/rule": (1.0 + 0.25) / 2 - (0.0 + 0.5) / 2}


def test_blind_gap_leaves_out_failed_terms_with_and_without_the_media():
    scorer = make_scorer(term(rule, fallback=0.5), on_missing_score="fallback")
    groups = scorer.score_groups([answers("3", "a few")], step=0, probes=[{"grey": answers("3", "a few")}])
    assert compute_blind_gaps(groups) == {"probe/blind_gap/grey/rule": 0.0}


@pytest.mark.parametrize(("policy", "left"), [("skip", 0), ("skip_group", 0), ("fallback", 1)])
def test_the_policy_decides_once_the_last_of_a_chain_failed(policy, left):
    judge, _ = counted("judge", Unscorable("down"))
    scorer = make_scorer(term(rule, fallback="judge"), judge, on_missing_score=policy)
    (group,) = scorer.score_groups([[rollout("<answer>few</answer>")]], step=0)
    assert len(group.scores) == left
    for dropped in group.dropped:
        assert {name: why.reason for name, why in dropped.failures.items()} == {"rule": "no number", "judge": "down"}
    score = scorer.score_eval([rollout("<answer>few</answer>")])[0]
    assert score.terms["rule"] == (0.0, "fallback: down") and score.decided_by == {}


def test_stop_ends_the_run_where_the_last_of_a_chain_failed():
    judge, _ = counted("judge", Unscorable("down"))
    scorer = make_scorer(term(rule, fallback="judge"), judge, on_missing_score="stop")
    assert scored(scorer, ANY).total == 1.0
    with pytest.raises(RewardError, match="reward 'judge' .*down"):
        scored(scorer, rollout("<answer>few</answer>"))


def test_the_last_fallback_may_name_a_value():
    judge, _ = counted("judge", Unscorable("down"), fallback=0.5, transform={"rescale_to": [0.0, 0.5]})
    scorer = make_scorer(term(rule, fallback="judge"), judge, on_missing_score="fallback")
    assert scored(scorer, rollout("<answer>few</answer>")).total == 0.25


def test_a_bug_ends_the_run_although_the_term_has_a_fallback():
    judge, calls = counted("judge")
    with pytest.raises(RewardError, match="reward 'odd' .*ValueError"):
        scored(make_scorer(term(constant(ValueError("bug")), fallback="judge"), judge), ANY)
    assert calls == []
    scorer = make_scorer(term(constant(ValueError("bug")), fallback="judge"), judge, on_error="fallback")
    assert scored(scorer, ANY).total == 0.5


@pytest.mark.parametrize("policy", ["skip", "skip_group"])
def test_a_bug_is_not_hidden_by_a_fallback_that_another_term_called(policy):
    judge, calls = counted("judge")
    bug = term(constant(ValueError("bug"), name="bug"), fallback="judge")
    scorer = make_scorer(bug, term(constant(ABSTAINS), fallback="judge"), judge, on_error=policy)
    (group,) = scorer.score_groups([[ANY]], step=0)
    assert len(calls) == 1 and not group.scores
    assert list(group.dropped[0].failures) == ["bug"]
    score = scorer.score_eval([ANY])[0]
    assert score.terms["bug"].value == 0.0 and score.decided_by == {"odd": "judge"}


def test_the_transform_of_the_fallback_comes_before_that_of_the_term():
    judge, _ = counted("judge", 0.75, transform={"threshold": 0.5})
    scorer = make_scorer(term(constant(ABSTAINS), transform={"rescale_to": [-1.0, 1.0]}, fallback="judge"), judge)
    score = scored(scorer, ANY)
    assert (score.terms["odd"].value, score.total) == (1.0, 1.0)


def test_a_requirement_reads_what_the_fallback_decided():
    judge, _ = counted("judge", 0.0)
    terms = [term(constant(ABSTAINS, name="rule"), fallback="judge"), judge, term(constant(1.0), requires="rule")]
    assert scored(make_scorer(*terms), ANY).total == 0.0


def test_answers_that_the_rule_cannot_read_go_to_the_fallback_where_asked_for():
    exact = {"fn": "mmrl_rewards.number:exact", "name": "rule", "fallback": "judge", "fallback_on": "bad_answer"}
    terms = [as_read(exact), as_read({"fn": "mmrl_rewards.format:tags", "name": "judge"})]
    config = SimpleNamespace(rewards=SimpleNamespace(terms=terms, combine="sum"))
    scorer = make_scorer(*load_reward_terms(config, None))
    assert scored(scorer, rollout("<answer>3</answer>")).decided_by == {}
    assert scored(scorer, rollout("<answer>three or so</answer>")).decided_by == {"rule": "judge"}
    judge, calls = counted("judge")
    assert scored(make_scorer(term(number.exact, fallback="judge"), judge), rollout("no")).total == 0.0 and not calls


@pytest.mark.parametrize(("fn", "nearly"), [(number.exact, 0.25), (number.graded, 2 / 3)])
def test_all_answers_that_earn_the_low_end_go_to_the_fallback_where_asked_for(fn, nearly):
    judge, _ = counted("judge", 0.25)
    rule = replace(bind(fn, {}), fallback_on="low")
    scorer = make_scorer(replace(term(fn, "rule", fallback="judge"), reward=rule), judge)
    texts = ("<answer>3</answer>", "<answer>4</answer>", "<answer>90</answer>", "three or so")
    assert [scored(scorer, rollout(text)).total for text in texts] == pytest.approx([1.0, nearly, 0.25, 0.25])


@pytest.mark.parametrize("when", [{"rollout.finish_reason": [FinishReason.EOS]}, {"task": ["other"]}])
def test_a_low_value_stands_where_the_condition_of_the_fallback_excludes_the_rollout_or_sample(when):
    judge, calls = counted("judge", 1.0, when=when)
    rule = replace(bind(number.exact, {}), fallback_on="low")
    deferring = replace(term(number.exact, "rule", fallback="judge"), reward=rule)
    scorer = make_scorer(deferring, judge, on_missing_score="skip")
    cut = [replace(answer, finish_reason=FinishReason.LENGTH) for answer in answers("3", "4", "few")]
    (group,) = scorer.score_groups([cut], step=0)
    assert group.totals == (1.0, 0.0, 0.0) and not group.dropped and not calls
    check_samples(scorer, [ANY.prompt.sample], GRAMMAR)


def test_the_fallback_decides_in_workers():
    with closing(make_scorer(term(rule, fallback="format"), term(format.tags), workers=1)) as scorer:
        assert scored(scorer, rollout("<answer>few</answer>")).decided_by == {"rule": "format"}


@pytest.mark.parametrize(
    ("options", "judge", "words"),
    [
        ({"fallback": "jugde"}, {}, "it falls back on 'jugde', which is not another term; there are odd, judge"),
        ({"fallback": "odd"}, {}, "it falls back on 'odd', which is not another term"),
        ({"fallback": "judge"}, {"fallback": "odd"}, "its fallbacks form a cycle: odd -> judge -> odd"),
        ({"fallback": "judge"}, {"weight": 2.0}, "'judge' is the fallback of 'odd' and counts in its place"),
        ({"fallback": "judge"}, {"training_only": True}, "leave out its `weight`, `schedule`, `requires`"),
        ({"fallback": "judge", "requires": "judge"}, {}, "requires 'judge', which is a fallback and has no value"),
        ({"fallback": "judge"}, {"transform": {"rescale_to": [0.0, 2.0]}}, "from 0 to 2 do not fit into 0 to 1"),
    ],
)
def test_a_fallback_that_cannot_work_is_refused_with_its_key(options, judge, words):
    terms = [term(constant(1.0), **options), term(constant(1.0, name="judge"), **judge)]
    with pytest.raises(UserError, match=words) as caught:
        check_terms(terms, "sum")
    assert caught.value.key.startswith("rewards.terms.0.")


def test_a_fallback_applies_where_its_when_says():
    judge = term(constant(1.0, name="judge"), when={"task": ["find"]})
    scorer = make_scorer(term(constant(ABSTAINS), fallback="judge"), judge)
    (group,) = scorer.score_groups([[ANY]], step=0)
    assert not group.scores and group.dropped[0].failures.keys() == {"odd"}
    assert scored(scorer, rollout("<answer>[0, 0, 5, 5]</answer>", FIND)).total == 1.0


def test_the_trial_accepts_a_sample_that_only_the_fallback_can_score():
    judge, calls = counted("judge")
    check_samples(make_scorer(term(constant(ABSTAINS), fallback="judge"), judge), [COUNT], GRAMMAR)
    assert len(calls) == 2
    with pytest.raises(RewardError, match="no rule for this"):
        check_samples(make_scorer(term(constant(ABSTAINS))), [COUNT], GRAMMAR)


def test_the_trial_asks_a_service_that_is_a_fallback_once():
    service = constant(Unscorable("down"), name="judge", uses_service=True)
    with pytest.raises(RewardError, match="reward 'judge' .*down"):
        check_samples(make_scorer(term(rule, fallback="judge"), term(service)), [COUNT], GRAMMAR)
    service = constant(0.5, name="judge", uses_service=True)
    check_samples(make_scorer(term(constant(ABSTAINS), fallback="judge"), term(service)), [COUNT] * 3, GRAMMAR)


P, E, F = Author.POLICY, Author.ENVIRONMENT, Author.FORCED


@pytest.mark.parametrize(
    ("when", "authors", "changes", "applies"),
    [
        ({"rollout.rethought": True}, (P, F, P), {"parent_index": 0}, True),
        ({"rollout.rethought": True}, (P,), {}, False),
        ({"rollout.rethought": [False]}, (P,), {}, True),
        ({"rollout.used_tool": True}, (P, E, E, P), {}, True),
        ({"rollout.used_tool": True}, (P, F, P), {}, False),
        ({"rollout.used_tool": False}, (P, E), {}, False),
        ({"rollout.turns": [2, 3]}, (P, E, E, P), {}, True),
        ({"rollout.turns": 2}, (P, F, P), {"parent_index": 0}, False),
        ({"rollout.turns": 1}, (P, E), {}, True),
        ({"rollout.turns": 3}, (P, E, P, E, P), {}, True),
        ({"rollout.finish_reason": ["eos", "stop"]}, (P,), {"finish_reason": FinishReason.STOP}, True),
        ({"rollout.finish_reason": "length"}, (P,), {"finish_reason": FinishReason.STOP}, False),
        ({"rollout.turns": 1, "rollout.used_tool": True}, (P,), {}, False),
        ({"rollout.turns": 1, "task": ["count"]}, (P,), {}, True),
    ],
)
def test_a_term_may_apply_to_some_rollouts_alone(when, authors, changes, applies):
    bonus, calls = counted("bonus", 1.0, when=when, weight=3.0)
    scorer = make_scorer(term(number.exact), bonus)
    segments = tuple(Segment(token_ids=(1,), logprobs=(0.0,), author=author) for author in authors)
    score = scored(scorer, replace(ANY, segments=segments, **changes))
    assert (score.total, len(calls)) == ((4.0, 1) if applies else (1.0, 0))
    assert score.contributions["bonus"].is_counted is applies
    assert score.terms["bonus"].value == float(applies)


@pytest.mark.parametrize(("combine", "total"), [("sum", 0.0), ("product", 0.0), ("min", 0.0)])
def test_a_rollout_to_which_no_term_applies_has_the_total_0(combine, total):
    assert scored(make_scorer(term(constant(1.0), when={"rollout.turns": 2}), combine=combine), ANY).total == total


@pytest.mark.parametrize(("combine", "total"), [("product", 0.5), ("min", 0.5)])
def test_a_term_for_other_rollouts_leaves_product_and_minimum_alone(combine, total):
    terms = [term(constant(0.5)), term(constant(0.25, name="b"), when={"rollout.used_tool": True})]
    assert scored(make_scorer(*terms, combine=combine), ANY).total == total


def test_the_trial_calls_terms_whatever_rollouts_they_are_for():
    bonus, calls = counted("bonus", Unscorable("bad column"), when={"rollout.rethought": True})
    with pytest.raises(RewardError, match="bad column"):
        check_samples(make_scorer(term(number.exact), bonus), [COUNT], GRAMMAR)
    assert calls


def test_a_column_of_a_like_name_stays_a_column():
    sample = replace(COUNT, meta={"turns": "2", "rethought": "true"})
    scorer = make_scorer(term(number.exact, when={"turns": ["2"], "rethought": ["true"]}))
    assert scored(scorer, make_rollout(replace(ANY.prompt, sample=sample), 0, ANY.text, ANY.answer)).total == 1.0


@pytest.mark.parametrize(
    ("when", "words"),
    [
        ({"rollout.rethougt": True}, "a rollout has no 'rethougt'; it has rethought, used_tool, turns, finish_reason"),
        ({"rollout.turns": 0}, "rollout.turns is a number from 1, not '0'"),
        ({"rollout.turns": []}, "rollout.turns is a number from 1, not ''"),
        ({"rollout.used_tool": "yes"}, "rollout.used_tool is true, false, not 'yes'"),
        ({"rollout.finish_reason": ["done"]}, "rollout.finish_reason is eos, stop, length, not 'done'"),
        ({"task": "count"}, "when.task"),
    ],
)
def test_a_condition_that_no_rollout_can_meet_is_refused(when, words):
    with pytest.raises(ValueError, match=words):
        as_read({"when": when})


def test_a_group_reward_has_no_conditions_on_one_rollout():
    with pytest.raises(ValueError, match="rollout.turns is about one rollout"):
        GroupRewardConfig.model_validate({"fn": "a:b", "when": {"rollout.turns": ("1",)}})


def test_conditions_on_rollouts_are_not_reported_as_missing_columns():
    scorer = make_scorer(term(number.exact, when={"rollout.turns": 2}))
    config = SimpleNamespace(rewards=SimpleNamespace(group_rewards=()), training_stages=())
    assert list(find_coverage_gaps(config, scorer, [COUNT])) == []
