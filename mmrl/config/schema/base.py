"""What every part of the schema is made of."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mmrl.types import Sample

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Identifier = Annotated[str, Field(pattern=r"^[^\W\d][\w-]*$")]
TagName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
SampleConditions = dict[str, tuple[str, ...]]
Component = Literal["vision", "projector", "language"]
COMPONENTS: tuple[Component, ...] = get_args(Component)


class StrictModel(BaseModel):
    """A mapping that refuses unknown keys and wrong types, and never changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def matches_conditions(when: SampleConditions, sample: Sample) -> bool:
    """Whether a sample meets every condition: allowed values of `task` or of a column of its `meta`."""
    for name, allowed in when.items():
        if name == "task":
            value = sample.task
        elif name in sample.meta:
            value = sample.meta[name]
        else:
            return False
        if str(value) not in allowed:
            return False
    return True
