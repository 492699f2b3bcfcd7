"""What every part of the schema is made of."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mmrl.types import Sample

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
Word = Annotated[str, Field(pattern=r"^[^\W\d][\w-]*$")]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$")]
When = dict[str, tuple[str, ...]]
Role = Literal["vision", "projector", "language"]
ROLES: tuple[Role, ...] = get_args(Role)


class Strict(BaseModel):
    """A mapping that refuses unknown keys and wrong types, and never changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def holds(when: When, sample: Sample) -> bool:
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
