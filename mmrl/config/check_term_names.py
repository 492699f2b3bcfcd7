"""Check of the reward terms that stages name; their names are known once the rewards are loaded."""

from __future__ import annotations

from collections.abc import Collection

from mmrl.config.schema import Config, RlStage, SelectStage
from mmrl.types import UserError


def check_reward_names(config: Config, reward_names: Collection[str], group_reward_names: Collection[str]) -> None:
    """Check that every reward term and group reward that a stage names exists.

    Raises:
        UserError: one does not.
    """
    training_names = [*reward_names, *group_reward_names]
    for stage in config.stages:
        if isinstance(stage, RlStage):
            for term in stage.track_rewards:
                _check_name(term, training_names, f"stage {stage.name!r}: track_rewards")
            for entry in stage.dynamic_sampling.ranges if stage.dynamic_sampling else ():
                _check_name(entry.term, training_names, f"stage {stage.name!r}: dynamic_sampling.ranges")
        if isinstance(stage, SelectStage):
            for term in stage.correct:
                _check_name(term, reward_names, f"stage {stage.name!r}: correct")


def _check_name(term: str, known: Collection[str], place: str) -> None:
    if term not in known:
        raise UserError(f"{place}: there is no reward term {term!r}, but {', '.join(known)}")
