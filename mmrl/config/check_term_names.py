"""The reward terms that stages name must be there; which ones are, only the rewards themselves say."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from mmrl.config.schema import Config, RlStage, SelectStage
from mmrl.types import UserError


def check_reward_names(config: Config, reward_names: Collection[str], group_reward_names: Collection[str]) -> None:
    """Hold what stages name against the names of reward terms and of the group terms that shape training.

    Raises:
        UserError: there is no such term.
    """
    for stage, key, term, known in _iter_named_rewards(config, reward_names, [*reward_names, *group_reward_names]):
        if term not in known:
            raise UserError(f"stage {stage!r}: {key}: there is no reward term {term!r}, but {', '.join(known)}")


def _iter_named_rewards(
    config: Config, rewards: Collection[str], every: Collection[str]
) -> Iterator[tuple[str, str, str, Collection[str]]]:
    """Stage, key, the term named there, and the terms that may be."""
    for stage in config.stages:
        if isinstance(stage, RlStage):
            yield from ((stage.name, "history", term, every) for term in stage.track_rewards)
            bands = stage.dynamic_sampling.ranges if stage.dynamic_sampling else ()
            yield from ((stage.name, "filter.bands", band.term, every) for band in bands)
        if isinstance(stage, SelectStage):
            yield from ((stage.name, "correct", term, rewards) for term in stage.correct)
