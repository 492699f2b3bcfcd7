"""Co-Reward: the majority answer to a reworded question becomes the target of responses to the original question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mmrl.algo.group_rewards import TYPES_WITHOUT_EQUALITY, find_majority
from mmrl.config import Config
from mmrl.config.schema import CustomStepConfig, RlStage, SampleStage, matches_conditions
from mmrl.rollout.steps.base import RolloutContext, add_metrics
from mmrl.types import Failure, FailureKind, Prompt, RolloutBatch, Sample, UserError

_COLUMN: Final = "reworded"


@dataclass(frozen=True, slots=True)
class MajorityTargets:
    """Replaces the target of each group by the majority answer to its reworded question. The old target is never read.

    Source: Co-Reward (arXiv:2508.00410). Departures: responses to the rewording are not trained on, unless a second row
    has the two wordings swapped; a group without a majority is left out, where the paper's code takes the first answer.
    """

    context: RolloutContext
    column: str = field(default=_COLUMN, kw_only=True)  # of `meta`, with the reworded question

    def __call__(self, batch: RolloutBatch, *, step: int) -> RolloutBatch:
        """Return the batch with these targets. Raises UserError for a sample without rewording or of an unfit type."""
        prompts = [self._reword(group[0].prompt) for group in batch.groups]
        context, groups, missing = self.context, [], 0
        reworded = context.sampler.generate(prompts, context.group_size, context.sampling_params, step=step)
        for group, others in zip(batch.groups, reworded, strict=True):
            majority = find_majority(others)
            if majority is None:
                missing += 1
                failure = Failure(FailureKind.UNSCORABLE, "the other wording has no majority answer")
                groups.append(tuple(replace(rollout, failure=failure) for rollout in group))
                continue
            sample = group[0].prompt.sample
            sample = replace(sample, target=replace(sample.target, value=majority.answer.value))
            prompt = replace(group[0].prompt, sample=sample)
            groups.append(tuple(replace(rollout, prompt=prompt) for rollout in group))
        return add_metrics(replace(batch, groups=tuple(groups)), {"reworded/no_majority": float(missing)})

    def _reword(self, prompt: Prompt) -> Prompt:
        sample = prompt.sample
        question = read_rewording(sample, self.column)
        # Its own id, because random numbers derive from it.
        reworded = replace(sample, id=f"{sample.id}~reworded", parts=(*sample.media, question))
        return self.context.processor.build(reworded)


def read_rewording(sample: Sample, column: str, *, key: str = "") -> str:
    """Return the reworded question of a sample.

    Raises:
        UserError: it has none, or its answers are of a type that has no majority; the error is about the setting `key`.
    """
    question, kind = sample.meta.get(column), sample.target.answer_type
    if not isinstance(question, str):
        there_is = ", ".join(map(str, sample.meta)) or "nothing"
        problem = f"has no text in the column {column!r} of its meta; there is {there_is}"
        raise UserError(f"rewording: sample {sample.id!r} {problem}", key=key)
    if kind in TYPES_WITHOUT_EQUALITY:
        raise UserError(f"rewording: sample {sample.id!r}: no two answers of type {kind} are exactly equal", key=key)
    return question


def check_rewordings(config: Config, samples: Sequence[Sample], source_indices: Mapping[str, int]) -> None:
    """Check that each training sample that a `MajorityTargets` step will get has another wording.

    `source_indices` has the index of each sample's source in `data.train`, by id.

    Raises:
        UserError: as `read_rewording`, about the sample's source.
    """
    for stage in config.stages:
        # The samples of a stage with `samples_of` do not exist yet.
        if not isinstance(stage, RlStage | SampleStage) or stage.samples_of is not None:
            continue
        for step in stage.rollout_steps:
            if not isinstance(step, CustomStepConfig) or step.fn != f"{__name__}:MajorityTargets":
                continue
            for sample in samples:
                if matches_conditions(stage.when, sample):
                    key = f"data.train.{source_indices[sample.id]}"
                    read_rewording(sample, step.args.get("column", _COLUMN), key=key)
