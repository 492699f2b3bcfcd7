"""Health: each warning when it begins, once, with advice; duplicates among siblings; the summary of a stage."""

import re
from dataclasses import replace

import pytest
from factories import make_answer, make_group, make_prompt, make_rollout, make_sample, make_score
from scoring import constant, make_scorer, term
from selection import make_experiences

from mmrl import types
from mmrl.algo.group_metrics import compute_reward_metrics, compute_step_metrics
from mmrl.config.schema import HealthConfig
from mmrl.training.callbacks import TrainStepResult
from mmrl.training.health import HealthMonitor

HEALTHY = {
    "groups/nonzero_advantage_frac": 0.5,
    "rollout/truncated_frac": 0.0,
    "rollout/duplicate_frac": 0.3,
    "policy/entropy_nats": 0.4,
    "policy/reference_kl_nats": 0.01,
    "policy/importance_ratio_max": 1.5,
    "rollout/logprob_diff_mean": 0.01,
    "rollout/logprob_diff_max": 0.4,
    "rollout/stale_logprob_diff_mean": 0.1,
    "replay/staleness_max": 4.0,
    "probe/blind_gap/grey/count": 0.3,
    "probe/blind_gap/grey/format": 0.0,
    "tools/calls": 8.0,
    "tools/errors": 1.0,
    "tools/timeouts": 0.0,
    "environment/episodes": 8.0,
    "environment/crashes": 2.0,
    "environment/errors": 2.0,
    "reward/term/count": 0.6,
    "reward/mean": 0.5,
}


def monitor_steps(monitor, steps, start=1):
    nothing = types.SelectedExperiences(groups=(), experiences_by_group=(), experiences=(), has_signal=False)
    for number, metrics in enumerate(steps, start):
        result = TrainStepResult(selected=nothing, metrics=metrics, seconds={})
        monitor.on_step_end(types.TrainingState(step=number), result)


def warnings_of(steps, **options):
    """Return the warnings over steps whose metrics differ from HEALTHY."""
    warnings = []
    monitor = HealthMonitor(HealthConfig(window=3, **options), warnings.append)
    monitor_steps(monitor, [{**HEALTHY, **metrics} for metrics in steps])
    return warnings


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"groups/nonzero_advantage_frac": 0.05}, "5% of the groups.*`replay`"),
        ({"rollout/truncated_frac": 0.6}, "60% of the rollouts.*sampling.max_new_tokens"),
        ({"rollout/duplicate_frac": 0.97}, "97% of the rollouts.*sampling.temperature"),
        ({"policy/entropy_nats": 0.001}, r"\(entropy 0.0010 nats\).*loss.clip_high"),
        ({"policy/reference_kl_nats": 1.5}, "1.50 nats per token from its reference"),
        ({"policy/importance_ratio_max": 30.0}, "ratio of 30.*replay.max_staleness.*rollout/logprob_diff_mean"),
        ({"rollout/logprob_diff_mean": 0.2}, "0.2 nats per token.*logprob_check.every=1.*loss.rollout_correction"),
        ({"rollout/stale_logprob_diff_mean": 0.3}, "0.3 nats from the learner.*logprob_check/diff_mean"),
        ({"replay/staleness_max": 57.0}, "57 policy versions old.*replay.max_staleness"),
        (
            {"tools/errors": 2.0, "tools/timeouts": 1.0, "tools/limits": 1.0},
            "50% of the tool calls in step tools.*`on_error: stop`",
        ),
        ({"maze/episodes": 8.0, "maze/timeouts": 3.0, "maze/crashes": 2.0}, "62% .*episodes.*maze fail, most by time"),
        ({"probe/blind_gap/grey/count": 0.01}, "probe grey.* 0.010 when the media are hidden"),
    ],
)
def test_problem_is_reported_once_while_it_lasts(metrics, words):
    [warning] = warnings_of([metrics] * 12)
    assert re.search(words, warning)
    assert warning.startswith("step ") and "mean of 3 steps" in warning


def test_healthy_run_and_an_incomplete_window_give_no_warning():
    assert warnings_of([{}] * 20) == []
    assert warnings_of([{"rollout/truncated_frac": 1.0}] * 2) == []


def test_problem_is_reported_again_only_after_a_window_without_it():
    ill = {"policy/reference_kl_nats": 9.0}
    assert len(warnings_of([ill] * 3 + [{}] * 3 + [ill] + [{}] * 3)) == 1
    assert len(warnings_of([ill] * 3 + [{}] * 9 + [ill] * 3)) == 2


def test_problem_is_recorded_where_it_begins_and_where_it_has_been_absent_for_a_window():
    ill, events = {**HEALTHY, "policy/reference_kl_nats": 9.0}, []
    monitor = HealthMonitor(HealthConfig(window=3), lambda text: None, lambda *event: events.append(event))
    monitor_steps(monitor, [ill] * 4 + [HEALTHY] * 9)
    [(began, name, message), (ended, same, nothing)] = events
    assert name == same == "max_reference_kl" and "nats per token from its reference" in message and nothing is None
    # The window holds an ill step up to step 6; three steps later the problem counts as gone.
    assert (began.step, ended.step) == (3, 10)


@pytest.mark.parametrize("resumed_at", range(1, 13))
def test_resumed_monitor_reports_what_one_that_was_never_interrupted_reports_afterwards(resumed_at):
    ill = {**HEALTHY, "policy/reference_kl_nats": 9.0, "policy/importance_ratio_max": worst_token(2e4)}
    steps = [HEALTHY, *[ill] * 4, *[HEALTHY] * 8, ill]
    whole, later = [], []
    monitor_steps(HealthMonitor(HealthConfig(window=3), print, lambda *event: whole.append(event)), steps)
    resumed = HealthMonitor(HealthConfig(window=3), print, lambda *event: later.append(event))
    resumed.restore((number, metrics) for number, metrics in enumerate(steps[:resumed_at], 1))
    monitor_steps(resumed, steps[resumed_at:], resumed_at + 1)
    assert later == [event for event in whole if event[0].step > resumed_at]
    assert len(whole) == 9  # three problems begin, end, and begin again


def worst_token(value):
    token = types.WorstToken(value)
    token.owner = "rollout 3 of image sample a-7"
    return token


@pytest.mark.parametrize("metric", ["policy/importance_ratio_max", "rollout/logprob_diff_max"])
def test_token_beyond_its_limit_is_reported_in_its_step_and_again_after_a_window_without_one(metric):
    def token_warnings(steps):
        return [text for text in warnings_of(steps) if "mean of" not in text]

    ill = {metric: worst_token(20_000.0)}
    [warning] = token_warnings([{}, ill])
    assert warning.startswith("step 2: ") and "2e+04" in warning and "rollout 3 of image sample a-7" in warning
    assert len(token_warnings([ill] * 9)) == 1
    assert len(token_warnings([ill, {}, {}, ill])) == 1
    assert len(token_warnings([ill, {}, {}, {}, ill])) == 2
    assert warnings_of([{metric: worst_token(4.9)}]) == []
    [warning] = token_warnings([{metric: worst_token(float("nan"))}])
    assert "nan" in warning and "image sample a-7" in warning


@pytest.mark.parametrize(
    ("metric", "value", "option", "higher"),
    [
        ("rollout/logprob_diff_mean", 0.2, "max_logprob_diff", 0.3),
        ("rollout/stale_logprob_diff_mean", 1.0, "max_stale_logprob_diff", 2.0),
        ("replay/staleness_max", 57.0, "max_replay_staleness", 60),
    ],
)
def test_configured_limit_may_be_raised_or_switched_off(metric, value, option, higher):
    steps = [{metric: value}] * 5
    assert len(warnings_of(steps)) == 1
    assert warnings_of(steps, **{option: higher}) == warnings_of(steps, **{option: None}) == []


def failing_step(outcomes, name="judge"):
    """A step whose rollouts of one prompt have this failure of `name`, or None; a failure drops its rollout."""
    prompt = make_prompt()
    rollouts = [make_rollout(prompt, index) for index in range(len(outcomes))]
    dropped = [types.Dropped(made, {name: end}) for made, end in zip(rollouts, outcomes, strict=True) if end]
    kept = [made for made, end in zip(rollouts, outcomes, strict=True) if not end]
    scores = tuple(make_score(count=1.0) for _ in kept)
    group = types.Group(prompt=prompt, rollouts=tuple(kept), scores=scores, dropped=tuple(dropped))
    selected = types.SelectedExperiences(groups=(group,), experiences_by_group=((),), experiences=(), has_signal=False)
    counted = {**HEALTHY, **compute_reward_metrics([group])}
    return TrainStepResult(selected=selected, metrics=counted, seconds={})


def test_failed_episode_is_reported_in_its_first_step_with_its_error():
    warnings = []
    monitor = HealthMonitor(HealthConfig(window=30), warnings.append)
    for number in range(1, 7):
        reason = f"action {number}: the environment raised KeyError: {'x' * 900}"
        failure = types.Failure(types.FailureKind.ERROR, reason, "maze")
        monitor.on_step_end(
            types.TrainingState(step=number), failing_step([failure if number > 1 else None] * 3, name="step/maze")
        )
    [warning] = warnings
    said = "step 2: 3 of 3 rollouts failed in step maze and leave their groups: action 2: the environment raised KeyErr"
    assert warning.startswith(said)
    assert warning.count("x") < 210  # an error may quote a whole page


def test_reward_without_a_value_is_reported_in_its_first_step_with_term_count_and_error():
    down = types.Failure(types.FailureKind.UNSCORABLE, "http://localhost:9000: no usable reply in 3 tries")
    steps = [failing_step([None] * 4), failing_step([None, down, down, down]), *[failing_step([down] * 4)] * 5]
    warnings = []
    monitor = HealthMonitor(HealthConfig(window=30), warnings.append)
    for number, result in enumerate(steps, 1):
        monitor.on_step_end(types.TrainingState(step=number), result)
    [warning] = warnings
    assert warning.startswith("step 2: reward term judge has no value for 3 of 4 rollouts")
    assert warning.endswith(
        "`on_missing_score` or `on_error` of `rewards` leaves out or counts as a fallback: "
        "http://localhost:9000: no usable reply in 3 tries"
    )


def test_reward_whose_fallback_term_decides_is_not_reported():
    abstained = {"reward/rule/unscorable": 3, "reward/rule/fallback": 3}
    # A task or a term may be named like a kind of failure.
    named = {"reward/task/errors": 0.5, "reward/term/unscorable": 1.0, "reward/term/environment": 1.0}
    assert warnings_of([abstained, named] * 5, max_replay_staleness=None) == []
    [warning] = warnings_of([abstained | {"reward/rule/unscorable": 4}] * 3)
    assert "reward term rule has no value for 1 of 0 rollouts" in warning


def test_fallback_whose_own_fallback_decides_is_not_reported():
    abstains = constant(types.Unscorable("no rule for this"))
    terms = [term(abstains, name="first", fallback="second"), term(abstains, name="second", fallback="judge")]
    scorer = make_scorer(*terms, term(constant(0.5), name="judge"))
    groups = scorer.score_groups([[make_rollout(make_prompt(), index) for index in range(3)]], step=0)
    metrics = compute_reward_metrics(groups)
    assert metrics["reward/second/unscorable"] == 3
    assert warnings_of([metrics]) == []


def test_term_that_falls_while_the_total_rises_is_reported():
    fallen = {"reward/term/count": 0.4, "reward/mean": 0.9}
    [warning] = warnings_of([{}] * 3 + [fallen] * 5)
    assert "count fell from 0.600 to 0.467" in warning and "requires: count" in warning
    assert warnings_of([{}] * 3 + [{**fallen, "reward/mean": 0.4}] * 5) == []  # everything fell


def test_metrics_that_only_some_steps_have_are_averaged_over_those():
    monitor = HealthMonitor(HealthConfig(window=2), print)
    monitor_steps(monitor, [{"a": 1.0}, {"a": 3.0, "b": 5.0}])
    assert monitor.window_means() == {"a": 2.0, "b": 5.0}


def test_summary_has_the_means_that_exist():
    monitor = HealthMonitor(HealthConfig(), print)
    metrics = {"replay/frac": 0.25, "groups/nonzero_advantage_frac": 0.5, "rollout/duplicate_frac": 0.5}
    monitor_steps(monitor, [metrics])
    assert monitor.summary() == "Health at the end: 50% of groups informative, 25% replayed, 50% duplicates"


def test_duplicates_are_counted_within_groups():
    groups = []
    for name, texts in (("a", ("so 3", "so 3", "thus 3", "so 4")), ("b", ("so 3", "so 3"))):
        prompt = make_prompt(make_sample(id=name))
        rollouts = []
        for index, text in enumerate(texts):
            answer = replace(make_answer(), text=text.split()[-1])
            rollouts.append(make_rollout(prompt, index, text, answer))
        groups.append(make_group(prompt, rollouts, [make_score(count=0.0)] * len(texts)))
    metrics = compute_step_metrics(groups, [make_experiences(group, *group.totals) for group in groups])
    assert metrics["rollout/duplicate_frac"] == pytest.approx(2 / 6)
    assert metrics["rollout/duplicate_answer_frac"] == pytest.approx(3 / 6)


def test_responses_without_an_answer_repeat_no_other():
    prompt, missing = make_prompt(), replace(make_answer(), text=None)
    answers = [missing, missing, replace(missing, text="3"), replace(missing, text="3")]
    rollouts = [make_rollout(prompt, index, f"text {index}", answer) for index, answer in enumerate(answers)]
    group = make_group(prompt, rollouts, [make_score(count=0.0)] * 4)
    metrics = compute_step_metrics([group], [make_experiences(group, *group.totals)])
    assert metrics["rollout/duplicate_answer_frac"] == pytest.approx(1 / 4)
