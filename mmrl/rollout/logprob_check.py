"""Checks that the rollout engine and the learner agree on log-probabilities.

The engine answers a few prompts, and the learner computes the log-probabilities of the same tokens. If they differ by
more than rounding, the two used different images, positions, weights or sampling parameters, and the importance ratios
of training would be wrong. Suffixes of tensor names as in `mmrl.policy.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import torch

from mmrl.config.schema import LogprobCheckConfig
from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.policy.batch import collate
from mmrl.policy.expert_routing import check_routes
from mmrl.policy.policy import PolicyModel
from mmrl.policy.processor import PromptProcessor
from mmrl.protocols import Sampler
from mmrl.types import Experience, Prompt, Rollout, Sample, SamplingParams, UserError

_METRIC = "logprob_check/diff_mean"
_DEFAULT_EVERY = 50  # docs/vllm.md has the cost


@dataclass(frozen=True, slots=True)
class LogprobCheck:
    """Measures the mean absolute difference of a token's log-probability between a sampler and the policy, in nats."""

    sampler: Sampler
    policy: PolicyModel
    processor: PromptProcessor
    _: KW_ONLY
    samples: Sequence[Sample]  # the first of each modality are used, `options.prompts_per_modality` of them
    sampling_params: SamplingParams
    options: LogprobCheckConfig
    warn: Callable[[str], None]
    ranks: Ranks = field(default_factory=SingleProcess)

    def measure(self, version: int) -> dict[str, float]:
        """Return the difference over all tokens, and by modality, as metrics. Collective.

        The number of the policy version seeds the sampling.

        Raises:
            UserError: the difference of a modality is above `stop_above`, or the policy lacks an expert of a route.
        """
        # The first samples of each modality, grouped by modality.
        samples_of: dict[str, list[Sample]] = {}
        for sample in self.samples:
            samples_of.setdefault(sample.modality, []).append(sample)
        prompts: list[Prompt] = []
        for of_modality in samples_of.values():
            prompts += map(self.processor.build, of_modality[: self.options.prompts_per_modality])
        max_new_tokens = min(self.sampling_params.max_new_tokens, self.options.max_new_tokens)
        sampling_params = replace(self.sampling_params, max_new_tokens=max_new_tokens)
        diffs_of: dict[str, list[torch.Tensor]] = {}
        for (rollout,) in self.sampler.generate(prompts, 1, sampling_params, step=version):
            diffs_of.setdefault(rollout.prompt.sample.modality, []).append(self._logprob_diffs(rollout))
        metrics: dict[str, float] = {}
        all_diffs: list[torch.Tensor] = []
        for modality, diffs in diffs_of.items():
            diff = self._worst_mean(diffs)
            finding = f"on {modality} prompts, rollout engine and learner differ by {diff:.2g} nats per token"
            if not diff <= self.options.stop_above:  # "not below", so that NaN ends the run too
                raise UserError(
                    f"{finding} (rollout.logprob_check.stop_above is {self.options.stop_above:g}): what is learned is "
                    "not what is sampled. Does the engine run the model that is trained, in a version that fits "
                    "transformers', and does it read the token ids and patches that mmrl gives it?"
                )
            if diff > self.options.warn_above:
                self.warn(f"{finding} (rollout.logprob_check.warn_above is {self.options.warn_above:g})")
            metrics[f"{_METRIC}/{modality}"] = diff
            all_diffs += diffs
        # The mean over tokens, not over modalities: a modality with few tokens must not weigh as much as one with many.
        return {_METRIC: self._worst_mean(all_diffs), **metrics}

    def measure_if_due(self, version: int) -> dict[str, float]:
        """Return the result of `measure` if the version is a multiple of `options.every`, else nothing."""
        every = _DEFAULT_EVERY if self.options.every is None else self.options.every
        return self.measure(version) if every and version % every == 0 else {}

    def _worst_mean(self, diffs: Sequence[torch.Tensor]) -> float:
        """Return the largest of the ranks' means over tokens, since each rank may have its own engine."""
        means = self.ranks.all_gather(float(torch.cat(list(diffs)).mean()))
        return float(torch.tensor(means).amax())  # unlike `max`, it keeps a NaN

    @torch.no_grad()
    def _logprob_diffs(self, rollout: Rollout) -> torch.Tensor:
        """Return |policy - sampler| for each token of a response: float32 [tokens], nats, on the CPU."""
        experience = Experience(rollout=rollout, advantage=0.0)
        eos_id: int = self.processor.tokenizer.eos_token_id
        # Without prefix sharing: the check must not depend on the learner's optimization either.
        batch = collate([[experience]], self.processor, pad_id=eos_id, shared_prefix=False).to(self.policy.model.device)
        recorded = torch.tensor([logprob for segment in rollout.segments for logprob in segment.logprobs])
        # As in training, the learner uses the engine's routes if they are recorded: its routers may round differently.
        if batch.engine_routes_XTK is not None:
            check_routes(self.policy.routers, batch.engine_routes_XTK)
        computed = self.policy.compute_logprobs(batch, batch.engine_routes_XTK)
        return (computed.logprobs_N.cpu() - recorded).abs()
