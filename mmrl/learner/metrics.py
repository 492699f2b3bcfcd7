"""Metrics of a training step: measures tokens, and merges the metrics of micro-batches, ranks and updates.

Suffixes of tensor names as in `mmrl.policy.batch`: N trained tokens, the rows of a `TokenTable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mmrl.algo.losses import estimate_kl
from mmrl.config.schema import LossConfig
from mmrl.learner.tokens import LossColumns, LossDenominators, TokenTable
from mmrl.types import Experience, WorstToken

_Kind = Literal["sum", "mean", "ratio", "max", "min"]


class _Metric(NamedTuple):
    kind: _Kind
    value: float  # what was added so far; for a ratio its numerator, for a max or min the extreme
    weight: float = 1.0  # for a mean the tokens of its update, for a ratio its denominator; else unused


class _UnreadMetric(NamedTuple):
    name: str
    kind: _Kind
    value: Tensor  # a scalar; or, with `experiences`, a value and the number of the response that it belongs to, [2]
    weight: float = 1.0
    experiences: Sequence[Experience] = ()


@dataclass(slots=True)
class Metrics:
    """Named metrics of a part of a step. `merge` adds the metrics of another part, each by its kind.

    Methods accumulate, and floating point sums depend on the order of calls. Values may be tensors of any float type.
    They stay on the device until `read_tensors`, which waits for it once and copies them all.
    """

    _metrics: dict[str, _Metric] = field(default_factory=dict)
    _unread: list[_UnreadMetric] = field(default_factory=list)

    def add(self, name: str, kind: _Kind, value: float | Tensor, weight: float = 1.0) -> None:
        """Add a scalar to a metric.

        sum: `value` is added to a sum over all parts of a step.
        mean: `value` is a micro-batch's share of a mean over an update's tokens: the sum over its own tokens, divided
            by the number of tokens of the whole update. Shares are summed. `weight` is that number of tokens, by which
            `merge_updates` weighs the updates. With the default, all updates weigh the same.
        ratio: `value` is added to the numerator, `weight` to the denominator, known only once all parts are merged.
        max, min: the largest or the smallest `value` is kept.
        """
        if isinstance(value, Tensor):
            self._unread.append(_UnreadMetric(name, kind, value, weight))
            return
        known = self._metrics.get(name)
        if known is not None:
            match kind:
                case "max" | "min" if math.isnan(value):
                    pass  # it is kept: Python's `max` and `min` would drop it, since it is neither larger nor smaller
                case "max":
                    value = max(known.value, value)
                case "min":
                    value = min(known.value, value)
                case _:
                    value = known.value + value
            weight = known.weight + weight if kind == "ratio" else known.weight
        self._metrics[name] = _Metric(kind, value, weight)

    def keep_worst_token(self, name: str, values_N: Tensor, tokens: TokenTable) -> None:
        """Keep the largest value, with the rollout of its token, as a `WorstToken`."""
        index_1 = values_N.argmax().reshape(1)  # [1]: the CPU would have to read a scalar index
        columns = (values_N, tokens.response_N)
        pair = torch.cat([column.index_select(0, index_1).double() for column in columns])
        self._unread.append(_UnreadMetric(name, "max", pair, experiences=tokens.experiences))

    def merge(self, other: Metrics) -> None:
        """Merge in the metrics of another part of the same update: a micro-batch, or a rank's whole share."""
        for name, metric in other._metrics.items():
            self.add(name, *metric)
        self._unread += other._unread

    def read_tensors(self) -> None:
        """Fetch all values that are still tensors, in one transfer."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        numbers = iter(torch.cat([metric.value.double().reshape(-1) for metric in unread]).tolist())
        for metric in unread:
            value = next(numbers)
            if metric.experiences:
                rollout = metric.experiences[int(next(numbers))].rollout
                value = WorstToken(value)
                sample = rollout.prompt.sample
                value.owner = f"rollout {rollout.index} of {sample.modality} sample {sample.id}"
            self.add(metric.name, metric.kind, value, metric.weight)

    def values(self) -> dict[str, float]:
        """Return the value of each metric. A ratio is 0 if nothing was counted."""
        self.read_tensors()
        values = {}
        for name, metric in self._metrics.items():
            values[name] = metric.value / max(1.0, metric.weight) if metric.kind == "ratio" else metric.value
        return values


def merge_updates(updates: Iterable[Metrics]) -> Metrics:
    """Return the metrics of several updates, each of which is merged and read.

    A mean weighs each update by its tokens, so it does not depend on the number of mini-batches. All other kinds merge
    as they do within an update.
    """
    merged = Metrics()
    for update in updates:
        for name, metric in update._metrics.items():
            if metric.kind == "mean":
                # The mean has all its shares by now, so this is the sum over the update's tokens.
                merged.add(name, "ratio", metric.value * metric.weight, metric.weight)
            else:
                merged.add(name, *metric)
    return merged


def measure_tokens(
    sampled: TokenTable,
    options: LossConfig,
    denominators: LossDenominators,
    *,
    old_N: Tensor,
    ratio_N: Tensor,
    advantage_N: Tensor,
    correction_N: Tensor,
    kl_N: Tensor | None,
) -> tuple[Metrics, LossColumns]:
    """Return means over the tokens with a gradient, extremes of the ratio, and the values of single tokens.

    Means are over tokens, whatever `loss.aggregation` is. All arguments [N] are without gradient. `kl_N` is the KL
    divergence from the reference, None without a KL penalty.

    A token counts as clipped where the bound changes its loss, as in TRL (`clip_ratio/low_mean`, `high_mean`) and
    verl (`pg_clipfrac`; `pg_clipfrac_lower` is our `policy/clip_frac_dual`). With a user's policy loss, it counts where
    the bound would change the loss `clip`.

    Source of `policy/approx_kl`: Schulman, "Approximating KL Divergence" (2020), the estimator k3 of
    KL(old || current) at tokens drawn from old: (r - 1) - log r with r = exp(current - old log-prob).
    """
    # The minimum of the clipped policy loss takes the bound only where it makes the gain smaller. CISPO's bounds
    # replace the ratio whatever the sign of the advantage; TRL counts only tokens with A > 0.
    is_cispo = options.policy_loss == "cispo"
    low_matters_N = (advantage_N != 0.0) if is_cispo else (advantage_N < 0.0)
    high_matters_N = (advantage_N != 0.0) if is_cispo else (advantage_N > 0.0)
    is_low_N = (ratio_N < 1.0 - options.clip_low) & low_matters_N
    is_high_N = (ratio_N > 1.0 + options.clip_high) & high_matters_N
    logprobs_N, entropies_N = sampled.current_logprobs_N.detach(), sampled.entropies_N.detach()
    sums = {} if kl_N is None else {"policy/reference_kl_nats": kl_N.sum()}
    sums |= {
        "policy/entropy_nats": entropies_N.sum(),
        # From each token's own ratio: `importance_ratio_level` and `log_ratio_clip` do not apply here.
        "policy/approx_kl": estimate_kl(old_N, logprobs_N, "k3").sum(),
        "policy/clip_frac": (is_low_N | is_high_N).sum(),
        "policy/clip_frac_low": is_low_N.sum(),
        "policy/clip_frac_high": is_high_N.sum(),
    }
    if options.dual_clip is not None:
        sums["policy/clip_frac_dual"] = ((ratio_N > options.dual_clip) & (advantage_N < 0.0)).sum()
    if options.rollout_correction.method != "none":
        sums["policy/rollout_correction_weight_mean"] = correction_N.sum()
    metrics = Metrics()
    count = denominators.policy_tokens_with_gradient
    for name, total in sums.items():
        metrics.add(name, "mean", total.double() / count, count)
    metrics.add("policy/importance_ratio_min", "min", ratio_N.min())
    metrics.keep_worst_token("policy/importance_ratio_max", ratio_N, sampled)
    columns = (logprobs_N, ratio_N, entropies_N, advantage_N, is_low_N + 2 * is_high_N)
    return metrics, LossColumns(sampled.experiences, sampled.response_N, columns)


def measure_sampler(sampled: TokenTable, denominators: LossDenominators) -> Metrics:
    """Return the differences between the learner's log-probs and the sampler's recorded ones, in nats.

    Before the first update, differences of on-policy tokens come from the rollout engine alone. Differences of tokens
    of the version before also contain one step's learning.
    """
    difference_N = (sampled.current_logprobs_N.detach() - sampled.recorded_logprobs_N).abs()
    metrics = Metrics()
    names = ("rollout/logprob_diff_mean", "rollout/stale_logprob_diff_mean")
    for staleness, count in enumerate(denominators.policy_tokens_with_gradient_by_staleness):
        if count:
            share = difference_N.where(sampled.staleness_N == staleness, 0.0).sum().double() / count
            # A sum, because a step measures this in its first update alone: there is no mean over updates.
            metrics.add(names[staleness], "sum", share)
    if any(denominators.policy_tokens_with_gradient_by_staleness):
        recent_N = difference_N.where(sampled.staleness_N <= 1, 0.0)
        metrics.keep_worst_token("rollout/logprob_diff_max", recent_N, sampled)
    return metrics
