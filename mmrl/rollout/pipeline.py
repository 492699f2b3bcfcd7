"""The rollout pipeline: generate first responses, then apply the steps of `rollout_steps` in their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mmrl.answer.tool_calls import CALL_END
from mmrl.config.schema import (
    BlindProbeConfig,
    CustomStepConfig,
    GenerateConfig,
    RethinkConfig,
    RolloutStepConfigs,
    ToolsConfig,
)
from mmrl.config.schema.rollout_steps import step_name
from mmrl.policy.processor import QwenProcessor
from mmrl.rollout.steps.base import RolloutContext, RolloutStep
from mmrl.rollout.steps.blind_probe import BlindProbe
from mmrl.rollout.steps.custom import CustomStep, load_step_factory
from mmrl.rollout.steps.generate import CompleteRollouts, ResponseGenerator
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.rollout.steps.rethink import CorrectnessCheck, ForcedRethink, tokenize_trigger
from mmrl.rollout.steps.tools import ToolStep
from mmrl.rollout.tools.executor import ToolLoader
from mmrl.types import Prompt, Rollout, RolloutBatch, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPipeline:
    """A rollout pipeline that calls a generator once, then each step on what the one before returned."""

    generator: ResponseGenerator
    steps: tuple[RolloutStep, ...] = ()

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """Return a group of rollouts for each prompt, in order, after the groups of `unfinished` that are complete."""
        batch = self.generator.generate(prompts, step=step, unfinished=unfinished)
        for rollout_step in self.steps:
            batch = rollout_step(batch, step=step)
        return batch


def build_pipeline(step_configs: RolloutStepConfigs, context: RolloutContext) -> StepPipeline:
    """Build the pipeline that `step_configs` describe.

    Raises:
        UserError: a trigger contains tokens that no response may contain, or a step of the user's cannot be loaded.
    """
    if any(isinstance(config, ToolsConfig) for config in step_configs):
        # A tool call ends a response until the tool has replied, so the closing tag is one more stop string.
        stop = (*context.sampling_params.stop, CALL_END)
        context = replace(context, sampling_params=replace(context.sampling_params, stop=stop))
    steps: list[RolloutStep] = []
    for config in step_configs:
        match config:
            case RethinkConfig():
                steps.append(_build_rethink(config, context))
            case ToolsConfig():
                steps.append(_build_tools(config, context))
            case CustomStepConfig():
                steps.append(_build_custom(config, context))
    # Probes come last and take all other steps along, wherever they stand in the config: what a rethink or a tool adds
    # must not look like what seeing the image adds.
    probes = [_build_probe(config, steps, context) for config in step_configs if isinstance(config, BlindProbeConfig)]
    return StepPipeline(generator=_build_generator(step_configs, context), steps=(*steps, *probes))


def check_steps(
    step_configs: RolloutStepConfigs,
    processor: QwenProcessor,
    banned_token_ids: Collection[int],
    reward_terms: Collection[str],
    load_tool: ToolLoader,
    *,
    base_dir: Path = Path(),
) -> None:
    """Check, before any training, that the steps can run.

    Args:
        step_configs: the steps of one stage, or of the evaluation.
        processor: tokenizes triggers.
        banned_token_ids: tokens that no response may contain.
        reward_terms: names of the reward terms that `correct` may name.
        load_tool: loads a tool.
        base_dir: folder that files of the user's own steps start from.

    Raises:
        UserError: a trigger contains tokens that no response may contain, `correct` names no reward term, or a function
            of the user's cannot be loaded.
    """
    for config in step_configs:
        match config:
            case ToolsConfig():
                for tool in config.tools:
                    load_tool(tool)
            case RethinkConfig():
                for trigger in config.triggers:
                    tokenize_trigger(trigger.text, processor, tuple(banned_token_ids))
                for name in config.correct:
                    if name not in reward_terms:
                        known = ", ".join(reward_terms)
                        raise UserError(f"step {config.name}: correct: there is no term {name!r}, but {known}")
            case CustomStepConfig():
                load_step_factory(config, base_dir)


def _build_generator(step_configs: RolloutStepConfigs, context: RolloutContext) -> ResponseGenerator:
    config = next(config for config in step_configs if isinstance(config, GenerateConfig))
    if config.partial_rollout_tokens is None:
        return CompleteRollouts(
            sampler=context.sampler, group_size=context.group_size, sampling_params=context.sampling_params
        )
    return PartialRollouts(
        sampler=context.sampler,
        group_size=context.group_size,
        sampling_params=context.sampling_params,
        chunk_tokens=config.partial_rollout_tokens,
        groups_per_step=context.groups_per_step,
        ranks=context.ranks,
        token_budget=config.max_tokens_per_step,
    )


def _build_tools(config: ToolsConfig, context: RolloutContext) -> ToolStep:
    executor = context.tool_runner.make_executor(config, context.processor)
    return ToolStep(executor=executor, sampler=context.sampler, sampling_params=context.sampling_params)


def _build_rethink(config: RethinkConfig, context: RolloutContext) -> ForcedRethink:
    first = context.sampling_params
    temperature = first.temperature if config.temperature is None else config.temperature
    longest = first.max_new_tokens - config.min_free_tokens if config.min_free_tokens else None
    triggers = []
    for trigger in config.triggers:
        triggers.append(tokenize_trigger(trigger.text, context.processor, first.banned_token_ids))
    return ForcedRethink(
        options=config,
        sampler=context.sampler,
        is_correct=CorrectnessCheck(scorer=context.scorer, correct_terms=config.correct, threshold=config.threshold),
        sampling_params=replace(first, temperature=temperature, max_new_tokens=config.max_new_tokens),
        max_first_response_tokens=longest,
        trigger_ids=tuple(triggers),
        processor=context.processor,
        seed=context.seed,
    )


def _build_custom(config: CustomStepConfig, context: RolloutContext) -> CustomStep:
    make_step = load_step_factory(config, context.base_dir)
    return CustomStep(name=step_name(config), function=make_step(context))


def _build_probe(config: BlindProbeConfig, other_steps: Sequence[RolloutStep], context: RolloutContext) -> BlindProbe:
    return BlindProbe(
        options=config,
        prompt_builder=context.processor,
        sampler=context.sampler,
        sampling_params=context.sampling_params,
        swap_samples=context.swap_samples,
        steps=tuple(other_steps),
    )
