"""Metrics of the rollouts of a step: rewards, lengths, failures, and the gap to answers given without the media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from mmrl.types import FinishReason, Group, Rollout


def compute_step_metrics(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of a step's groups, at least one, with the advantage of each of their rollouts.

    `reward/mean`, `reward/task/<task>` and `reward/term/<name>` are means over rollouts, without any that a step has
    none of. `reward/<name>/<kind>` counts the failed calls of a reward and appears only where there are some.
    """
    rewards: dict[str, list[float]] = {}
    failures: Counter[str] = Counter()
    num_dropped = 0
    rollouts: list[Rollout] = []
    for group in groups:
        rollouts += group.all_rollouts
        num_dropped += len(group.dropped)
        for name, failure in group.failures:
            failures[f"reward/{name}/{failure.error_kind}"] += 1
        for score in group.scores:
            rewards.setdefault("reward/mean", []).append(score.total)
            rewards.setdefault(f"reward/task/{group.prompt.sample.task}", []).append(score.total)
            for name, term in score.terms.items():
                rewards.setdefault(f"reward/term/{name}", []).append(term.value)
    if num_dropped:
        failures["reward/dropped"] = num_dropped
    return {
        **{name: fmean(values) for name, values in rewards.items()},
        **failures,
        **blind_gaps(groups),
        "groups/nonzero_advantage_frac": fmean(map(any, advantages)),
        "rollout/response_tokens_mean": fmean(rollout.num_tokens for rollout in rollouts),
        "rollout/truncated_frac": fmean(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
    }


def blind_gaps(groups: Sequence[Group]) -> dict[str, float]:
    """Return `probe/blind_gap/<probe>/<term>`: the mean of a reward term over rollouts, minus that over their probes.

    A probe answers the same prompt with its media hidden, so 0 means that the reward is earned without looking. Terms
    are compared and never totals, since some of what a total holds is given to rollouts that train alone.
    """
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for group in groups:
        for probe, blind_scores in group.probes.items():
            # Terms that only training gives are missing from probes, so the probe's own decide what is compared.
            for name in set().union(*(score.terms for score in blind_scores)):
                seen, blind = pairs.setdefault(f"probe/blind_gap/{probe}/{name}", ([], []))
                seen += [score.terms[name].value for score in group.scores]
                blind += [score.terms[name].value for score in blind_scores]
    # A group whose rollouts were all dropped may have probes, but then there is nothing to compare them with.
    return {name: fmean(seen) - fmean(blind) for name, (seen, blind) in sorted(pairs.items()) if seen}
