"""How responses are written, and how they are scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mmrl.config.schema.base import Strict, Tag


class Section(Strict):
    """A part of a response before the answer, besides the thinking: an observation, say."""

    tag: Tag
    """Its name."""
    required: bool = True
    """Whether a response may leave it out."""
    after_thinking: bool = False
    """Whether it stands between thinking and answer, rather than before both."""


class AnswerGrammar(Strict):
    """How a response is written. One statement drives prompt text, parser, demonstrations and the format reward."""

    think: Literal["none", "optional", "required"] = "none"
    """Whether the response opens with <think>...</think>."""
    style: Literal["tags", "boxed", "json"] = "tags"
    """Where the answer stands: in <answer>...</answer>; in \\boxed{...}, with free words before it; or as the last
    field of one JSON object, whose other fields are the thinking and the sections."""
    answer_tag: Tag = "answer"
    """Name of the answer's tag, or of its JSON field."""
    think_tag: Tag = "think"
    """Name of the thinking's tag, or of its JSON field."""
    sections: tuple[Section, ...] = ()
    """Other parts that come before the answer, in their order."""
    more_stops: tuple[str, ...] = ()
    """Strings that end a response, besides the closing tag of the answer."""
    instruct: bool = True
    """Append a sentence to the question that states the format."""

    @model_validator(mode="after")
    def _names_differ(self) -> AnswerGrammar:
        names = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two parts of a response are named {twice[0]!r}")
        return self


class Term(Strict):
    """One reward term."""

    fn: str
    """`module:function` or `./file.py:function`."""
    name: str | None = None
    """Name in metrics; the function's own name when left out."""
    weight: float = 1.0
    """Factor in the total."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward function."""
    tasks: tuple[str, ...] = ()
    """Tasks the term applies to; empty means all."""
    train_only: bool = False
    """Leave the term out of evaluation totals (a shaping bonus, say)."""


class GroupTerm(Strict):
    """What a response earns by comparison with its siblings, in training only."""

    fn: str
    """`module:function` or `./file.py:function`, such as `mmrl.algo.group_terms:kimi_length`."""
    name: str | None = None
    """Name in metrics; the function's own name when left out."""
    weight: float = 1.0
    """Factor in the total."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Options of the function; `correct` names the reward terms that say whether a response is right."""
    tasks: tuple[str, ...] = ()
    """Tasks the term applies to; empty means all."""


class Rewards(Strict):
    """How a response is scored: the weighted sum of the terms that apply to its task."""

    terms: Annotated[tuple[Term, ...], Field(min_length=1)]
    """The terms."""
    group_terms: tuple[GroupTerm, ...] = ()
    """Added to the totals of a group before they become advantages."""
