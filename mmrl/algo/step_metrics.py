"""What a step's rollouts look like, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from mmrl.algo.blind_gap import blind_gaps
from mmrl.types import FinishReason, Group


def compute_step_metrics(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics of a step's rollouts: mean reward, by term and by task; failures, if any; informative groups; lengths."""
    drawn = [rollout for group in groups for rollout in group.all_rollouts]
    failed = Counter(f"reward/{name}/{failure.error_kind}" for group in groups for name, failure in group.failures)
    failed["reward/dropped"] = sum(len(group.dropped) for group in groups)
    named: dict[str, list[float]] = {}
    for group in groups:
        for score in group.scores:
            named.setdefault("reward/mean", []).append(score.total)
            named.setdefault(f"reward/task/{group.prompt.sample.task}", []).append(score.total)
            for name, term in score.terms.items():
                named.setdefault(f"reward/term/{name}", []).append(term.value)
    return {
        **{name: fmean(values) for name, values in named.items()},
        **+failed,
        **blind_gaps(groups),
        "groups/nonzero_advantage_frac": fmean(any(row) for row in advantages),
        "rollout/response_tokens_mean": fmean(rollout.num_tokens for rollout in drawn),
        "rollout/truncated_frac": fmean(rollout.finish_reason is FinishReason.LENGTH for rollout in drawn),
    }
