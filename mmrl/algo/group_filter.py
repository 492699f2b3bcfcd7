"""Which groups are worth learning from: filters on named terms and on truncation."""

from __future__ import annotations

from math import fsum

from mmrl.algo.advantages import EQUALITY_TOLERANCE
from mmrl.config.schema import DynamicSamplingConfig, GroupRewardRangeConfig
from mmrl.types import FinishReason, Group

TRUNCATED, UNSCORED = "truncated", "unscored"


def rejection_reason(group: Group, options: DynamicSamplingConfig) -> str | None:
    """Why a group is not learned: the name of a term, `truncated`, or `unjudged`; None where it passes.

    Sources: DAPO (arXiv:2503.14476, eq. 11) leaves out groups that are all right or all wrong; MM-EUREKA
    (arXiv:2503.07365) those whose mean accuracy is outside [0.1, 0.9].
    """
    if not group.rollouts:
        return UNSCORED
    truncated = sum(rollout.finish_reason is FinishReason.LENGTH for rollout in group.rollouts) / len(group.rollouts)
    if truncated > options.max_truncated_frac:
        return TRUNCATED
    return next((band.term for band in options.ranges if not _in_range(group, band)), None)


def _in_range(group: Group, accuracy_range: GroupRewardRangeConfig) -> bool:
    values = [score.terms[accuracy_range.term].value for score in group.scores if accuracy_range.term in score.terms]
    if not values:
        return True
    mean = fsum(values) / len(values)
    differs = max(values) - min(values) > EQUALITY_TOLERANCE
    return accuracy_range.low - EQUALITY_TOLERANCE <= mean <= accuracy_range.high + EQUALITY_TOLERANCE and (
        differs or not accuracy_range.require_mixed
    )
