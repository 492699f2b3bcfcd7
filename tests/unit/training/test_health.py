"""Health: each warning when it begins, once, with advice; duplicates among siblings; the summary of a stage."""

import re
from dataclasses import replace

import pytest
from selection import group

from mmrl.algo.step_metrics import compute_step_metrics
from mmrl.config.schema import HealthConfig
from mmrl.training.callbacks import StepResult
from mmrl.training.health import HealthMonitor
from mmrl.types import Answer, SelectedExperiences, TrainingState, WorstToken

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
    "reward/term/count": 0.6,
    "reward/mean": 0.5,
}


def step_result(metrics):
    nothing = SelectedExperiences(groups=(), advantages=(), experiences=(), has_signal=False)
    return StepResult(selected=nothing, metrics=metrics, seconds={})


def warnings_of(steps, **options):
    """Return the warnings over steps whose metrics depart from HEALTHY."""
    warnings = []
    monitor = HealthMonitor(HealthConfig(window=3, **options), warnings.append)
    for number, metrics in enumerate(steps, 1):
        monitor.on_step_end(TrainingState(step=number), step_result({**HEALTHY, **metrics}))
    return warnings


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (
            {"groups/nonzero_advantage_frac": 0.05},
            "5% of the groups have a nonzero advantage.*or train again on groups that had",
        ),
        ({"rollout/truncated_frac": 0.6}, "60% of the rollouts are cut before their end: raise sampling.max_new_tok"),
        (
            {"rollout/duplicate_frac": 0.97},
            "97% of the rollouts repeat the text of a sibling: raise sampling.temperature",
        ),
        ({"policy/entropy_nats": 0.001}, r"certain of every token \(entropy 0.0010 nats\).*raise loss.clip_high"),
        ({"policy/reference_kl_nats": 1.5}, "1.50 nats a token from its reference: lower the learning rate"),
        (
            {"policy/importance_ratio_max": 30.0},
            "30 times as likely as when they were sampled.*replay.max_staleness.*suspect the rollout engine: look at "
            "rollout/logprob_diff_mean",
        ),
        (
            {"rollout/logprob_diff_mean": 0.2},
            r"engine and learner differ by 0.2 nats a token .*suspect the engine.*rollout.logprob_check.every=1.*"
            r"model.dtype=float32.*loss.rollout_correction",
        ),
        (
            {"rollout/stale_logprob_diff_mean": 0.3},
            "tokens of the policy version before are 0.3 nats from the learner.*logprob_check/diff_mean.*learning rate",
        ),
        (
            {"replay/staleness_max": 57.0},
            "replays rollouts that are up to 57 policy versions old: .*set replay.max_staleness",
        ),
        ({"tools/errors": 2.0, "tools/timeouts": 2.0}, "50% of the tool calls in step tools fail.*`on_error: stop`"),
        (
            {"probe/blind_gap/grey/count": 0.01},
            "probe grey: no reward term loses more than 0.010 when the media are hidden",
        ),
    ],
)
def test_a_problem_is_reported_once_while_it_lasts(metrics, message):
    [text] = warnings_of([metrics] * 12)
    assert re.search(message, text)
    assert text.startswith("step ") and "mean of 3 steps" in text


def test_a_healthy_run_and_an_incomplete_window_give_no_warning():
    assert warnings_of([{}] * 20) == []
    assert warnings_of([{"rollout/truncated_frac": 1.0}] * 2) == []


def test_a_problem_is_reported_again_only_after_a_window_without_it():
    ill = {"policy/reference_kl_nats": 9.0}
    assert len(warnings_of([ill] * 3 + [{}] * 3 + [ill] + [{}] * 3)) == 1
    assert len(warnings_of([ill] * 3 + [{}] * 9 + [ill] * 3)) == 2


def of_tokens(steps):
    """Return the warnings about single tokens."""
    return [text for text in warnings_of(steps) if "mean of" not in text]


def worst(value):
    token = WorstToken(value)
    token.owner = "rollout 3 of image sample a-7"
    return token


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("policy/importance_ratio_max", "rollout 3 of image sample a-7 is 2e+04 times as likely as"),
        (
            "rollout/logprob_diff_max",
            "engine and learner differ by 2e+04 nats on a token of rollout 3 of image sample a-7 before the update",
        ),
    ],
)
def test_a_token_beyond_its_bound_is_reported_at_once(metric, message):
    """In its own step, before a window is full, and again only after a window without one."""
    ill = {metric: worst(20_000.0)}
    [text] = of_tokens([{}, ill])
    assert text.startswith("step 2: ") and message in text
    assert len(of_tokens([ill] * 9)) == 1
    assert len(of_tokens([ill, {}, {}, ill])) == 1
    assert len(of_tokens([ill, {}, {}, {}, ill])) == 2
    assert warnings_of([{metric: worst(4.9)}]) == []
    [text] = of_tokens([{metric: worst(float("nan"))}])
    assert "nan" in text and "image sample a-7" in text


def test_null_switches_a_rule_off():
    assert warnings_of([{"rollout/logprob_diff_mean": 1.0}] * 5, max_logprob_diff=None) == []
    assert warnings_of([{"rollout/stale_logprob_diff_mean": 1.0}] * 5, max_stale_logprob_diff=None) == []
    assert warnings_of([{"replay/staleness_max": 99.0}] * 5, max_replay_staleness=None) == []


def test_a_term_that_falls_while_the_total_rises_is_reported():
    fallen = {"reward/term/count": 0.4, "reward/mean": 0.9}
    [text] = warnings_of([{}] * 3 + [fallen] * 5)
    assert "count fell from 0.600 to 0.467 while the total rose: other terms are easier to earn." in text
    assert warnings_of([{}] * 3 + [{**fallen, "reward/mean": 0.4}] * 5) == []  # everything fell: no matter of terms


def test_a_threshold_may_be_set_higher():
    gap = {"rollout/logprob_diff_mean": 0.2, "replay/staleness_max": 57.0}
    assert warnings_of([gap] * 5, max_logprob_diff=0.3, max_replay_staleness=60) == []
    assert len(warnings_of([gap] * 5)) == 2


def test_metrics_that_only_some_steps_have_are_averaged_over_those():
    monitor = HealthMonitor(HealthConfig(window=2), print)
    monitor.on_step_end(TrainingState(step=1), step_result({"a": 1.0}))
    monitor.on_step_end(TrainingState(step=2), step_result({"a": 3.0, "b": 5.0}))
    assert monitor.window_means() == {"a": 2.0, "b": 5.0}


def with_texts(group_, *texts):
    said = [
        replace(rollout, text=text, answer=Answer(text=text.split()[-1], thinking=None, value=None))
        for rollout, text in zip(group_.rollouts, texts, strict=True)
    ]
    return replace(group_, rollouts=tuple(said))


def test_duplicates_by_hand():
    one = with_texts(group("a", 0.0, 1.0, 0.0, 1.0), "so 3", "so 3", "thus 3", "so 4")
    two = with_texts(group("b", 0.0, 1.0), "so 3", "so 3")
    metrics = compute_step_metrics([one, two], [one.totals, two.totals])
    assert metrics["rollout/duplicate_frac"] == pytest.approx(2 / 6)
    assert metrics["rollout/duplicate_answer_frac"] == pytest.approx(3 / 6)


def test_the_monitor_is_a_callback_whose_summary_ends_the_stage():
    monitor = HealthMonitor(HealthConfig(), print)
    metrics = {"replay/frac": 0.25, "groups/nonzero_advantage_frac": 0.5, "rollout/duplicate_frac": 0.5}
    monitor.on_step_end(TrainingState(step=1), step_result(metrics))
    assert monitor.summary() == "Health at the end: 50% of groups informative, 25% replayed, 50% duplicates"
