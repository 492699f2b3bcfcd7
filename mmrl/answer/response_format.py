"""The format of a response: its instruction, its parser, and the writer of demonstrations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mmrl.answer.sections import SplitResponse, TaggedSection, find_first_tag, split_boxed, split_json, split_tags
from mmrl.answer.text import ANSWER_PLACEHOLDERS, NON_JSON_TYPES, format_target, parse_answer_value
from mmrl.answer.values import COORDINATE_TYPES
from mmrl.types import Answer, AnswerType, CoordinateSystem, Target, UserError

_MAX_EXCERPT_CHARS, _MAX_CACHED_CHARS = 40, 200
_UNITS = MappingProxyType(
    {
        CoordinateSystem.PX_ORIGINAL: "in pixels",
        CoordinateSystem.PX_RESIZED: "in pixels",
        CoordinateSystem.NORM_1: "as fractions of width and height",
        CoordinateSystem.NORM_1000: "from 0 to 1000",
    }
)
_TAG_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


class ResponseSection(NamedTuple):
    """A part of a response besides thinking and answer, such as an observation."""

    tag: str
    """Name of the tag, or of the JSON field."""
    required: bool = True
    """False if a response may leave it out."""
    after_thinking: bool = False
    """It stands between thinking and answer, rather than before both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The format of a response; the fields are those of `ResponseFormatConfig`."""

    thinking: Literal["none", "optional", "required"] = "none"
    """Thinking before the answer."""
    style: Literal["tags", "boxed", "json"] = "tags"
    """Place of the answer: in <answer> tags; in \\boxed{..}, after free text; or in the last field of a JSON object."""
    answer_tag: str = "answer"
    """Name of the answer's tag or field."""
    think_tag: str = "think"
    """Name of the thinking's tag or field."""
    sections: tuple[ResponseSection, ...] = ()
    """Other parts before the answer, in their order."""
    stop_at_answer: bool = False
    """A response ends at the closing tag of its answer."""
    stop_strings: tuple[str, ...] = ()
    """Other strings that end a response."""

    def __post_init__(self) -> None:
        """Check the names of tags.

        Raises:
            UserError: a name cannot be a tag, or stands for two parts.
        """
        names = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        for name in names:
            if not _TAG_NAME.fullmatch(name):
                raise UserError(
                    f"response_format: {name!r} cannot be a tag: use letters, digits, - and _, a letter first"
                )
            if names.count(name) > 1:
                raise UserError(f"response_format: two parts of a response are named {name!r}")

    @property
    def all_stop_strings(self) -> tuple[str, ...]:
        """Strings that complete a response without its end-of-sequence token."""
        closing_tag = (f"</{self.answer_tag}>",) if self.stop_at_answer else ()
        return (*closing_tag, *self.stop_strings)

    def instruction(self, answer_type: AnswerType, coordinate_system: CoordinateSystem | None = None) -> str:
        """Return the sentence that asks for this format; coordinates are asked for in the model's own system."""
        answer = self._wrap_answer(answer_type, ANSWER_PLACEHOLDERS[answer_type])
        units = _describe_units(answer_type, coordinate_system)
        if self.style == "json" or self.sections:
            tags = self._expected_tags()
            optional = []
            for tag in tags:
                if not self._is_required(tag):
                    optional.append(tag)
            omissions = f"; {' and '.join(optional)} may be left out" if optional else ""
            return f"Answer as {self._join_sections(dict.fromkeys(tags, '...'), answer)}{units}{omissions}."
        thinking = f"<{self.think_tag}>...</{self.think_tag}>"
        match self.thinking:
            case "none":
                return f"Answer as {answer}{units}."
            case "optional":
                return f"Answer as {answer}{units}; you may think first in {thinking}."
            case "required":
                return f"Think first, then answer: {thinking}{answer}{units}."

    def render(self, target: Target, thinking: str | None = None) -> str:
        """Return the response that a demonstration of this target shows.

        Args:
            target: the answer, its coordinates in the model's own system; they are rounded.
            thinking: text for the thinking; ignored by a format without thinking. Text that begins with the tag of a
                part is taken for everything before the answer, so that a demonstration can fill its sections.

        Raises:
            UserError: the response would not parse: a required part is missing, the target is not of its type, or
                the texts hold tags.
        """
        if thinking is None:
            return self._render_checked({}, target)
        opening_tags = tuple(f"<{tag}>" for tag in self._expected_tags())
        if self.style != "json" and thinking.lstrip().startswith(opening_tags):
            return self._render_checked({}, target, opening=thinking)
        return self._render_checked({self.think_tag: thinking} if self.thinking != "none" else {}, target)

    def strip_thinking(self, response: str) -> str:
        """Return a response in tags or boxed style without its thinking."""
        tag = re.escape(self.think_tag)
        return re.sub(rf"\s*<{tag}>.*?</{tag}>\s*", "", response, count=1, flags=re.DOTALL)

    def find_answer_opening(self, response: str) -> int | None:
        """Return the index at which the tag, box or field of the answer begins, or None if there is none."""
        match self.style:
            case "tags":
                opening = f"<{self.answer_tag}>"
            case "boxed":
                opening = r"\boxed{"
            case "json":
                opening = f'"{self.answer_tag}"'
        start = response.rfind(opening)
        return start if start >= 0 else None

    def build_example(self, target: Target) -> str:
        """Return a fully correct response, with `...` in every part before the answer.

        Raises:
            UserError: the target cannot be written.
        """
        return self._render_checked(dict.fromkeys(self._expected_tags(), "..."), target)

    def parse(self, text: str, answer_type: AnswerType) -> Answer:
        """Read a response; never raises.

        `problems` names every departure from the format, the worst first. `value` needs less than perfection: exactly
        one answer outside the thinking, of the right type, and nothing after it. A flaw before the answer (missing
        thinking, loose words) is left to the format reward and does not affect the value.
        """
        return self._build_answer(self._split(text), answer_type)

    def parse_continuation(self, first_response: str, text: str, answer_type: AnswerType) -> Answer:
        """Read a response that was continued behind a forced trigger; `text` begins with the trigger.

        An answer of the first response does not count, so that there is one answer after all: the last. The parts
        before an answer may stand in the first response or be repeated, and the words of a trigger are no flaw.
        """
        start = 0 if self.style == "boxed" else text.find("{")
        if self.style == "tags":
            start = find_first_tag(text, (*self._all_leading_tags(), self.answer_tag))
        first_sections = self._split(first_response).sections
        return self._build_answer(self._split(text[max(start, 0) :]), answer_type, first_sections)

    def find_last_answer(self, text: str) -> int | None:
        """Return the index at which the last answer begins, tag or box included, or None if there is none."""
        return self._split(text).answer_start

    def _build_answer(
        self, parts: SplitResponse, answer_type: AnswerType, earlier_sections: Sequence[TaggedSection] = ()
    ) -> Answer:
        """Build the answer from a response's parts; `earlier_sections` are those of the first response."""
        if parts.content is None:
            value, problem = None, parts.content_problem
        else:
            value, problem = _parse_value(answer_type, parts.content)
        # In reverse, so that the first of two sections with one name wins.
        contents = {}
        for section in reversed((*parts.sections, *earlier_sections)):
            contents[section.name] = section.content
        problems = [
            problem,
            *parts.problems,
            *self._find_section_problems(parts.sections, earlier_sections),
            parts.outside_text_problem,
        ]
        return Answer(
            text=parts.content,
            thinking=contents.pop(self.think_tag, None),
            value=value,
            problems=tuple(dict.fromkeys(filter(None, problems))),
            sections=contents,
        )

    def _split(self, text: str) -> SplitResponse:
        leading_tags = self._all_leading_tags()
        match self.style:
            case "tags":
                return split_tags(text, (*leading_tags, self.answer_tag), self.answer_tag)
            case "boxed":
                return split_boxed(text, leading_tags)
            case "json":
                return split_json(text, (*leading_tags, self.answer_tag), self.answer_tag)

    def _all_leading_tags(self) -> tuple[str, ...]:
        """Return the names of all parts before an answer, the thinking even where it is not asked for."""
        return (self.think_tag, *(section.tag for section in self.sections))

    def _expected_tags(self) -> list[str]:
        """Return the names of the parts that may come before the answer, in their order."""
        before = [section.tag for section in self.sections if not section.after_thinking]
        after = [section.tag for section in self.sections if section.after_thinking]
        thinking = [self.think_tag] if self.thinking != "none" else []
        return [*before, *thinking, *after]

    def _is_required(self, tag: str) -> bool:
        if tag == self.think_tag:
            return self.thinking == "required"
        return any(section.required for section in self.sections if section.tag == tag)

    def _find_section_problems(
        self, sections: Sequence[TaggedSection], earlier_sections: Sequence[TaggedSection]
    ) -> list[str]:
        """Return what is wrong with the parts before the answer; a part of the first response need not come again."""
        contents: dict[str, list[str]] = {}
        for section in sections:
            contents.setdefault(section.name, []).append(section.content)
        expected = self._expected_tags()
        present = {*contents, *(section.name for section in earlier_sections)}
        problems = []
        for tag in expected:
            if tag not in present and self._is_required(tag):
                problems.append(f"no {self._display_name(tag)}")
        for tag, texts in contents.items():
            if tag not in expected:
                problems.append(f"{self._display_name(tag)} not asked for")
            elif len(texts) > 1:
                problems.append(f"{len(texts)} {'thoughts' if tag == self.think_tag else f'<{tag}>'}")
            elif not texts[0].strip():
                problems.append(f"empty {self._display_name(tag)}")
        found_order = [tag for tag in contents if tag in expected]
        if found_order != [tag for tag in expected if tag in contents]:
            problems.append("parts out of order")
        return problems

    def _display_name(self, tag: str) -> str:
        return "thinking" if tag == self.think_tag else f"<{tag}>"

    def _render_checked(self, sections: Mapping[str, str], target: Target, *, opening: str = "") -> str:
        """Return the response with these sections after checking that it parses without a problem."""
        try:
            content = format_target(target)
        except ValueError as error:
            raise _render_error(target, f"{error}: {str(target.value)!r}") from None
        text = opening + self._join_sections(sections, self._wrap_answer(target.answer_type, content))
        if len(text) <= _MAX_CACHED_CHARS:
            problems = _cached_problems(self, text, target.answer_type)
        else:
            problems = self.parse(text, target.answer_type).problems
        if problems:
            raise _render_error(target, problems[0])
        return text

    def _wrap_answer(self, answer_type: AnswerType, content: str) -> str:
        """Return an answer's content in its tag, box or field."""
        match self.style:
            case "tags":
                return f"<{self.answer_tag}>{content}</{self.answer_tag}>"
            case "boxed":
                return rf"\boxed{{{content}}}"
            case "json":
                return f'"{self.answer_tag}": {_to_json_string(content) if answer_type in NON_JSON_TYPES else content}'

    def _join_sections(self, sections: Mapping[str, str], answer: str) -> str:
        if self.style == "json":
            fields = [f'"{tag}": {_to_json_string(text)}' for tag, text in sections.items()]
            return f"{{{', '.join([*fields, answer])}}}"
        return "".join(f"<{tag}>{text}</{tag}>" for tag, text in sections.items()) + answer


def _parse_value(answer_type: AnswerType, content: str) -> tuple[Any, str]:
    """Return the value of an answer's content and an empty text, or None and the problem."""
    text = content.strip()
    if not text:
        return None, "empty answer"
    try:
        return parse_answer_value(answer_type, text), ""
    except ValueError as error:
        excerpt = text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "..."
        return None, f"{error}: {excerpt!r}"


# Demonstrations without thinking are few and come again in every epoch.
@lru_cache(maxsize=4096)
def _cached_problems(response_format: ResponseFormat, text: str, answer_type: AnswerType) -> tuple[str, ...]:
    return response_format.parse(text, answer_type).problems


def _render_error(target: Target, problem: str) -> UserError:
    return UserError(f"a {target.answer_type} target {target.value!r} cannot be written as an answer: {problem}")


def _describe_units(answer_type: AnswerType, coordinate_system: CoordinateSystem | None) -> str:
    if answer_type in (AnswerType.SPAN, AnswerType.SPANS):
        return ", in seconds"
    if coordinate_system is None or answer_type not in COORDINATE_TYPES:
        return ""
    return f", coordinates {_UNITS[coordinate_system]}"


def _to_json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
