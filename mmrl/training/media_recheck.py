"""Finds rollouts of earlier steps whose images or videos have changed since, so that they cannot be trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mmrl.algo.replay import MediaDigests
from mmrl.distributed.ranks import Ranks
from mmrl.policy.processor import PromptProcessor
from mmrl.types import Rollout, UserError


@dataclass(frozen=True, slots=True)
class MediaRecheck:
    """Checks the media of stored rollouts again, each rollout on one rank."""

    processor: PromptProcessor
    ranks: Ranks
    media_ranks: dict[str, int]  # as in `RlParts`; records which rank has just decoded a prompt's media
    warn: Callable[[str], None]

    def find_changed(self, rollouts: Iterable[Rollout]) -> set[MediaDigests]:
        """Return the media digests of rollouts that cannot be used any more, and warn of each problem. Collective."""
        # Most rollouts of a group saw the same media, which need not be checked again for each. Two files may have
        # equal content, and one of them may be gone.
        distinct = {(rollout.media_digests, rollout.media): rollout for rollout in rollouts}
        problems: dict[MediaDigests, str] = {}
        for found in self.ranks.all_gather(self._check_own_share(list(distinct.values()))):
            problems |= found
        for problem in dict.fromkeys(problems.values()):
            self.warn(f"rollouts of earlier steps are dropped: {problem}")
        return set(problems)

    def _check_own_share(self, rollouts: Sequence[Rollout]) -> dict[MediaDigests, str]:
        """Return why rollouts of this rank's share cannot be used."""
        # One rank may still hold in memory a file that another would find changed on disk. If each checked all of them,
        # ranks would drop different rollouts and disagree about the step from then on.
        problems = {}
        for index, rollout in enumerate(rollouts):
            rank = self.media_ranks.setdefault(rollout.prompt.digest, index % self.ranks.size)
            if rank != self.ranks.rank:
                continue
            try:
                self.processor.check_media(rollout)
            except UserError as error:
                problems[rollout.media_digests] = str(error)
        return problems
