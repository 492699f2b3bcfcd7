"""Which groups are worth learning from: filters on named terms and on truncation."""

from __future__ import annotations

from math import fsum

from mmrl.algo.advantages import SAME
from mmrl.config.schema import Band, Filter
from mmrl.types import Finish, Group

TRUNCATED, UNJUDGED = "truncated", "unjudged"


def rejection(group: Group, options: Filter) -> str | None:
    """Why a group is not learned: the name of a term, `truncated`, or `unjudged`; None where it passes.

    Sources: DAPO (arXiv:2503.14476, eq. 11) leaves out groups that are all right or all wrong; MM-EUREKA
    (arXiv:2503.07365) those whose mean accuracy is outside [0.1, 0.9].
    """
    if not group.rollouts:
        return UNJUDGED
    truncated = sum(rollout.finish is Finish.LENGTH for rollout in group.rollouts) / len(group.rollouts)
    if truncated > options.max_truncated:
        return TRUNCATED
    return next((band.term for band in options.bands if not _holds(group, band)), None)


def _holds(group: Group, band: Band) -> bool:
    values = [score.terms[band.term].value for score in group.scores if band.term in score.terms]
    if not values:
        return True
    mean = fsum(values) / len(values)
    differs = max(values) - min(values) > SAME
    return band.low - SAME <= mean <= band.high + SAME and (differs or not band.mixed)
