"""From the steps of a config to a rollout program."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from mmrl.answer.tool_calls import CALL_END
from mmrl.config.schema import BlindProbeConfig, RethinkConfig, RolloutStepConfigs, ToolsConfig
from mmrl.config.schema import GenerateConfig as GenerateOptions
from mmrl.distributed.ranks import Ranks, SingleProcess
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import RewardScorer, Sampler
from mmrl.rollout.pipeline import CompleteRollouts, PipelineStep, StepPipeline
from mmrl.rollout.steps.blind_probe import BlindProbe
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.rollout.steps.rethink import CorrectnessCheck, ForcedRethink, tokenize_trigger
from mmrl.rollout.steps.tools import ToolStep
from mmrl.rollout.tools.replies import ToolLoader, ToolRunner
from mmrl.types import Sample, SamplingParams, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What the steps of a program work with; `law` is that of first responses, `groups` how many a step wants. Probes
    show the media of `others`.
    """

    sampler: Sampler
    scorer: RewardScorer
    processor: QwenProcessor
    sampling_params: SamplingParams
    group_size: int
    groups_per_step: int
    seed: int
    tool_runner: ToolRunner
    swap_samples: Sequence[Sample] = ()
    ranks: Ranks = field(default_factory=SingleProcess)


def build_pipeline(steps: RolloutStepConfigs, context: RolloutContext) -> StepPipeline:
    """The program that `steps` describe.

    Raises:
        UserError: a trigger cannot be said.
    """
    if any(isinstance(step, ToolsConfig) for step in steps):
        context = replace(
            context, sampling_params=replace(context.sampling_params, stop=(*context.sampling_params.stop, CALL_END))
        )
    further = tuple(_build_step(step, context) for step in steps if isinstance(step, RethinkConfig | ToolsConfig))
    probes = (_build_probe(step, further, context) for step in steps if isinstance(step, BlindProbeConfig))
    return StepPipeline(generator=_build_generator(steps, context), steps=(*further, *probes))


def check_steps(
    steps: RolloutStepConfigs,
    processor: QwenProcessor,
    banned: Collection[int],
    reward_terms: Collection[str],
    load_tool: ToolLoader,
) -> None:
    """Refuse, before anything is trained, a program that cannot run; `terms` judge in training and in evaluation.

    Raises:
        UserError: a trigger cannot be said, `correct` names no term, or a tool is none.
    """
    for step in steps:
        if isinstance(step, ToolsConfig):
            for tool in step.tools:
                load_tool(tool)
        if isinstance(step, RethinkConfig):
            for trigger in step.triggers:
                tokenize_trigger(trigger.text, processor, tuple(banned))
            if unknown := [name for name in step.correct if name not in reward_terms]:
                raise UserError(
                    f"step {step.name}: correct: there is no term {unknown[0]!r}, but {', '.join(reward_terms)}"
                )


def _build_generator(steps: RolloutStepConfigs, context: RolloutContext) -> CompleteRollouts | PartialRollouts:
    options = next(step for step in steps if isinstance(step, GenerateOptions))
    if options.partial_rollout_tokens is None:
        return CompleteRollouts(
            sampler=context.sampler, group_size=context.group_size, sampling_params=context.sampling_params
        )
    return PartialRollouts(
        sampler=context.sampler,
        group_size=context.group_size,
        sampling_params=context.sampling_params,
        chunk_tokens=options.partial_rollout_tokens,
        groups_per_step=context.groups_per_step,
        ranks=context.ranks,
        token_budget=options.max_tokens_per_step,
    )


def _build_step(options: RethinkConfig | ToolsConfig, context: RolloutContext) -> PipelineStep:
    match options:
        case ToolsConfig():
            replies = context.tool_runner.make_executor(options, context.processor)
            return ToolStep(executor=replies, sampler=context.sampler, sampling_params=context.sampling_params)
        case RethinkConfig():
            return _build_rethink(options, context)


def _build_probe(
    options: BlindProbeConfig, following_steps: Sequence[PipelineStep], context: RolloutContext
) -> BlindProbe:
    return BlindProbe(
        options=options,
        prompt_builder=context.processor,
        sampler=context.sampler,
        sampling_params=context.sampling_params,
        swap_samples=context.swap_samples,
        steps=following_steps,
    )


def _build_rethink(options: RethinkConfig, context: RolloutContext) -> ForcedRethink:
    temperature = context.sampling_params.temperature if options.temperature is None else options.temperature
    return ForcedRethink(
        options=options,
        sampler=context.sampler,
        is_correct=CorrectnessCheck(scorer=context.scorer, correct_terms=options.correct, threshold=options.threshold),
        sampling_params=replace(
            context.sampling_params, temperature=temperature, max_new_tokens=options.max_new_tokens
        ),
        max_first_response_tokens=context.sampling_params.max_new_tokens - options.min_free_tokens
        if options.min_free_tokens
        else None,
        trigger_ids=tuple(
            tokenize_trigger(t.text, context.processor, context.sampling_params.banned_token_ids)
            for t in options.triggers
        ),
        processor=context.processor,
        seed=context.seed,
    )
