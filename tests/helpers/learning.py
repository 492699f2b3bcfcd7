"""Steps of the learner on a tiny model: experiences, a learner, and optimizers that show what it computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config.schema import LossConfig, OptimizerConfig
from mmrl.distributed.ranks import SingleProcess
from mmrl.learner.learner import LearnerConfig, PolicyLearner
from mmrl.learner.optimizer import Optimizer
from mmrl.learner.optimizer_torch import TorchOptimizer
from mmrl.policy.policy import PolicyModel
from mmrl.protocols import Sampler
from mmrl.types import Experience, Segment
from mmrl.utils.activity import Activity

if TYPE_CHECKING:
    from conftest import TinyModel

LEARNER_OPTIONS = {field.name for field in fields(LearnerConfig)}


class KeepGradients:
    """An optimizer that leaves gradients and weights as they are."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def update(self, lr: float) -> dict[str, float]:
        return {}


class MeasureGradients(KeepGradients):
    """An optimizer that returns the norm of the gradient and leaves weights as they are."""

    def __init__(self, tiny: TinyModel) -> None:
        self.parameters = list(tiny.policy.trainable.values())

    def update(self, lr: float) -> dict[str, float]:
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, math.inf))
        for parameter in self.parameters:
            parameter.grad = None
        return {"language": norm}


class Sgd(KeepGradients):
    """Plain gradient descent, in which small differences stay small."""

    def __init__(self, tiny: TinyModel) -> None:
        self.parameters = list(tiny.policy.trainable.values())

    @torch.no_grad()
    def update(self, lr: float) -> dict[str, float]:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)
                parameter.grad = None
        return {}


def make_learner(
    tiny: TinyModel,
    *,
    optimizer: Optimizer | None = None,
    optimizer_config: OptimizerConfig | None = None,
    lr: float = 1e-3,
    reference: PolicyModel | None = None,
    loss: LossConfig | None = None,
    **options: Any,
) -> PolicyLearner:
    """Return a learner, with AdamW by default; `options` are fields of `LearnerConfig` or of `LossConfig`."""
    settings: dict[str, Any] = {"optimizer": optimizer_config or OptimizerConfig(lr=lr), "total_steps": 4}
    settings |= {"micro_batch_groups": 2, "micro_batch_tokens": 10_000, "ppo_epochs": 1}
    settings |= {"shared_prefix": True, "pad_id": tiny.eos_id}
    for name in LEARNER_OPTIONS & options.keys():
        settings[name] = options.pop(name)
    config = LearnerConfig(loss=loss or LossConfig(**options), **settings)
    optimizer = optimizer or TorchOptimizer(tiny.policy.trained_by_component, config.optimizer)
    return PolicyLearner(
        tiny.policy,
        tiny.processor,
        optimizer,
        config,
        reference,
        ranks=SingleProcess(),
        activity=Activity(),
    )


def make_experiences(
    tiny: TinyModel, advantages: Sequence[float] = (1.0, -1.0, 0.5), *, num_prompts: int = 3
) -> list[Experience]:
    """Return a group for each of the first prompts, sampled by the policy, with these advantages in each."""
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:num_prompts]]
    experiences = []
    for group in tiny.sampler().generate(prompts, len(advantages), tiny.params, step=0):
        for rollout, advantage in zip(group, advantages, strict=True):
            experiences.append(Experience(rollout=rollout, advantage=advantage))
    return experiences


def make_off_policy_experiences(
    tiny: TinyModel, *, group_size: int = 4, sampler: Sampler | None = None, demonstrations: bool = False
) -> list[Experience]:
    """Return five groups whose recorded log-probs differ a little from the policy's, so ratios are not 1.

    With `demonstrations`, one of each prompt comes after them.
    """
    prompts = [tiny.processor.build(sample) for sample in tiny.samples[:5]]
    experiences = []
    for g, group in enumerate((sampler or tiny.sampler()).generate(prompts, group_size, tiny.params, step=0)):
        for i, rollout in enumerate(group):
            (segment,) = rollout.segments
            shifts = [0.15 * ((7 * i + 3 * t + g) % 5 - 2) for t in range(len(segment.logprobs))]
            own = Experience(rollout=rollout, advantage=(i - 1.2) * (g + 1) / 3)
            experiences.append(shift_logprobs(own, shifts))
    if demonstrations:
        for prompt in prompts:
            demonstration = tiny.processor.build_demonstration(prompt, prompt.sample.target)
            experiences.append(Experience(rollout=replace(demonstration, sampling_params=tiny.params), advantage=0.0))
    return experiences


def replace_segments(experience: Experience, *segments: Segment) -> Experience:
    return replace(experience, rollout=replace(experience.rollout, segments=segments))


def copy_of_sample(experiences: Sequence[Experience], number: int) -> list[Experience]:
    """Return the experiences of a copy of their sample, as `repeat_samples` names it; its digest is the same."""
    copies = []
    for experience in experiences:
        prompt = experience.rollout.prompt
        prompt = replace(prompt, sample=replace(prompt.sample, id=f"{prompt.sample.id}#{number}"))
        copies.append(replace(experience, rollout=replace(experience.rollout, prompt=prompt)))
    return copies


def shift_logprobs(experience: Experience, by: float | Sequence[float]) -> Experience:
    """Return an experience of one segment with other recorded log-probs: higher by so many nats, for each token."""
    (segment,) = experience.rollout.segments
    shifts = by if isinstance(by, Sequence) else [by] * len(segment.logprobs)
    logprobs = tuple(logprob + shift for logprob, shift in zip(segment.logprobs, shifts, strict=True))
    return replace_segments(experience, replace(segment, logprobs=logprobs))


def cut_response(experience: Experience, num_tokens: int) -> Experience:
    """Return an experience of one segment that ends after so many tokens."""
    (segment,) = experience.rollout.segments
    shorter = replace(segment, token_ids=segment.token_ids[:num_tokens], logprobs=segment.logprobs[:num_tokens])
    return replace_segments(experience, shorter)


def perturbed_copy(policy: PolicyModel, factor: float = 1.05) -> PolicyModel:
    """Return a frozen copy of a policy, with all weights multiplied."""
    copied = policy.frozen_copy()
    with torch.no_grad():
        for parameter in copied.model.parameters():
            parameter.mul_(factor)
    return copied


def step_gradient(
    tiny: TinyModel, experiences: Sequence[Experience], *, step: int = 0, **options: Any
) -> tuple[Mapping[str, float], dict[str, torch.Tensor]]:
    """Return the metrics of a step and its gradient by weight; `options` are those of `make_learner`."""
    tiny.policy.model.zero_grad()
    learner = make_learner(tiny, optimizer=KeepGradients(), **{"micro_batch_groups": 100, **options})
    metrics = learner.step(experiences, step=step)
    return metrics, gradients_of(tiny.policy)


def gradients_of(policy: PolicyModel) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def relative_difference(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference of two gradients over the norm of the second."""
    assert ours.keys() == theirs.keys()
    square = sum(float((ours[name] - theirs[name]).square().sum()) for name in theirs)
    return (square / sum(float(gradient.square().sum()) for gradient in theirs.values())) ** 0.5
