"""Finds rollouts of earlier steps whose images or videos have changed since, so that they cannot be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mmrl.algo.replay import MediaDigests
from mmrl.distributed.ranks import Ranks
from mmrl.policy.processor import PromptProcessor
from mmrl.types import Rollout, UserError


def find_changed_media(
    rollouts: Iterable[Rollout], *, processor: PromptProcessor, ranks: Ranks, warn: Callable[[str], None]
) -> set[MediaDigests]:
    """Return the media digests of rollouts that cannot be used any more, and warn of each problem. Collective.

    Each rollout is checked on one rank, by preference the one that `ranks.media_ranks` names; the others are added.
    """
    # Most rollouts of a group saw the same media, which need not be checked again for each. Two files may have equal
    # content, and one of them may be gone.
    distinct = {(rollout.media_digests, rollout.media): rollout for rollout in rollouts}
    # One rank may still hold in memory a file that another would find changed on disk. If each checked all of them,
    # ranks would drop different rollouts and disagree about the step from then on.
    own_problems: dict[MediaDigests, str] = {}
    for index, rollout in enumerate(distinct.values()):
        rank = ranks.media_ranks.setdefault(rollout.prompt.digest, index % ranks.size)
        if rank != ranks.rank:
            continue
        try:
            processor.check_media(rollout)
        except UserError as error:
            own_problems[rollout.media_digests] = str(error)
    problems: dict[MediaDigests, str] = {}
    for found in ranks.all_gather(own_problems):
        problems |= found
    for problem in dict.fromkeys(problems.values()):
        warn(f"rollouts of earlier steps are dropped: {problem}")
    return set(problems)
