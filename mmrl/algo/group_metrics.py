"""Metrics of a step's rollouts: rewards, failures, advantages, lengths, duplicates, and gaps to blind probes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from statistics import fmean, pstdev

from mmrl.config.schema.rollout_steps import GREEDY_PROBE
from mmrl.types import Experience, Failure, FailureKind, FinishReason, Group, Rollout


def compute_step_metrics(groups: Sequence[Group], rows: Sequence[Sequence[Experience]]) -> dict[str, float]:
    """Return metrics of a step's groups; empty without groups. `rows` has the experiences of each group.

    A metric without a value in this step is left out. Rewards and advantages come from scored rollouts alone, lengths
    and duplicates from dropped ones too.
    """
    if not groups:
        return {}
    rollouts: list[Rollout] = []
    num_texts = num_answers = 0
    for group in groups:
        rollouts += group.all_rollouts
        num_texts += len({rollout.text for rollout in group.all_rollouts})
        answers = [rollout.answer.text for rollout in group.all_rollouts]
        # A response without an answer repeats no other.
        num_answers += len({*answers} - {None}) + answers.count(None)
    lengths = list(map(attrgetter("num_tokens"), rollouts))
    metrics = {
        **compute_reward_metrics(groups),
        **compute_blind_gaps(groups),
        "groups/nonzero_advantage_frac": fmean(any(map(attrgetter("has_signal"), row)) for row in rows),
        "rollout/response_tokens_mean": fmean(lengths),
        "rollout/response_tokens_min": float(min(lengths)),
        "rollout/response_tokens_max": float(max(lengths)),
        "rollout/truncated_frac": fmean(rollout.finish_reason is FinishReason.LENGTH for rollout in rollouts),
        # Duplicates are counted within a group, because different prompts may well have the same answer.
        "rollout/duplicate_frac": 1.0 - num_texts / len(rollouts),
        "rollout/duplicate_answer_frac": 1.0 - num_answers / len(rollouts),
    }
    # Groups that are not trained on count with their advantages of 0.
    all_advantages = list(chain.from_iterable(map(attrgetter("advantages"), chain.from_iterable(rows))))
    if all_advantages:
        metrics["advantage/min"], metrics["advantage/max"] = min(all_advantages), max(all_advantages)
    return metrics


def compute_reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return mean, population standard deviation and extremes of the total rewards, other means, and failures.

    `reward/mean`, `reward/task/<task>` and `reward/term/<name>` are means over rollouts. `reward/<name>/<kind>` counts
    the failed calls of a reward by kind of error, and `reward/<name>/fallback` those whose value its fallback gave.
    """
    totals: list[float] = []
    parts: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    failures: list[tuple[str, Failure]] = []
    for group in groups:
        for score in group.scores:
            totals.append(score.total)
            # A term may fail on a rollout that is kept, which then gets the term's fallback.
            failures += score.failures.items()
            counts.update(f"reward/{name}/fallback" for name in score.decided_by)
            parts.setdefault(f"reward/task/{group.prompt.sample.task}", []).append(score.total)
            for name, term in score.terms.items():
                parts.setdefault(f"reward/term/{name}", []).append(term.value)
        if group.dropped:
            counts["reward/dropped"] += len(group.dropped)
        for dropped in group.dropped:
            failures += dropped.failures.items()
    for name, failure in failures:
        counts[f"reward/{name}/{failure.kind}"] += 1
    metrics: dict[str, float] = {name: fmean(values) for name, values in parts.items()} | counts
    if totals:
        metrics["reward/mean"], metrics["reward/std"] = fmean(totals), pstdev(totals)
        metrics["reward/min"], metrics["reward/max"] = min(totals), max(totals)
    return metrics


def count_missing_values(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the number of rollouts for which neither a reward term nor its fallback gave a value, by the term's name.

    The number of rollouts that a rollout step failed is under `step/` and its name. Terms without any are missing.
    `metrics` are of `compute_reward_metrics`.
    """
    missing: Counter[str] = Counter()
    for metric, count in metrics.items():
        owner, _, kind = metric.rpartition("/")
        name = owner.removeprefix("reward/")
        # `reward/task/...` and `reward/term/...` are means of a task or term that may be named like a kind of failure.
        if not owner.startswith("reward/") or name in ("task", "term"):
            continue
        if kind == "fallback":
            missing[name] -= int(count)
        elif kind in tuple(FailureKind):
            missing[name] += int(count)
    return {name: count for name, count in missing.items() if count > 0}


def compute_blind_gaps(groups: Sequence[Group]) -> dict[str, float]:
    """Return `probe/blind_gap/<probe>/<term>`: the mean of a reward term over rollouts, minus that over their probes.

    A probe answers the same prompt with its media hidden, so 0 means that the reward is earned without looking. Only
    terms are compared: totals also hold training-only terms, which probes do not get.
    """
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for group in groups:
        for probe, blind_scores in group.probes.items():
            # The greedy probe is not blind: it has the media. A group without scores may have no target, either.
            if probe == GREEDY_PROBE or not group.scores:
                continue
            # Probes lack training-only terms, so a probe's terms decide what is compared.
            for name in set().union(*(score.terms for score in blind_scores)):
                seen, blind = pairs.setdefault(f"probe/blind_gap/{probe}/{name}", ([], []))
                for values, scores in ((seen, group.scores), (blind, blind_scores)):
                    for score in scores:
                        # A term in `decided_by` has the value of its fallback; other failed terms have none.
                        if name not in score.failures or name in score.decided_by:
                            values.append(score.terms[name].value)
    # Rollouts or probes that failed leave nothing to compare.
    return {name: fmean(seen) - fmean(blind) for name, (seen, blind) in sorted(pairs.items()) if seen and blind}
