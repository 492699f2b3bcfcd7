"""The sampler on top of any rollout engine: seeds, policy versions, length checks, and rollouts made of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from mmrl.policy.processor import PromptProcessor
from mmrl.rollout.engines.base import GenerationRequest, RolloutEngine
from mmrl.rollout.responses import GeneratedTokens, append_generated, empty_rollout
from mmrl.types import Prompt, Rollout, SamplingParams, UserError
from mmrl.utils.seeds import derive_seed


@dataclass(slots=True)
class EngineSampler:
    """Samples with an engine that several samplers share, each with random numbers of its own."""

    engine: RolloutEngine
    processor: PromptProcessor
    _: KW_ONLY
    load_version: Callable[[int], None]  # loads the policy's weights, which have this version, into the engine
    # Root of all random seeds, such as the run's seed and the stage's name. No other sampler has the same parts.
    seed_parts: Sequence[str | int]
    version: int = 0  # policy version that segments carry
    record_routes: bool = False  # true if rollouts carry the experts that their tokens were sent to

    def sync(self, version: int) -> None:
        """Have the engine load the learner's weights, and stamp further segments with `version`."""
        self.load_version(version)
        self.version = version

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> list[list[Rollout]]:
        """Return `group_size` rollouts for each prompt, in order.

        Raises:
            UserError: a prompt and the longest response exceed the engine's limit, or the engine returned too few
                rollouts or log-probs.
        """
        requests = []
        for prompt in prompts:
            seed_parts = (*self.seed_parts, step, prompt.sample.id)
            request = GenerationRequest(
                rollout=empty_rollout(prompt, 0, sampling_params),
                seed=derive_seed(*seed_parts),
                sample_seeds=tuple(derive_seed(*seed_parts, index) for index in range(group_size)),
            )
            requests.append(request)
        self._check_lengths(requests, sampling_params)
        generated = self.engine.generate(requests, sampling_params, record_routes=self.record_routes)
        return self._make_rollouts(requests, generated, sampling_params)

    def extend(
        self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int, repeat: int = 0
    ) -> list[Rollout]:
        """Continue each rollout after its last token, with one more segment by POLICY. Raises as `generate`."""
        requests = []
        for rollout in rollouts:
            seed_parts = (*self.seed_parts, step, rollout.prompt.sample.id, rollout.index)
            # The number of segments is part of the seed, so that a rollout that is continued twice draws new numbers.
            seed = derive_seed(*seed_parts, len(rollout.segments), *([repeat] if repeat else []))
            # A rollout without tokens draws the numbers that it would draw in `generate`.
            sample_seed = seed if rollout.segments else derive_seed(*seed_parts)
            requests.append(GenerationRequest(rollout=rollout, seed=seed, sample_seeds=(sample_seed,)))
        self._check_lengths(requests, sampling_params)
        generated = self.engine.generate(requests, sampling_params, record_routes=self.record_routes)
        return [rollout for (rollout,) in self._make_rollouts(requests, generated, sampling_params)]

    def _check_lengths(self, requests: Sequence[GenerationRequest], sampling_params: SamplingParams) -> None:
        """Raise a UserError if the engine cannot hold a prompt with the longest response to it."""
        limit, max_new_tokens = self.engine.max_model_len, sampling_params.max_new_tokens
        for request in requests:
            rollout = request.rollout
            length = len(rollout.prompt.token_ids) + rollout.num_tokens
            if limit is not None and length + max_new_tokens > limit:
                raise UserError(
                    f"sample {rollout.prompt.sample.id}: {length} tokens, and {max_new_tokens} more, are beyond the "
                    f"{limit} that the rollout engine takes"
                )

    def _make_rollouts(
        self,
        requests: Sequence[GenerationRequest],
        all_generated: Sequence[Sequence[GeneratedTokens]],
        sampling_params: SamplingParams,
    ) -> list[list[Rollout]]:
        """Return the continued rollouts of each request. The first keeps its index; those of siblings follow it."""
        if list(map(len, all_generated)) != [request.num_samples for request in requests]:
            raise UserError("the rollout engine must return `num_samples` continuations for each request, in order")
        groups = []
        for request, siblings in zip(requests, all_generated, strict=True):
            group = []
            for index, generated in enumerate(siblings, start=request.rollout.index):
                num_tokens, num_logprobs = len(generated.token_ids), len(generated.logprobs)
                if num_tokens != num_logprobs:
                    raise UserError(
                        f"sample {request.rollout.prompt.sample.id}: the rollout engine returned {num_tokens} "
                        f"tokens with {num_logprobs} log-probabilities; return one for each"
                    )
                rollout = replace(request.rollout, index=index)
                # All siblings refer to the first one's routes of the prompt, because training runs the prompt once.
                shared = generated._replace(prompt_routes=siblings[0].prompt_routes)
                group.append(append_generated(rollout, shared, sampling_params, self.version, self.processor))
            groups.append(group)
        return groups
