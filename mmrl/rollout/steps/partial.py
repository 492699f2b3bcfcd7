"""Partial rollouts: a step does not wait for the longest responses; they go on in later steps, under newer weights.

Source: APRIL, arXiv:2509.18521. Departure: whole groups wait, so that every group that is learned from is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from mmrl.distributed.ranks import Alone, Ranks
from mmrl.ports import Sampler
from mmrl.types import Answers, Finish, Prompt, Rollout, SamplingLaw

Group = tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InChunks:
    """Draws `chunk` tokens of every open response, then looks: is `wanted` groups complete, or `token_budget` spent?

    Counted over all `ranks`, which look together.
    """

    sampler: Sampler
    group_size: int
    law: SamplingLaw
    chunk: int
    wanted: int
    token_budget: int | None = None
    ranks: Ranks = field(default_factory=Alone)

    def answer(self, prompts: Sequence[Prompt], *, step: int, pending: Sequence[Group] = ()) -> Answers:
        """The complete groups, at least one on all ranks together; the others are pending."""
        first = replace(self.law, max_new_tokens=min(self.chunk, self.law.max_new_tokens))
        begun = self.sampler.generate(prompts, self.group_size, first, step=step)
        groups: list[Group] = [*pending, *(tuple(replace(r, law=self.law) for r in group) for group in begun)]
        spent = sum(rollout.num_tokens for group in begun for rollout in group)
        while not self._enough(groups, spent):
            before = _tokens(groups)
            groups = self._longer(groups, step)
            spent += _tokens(groups) - before
        complete = [group for group in groups if self._complete(group)]
        waiting = [group for group in groups if not self._complete(group)]
        versions = [{s.version for s in rollout.segments} for group in complete for rollout in group]
        return Answers(
            groups=tuple(complete),
            pending=tuple(waiting),
            metrics={
                "rollout/pending_groups": float(len(waiting)),
                "rollout/resumed": float(sum(len(of) > 1 for of in versions)),
            },
        )

    def _enough(self, groups: Sequence[Group], drawn: int) -> bool:
        mine = (sum(map(self._complete, groups)), len(groups), drawn)
        complete, begun, spent = map(sum, zip(*self.ranks.gather(mine), strict=True))
        over = self.token_budget is not None and spent >= self.token_budget
        return complete >= min(self.wanted, begun) or (over and complete > 0)

    def _complete(self, group: Group) -> bool:
        return not any(map(self._open, group))

    def _open(self, rollout: Rollout) -> bool:
        return rollout.finish is Finish.LENGTH and rollout.num_tokens < self.law.max_new_tokens

    def _longer(self, groups: Sequence[Group], step: int) -> list[Group]:
        """The groups with one more chunk of every open response, or what is left of its length."""
        open_ = [rollout for group in groups for rollout in group if self._open(rollout)]
        longer: dict[int, Rollout] = {}
        lengths = {id(r): min(self.chunk, self.law.max_new_tokens - r.num_tokens) for r in open_}
        for length in sorted(set(lengths.values())):
            part = [rollout for rollout in open_ if lengths[id(rollout)] == length]
            drawn = self.sampler.extend(part, replace(self.law, max_new_tokens=length), step=step)
            longer |= {id(before): after for before, after in zip(part, drawn, strict=True)}
        return [tuple(longer.get(id(rollout), rollout) for rollout in group) for group in groups]


def _tokens(groups: Sequence[Group]) -> int:
    return sum(rollout.num_tokens for group in groups for rollout in group)
