"""Sampling by an engine beside the learner: requests, completions, and the weights that the engine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmrl.policy.processor import PromptProcessor
from mmrl.ports import Learner
from mmrl.rollout.responses import GeneratedTokens, append_generated, empty_rollout
from mmrl.rollout.weight_sync import WeightStream
from mmrl.types import Experience, FinishReason, Prompt, Rollout, SamplingParams, UserError
from mmrl.utils.seeds import derive_seed

# vLLM reads a seed as a signed 64-bit number and gives sibling i the seed plus i; the bound leaves room for both.
_SEED_LIMIT = 2**62

# The least bias that vLLM accepts. It leaves a banned token e^-100 of its probability, which is nothing in float32.
_BANNED_LOGIT_BIAS = -100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request to an engine: continue a response `num_samples` times."""

    rollout: Rollout
    """Prompt and response so far; the response may be empty."""
    num_samples: int
    """Independent continuations."""
    seed: int
    """Random seed of the first continuation; continuation i draws with `seed + i`."""
    sampling_params: SamplingParams
    """Distribution and limits of the new tokens."""

    def to_vllm_params(self, eos_id: int) -> dict[str, Any]:
        """Return the fields of vLLM's `SamplingParams` for this request."""
        return {
            "n": self.num_samples,
            "seed": self.seed,
            "temperature": self.sampling_params.temperature,
            "top_p": self.sampling_params.top_p,
            "top_k": self.sampling_params.top_k,
            "max_tokens": self.sampling_params.max_new_tokens,
            "logprobs": 0,  # of the sampled token alone
            "logit_bias": dict.fromkeys(self.sampling_params.banned_token_ids, _BANNED_LOGIT_BIAS),
            "stop": list(self.sampling_params.stop),
            "stop_token_ids": [eos_id],
            # A model's generation config may name more end tokens than the one that ends a response here.
            "ignore_eos": True,
            "detokenize": bool(self.sampling_params.stop),
        }


def parse_completion(
    ids: Sequence[int], logps: Sequence[float], finish_reason: str | None, stop_reason: object
) -> GeneratedTokens:
    """Read one completion of vLLM.

    Args:
        ids: token ids, end token included.
        logps: their log-probabilities, nats.
        finish_reason: vLLM's own, "length" or "stop" for a completion that can be used.
        stop_reason: the stop string that ended it, or the id of the end token.

    Raises:
        RuntimeError: the completion was aborted, or has no token.
    """
    reason: FinishReason | None = None
    match finish_reason:
        case "length":
            reason = FinishReason.LENGTH
        case "stop":
            reason = FinishReason.STOP if isinstance(stop_reason, str) else FinishReason.EOS
    if reason is None or not ids or len(ids) != len(logps):
        raise RuntimeError(
            f"the rollout engine gave {len(ids)} tokens, finished by {finish_reason!r}: that is no response"
        )
    return GeneratedTokens(tuple(ids), tuple(logps), reason)


class RolloutEngine(Protocol):
    """An engine that generates tokens with weights of its own."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        """Return the continuations of each request, in order."""

    def load_weights(self, weights: WeightStream) -> None:
        """Load weights, drop caches that the old ones filled, and verify that the new ones arrived.

        Raises:
            UserError: they are another model's.
            RuntimeError: they did not arrive.
        """

    def load_adapter(self, folder: Path) -> None:
        """Use the LoRA adapter that peft saved in `folder`, in place of the one before."""

    def sleep(self) -> None:
        """Give the memory of a shared device to the learner. The next call that needs it takes it back."""

    def close(self) -> None:
        """Shut the engine down."""


class WeightPublisher:
    """Sends the policy's weights to an engine, once for each version, however many samplers ask for it."""

    def __init__(self, engine: RolloutEngine, send_weights: Callable[[RolloutEngine], None]) -> None:
        self.engine = engine
        self._send_weights = send_weights
        self._published_version: int | None = None

    def publish(self, version: int) -> None:
        """Send the weights unless the engine has those of `version`.

        Raises:
            UserError: the engine runs another model.
            RuntimeError: the weights did not arrive.
        """
        if version != self._published_version:
            self._send_weights(self.engine)
            self._published_version = version


class SleepDuringLearning:
    """A learner before whose steps the engine on its device goes to sleep."""

    def __init__(self, learner: Learner, engine: RolloutEngine) -> None:
        self._learner, self._engine = learner, engine

    def step(self, experiences: Sequence[Experience], *, step: int) -> Mapping[str, float]:
        """Put the engine to sleep, then take the learner's step."""
        self._engine.sleep()
        return self._learner.step(experiences, step=step)


class EngineSampler:
    """Samples with an engine that several samplers share, each with random numbers of its own."""

    def __init__(
        self,
        publisher: WeightPublisher,
        processor: PromptProcessor,
        *,
        max_model_len: int,
        salt: Sequence[str | int],
        version: int = 0,
    ) -> None:
        """Create a sampler.

        Args:
            publisher: the engine, and the way to its weights.
            processor: parses responses.
            max_model_len: tokens of the longest sequence that the engine takes, prompt included.
            salt: sets this sampler's random numbers apart from those of others.
            version: policy version that the engine has.
        """
        self._publisher, self._processor, self._max_model_len = publisher, processor, max_model_len
        self._salt, self._version = tuple(salt), version

    def sync(self, version: int) -> None:
        """Send the learner's weights to the engine and stamp further segments with `version`.

        Raises:
            UserError: the engine runs another model.
            RuntimeError: the weights did not arrive.
        """
        self._publisher.publish(version)
        self._version = version

    def close(self) -> None:
        """Leave the engine running: it serves other samplers and later stages."""

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> list[list[Rollout]]:
        """Return `group_size` rollouts for each prompt, in order.

        Raises:
            UserError: a prompt and the longest response exceed the engine's limit.
        """
        requests = []
        for prompt in prompts:
            request = GenerationRequest(
                rollout=empty_rollout(prompt, 0, sampling_params),
                num_samples=group_size,
                seed=self._derive_seed(step, prompt.sample.id),
                sampling_params=sampling_params,
            )
            requests.append(request)
        groups = []
        for prompt, continuations in zip(prompts, self._generate(requests), strict=True):
            group = []
            for index, generated in enumerate(continuations):
                empty = empty_rollout(prompt, index, sampling_params)
                group.append(self._append_generated(empty, generated, sampling_params))
            groups.append(group)
        return groups

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> list[Rollout]:
        """Continue each rollout behind its last token, with one more segment by POLICY.

        Raises:
            UserError: a rollout and `max_new_tokens` more exceed the engine's limit.
        """
        requests = []
        for rollout in rollouts:
            # The number of segments is part of the seed, so that a rollout that is continued twice draws new numbers.
            seed = self._derive_seed(step, rollout.prompt.sample.id, rollout.index, len(rollout.segments))
            requests.append(
                GenerationRequest(rollout=rollout, num_samples=1, seed=seed, sampling_params=sampling_params)
            )
        extended = []
        for rollout, continuations in zip(rollouts, self._generate(requests), strict=True):
            extended.append(self._append_generated(rollout, continuations[0], sampling_params))
        return extended

    def _generate(self, requests: Sequence[GenerationRequest]) -> list[list[GeneratedTokens]]:
        for request in requests:
            length = len(request.rollout.prompt.token_ids) + request.rollout.num_tokens
            max_new_tokens = request.sampling_params.max_new_tokens
            if length + max_new_tokens > self._max_model_len:
                raise UserError(
                    f"sample {request.rollout.prompt.sample.id}: {length} tokens, and {max_new_tokens} more, are "
                    f"beyond the {self._max_model_len} that the rollout engine takes"
                )
        return self._publisher.engine.generate(requests)

    def _derive_seed(self, *parts: str | int) -> int:
        return derive_seed(*self._salt, *parts) % _SEED_LIMIT

    def _append_generated(
        self, rollout: Rollout, generated: GeneratedTokens, sampling_params: SamplingParams
    ) -> Rollout:
        return append_generated(rollout, generated, sampling_params, version=self._version, processor=self._processor)
