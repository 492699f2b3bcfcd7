"""Section `response_format`: how a response is written."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from mmrl.config.schema.base import StrictModel, TagName, check_unique


class ResponseSectionConfig(StrictModel):
    """A part of a response before its answer, besides the thinking: an observation, for example."""

    tag: TagName
    """Name of the section's tag, or of its JSON field."""
    required: bool = True
    """False if a response may leave it out."""
    after_thinking: bool = False
    """The section is between thinking and answer, rather than before both."""


class ResponseFormatConfig(StrictModel):
    """Format of a response; it drives the prompt's instruction, the parser, demonstrations and the format reward."""

    thinking: Literal["none", "optional", "required"] = "none"
    """Thinking in <think>...</think> before the answer: never, optional or required."""
    style: Literal["tags", "boxed", "json"] = "tags"
    """Place of the answer: in <answer>...</answer>; in \\boxed{...}, after free text; or as the last field of one JSON
    object, whose other fields are the thinking and the sections."""
    answer_tag: TagName = "answer"
    """Name of the answer's tag, or of its JSON field."""
    think_tag: TagName = "think"
    """Name of the thinking's tag, or of its JSON field."""
    sections: tuple[ResponseSectionConfig, ...] = ()
    """Other parts that come before the answer, in their order."""
    stop_at_answer: bool = False
    """End a response at the closing tag of its answer. Otherwise it continues until its end-of-sequence token, which
    the model learns to write, as demonstrations end with it."""
    stop_strings: tuple[str, ...] = ()
    """Other strings that end a response."""
    add_instruction: bool = True
    """Append a sentence to the question that states the format."""

    @model_validator(mode="after")
    def _check_options(self) -> ResponseFormatConfig:
        tags = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        check_unique(tags, "parts of a response", "give one another tag")
        if self.stop_at_answer and self.style != "tags":
            raise ValueError(f"stop_at_answer needs `style: tags`: style {self.style!r} has no closing tag to stop at")
        if "" in self.stop_strings:
            raise ValueError("stop_strings has an empty string, which would end every response before it begins")
        return self
