"""From the steps of a config to a rollout program."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from mmrl.answer.tool_calls import CALL_END
from mmrl.config.schema import ContinueWith, Probe, Steps, UseTools
from mmrl.config.schema import Generate as GenerateOptions
from mmrl.distributed.ranks import Alone, Ranks
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Judge, Sampler
from mmrl.rollout.pipeline import Generate, Program, Step
from mmrl.rollout.steps.blind_probe import Blindfold
from mmrl.rollout.steps.partial import InChunks
from mmrl.rollout.steps.rethink import Rethink, Verdict, trigger_ids
from mmrl.rollout.steps.tools import Toolbox
from mmrl.rollout.tools.replies import FindTool, Workshop
from mmrl.types import Sample, SamplingLaw, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """What the steps of a program work with; `law` is that of first responses, `groups` how many a step wants. Probes
    show the media of `others`.
    """

    sampler: Sampler
    judge: Judge
    processor: QwenProcessor
    law: SamplingLaw
    group_size: int
    groups: int
    seed: int
    workshop: Workshop
    others: Sequence[Sample] = ()
    ranks: Ranks = field(default_factory=Alone)


def compose(steps: Steps, kit: Kit) -> Program:
    """The program that `steps` describe.

    Raises:
        UserError: a trigger cannot be said.
    """
    if any(isinstance(step, UseTools) for step in steps):
        kit = replace(kit, law=replace(kit.law, stop=(*kit.law.stop, CALL_END)))
    further = tuple(_further(step, kit) for step in steps if isinstance(step, ContinueWith | UseTools))
    probes = (_probe(step, further, kit) for step in steps if isinstance(step, Probe))
    return Program(generate=_first(steps, kit), steps=(*further, *probes))


def check(
    steps: Steps, processor: QwenProcessor, banned: Collection[int], terms: Collection[str], find_tool: FindTool
) -> None:
    """Refuse, before anything is trained, a program that cannot run; `terms` judge in training and in evaluation.

    Raises:
        UserError: a trigger cannot be said, `correct` names no term, or a tool is none.
    """
    for step in steps:
        if isinstance(step, UseTools):
            for tool in step.tools:
                find_tool(tool)
        if isinstance(step, ContinueWith):
            for trigger in step.triggers:
                trigger_ids(trigger.text, processor, tuple(banned))
            if unknown := [name for name in step.correct if name not in terms]:
                raise UserError(f"step {step.name}: correct: there is no term {unknown[0]!r}, but {', '.join(terms)}")


def _first(steps: Steps, kit: Kit) -> Generate | InChunks:
    options = next(step for step in steps if isinstance(step, GenerateOptions))
    if options.chunk is None:
        return Generate(sampler=kit.sampler, group_size=kit.group_size, law=kit.law)
    return InChunks(
        sampler=kit.sampler,
        group_size=kit.group_size,
        law=kit.law,
        chunk=options.chunk,
        wanted=kit.groups,
        ranks=kit.ranks,
        token_budget=options.token_budget,
    )


def _further(options: ContinueWith | UseTools, kit: Kit) -> Step:
    match options:
        case UseTools():
            replies = kit.workshop.replies(options, kit.processor)
            return Toolbox(replies=replies, sampler=kit.sampler, law=kit.law)
        case ContinueWith():
            return _rethink(options, kit)


def _probe(options: Probe, further: Sequence[Step], kit: Kit) -> Blindfold:
    return Blindfold(
        options=options,
        asker=kit.processor,
        sampler=kit.sampler,
        law=kit.law,
        others=kit.others,
        steps=further,
    )


def _rethink(options: ContinueWith, kit: Kit) -> Rethink:
    temperature = kit.law.temperature if options.temperature is None else options.temperature
    return Rethink(
        options=options,
        sampler=kit.sampler,
        is_right=Verdict(judge=kit.judge, correct=options.correct, threshold=options.threshold),
        law=replace(kit.law, temperature=temperature, max_new_tokens=options.max_new_tokens),
        longest_draft=kit.law.max_new_tokens - options.room if options.room else None,
        triggers=tuple(trigger_ids(t.text, kit.processor, kit.law.banned) for t in options.triggers),
        processor=kit.processor,
        seed=kit.seed,
    )
