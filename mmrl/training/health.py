"""Warnings about runs that go wrong, and the two conditions that end a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple

from mmrl.algo.group_metrics import count_missing_values
from mmrl.config.schema import HealthConfig
from mmrl.config.schema.rollout_steps import LOOKED_PROBE
from mmrl.rollout.tools.executor import TOOL_FAILURE_KINDS
from mmrl.scoring.scorer import ROLLOUT_STEP_PREFIX
from mmrl.training.callbacks import TrainStepResult
from mmrl.types import Dropped, FailureKind, Group, Score, TrainingState, UserError, WorstToken


class HealthRule(NamedTuple):
    """A limit on one metric, and the advice to print when it is violated."""

    metric: str  # name of the metric
    name: str  # name of the limit
    limit: float | None  # None: the limit is the field `name` of `HealthConfig`
    message: str  # format string; `value` is the mean or the step's value, `owner` the rollout of a single token
    is_minimum: bool = False  # True: the metric may not fall below the limit; False: it may not exceed it


HEALTH_RULES: Final = (  # of windowed means
    HealthRule(
        "groups/nonzero_advantage_frac",
        "min_nonzero_advantage_frac",
        0.1,
        "{value:.0%} of the groups have a nonzero advantage: the other questions are too easy or too hard for this "
        "policy. Mix in others, sample more (`dynamic_sampling` with `max_rounds`), or train again on groups that had "
        "one (`replay`)",
        is_minimum=True,
    ),
    HealthRule(
        "rollout/truncated_frac",
        "max_truncated_frac",
        0.5,
        "{value:.0%} of the rollouts are truncated: raise sampling.max_new_tokens, or reward brevity",
    ),
    HealthRule(
        "rollout/duplicate_frac",
        "max_duplicate_frac",
        0.95,
        "{value:.0%} of the rollouts repeat the text of a sibling: raise sampling.temperature, or add a bonus on "
        "entropy (loss.entropy)",
    ),
    HealthRule(
        "policy/entropy_nats",
        "min_entropy",
        0.005,
        "the policy is certain of every token (entropy {value:.4f} nats) and no longer explores: lower the learning "
        "rate, raise loss.clip_high, or add a bonus on entropy (loss.entropy)",
        is_minimum=True,
    ),
    HealthRule(
        "policy/reference_kl_nats",
        "max_reference_kl",
        1.0,
        "the policy is {value:.2f} nats per token from its reference: lower the learning rate, or raise loss.kl.coef",
    ),
    HealthRule(
        "policy/importance_ratio_max",
        "max_importance_ratio",
        20.0,
        "some tokens have an importance ratio of {value:.0f}: lower the learning rate, ppo_epochs or "
        "replay.max_staleness, or set loss.dual_clip. If no rollout is old or used twice, suspect the rollout "
        "engine: look at rollout/logprob_diff_mean",
    ),
    HealthRule(
        "rollout/logprob_diff_mean",
        "max_logprob_diff",
        None,
        "rollout engine and learner differ by {value:.2g} nats per token before the update: suspect the engine, not "
        "the learning rate. rollout.logprob_check.every=1 shows the modality that differs, and whether the gap begins "
        "at a weight sync. If the cause is rounding, try model.float32_output_layer=true, then model.dtype=float32, or "
        "weight the gap with loss.rollout_correction",
    ),
    HealthRule(
        "rollout/stale_logprob_diff_mean",
        "max_stale_logprob_diff",
        None,
        "tokens of the previous policy version are {value:.2g} nats from the learner. If logprob_check/diff_mean is as "
        "large, suspect the engine. Otherwise, the policy moves far in one step: lower the learning rate or "
        "ppo_epochs, or weight the gap with loss.rollout_correction",
    ),
    HealthRule(
        "replay/staleness_max",
        "max_replay_staleness",
        None,
        "the stage replays rollouts that are up to {value:.0f} policy versions old: their ratios are far from 1 and "
        "mostly clipped. Add questions whose rollouts still earn different rewards, or set replay.max_staleness",
    ),
)
STEP_RULES: Final = (  # of a single step, for metrics that are a `WorstToken`
    HealthRule(
        "policy/importance_ratio_max",
        "max_token_ratio",
        1000.0,  # e^6.9
        "a token of {owner} is {value:.3g} times as likely as when it was sampled, and the loss may explode. If "
        "rollout/logprob_diff_max is large too, suspect the rollout engine; otherwise lower the learning rate",
    ),
    HealthRule(
        "rollout/logprob_diff_max",
        "max_token_logprob_diff",
        5.0,  # rounding in bfloat16 reaches 0.35
        "rollout engine and learner differ by {value:.3g} nats on a token of {owner} before the update: suspect the "
        "engine or its media. rollout.logprob_check.every=1 shows whether the gap begins at a weight sync",
    ),
)
MIN_BLIND_GAP: Final = 0.02  # mean of a reward term with the media, minus the mean without
MAX_FAILED_TOOL_CALL_FRAC: Final = 0.2
MAX_FAILED_EPISODE_FRAC: Final = 0.5
# Kinds of failure of the tool calls and episodes that `<step>/calls` and `<step>/episodes` count, in `<step>/<kind>`.
FAILURE_KINDS_BY_COUNT: Final = {"calls": TOOL_FAILURE_KINDS, "episodes": tuple(FailureKind)}
MAX_REWARD_TERM_DROP: Final = 0.1  # from the first window on, while the total reward rises
BLIND_GAP_PREFIX: Final = "probe/blind_gap/"
TERM_PREFIX: Final = "reward/term/"
TOTAL_METRIC: Final = "reward/mean"
SUMMARY_METRICS: Final = (  # metric, format of its windowed mean
    ("groups/nonzero_advantage_frac", "{:.0%} of groups informative"),
    ("replay/frac", "{:.0%} replayed"),
    ("replay/staleness_mean", "staleness {:.1f}"),
    ("replay/effective_size", "replay effective sample size {:.0f}"),
    ("policy/entropy_nats", "entropy {:.3f} nats"),
    ("rollout/response_tokens_mean", "{:.1f} tokens"),
    ("rollout/truncated_frac", "{:.0%} truncated"),
    ("rollout/duplicate_frac", "{:.0%} duplicates"),
    ("policy/reference_kl_nats", "KL {:.3f} nats"),
    ("policy/importance_ratio_max", "ratios up to {:.2f}"),
    ("rollout/logprob_diff_mean", "engine and learner {:.3f} nats apart"),
    ("rollout/stale_logprob_diff_mean", "{:.3f} nats one version later"),
)


class HealthMonitor:
    """A callback that warns when a mean over the last `health.window` steps, or a single token, violates a limit.

    It also warns of the first step in which an episode fails, or a reward term has no value for some rollouts.

    A problem is reported when it begins, and ends once it was absent for a whole window.
    """

    def __init__(
        self,
        options: HealthConfig,
        warn: Callable[[str], None],
        log_event: Callable[[TrainingState, str, str | None], None] = lambda *_: None,
    ) -> None:
        """Create a monitor. `log_event` records a problem by name: its message when it begins, None when it ends."""
        self._options, self._warn, self._log_event = options, warn, log_event
        self._window: deque[Mapping[str, float]] = deque(maxlen=options.window)
        self._first_means: Mapping[str, float] = {}
        self._last_violation: dict[str, int] = {}  # the last step of each problem that has not ended, by its name

    def restore(self, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Take over the metrics of a stage's earlier steps, whose problems were reported before the run was resumed."""
        for step, metrics in steps:
            self._update(step, metrics)

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Add the metrics of a step. Warn of each problem that begins with it; record beginnings and ends."""
        begun, ended = self._update(state.step, result.metrics, result.selected.groups)
        for name in ended:
            self._log_event(state, name, None)
        for name, message in begun:
            self._warn(message)
            self._log_event(state, name, message)

    def _update(
        self, step: int, metrics: Mapping[str, float], groups: Sequence[Group] = ()
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Add a step; return the name and message of each problem that begins with it, and the names of ended ones."""
        ended = [name for name, last in self._last_violation.items() if step - last > self._options.window]
        for name in ended:
            del self._last_violation[name]
        self._window.append(metrics)
        step_problems = [*self._find_violations(STEP_RULES, metrics), *_find_failures(metrics, groups)]
        problems = [(f"step {step}", *problem) for problem in step_problems]
        if len(self._window) == self._options.window:
            means = self.window_means()
            # `_find_falling_terms` compares later windows with the first full one.
            self._first_means = self._first_means or means
            basis = f"step {step}, mean of {self._options.window} steps"
            problems += [(basis, *problem) for problem in self._find_problems(means)]
        begun = []
        for basis, name, message in problems:
            if name not in self._last_violation:
                begun.append((name, f"{basis}: {message}"))
            self._last_violation[name] = step
        return begun, ended

    def window_means(self) -> dict[str, float]:
        """Return the mean of each metric over those steps of the window that have it."""
        values: dict[str, list[float]] = {}
        for metrics in self._window:
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return {name: fmean(found) for name, found in values.items()}

    def summary(self) -> str:
        """Return one line about the last steps, for the end of a stage."""
        means = self.window_means()
        parts = []
        for name, text in SUMMARY_METRICS:
            if name in means:
                parts.append(text.format(means[name]))
        return "Health at the end: " + ", ".join(parts)

    def _find_violations(self, rules: Iterable[HealthRule], metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield the limit's name and the message of each rule that `metrics` violate."""
        for rule in rules:
            limit: float | None = getattr(self._options, rule.name) if rule.limit is None else rule.limit
            value = metrics.get(rule.metric)
            if limit is None or value is None:
                continue
            # "not within", so that NaN violates every limit.
            is_within = value >= limit if rule.is_minimum else value <= limit
            if not is_within:
                owner = value.owner if isinstance(value, WorstToken) else ""
                yield rule.name, rule.message.format(value=value, owner=owner)

    def _find_problems(self, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Yield a name and the message of each problem that `means` show."""
        yield from self._find_violations(HEALTH_RULES, means)
        yield from self._find_blind_probes(means)
        yield from self._find_failing_calls(means)
        yield from self._find_falling_terms(means)

    def _find_blind_probes(self, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        # Each probe is judged by the reward term that depends most on the media: a format term never loses anything.
        gaps: dict[str, float] = {}
        for name, gap in means.items():
            if name.startswith(BLIND_GAP_PREFIX):
                probe = name.removeprefix(BLIND_GAP_PREFIX).partition("/")[0]
                gaps[probe] = max(gap, gaps.get(probe, gap))
        for probe, gap in gaps.items():
            if gap < MIN_BLIND_GAP and probe != LOOKED_PROBE:
                yield (
                    BLIND_GAP_PREFIX + probe,
                    f"probe {probe}: no reward term loses more than {gap:.3f} when the media are hidden: the policy "
                    "is probably not looking at them. Leave out questions that can be answered blind",
                )

    def _find_failing_calls(self, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Find rollout steps in which too many tool calls or episodes fail."""
        for name, count in means.items():
            rollout_step, _, counted = name.rpartition("/")
            if counted not in FAILURE_KINDS_BY_COUNT or not count:
                continue
            failures = {kind: means.get(f"{rollout_step}/{kind}", 0.0) for kind in FAILURE_KINDS_BY_COUNT[counted]}
            failed = sum(failures.values()) / count
            if counted == "calls" and failed > MAX_FAILED_TOOL_CALL_FRAC:
                yield (
                    name,
                    f"{failed:.0%} of the tool calls in step {rollout_step} fail: a tool raises, hangs or exceeds a "
                    "limit; the rollouts contain its error messages. Fix it, or end the run there with "
                    "`on_error: stop`",
                )
            if counted == "episodes" and failed > MAX_FAILED_EPISODE_FRAC:
                most_by = max(failures, key=failures.__getitem__)
                yield (
                    name,
                    f"{failed:.0%} of the episodes in step {rollout_step} fail, most by {most_by}: they leave their "
                    "groups, so little is learned. The records in rollouts/ give the reasons; fix the environment, "
                    "raise its limits, or end the run there with `on_error: stop`",
                )

    def _find_falling_terms(self, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Find reward terms that fell while the total rose: a sign that the policy games the other terms."""
        for name, value in sorted(means.items()):
            if not name.startswith(TERM_PREFIX) or name not in self._first_means:
                continue
            first = self._first_means[name]
            if first - value > MAX_REWARD_TERM_DROP and means[TOTAL_METRIC] > self._first_means[TOTAL_METRIC]:
                term = name.removeprefix(TERM_PREFIX)
                yield (
                    name,
                    f"reward term {term} fell from {first:.3f} to {value:.3f} while the total rose: other terms are "
                    f"easier to earn. Lower their weights, or make them require it (`requires: {term}`)",
                )


def _find_failures(metrics: Mapping[str, float], groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """Find failed rollout steps, and reward terms without a value that no fallback gave, with the first error of each.

    The numbers come from the metrics, which a resumed run still has of earlier steps; the errors come from the groups.
    """
    outcomes: list[Score | Dropped] = []  # of each rollout
    for group in groups:
        outcomes += (*group.dropped, *group.scores)
    for name, count in count_missing_values(metrics).items():
        if name.startswith(ROLLOUT_STEP_PREFIX):
            rollout_step = name.removeprefix(ROLLOUT_STEP_PREFIX)
            problem = f"{count} of {len(outcomes)} rollouts failed in step {rollout_step} and leave their groups"
        else:
            problem = (
                f"reward term {name} has no value for {count} of {len(outcomes)} rollouts, which `on_missing_score` or "
                "`on_error` of `rewards` leaves out or counts as a fallback"
            )
        reasons = (outcome.failures[name].reason for outcome in outcomes if name in outcome.failures)
        yield f"without_value:{name}", f"{problem}: {next(reasons, 'see rollouts/')[:200]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStepCounter:
    """A callback that counts consecutive steps without signal or with a non-finite gradient, for `FailedStepLimit`.

    The counts are part of `TrainingState`, so they survive a restart.
    """

    count_steps_without_signal: bool  # True in RL stages, where steps may lack an advantage

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Extend or end both series of failed steps."""
        # The metric is absent when the step attempted no update: that neither extends nor ends the series.
        nonfinite_updates = result.metrics.get("learner/nonfinite_updates")
        if nonfinite_updates is not None:
            state.nonfinite_steps = state.nonfinite_steps + 1 if nonfinite_updates else 0
        if self.count_steps_without_signal:
            state.steps_without_signal = 0 if result.selected.has_signal else state.steps_without_signal + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStepLimit:
    """A callback that ends a run when it no longer learns."""

    max_nonfinite_steps: int  # the run ends after so many consecutive steps with a non-finite gradient
    # The run ends after so many consecutive steps without a new rollout of nonzero advantage; None in other stages.
    max_steps_without_signal: int | None

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Raise UserError if a count of `FailedStepCounter` has reached its limit."""
        if self.max_steps_without_signal is not None and state.steps_without_signal >= self.max_steps_without_signal:
            raise UserError(
                f"{state.steps_without_signal} steps in a row had no group to learn from: in each, all rollouts of a "
                "group earned the same, or could not be scored, or `dynamic_sampling` rejected the group (what replay "
                "trains on is not counted). The task is solved or out of reach, the temperature is too low, the filter "
                "too narrow, or a reward fails; look at rollouts/"
            )
        if state.nonfinite_steps >= self.max_nonfinite_steps:
            raise UserError(
                f"{state.nonfinite_steps} steps in a row had an update whose gradient is not finite; those updates "
                f"changed no weight. The samples of the last step are in {result.rollouts_file}: look for anything "
                "unusual in them, or try model.dtype=float32 or a lower learning rate"
            )
