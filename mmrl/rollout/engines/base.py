"""Rollouts by an engine beside the learner: what it is asked, what it answers, and when it gets new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmrl.algo.seeds import derive
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Learner
from mmrl.rollout.responses import Drawn, begun, longer
from mmrl.rollout.weight_sync import Weights
from mmrl.types import Experience, Finish, Prompt, Rollout, SamplingLaw, UserError

_SEEDS = 2**62  # siblings count on from it, and it must stay a signed number


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Go on `times` times behind what there is of a response; the i-th sibling draws with the seed `seed + i`."""

    begun: Rollout
    times: int
    seed: int
    law: SamplingLaw

    def parameters(self, eos_id: int) -> dict[str, Any]:
        """As fields of vLLM's SamplingParams: the law's own distribution, and log-probabilities under it.

        vLLM takes no bias below -100, which leaves a banned token e^-100 of its probability: nothing in float32.
        """
        return {
            "n": self.times,
            "seed": self.seed,
            "temperature": self.law.temperature,
            "top_p": self.law.top_p,
            "top_k": self.law.top_k,
            "max_tokens": self.law.max_new_tokens,
            "logprobs": 0,
            "logit_bias": dict.fromkeys(self.law.banned, -100.0),
            "stop": list(self.law.stop),
            "stop_token_ids": [eos_id],
            "ignore_eos": True,  # a model's own config may name more tokens than the one that ends a response here
            "detokenize": bool(self.law.stop),
        }


def drawn(ids: Sequence[int], logps: Sequence[float], finish: str | None, stopped_by: object) -> Drawn:
    """A completion in vLLM's words.

    Raises:
        RuntimeError: it is no completion: aborted, or without a token.
    """
    reasons = {"length": Finish.LENGTH, "stop": Finish.STOP if isinstance(stopped_by, str) else Finish.EOS}
    if finish not in reasons or not ids or len(ids) != len(logps):
        raise RuntimeError(f"the rollout engine gave {len(ids)} tokens, finished by {finish!r}: that is no response")
    return Drawn(tuple(ids), tuple(logps), reasons[finish])


class Engine(Protocol):
    """Something that draws tokens with weights of its own."""

    def draw(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        """The siblings of each request, in order."""

    def load(self, weights: Weights) -> None:
        """Take over weights, forget what was computed with the old ones, and make sure that they arrived.

        Raises:
            UserError: they are another model's.
            RuntimeError: they did not arrive.
        """

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter that peft wrote, in place of the one before."""

    def rest(self) -> None:
        """Leave the memory of a shared device to the learner, until there is something to load or to draw."""

    def close(self) -> None:
        """End it."""


class Publisher:
    """Brings the policy to an engine, once for each version, however many samplers ask."""

    def __init__(self, engine: Engine, push: Callable[[Engine], None]) -> None:
        self.engine = engine
        self._push = push
        self._version: int | None = None

    def publish(self, version: int) -> None:
        """Make `version` the engine's. Raises as `Engine.load`."""
        if version != self._version:
            self._push(self.engine)
            self._version = version


class Resting:
    """A learner while whose steps the engine leaves it the device."""

    def __init__(self, learner: Learner, engine: Engine) -> None:
        self._learner, self._engine = learner, engine

    def learn(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """As the learner does."""
        self._engine.rest()
        return self._learner.learn(experiences, step=step)


class EngineSampler:
    """Samples by an engine that several samplers share; whoever made the engine closes it."""

    def __init__(
        self,
        publisher: Publisher,
        processor: QwenProcessor,
        *,
        longest: int,
        salt: Sequence[str | int],
        version: int = 0,
    ) -> None:
        """`longest` is how many tokens of a sequence the engine takes."""
        self._publisher, self._processor, self._longest = publisher, processor, longest
        self._salt, self._version = tuple(salt), version

    def sync(self, version: int) -> None:
        """Bring the learner's weights to the engine. Raises as `Engine.load`."""
        self._publisher.publish(version)
        self._version = version

    def close(self) -> None:
        """The engine stays: it outlives a stage."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, law: SamplingLaw, *, step: int
    ) -> list[list[Rollout]]:
        """`group_size` rollouts per prompt, in order. Raises UserError where one has no room."""
        requests = [
            Request(begun=begun(prompt, 0, law), times=group_size, seed=self._seed(step, prompt.sample.id), law=law)
            for prompt in prompts
        ]
        groups = zip(prompts, self._drawn(requests), strict=True)
        return [[self._longer(begun(prompt, i, law), one, law) for i, one in enumerate(of)] for prompt, of in groups]

    def extend(self, rollouts: Sequence[Rollout], law: SamplingLaw, *, step: int) -> list[Rollout]:
        """Go on behind each rollout's last token; what is drawn becomes one more segment of POLICY.

        Raises:
            UserError: one has no room for as many tokens as the law allows.
        """
        requests = [
            Request(
                begun=rollout,
                times=1,
                seed=self._seed(step, rollout.prompt.sample.id, rollout.index, len(rollout.segments)),
                law=law,
            )
            for rollout in rollouts
        ]
        answers = self._drawn(requests)
        return [self._longer(rollout, one, law) for rollout, (one,) in zip(rollouts, answers, strict=True)]

    def _drawn(self, requests: Sequence[Request]) -> list[list[Drawn]]:
        for request in requests:
            length = len(request.begun.prompt.ids) + request.begun.num_tokens
            if length + request.law.max_new_tokens > self._longest:
                raise UserError(
                    f"sample {request.begun.prompt.sample.id}: {length} tokens, and {request.law.max_new_tokens} more, "
                    f"are beyond the {self._longest} that the rollout engine takes"
                )
        return self._publisher.engine.draw(requests)

    def _seed(self, *of: str | int) -> int:
        return derive(*self._salt, *of) % _SEEDS

    def _longer(self, rollout: Rollout, one: Drawn, law: SamplingLaw) -> Rollout:
        return longer(rollout, one, law, version=self._version, processor=self._processor)
