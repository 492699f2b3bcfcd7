"""Rollouts by an engine beside the learner: what it is asked, what it answers, and when it gets new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmrl.algo.seeds import derive_seed
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Learner
from mmrl.rollout.responses import GeneratedTokens, append_generated, empty_rollout
from mmrl.rollout.weight_sync import WeightStream
from mmrl.types import Experience, FinishReason, Prompt, Rollout, SamplingParams, UserError

_SEED_LIMIT = 2**62  # siblings count on from it, and it must stay a signed number


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Go on `times` times behind what there is of a response; the i-th sibling draws with the seed `seed + i`."""

    rollout: Rollout
    num_samples: int
    seed: int
    sampling_params: SamplingParams

    def to_vllm_params(self, eos_id: int) -> dict[str, Any]:
        """As fields of vLLM's SamplingParams: the law's own distribution, and log-probabilities under it.

        vLLM takes no bias below -100, which leaves a banned token e^-100 of its probability: nothing in float32.
        """
        return {
            "n": self.num_samples,
            "seed": self.seed,
            "temperature": self.sampling_params.temperature,
            "top_p": self.sampling_params.top_p,
            "top_k": self.sampling_params.top_k,
            "max_tokens": self.sampling_params.max_new_tokens,
            "logprobs": 0,
            "logit_bias": dict.fromkeys(self.sampling_params.banned_token_ids, -100.0),
            "stop": list(self.sampling_params.stop),
            "stop_token_ids": [eos_id],
            "ignore_eos": True,  # a model's own config may name more tokens than the one that ends a response here
            "detokenize": bool(self.sampling_params.stop),
        }


def parse_completion(
    ids: Sequence[int], logps: Sequence[float], finish_reason: str | None, stop_reason: object
) -> GeneratedTokens:
    """A completion in vLLM's words.

    Raises:
        RuntimeError: it is no completion: aborted, or without a token.
    """
    reasons = {
        "length": FinishReason.LENGTH,
        "stop": FinishReason.STOP if isinstance(stop_reason, str) else FinishReason.EOS,
    }
    if finish_reason not in reasons or not ids or len(ids) != len(logps):
        raise RuntimeError(
            f"the rollout engine gave {len(ids)} tokens, finished by {finish_reason!r}: that is no response"
        )
    return GeneratedTokens(tuple(ids), tuple(logps), reasons[finish_reason])


class RolloutEngine(Protocol):
    """Something that draws tokens with weights of its own."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """The siblings of each request, in order."""

    def load_weights(self, weights: WeightStream) -> None:
        """Take over weights, forget what was computed with the old ones, and make sure that they arrived.

        Raises:
            UserError: they are another model's.
            RuntimeError: they did not arrive.
        """

    def load_adapter(self, folder: Path) -> None:
        """Use the adapter that peft wrote, in place of the one before."""

    def sleep(self) -> None:
        """Leave the memory of a shared device to the learner, until there is something to load or to draw."""

    def close(self) -> None:
        """End it."""


class WeightPublisher:
    """Brings the policy to an engine, once for each version, however many samplers ask."""

    def __init__(self, engine: RolloutEngine, send_weights: Callable[[RolloutEngine], None]) -> None:
        self.engine = engine
        self._send_weights = send_weights
        self._published_version: int | None = None

    def publish(self, version: int) -> None:
        """Make `version` the engine's. Raises as `Engine.load`."""
        if version != self._published_version:
            self._send_weights(self.engine)
            self._published_version = version


class SleepDuringLearning:
    """A learner while whose steps the engine leaves it the device."""

    def __init__(self, learner: Learner, engine: RolloutEngine) -> None:
        self._learner, self._engine = learner, engine

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """As the learner does."""
        self._engine.sleep()
        return self._learner.step(experiences, step=step)


class EngineSampler:
    """Samples by an engine that several samplers share; whoever made the engine closes it."""

    def __init__(
        self,
        publisher: WeightPublisher,
        processor: QwenProcessor,
        *,
        max_model_len: int,
        salt: Sequence[str | int],
        version: int = 0,
    ) -> None:
        """`longest` is how many tokens of a sequence the engine takes."""
        self._publisher, self._processor, self._max_model_len = publisher, processor, max_model_len
        self._salt, self._version = tuple(salt), version

    def sync(self, version: int) -> None:
        """Bring the learner's weights to the engine. Raises as `Engine.load`."""
        self._publisher.publish(version)
        self._version = version

    def close(self) -> None:
        """The engine stays: it outlives a stage."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> list[list[Rollout]]:
        """`group_size` rollouts per prompt, in order. Raises UserError where one has no room."""
        requests = [
            GenerationRequest(
                rollout=empty_rollout(prompt, 0, sampling_params),
                num_samples=group_size,
                seed=self._derive_seed(step, prompt.sample.id),
                sampling_params=sampling_params,
            )
            for prompt in prompts
        ]
        groups = zip(prompts, self._generate(requests), strict=True)
        return [
            [
                self._append_generated(empty_rollout(prompt, i, sampling_params), one, sampling_params)
                for i, one in enumerate(of)
            ]
            for prompt, of in groups
        ]

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> list[Rollout]:
        """Go on behind each rollout's last token; what is drawn becomes one more segment of POLICY.

        Raises:
            UserError: one has no room for as many tokens as the law allows.
        """
        requests = [
            GenerationRequest(
                rollout=rollout,
                num_samples=1,
                seed=self._derive_seed(step, rollout.prompt.sample.id, rollout.index, len(rollout.segments)),
                sampling_params=sampling_params,
            )
            for rollout in rollouts
        ]
        answers = self._generate(requests)
        return [
            self._append_generated(rollout, one, sampling_params)
            for rollout, (one,) in zip(rollouts, answers, strict=True)
        ]

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        for request in requests:
            length = len(request.rollout.prompt.token_ids) + request.rollout.num_tokens
            if length + request.sampling_params.max_new_tokens > self._max_model_len:
                raise UserError(
                    f"sample {request.rollout.prompt.sample.id}: {length} tokens, and {request.sampling_params.max_new_tokens} more, "
                    f"are beyond the {self._max_model_len} that the rollout engine takes"
                )
        return self._publisher.engine.generate(requests)

    def _derive_seed(self, *parts: str | int) -> int:
        return derive_seed(*self._salt, *parts) % _SEED_LIMIT

    def _append_generated(
        self, rollout: Rollout, generated: GeneratedTokens, sampling_params: SamplingParams
    ) -> Rollout:
        return append_generated(rollout, generated, sampling_params, version=self._version, processor=self._processor)
