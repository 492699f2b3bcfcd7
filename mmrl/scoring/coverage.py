"""Mistakes in `when` that raise no error: values that no sample has, and samples whose answer no reward judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from mmrl.config import Config
from mmrl.config.schema import matches_conditions
from mmrl.config.schema.base import SampleConditions, condition_value
from mmrl.scoring.scorer import RewardFunctionScorer
from mmrl.types import Sample
from mmrl.utils.messages import did_you_mean, first_names


def find_coverage_gaps(config: Config, scorer: RewardFunctionScorer, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a warning for each condition that no sample meets, and for each task whose answers no reward judges."""
    conditions: dict[str, SampleConditions] = {}
    for term in scorer.caller.terms:
        conditions[f"reward term {term.name!r}"] = term.options.sample_when
    for group_reward in config.rewards.group_rewards:
        conditions[f"group reward {group_reward.name or group_reward.fn!r}"] = group_reward.when
    for stage in config.training_stages:
        conditions[f"stage {stage.name!r}"] = stage.when
    for owner, when in conditions.items():
        yield from _find_unmet(owner, when, samples)
    yield from _find_unjudged(config, scorer, samples)


def _find_unmet(owner: str, when: SampleConditions, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a warning for each value of `when` that no sample has, or for values that no sample has together."""
    is_reported = False
    for column, allowed in when.items():
        values = {condition_value(sample, column) for sample in samples}
        known = sorted(value for value in values if value is not None)
        for value in allowed:
            if value not in values:
                is_reported = True
                hint = did_you_mean(value, known) or f"there is {first_names(known) or 'no such column'}"
                yield f"{owner}: `when` names {column} {value!r}, which no sample has; {hint}"
    if not is_reported and not any(matches_conditions(when, sample) for sample in samples):
        yield f"{owner} applies to none of the samples: see its `when`"


def _find_unjudged(config: Config, scorer: RewardFunctionScorer, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield a warning for each task with samples to which only rewards of format, length or style apply."""
    unjudged: Counter[str] = Counter()
    terms_of_task: dict[str, list[str]] = {}
    for sample in samples:
        terms = scorer.caller.applicable_terms(sample)
        has_group_reward = any(matches_conditions(term.when, sample) for term in config.rewards.group_rewards)
        if not has_group_reward and not any(term.declaration.judges_answer for term in terms):
            unjudged[sample.task] += 1
            terms_of_task[sample.task] = [term.name for term in terms]
    for task, count in unjudged.items():
        yield (
            f"no reward judges the answers of {count:,} samples of task {task!r}: only "
            f"{', '.join(terms_of_task[task])} applies to them; see `when` of the other terms"
        )
