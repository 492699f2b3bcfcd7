"""The text that a demonstration of a sample consists of."""

from __future__ import annotations

from typing import Literal

from mmrl.types import Sample, Target, UserError

Imitated = Literal["label", "target", "response"]


def lesson(sample: Sample, imitate: Imitated) -> Target | str:
    """What a demonstration of this sample answers, or the whole of it.

    Raises:
        UserError: the sample has no label or no response.
    """
    if imitate == "target":
        return sample.target
    lesson = sample.label if imitate == "label" else sample.response
    if lesson is None:
        raise UserError(
            f"sample {sample.id} has no {imitate} to imitate; set `imitate: target` or give the data a {imitate}"
        )
    return lesson
