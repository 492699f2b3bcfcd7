"""Do engine and learner agree? Some prompts are answered by the one and scored by the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from mmrl.config import schema
from mmrl.policy.batch import collate
from mmrl.policy.processor import QwenProcessor
from mmrl.policy.qwen_vl import Policy
from mmrl.ports import Sampler
from mmrl.types import Experience, ImageRef, Prompt, Rollout, Sample, SamplingParams, UserError, VideoRef

_METRIC = "logprob_check/diff_mean"


def modality_of(sample: Sample) -> str:
    """`video` where there is one; else `image` where there is one; else `text`."""
    kinds = {type(ref) for ref in sample.media}
    return "video" if VideoRef in kinds else "image" if ImageRef in kinds else "text"


def take_per_modality(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The first `count` samples of each sort."""
    sorts: dict[str, list[Sample]] = {}
    for sample in samples:
        sorts.setdefault(modality_of(sample), []).append(sample)
    return [sample for of in sorts.values() for sample in of[:count]]


class LogprobCheck:
    """How far the log-probabilities that a sampler reports are from the policy's own."""

    def __init__(
        self,
        sampler: Sampler,
        policy: Policy,
        processor: QwenProcessor,
        *,
        samples: Sequence[Sample],
        sampling_params: SamplingParams,
        options: schema.LogprobCheckConfig,
        warn: Callable[[str], None],
    ) -> None:
        self._sampler, self._policy, self._processor = sampler, policy, processor
        self._samples = take_per_modality(samples, options.prompts_per_modality)
        self._sampling_params = replace(
            sampling_params, max_new_tokens=min(sampling_params.max_new_tokens, options.max_new_tokens)
        )
        self._options, self._warn = options, warn

    def measure(self, step: int) -> dict[str, float]:
        """Mean absolute gap of a token's log-probability, in nats: of all tokens, and by sort of prompts.

        Raises:
            UserError: one is beyond `parity.stop`.
        """
        prompts: list[Prompt] = [self._processor.build(sample) for sample in self._samples]
        gaps: dict[str, list[torch.Tensor]] = {}
        for (rollout,) in self._sampler.generate(prompts, 1, self._sampling_params, step=step):
            gaps.setdefault(modality_of(rollout.prompt.sample), []).append(self._logprob_diffs(rollout))
        means = {f"{_METRIC}/{sort}": float(torch.cat(found).mean()) for sort, found in gaps.items()}
        for name, gap in means.items():
            self._enforce_limits(name, gap)
        every = torch.cat([found for of in gaps.values() for found in of])
        return {_METRIC: float(every.mean()), **means}

    @torch.no_grad()
    def _logprob_diffs(self, rollout: Rollout) -> torch.Tensor:
        eos: int = self._processor.tokenizer.eos_token_id
        experience = Experience(rollout=rollout, advantage=0.0)
        batch = collate([[experience]], self._processor, pad_id=eos, shared_prefix=False).to(self._policy.device)
        recorded_N = torch.tensor([logp for segment in rollout.segments for logp in segment.logprobs])
        return (self._policy.compute_logprobs(batch).logprobs_N.cpu() - recorded_N).abs()

    def _enforce_limits(self, name: str, diff: float) -> None:
        sort = name.rpartition("/")[2]
        said = f"on {sort} prompts, rollout engine and learner differ by {diff:.2g} nats a token"
        if not diff <= self._options.stop_above:
            raise UserError(
                f"{said} (rollout.parity.stop is {self._options.stop_above:g}): what is learned is not what is sampled. Are "
                "vLLM and transformers versions that fit, and the server's model the one that is trained?"
            )
        if diff > self._options.warn_above:
            self._warn(f"{said} (rollout.parity.warn is {self._options.warn_above:g})")


class CheckedSampler:
    """A sampler that is probed as it gets the weights of every so-manieth version; `note` is told the gaps."""

    def __init__(
        self,
        sampler: Sampler,
        check: LogprobCheck,
        log_metrics: Callable[[Mapping[str, float]], None],
        *,
        check_every: int,
    ) -> None:
        self._sampler, self._check, self._log_metrics, self._check_every = sampler, check, log_metrics, check_every

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling_params: SamplingParams, *, step: int
    ) -> Sequence[Sequence[Rollout]]:
        """As the sampler does."""
        return self._sampler.generate(prompts, group_size, sampling_params, step=step)

    def extend(self, rollouts: Sequence[Rollout], sampling_params: SamplingParams, *, step: int) -> Sequence[Rollout]:
        """As the sampler does."""
        return self._sampler.extend(rollouts, sampling_params, step=step)

    def sync(self, version: int) -> None:
        """As the sampler does; then a probe, if one is due. Raises as `Parity.probe`, too."""
        self._sampler.sync(version)
        if self._check_every and version % self._check_every == 0:
            self._log_metrics(self._check.measure(version))

    def close(self) -> None:
        """As the sampler does."""
        self._sampler.close()
