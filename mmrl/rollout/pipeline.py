"""The rollout pipeline: generate first responses, then apply the steps of `rollout_steps` in order, and probes last.

A prompt's rollouts form a group. A rollout consists of segments: runs of tokens that one author wrote (`Author`: the
policy, a demonstration, forced text, or the environment). The author decides whether and how they are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrl.answer.tool_calls import CALL_END
from mmrl.config.schema import (
    BlindProbeConfig,
    CustomStepConfig,
    EnvironmentConfig,
    GenerateConfig,
    GreedyConfig,
    RethinkConfig,
    RolloutStepConfigs,
    ToolsConfig,
)
from mmrl.config.schema.rollout_steps import RolloutStepConfig, step_name
from mmrl.rollout.steps.base import RolloutContext, RolloutStep
from mmrl.rollout.steps.blind_probe import BlindProbe
from mmrl.rollout.steps.custom import CustomStep
from mmrl.rollout.steps.environment import EnvironmentStep, make_environment_step
from mmrl.rollout.steps.greedy import GreedyResponses
from mmrl.rollout.steps.partial import PartialRollouts
from mmrl.rollout.steps.rethink import ForcedRethink, tokenize_trigger
from mmrl.rollout.steps.rewording import MajorityTargets
from mmrl.rollout.steps.tools import ToolStep
from mmrl.types import Prompt, Rollout, RolloutBatch, UserError
from mmrl.utils.plugin_args import check_methods


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPipeline:
    """Generates first responses, then calls each step on the result of the step before."""

    context: RolloutContext
    steps: tuple[RolloutStep, ...] = ()
    # Generates first responses in chunks and leaves some of them unfinished; None to generate until all have ended.
    partial_rollouts: PartialRollouts | None = None

    def run(
        self, prompts: Sequence[Prompt], *, step: int, unfinished: Sequence[tuple[Rollout, ...]] = ()
    ) -> RolloutBatch:
        """Return the complete groups of rollouts: first of `unfinished`, then of `prompts`, in order."""
        if self.partial_rollouts is None:
            context = self.context
            groups = context.sampler.generate(prompts, context.group_size, context.sampling_params, step=step)
            batch = RolloutBatch(groups=tuple(map(tuple, groups)))
        else:
            batch = self.partial_rollouts.generate(prompts, step=step, unfinished=unfinished)
        for rollout_step in self.steps:
            batch = rollout_step(batch, step=step)
        return batch


def build_pipeline(step_configs: RolloutStepConfigs, context: RolloutContext) -> StepPipeline:
    """Build the pipeline that `step_configs` describe.

    Raises:
        UserError: a trigger contains tokens that no response may contain, the user's step cannot be made, or steps
            cannot be combined with `MajorityTargets`.
    """
    if any(map(_takes_calls, step_configs)):
        # A tool call ends a response until the tool has replied, so the closing tag is one more stop string.
        stop = (*context.sampling_params.stop, CALL_END)
        context = replace(context, sampling_params=replace(context.sampling_params, stop=stop))
    partial_rollouts = None
    steps: list[RolloutStep] = []
    probe_configs: list[BlindProbeConfig | GreedyConfig] = []
    for config in step_configs:
        match config:
            case GenerateConfig():
                if config.partial_rollout_tokens is not None:
                    chunk_tokens, budget = config.partial_rollout_tokens, config.max_tokens_per_step
                    partial_rollouts = PartialRollouts(context=context, chunk_tokens=chunk_tokens, token_budget=budget)
            case BlindProbeConfig() | GreedyConfig():
                probe_configs.append(config)
            case _:
                rollout_step = _make_rollout_step(config, context)
                if isinstance(rollout_step, ForcedRethink):
                    repeat = sum(isinstance(earlier, ForcedRethink) for earlier in steps)
                    rollout_step = replace(rollout_step, repeat=repeat)
                steps.append(rollout_step)
    _check_targets(steps)
    # Probes come last, wherever the config has them, and go through all other steps: otherwise the gain from a rethink
    # or a tool would look like the gain from seeing the image.
    probes = [_make_probe(config, context, steps) for config in probe_configs]
    return StepPipeline(context=context, steps=(*steps, *probes), partial_rollouts=partial_rollouts)


def _takes_calls(config: RolloutStepConfig) -> bool:
    return isinstance(config, ToolsConfig) or (isinstance(config, EnvironmentConfig) and config.action == "call")


def _sets_targets(rollout_step: RolloutStep) -> bool:
    return isinstance(rollout_step, CustomStep) and isinstance(rollout_step.function, MajorityTargets)


def _check_targets(steps: Sequence[RolloutStep]) -> None:
    """Raise a UserError if a step cannot be combined with `MajorityTargets`."""
    for index, rollout_step in enumerate(steps):
        acts = any(isinstance(other, ToolStep | EnvironmentStep) for other in steps)
        judged = any(isinstance(earlier, ForcedRethink) for earlier in steps[:index])  # by a target that it replaces
        if _sets_targets(rollout_step) and (acts or judged):
            raise UserError(
                "rollout_steps: majority_targets answers reworded questions in one turn, and replaces the targets that "
                "a rethink step judges by; take out steps of kind tools or environment, and put it before rethink"
            )


def _make_rollout_step(
    config: RethinkConfig | ToolsConfig | EnvironmentConfig | CustomStepConfig, context: RolloutContext
) -> RolloutStep:
    match config:
        case RethinkConfig():
            banned = context.sampling_params.banned_token_ids
            triggers = [tokenize_trigger(trigger.text, context.processor, banned) for trigger in config.triggers]
            return ForcedRethink(options=config, context=context, trigger_ids=tuple(triggers))
        case ToolsConfig():
            executor = context.tool_runner.make_executor(config, context.processor)
            return ToolStep(executor=executor, context=context)
        case EnvironmentConfig():
            return make_environment_step(
                config, context.tool_runner, context.processor, seed=context.seed, context=context
            )
        case CustomStepConfig():
            name = step_name(config)
            function = context.custom_steps[name](context)
            check_methods(function, RolloutStep, ("__call__",), owner=f"rollout step {config.fn!r}")
            return CustomStep(name=name, function=function)


def _make_probe(
    config: BlindProbeConfig | GreedyConfig, context: RolloutContext, steps: Sequence[RolloutStep]
) -> RolloutStep:
    """Return a probe that goes through `steps`. Its episodes get the seeds of the samples that it is made from."""
    probe_steps: list[RolloutStep] = []
    for rollout_step in steps:
        # The prompts of a probe have these targets: a majority of blind answers would be another.
        if _sets_targets(rollout_step):
            continue
        if isinstance(rollout_step, EnvironmentStep):
            probe_steps.append(replace(rollout_step, probe=step_name(config)))
        else:
            probe_steps.append(rollout_step)
    if isinstance(config, GreedyConfig):
        return GreedyResponses(context=context, steps=tuple(probe_steps))
    return BlindProbe(options=config, context=context, steps=tuple(probe_steps))
