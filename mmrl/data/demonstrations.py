"""The part of a sample that supervised training imitates."""

from __future__ import annotations

from typing import Literal

from mmrl.types import Sample, Target, UserError

TargetField = Literal["label", "target", "response"]


def demonstration_text(sample: Sample, target_field: TargetField) -> Target | str:
    """Return what supervised training imitates: the target, the annotator's label, or a full response.

    Raises:
        UserError: the sample has no label or no response.
    """
    match target_field:
        case "target":
            return sample.target
        case "label":
            demonstration: Target | str | None = sample.label
        case "response":
            demonstration = sample.response
    if demonstration is None:
        raise UserError(
            f"sample {sample.id} has no {target_field} to imitate; set `target_field: target`, or give the data a "
            f"{target_field}"
        )
    return demonstration
