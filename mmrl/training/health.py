"""Signs of a run that goes wrong, and what helps: warnings when they begin to hold, and a line at a stage's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from mmrl.config.schema import HealthConfig
from mmrl.ports import MetricsLogger
from mmrl.types import Group, TrainingState


class HealthRule(NamedTuple):
    """A metric, the limit that it should keep to, and what to say where it does not."""

    metric: str
    limit_field: str
    message: str


HEALTH_RULES: Final = (
    HealthRule(
        "groups/nonzero_advantage_frac",
        "min_nonzero_advantage_frac",
        "{value:.0%} of the groups tell better from worse: to this policy the questions are too easy or too hard. Mix "
        "in others, ask more of them (`filter` with `rounds`), or learn again from those that did (`replay`)",
    ),
    HealthRule(
        "rollout/truncated_frac",
        "max_truncated_frac",
        "{value:.0%} of the rollouts are cut before their end: raise sampling.max_new_tokens, or reward brevity",
    ),
    HealthRule(
        "rollout/duplicate_frac",
        "max_duplicate_frac",
        "{value:.0%} of the rollouts say what a sibling says: raise sampling.temperature, or add a bonus on entropy "
        "(loss.entropy)",
    ),
    HealthRule(
        "policy/entropy_nats",
        "min_entropy",
        "the policy is sure of every token (entropy {value:.4f} nats) and tries nothing new: lower the learning rate, "
        "raise loss.clip_high, or add a bonus on entropy (loss.entropy)",
    ),
    HealthRule(
        "policy/reference_kl_nats",
        "max_reference_kl",
        "the policy is {value:.2f} nats a token from its reference: lower the learning rate, or raise loss.kl.coef",
    ),
    HealthRule(
        "policy/importance_ratio_max",
        "max_importance_ratio",
        "some tokens are {value:.0f} times as likely as when they were sampled: lower the learning rate, epochs or "
        "replay.max_age, or set loss.dual_clip",
    ),
)
BLIND_GAP_PREFIX: Final = "probe/blind_gap/"
CALLS_SUFFIX: Final = "/calls"
TERM_PREFIX: Final = "reward/term/"
TOTAL_METRIC: Final = "reward/mean"


class HealthMonitor:
    """Averages the metrics of the last steps and holds them against the limits.

    A sign is told when it begins to hold, and again only after it was gone for as many steps as are averaged.
    """

    def __init__(self, options: HealthConfig, warn: Callable[[str], None]) -> None:
        self._options, self._warn = options, warn
        self._window: deque[Mapping[str, float]] = deque(maxlen=options.window)
        self._first_means: Mapping[str, float] = {}
        self._last_violation: dict[str, int] = {}  # the step at which a sign held last

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one more step; warn of what has begun to hold."""
        self._window.append(metrics)
        if len(self._window) < self._options.window:
            return
        means = self.window_means()
        self._first_means = self._first_means or means
        for name, text in self._find_problems(means):
            if name not in self._last_violation or step - self._last_violation[name] > self._options.window:
                self._warn(f"step {step}, mean of {self._options.window} steps: {text}")
            self._last_violation[name] = step

    def window_means(self) -> dict[str, float]:
        """The metrics of the last steps, each averaged over the steps that have it."""
        names = {name for metrics in self._window for name in metrics}
        return {name: fmean(metrics[name] for metrics in self._window if name in metrics) for name in names}

    def _find_problems(self, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """What is wrong, by the name of the metric."""
        for sign in HEALTH_RULES:
            limit: float | None = getattr(self._options, sign.limit_field)
            value = means.get(sign.metric)
            if limit is not None and value is not None and _violates_limit(value, limit, sign.limit_field):
                yield sign.metric, sign.message.format(value=value)
        for probe, gap in _largest_blind_gaps(means).items():
            if self._options.min_blind_gap is not None and gap < self._options.min_blind_gap:
                yield (
                    BLIND_GAP_PREFIX + probe,
                    f"probe {probe}: no reward loses more than {gap:.3f} where the media are hidden: the policy may "
                    "not look at them. Leave out questions that can be answered blind",
                )
        for step, failed in _failed_call_fracs(means).items():
            if self._options.max_failed_tool_call_frac is not None and failed > self._options.max_failed_tool_call_frac:
                yield (
                    step + CALLS_SUFFIX,
                    f"{failed:.0%} of the calls in step {step} fail: a tool raises or takes too long, the rollouts say "
                    "what it said. Mend it, or have `on_error: stop` end the run",
                )
        for name, value in sorted(means.items()):
            if name.startswith(TERM_PREFIX) and self._has_fallen(name, value, means):
                yield (
                    name,
                    f"{name.removeprefix(TERM_PREFIX)} fell from {self._first_means[name]:.3f} to {value:.3f} while the total rose: "
                    "other terms are easier to earn. Weigh them less, or make this one their gate",
                )

    def _has_fallen(self, name: str, value: float, means: Mapping[str, float]) -> bool:
        most = self._options.max_reward_term_drop
        if most is None or name not in self._first_means:
            return False
        return self._first_means[name] - value > most and means[TOTAL_METRIC] > self._first_means[TOTAL_METRIC]


class MonitoredLogger:
    """A teller whose steps are watched; it adds how far rollouts repeat their siblings."""

    def __init__(self, inner: MetricsLogger, monitor: HealthMonitor) -> None:
        self._inner, self._monitor = inner, monitor
        self._duplicate_metrics: Mapping[str, float] = {}

    def log_rollouts(
        self, state: TrainingState, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, force: bool
    ) -> str | None:
        """As the inner teller."""
        self._duplicate_metrics = compute_duplicate_metrics(groups)
        return self._inner.log_rollouts(state, groups, advantages, force=force)

    def log(self, state: TrainingState, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Tell the step, then look at it."""
        metrics = {**metrics, **self._duplicate_metrics}
        self._inner.log(state, metrics, times)
        self._monitor.update(state.step, metrics)


def compute_duplicate_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of rollouts that repeat a sibling: its whole text, and its answer alone."""
    drawn = [group.all_rollouts for group in groups]
    count = sum(map(len, drawn))
    if not count:
        return {}
    texts = sum(len({rollout.text for rollout in rollouts}) for rollouts in drawn)
    answers = sum(len({rollout.answer.text for rollout in rollouts}) for rollouts in drawn)
    return {"rollout/duplicate_frac": 1.0 - texts / count, "rollout/duplicate_answer_frac": 1.0 - answers / count}


_SUMMARY_METRICS: Final = (  # metric, words
    ("groups/nonzero_advantage_frac", "{:.0%} of groups informative"),
    ("replay/frac", "{:.0%} replayed"),
    ("replay/staleness_mean", "age {:.1f}"),
    ("replay/effective_size", "memory worth {:.0f}"),
    ("policy/entropy_nats", "entropy {:.3f} nats"),
    ("rollout/response_tokens_mean", "{:.1f} tokens"),
    ("rollout/truncated_frac", "{:.0%} truncated"),
    ("rollout/duplicate_frac", "{:.0%} duplicates"),
    ("policy/reference_kl_nats", "KL {:.3f} nats"),
    ("policy/importance_ratio_max", "ratios up to {:.2f}"),
)


def summarize_health(monitor: HealthMonitor) -> str:
    """One line on the last steps."""
    means = monitor.window_means()
    return "Health at the end: " + ", ".join(
        text.format(means[name]) for name, text in _SUMMARY_METRICS if name in means
    )


def _failed_call_fracs(means: Mapping[str, float]) -> dict[str, float]:
    """The share of calls that fail, by the step of the program that answers them."""
    failed: dict[str, float] = {}
    for name, calls in means.items():
        if name.endswith(CALLS_SUFFIX) and calls:
            step = name.removesuffix(CALLS_SUFFIX)
            failed[step] = (means.get(f"{step}/errors", 0.0) + means.get(f"{step}/timeouts", 0.0)) / calls
    return failed


def _largest_blind_gaps(means: Mapping[str, float]) -> dict[str, float]:
    """What the reward term that depends most on the media loses without them, by probe."""
    gaps: dict[str, float] = {}
    for name, gap in means.items():
        if name.startswith(BLIND_GAP_PREFIX):
            probe = name.removeprefix(BLIND_GAP_PREFIX).partition("/")[0]
            gaps[probe] = max(gap, gaps.get(probe, gap))
    return gaps


def _violates_limit(value: float, limit: float, name: str) -> bool:
    """Whether a value is below a limit whose name begins with `min_`, or above another."""
    return value < limit if name.startswith("min_") else value > limit
