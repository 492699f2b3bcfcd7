"""The text that a demonstration of a sample consists of."""

from __future__ import annotations

from typing import Literal

from mmrl.types import Sample, Target, UserError

TargetField = Literal["label", "target", "response"]


def demonstration_text(sample: Sample, target_field: TargetField) -> Target | str:
    """What a demonstration of this sample answers, or the whole of it.

    Raises:
        UserError: the sample has no label or no response.
    """
    if target_field == "target":
        return sample.target
    lesson = sample.label if target_field == "label" else sample.response
    if lesson is None:
        raise UserError(
            f"sample {sample.id} has no {target_field} to imitate; set `imitate: target` or give the data a {target_field}"
        )
    return lesson
