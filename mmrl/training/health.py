"""Signs of a run that goes wrong, and what helps: warnings when they begin to hold, and a line at a stage's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

from mmrl.config.schema import Health
from mmrl.ports import Teller
from mmrl.types import Group, State


class Sign(NamedTuple):
    """A metric, the limit that it should keep to, and what to say where it does not."""

    metric: str
    limit: str
    text: str


SIGNS: Final = (
    Sign(
        "group/informative_frac",
        "min_informative",
        "{value:.0%} of the groups tell better from worse: to this policy the questions are too easy or too hard. Mix "
        "in others, ask more of them (`filter` with `rounds`), or learn again from those that did (`replay`)",
    ),
    Sign(
        "rollout/truncated_frac",
        "max_truncated",
        "{value:.0%} of the rollouts are cut before their end: raise sampling.max_new_tokens, or reward brevity",
    ),
    Sign(
        "rollout/duplicate_frac",
        "max_duplicate",
        "{value:.0%} of the rollouts say what a sibling says: raise sampling.temperature, or add a bonus on entropy "
        "(loss.entropy)",
    ),
    Sign(
        "learner/entropy_nats",
        "min_entropy",
        "the policy is sure of every token (entropy {value:.4f} nats) and tries nothing new: lower the learning rate, "
        "raise loss.clip_high, or add a bonus on entropy (loss.entropy)",
    ),
    Sign(
        "learner/kl_nats",
        "max_kl",
        "the policy is {value:.2f} nats a token from its reference: lower the learning rate, or raise loss.kl.coef",
    ),
    Sign(
        "learner/ratio_max",
        "max_ratio",
        "some tokens are {value:.0f} times as likely as when they were sampled: lower the learning rate, epochs or "
        "replay.max_age, or set loss.dual_clip",
    ),
)
BLIND: Final = "probe/blind_gap/"
CALLS: Final = "/calls"
TERM: Final = "reward/term/"
TOTAL: Final = "reward/total"


class Watch:
    """Averages the metrics of the last steps and holds them against the limits.

    A sign is told when it begins to hold, and again only after it was gone for as many steps as are averaged.
    """

    def __init__(self, options: Health, warn: Callable[[str], None]) -> None:
        self._options, self._warn = options, warn
        self._window: deque[Mapping[str, float]] = deque(maxlen=options.window)
        self._first: Mapping[str, float] = {}
        self._held: dict[str, int] = {}  # the step at which a sign held last

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one more step; warn of what has begun to hold."""
        self._window.append(metrics)
        if len(self._window) < self._options.window:
            return
        means = self.means()
        self._first = self._first or means
        for name, text in self._found(means):
            if name not in self._held or step - self._held[name] > self._options.window:
                self._warn(f"step {step}, mean of {self._options.window} steps: {text}")
            self._held[name] = step

    def means(self) -> dict[str, float]:
        """The metrics of the last steps, each averaged over the steps that have it."""
        names = {name for metrics in self._window for name in metrics}
        return {name: fmean(metrics[name] for metrics in self._window if name in metrics) for name in names}

    def _found(self, means: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """What is wrong, by the name of the metric."""
        for sign in SIGNS:
            limit: float | None = getattr(self._options, sign.limit)
            value = means.get(sign.metric)
            if limit is not None and value is not None and _beyond(value, limit, sign.limit):
                yield sign.metric, sign.text.format(value=value)
        for probe, gap in _gaps(means).items():
            if self._options.min_blind_gap is not None and gap < self._options.min_blind_gap:
                yield (
                    BLIND + probe,
                    f"probe {probe}: no reward loses more than {gap:.3f} where the media are hidden: the policy may "
                    "not look at them. Leave out questions that can be answered blind",
                )
        for step, failed in _failing(means).items():
            if self._options.max_failed_calls is not None and failed > self._options.max_failed_calls:
                yield (
                    step + CALLS,
                    f"{failed:.0%} of the calls in step {step} fail: a tool raises or takes too long, the rollouts say "
                    "what it said. Mend it, or have `on_error: stop` end the run",
                )
        for name, value in sorted(means.items()):
            if name.startswith(TERM) and self._falls(name, value, means):
                yield (
                    name,
                    f"{name.removeprefix(TERM)} fell from {self._first[name]:.3f} to {value:.3f} while the total rose: "
                    "other terms are easier to earn. Weigh them less, or make this one their gate",
                )

    def _falls(self, name: str, value: float, means: Mapping[str, float]) -> bool:
        most = self._options.max_term_fall
        if most is None or name not in self._first:
            return False
        return self._first[name] - value > most and means[TOTAL] > self._first[TOTAL]


class Watched:
    """A teller whose steps are watched; it adds how far rollouts repeat their siblings."""

    def __init__(self, inner: Teller, watch: Watch) -> None:
        self._inner, self._watch = inner, watch
        self._repeats: Mapping[str, float] = {}

    def show(
        self, state: State, groups: Sequence[Group], advantages: Sequence[Sequence[float]], *, at_all_events: bool
    ) -> str | None:
        """As the inner teller."""
        self._repeats = repeats(groups)
        return self._inner.show(state, groups, advantages, at_all_events=at_all_events)

    def tell(self, state: State, metrics: Mapping[str, float], times: Mapping[str, float]) -> None:
        """Tell the step, then look at it."""
        metrics = {**metrics, **self._repeats}
        self._inner.tell(state, metrics, times)
        self._watch.look(state.step, metrics)


def repeats(groups: Sequence[Group]) -> dict[str, float]:
    """Shares of rollouts that repeat a sibling: its whole text, and its answer alone."""
    drawn = [group.drawn for group in groups]
    count = sum(map(len, drawn))
    if not count:
        return {}
    texts = sum(len({rollout.text for rollout in rollouts}) for rollouts in drawn)
    answers = sum(len({rollout.answer.text for rollout in rollouts}) for rollouts in drawn)
    return {"rollout/duplicate_frac": 1.0 - texts / count, "rollout/same_answer_frac": 1.0 - answers / count}


_SUMMARY: Final = (  # metric, words
    ("group/informative_frac", "{:.0%} of groups informative"),
    ("replay/share", "{:.0%} replayed"),
    ("replay/age_mean", "age {:.1f}"),
    ("replay/effective_size", "memory worth {:.0f}"),
    ("learner/entropy_nats", "entropy {:.3f} nats"),
    ("rollout/tokens_mean", "{:.1f} tokens"),
    ("rollout/truncated_frac", "{:.0%} truncated"),
    ("rollout/duplicate_frac", "{:.0%} duplicates"),
    ("learner/kl_nats", "KL {:.3f} nats"),
    ("learner/ratio_max", "ratios up to {:.2f}"),
)


def summary(watch: Watch) -> str:
    """One line on the last steps."""
    means = watch.means()
    return "Health at the end: " + ", ".join(text.format(means[name]) for name, text in _SUMMARY if name in means)


def _failing(means: Mapping[str, float]) -> dict[str, float]:
    """The share of calls that fail, by the step of the program that answers them."""
    failed: dict[str, float] = {}
    for name, calls in means.items():
        if name.endswith(CALLS) and calls:
            step = name.removesuffix(CALLS)
            failed[step] = (means.get(f"{step}/errors", 0.0) + means.get(f"{step}/timeouts", 0.0)) / calls
    return failed


def _gaps(means: Mapping[str, float]) -> dict[str, float]:
    """What the reward term that depends most on the media loses without them, by probe."""
    gaps: dict[str, float] = {}
    for name, gap in means.items():
        if name.startswith(BLIND):
            probe = name.removeprefix(BLIND).partition("/")[0]
            gaps[probe] = max(gap, gaps.get(probe, gap))
    return gaps


def _beyond(value: float, limit: float, name: str) -> bool:
    """Whether a value is below a limit whose name begins with `min_`, or above another."""
    return value < limit if name.startswith("min_") else value > limit
