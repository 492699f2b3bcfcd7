"""Rollouts by transformers: a prompt and its media are encoded once, then the cache is repeated for its rollouts.

Letters: B prompts, P prompt columns, R rows (one per rollout), K cached columns, S columns of what there is of a
response already, T new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from mmrl.algo.seeds import derive
from mmrl.policy.batch import collate_prompts, collate_responses
from mmrl.policy.logits import draw, law_logps
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.rollout.responses import Drawn, Stops, begun, longer
from mmrl.types import Finish, Prompt, Rollout, SamplingLaw

if TYPE_CHECKING:
    from transformers import Cache

_TOKENS_AT_ONCE = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefix:
    """What stands before the next token of each rollout: its logits, key mask and position."""

    cache: Cache
    logits_RV: torch.Tensor
    keep_RK: torch.Tensor
    next_R: torch.Tensor


class HfSampler:
    """Samples from the live policy; a row's random numbers derive from (salt, step, sample id, index) alone.

    Rows are drawn in parts whose caches hold at most `tokens_at_once` tokens, padding included; what is drawn does not
    depend on it.
    """

    def __init__(
        self,
        policy: Policy,
        processor: QwenProcessor,
        *,
        salt: Sequence[str | int],
        version: int = 0,
        tokens_at_once: int = _TOKENS_AT_ONCE,
    ) -> None:
        self._policy = policy
        self._processor = processor
        self._salt = tuple(salt)
        self._version = version
        self._tokens_at_once = tokens_at_once
        self._eos: int = processor.tokenizer.eos_token_id

    def sync(self, version: int) -> None:
        """The weights are shared with the learner, so only the version changes."""
        self._version = version

    def close(self) -> None:
        """Nothing was started."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, law: SamplingLaw, *, step: int
    ) -> list[list[Rollout]]:
        """`group_size` rollouts per prompt, in order."""
        empty = [begun(prompt, index, law) for prompt in prompts for index in range(group_size)]
        drawn = self.extend(empty, law, step=step)
        return [drawn[start : start + group_size] for start in range(0, len(drawn), group_size)]

    def extend(self, rollouts: Sequence[Rollout], law: SamplingLaw, *, step: int) -> list[Rollout]:
        """Go on behind each rollout's last token; what is drawn becomes one more segment of POLICY."""
        stops = Stops(law.stop, self._processor.decode)
        drawn = [row for part in self._parts(rollouts, law) for row in self._draw(part, law, stops, step)]
        return [self._longer(*row, law, stops) for row in zip(rollouts, drawn, strict=True)]

    def _parts(self, rollouts: Sequence[Rollout], law: SamplingLaw) -> Iterator[list[Rollout]]:
        part: list[Rollout] = []
        longest = 0
        for rollout in rollouts:
            length = len(rollout.prompt.ids) + rollout.num_tokens + law.max_new_tokens
            if part and max(longest, length) * (len(part) + 1) > self._tokens_at_once:
                yield part
                part, longest = [], 0
            part.append(rollout)
            longest = max(longest, length)
        if part:
            yield part

    @torch.no_grad()
    def _draw(
        self, rollouts: Sequence[Rollout], law: SamplingLaw, stops: Stops, step: int
    ) -> Iterator[tuple[list[int], list[float]]]:
        """New tokens and their log-probs, rollout by rollout."""
        prefix = self._prefix(rollouts)
        uniforms = np.stack([self._uniforms(rollout, law, step) for rollout in rollouts])
        ids_RT, logps_RT = self._decode(prefix, law, stops, torch.from_numpy(uniforms).to(self._policy.device))
        for ids, logps in zip(ids_RT.tolist(), logps_RT.tolist(), strict=True):
            count = ids.index(-1) if -1 in ids else len(ids)
            yield ids[:count], logps[:count]

    def _prefix(self, rollouts: Sequence[Rollout]) -> _Prefix:
        """Each prompt is encoded once; behind it, row by row, what there is of the responses."""
        device = self._policy.device
        prompts = {rollout.prompt.digest: rollout.prompt for rollout in rollouts}
        places = {digest: place for place, digest in enumerate(prompts)}
        batch = collate_prompts(list(prompts.values()), self._processor, pad_id=self._eos)
        cache, logits_BV = self._policy.prefill(batch)
        of_R = torch.tensor([places[rollout.prompt.digest] for rollout in rollouts], device=device)
        cache.batch_select_indices(of_R)
        logits_RV, keep_RK = logits_BV[of_R], batch.keep_BP.to(device)[of_R]
        next_R = (batch.positions_3BP.amax(dim=(0, 2)) + 1).to(device)[of_R]
        if any(rollout.num_tokens for rollout in rollouts):
            tails = collate_responses(rollouts, self._processor, pad_id=self._eos).to(device)
            keep_RK = torch.cat([keep_RK, tails.keep_BP], dim=1)
            begun_R = tails.keep_BP.any(dim=1)
            tails = replace(tails, positions_3BP=tails.positions_3BP + next_R[:, None])
            after_RV = self._policy.append(cache, tails, keep_RK)
            logits_RV = torch.where(begun_R[:, None], after_RV, logits_RV)
            next_R = torch.where(begun_R, tails.positions_3BP.amax(dim=(0, 2)) + 1, next_R)
        return _Prefix(cache=cache, logits_RV=logits_RV, keep_RK=keep_RK, next_R=next_R)

    def _decode(
        self, prefix: _Prefix, law: SamplingLaw, stops: Stops, uniforms_RT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token by token until every row has ended. Ended rows leave the computation; their tokens stay at -1."""
        cache, logits_RV, keep_RK, next_R = prefix.cache, prefix.logits_RV, prefix.keep_RK, prefix.next_R
        rows, steps = len(logits_RV), law.max_new_tokens
        ids_RT = torch.full((rows, steps), -1, device=logits_RV.device)
        logps_RT = torch.zeros(rows, steps, device=logits_RV.device)
        alive = torch.arange(rows, device=logits_RV.device)
        for t in range(steps):
            logps_RV = law_logps(logits_RV, law.divisor, law.banned)
            token_R = draw(logps_RV, law, uniforms_RT[alive, t])
            ids_RT[alive, t] = token_R
            logps_RT[alive, t] = logps_RV.gather(-1, token_R[:, None]).squeeze(-1)
            goes_R = token_R != self._eos
            if law.stop:
                lately = ids_RT[alive, max(0, t + 1 - stops.window) : t + 1].tolist()
                goes_R &= ~torch.tensor([*map(stops.complete, lately)], device=goes_R.device)
            going = goes_R.nonzero().squeeze(-1)
            if not len(going) or t + 1 == steps:
                break
            if len(going) < len(alive):
                cache.batch_select_indices(going)
                alive, keep_RK, next_R = alive[going], keep_RK[going], next_R[going]
            keep_RK = torch.nn.functional.pad(keep_RK, (0, 1), value=1)
            logits_RV = self._policy.extend(cache, token_R[going, None], keep_RK, next_R[:, None] + t)
        return ids_RT.cpu(), logps_RT.cpu()

    def _uniforms(self, rollout: Rollout, law: SamplingLaw, step: int) -> np.ndarray:
        begun = (len(rollout.segments),) if rollout.segments else ()
        seed = derive(*self._salt, step, rollout.prompt.sample.id, rollout.index, *begun)
        return np.random.Generator(np.random.Philox(seed)).random(law.max_new_tokens)

    def _longer(
        self, rollout: Rollout, drawn: tuple[list[int], list[float]], law: SamplingLaw, stops: Stops
    ) -> Rollout:
        """A rollout with one more segment."""
        ids, logps = drawn
        finish = Finish.STOP if stops.complete(ids) else Finish.LENGTH
        finish = Finish.EOS if ids[-1] == self._eos else finish
        return longer(rollout, Drawn(ids, logps, finish), law, version=self._version, processor=self._processor)
