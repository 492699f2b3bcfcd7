"""The part of a sample that supervised training imitates, and a check that every sample has it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from mmrl.answer import ResponseFormat, check_opening
from mmrl.config import Config
from mmrl.config.schema import SftStage, matches_conditions
from mmrl.types import Sample, Target, UserError

TargetField = Literal["label", "target", "response", "expert"]


def demonstration_text(sample: Sample, target_field: TargetField) -> Target | str:
    """Return what supervised training imitates: target, label, or a full response; raises UserError without one.

    For `expert` the text is empty: the expert's actions are known only after the environment has been played.
    """
    if target_field == "expert":
        return ""
    demonstration: Target | str | None = getattr(sample, target_field)
    if demonstration is None:
        raise UserError(
            f"sample {sample.id} has no {target_field} to imitate; set `target_field: target`, or give the data a "
            f"{target_field}"
        )
    return demonstration


def check_demonstrations(
    config: Config, samples: Iterable[Sample], response_format: ResponseFormat, response_opening: str = ""
) -> None:
    """Check that every sample of an sft stage has a demonstration that can be written in the response format.

    `response_opening` is what the prompt already holds of a response: an opened thought, or nothing.

    Raises:
        UserError: a sample lacks its `target_field`, the format cannot express it, it has no thought and the prompt
            opens one, or it has no answer and the stage trains on nothing else.
    """
    # The samples of a stage with `samples_of` do not exist yet.
    stages = [stage for stage in config.stages if isinstance(stage, SftStage) and stage.samples_of is None]
    for stage in stages:
        if response_opening and stage.drop_thinking_prob:
            raise UserError(
                f"stage {stage.name!r}: drop_thinking_prob leaves out thoughts, and the chat template opens one in "
                "each prompt; set it to 0, or model.chat: {enable_thinking: false}"
            )
    for sample in samples:
        own_stages = [stage for stage in stages if matches_conditions(stage.when, sample)]
        for target_field, loss_on in sorted({(stage.target_field, stage.loss_on) for stage in own_stages}):
            if target_field == "expert":
                continue
            demonstration = demonstration_text(sample, target_field)
            # A full response is imitated as it is; only a target or label has to be put into the format.
            if isinstance(demonstration, Target):
                try:
                    demonstration = response_format.render(demonstration, sample.thinking)
                except UserError as error:
                    raise UserError(f"sample {sample.id}: {error}") from error
            check_opening(demonstration, response_opening, sample.id)
            if loss_on == "answer" and response_format.find_answer_opening(demonstration) is None:
                raise UserError(
                    f"sample {sample.id}: its {target_field} {demonstration[:60]!r} has no answer, and the stage has "
                    "`loss_on: answer`; set `loss_on: response`, or leave such samples out with `when`"
                )
