"""How a response is asked for, read and written."""

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
    required: bool = True
    after_thinking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    r"""How a response is written; `think` says whether it opens with its thinking.

    `style` says where the answer stands: in <answer> tags; in \boxed{..}, with free words before it; or as the last
    field of one JSON object, whose other fields are the thinking and the sections.
    """

    thinking: Literal["none", "optional", "required"] = "none"
    style: Literal["tags", "boxed", "json"] = "tags"
    answer_tag: str = "answer"
    think_tag: str = "think"
    sections: tuple[ResponseSection, ...] = ()
    stop_at_answer: bool = False
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UserError for a name that cannot be a tag, or stands for two parts."""
        names = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        for name in names:
            if not _TAG_NAME.fullmatch(name):
                raise UserError(f"response_format: {name!r} cannot be a tag: use letters, digits, - and _, a letter first")
            if names.count(name) > 1:
                raise UserError(f"response_format: two parts of a response are named {name!r}")

    @property
    def all_stop_strings(self) -> tuple[str, ...]:
        """Strings after which a response is complete, though it has not ended itself with EOS."""
        return (*((f"</{self.answer_tag}>",) if self.stop_at_answer else ()), *self.stop_strings)

    def instruction(self, kind: AnswerType, frame: CoordinateSystem | None = None) -> str:
        """The sentence that asks for this format; for coordinates, `frame` is the model's native one."""
        answer, units = self._wrap_answer(kind, ANSWER_PLACEHOLDERS[kind]), _describe_units(kind, frame)
        if self.style == "json" or self.sections:
            tags = self._expected_tags()
            optional = [tag for tag in tags if not self._is_required(tag)]
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

    def render(self, target: Target, thought: str | None = None) -> str:
        """The canonical response for imitation. Coordinates must be in the model's frame; they are rounded.

        A thought is left out where the grammar has no thinking. One that begins with the tag of a part is taken for all
        that comes before the answer: so a demonstration fills its sections.

        Raises:
            UserError: the result would not parse: a missing thought or section, a target not of its kind, tags inside.
        """
        if thought is None:
            return self._render_checked({}, target)
        if self.style != "json" and thought.lstrip().startswith(tuple(f"<{tag}>" for tag in self._expected_tags())):
            return self._render_checked({}, target, opening=thought)
        return self._render_checked({self.think_tag: thought} if self.thinking != "none" else {}, target)

    def strip_thinking(self, response: str) -> str:
        """A response in tags or boxed style without its thinking."""
        tag = re.escape(self.think_tag)
        return re.sub(rf"\s*<{tag}>.*?</{tag}>\s*", "", response, count=1, flags=re.DOTALL)

    def find_answer_opening(self, response: str) -> int | None:
        """Where the part of a response begins that holds its answer; None where it has none."""
        opening = {"tags": f"<{self.answer_tag}>", "boxed": r"\boxed{", "json": f'"{self.answer_tag}"'}[self.style]
        start = response.rfind(opening)
        return start if start >= 0 else None

    def build_example(self, target: Target) -> str:
        """A response that is right in every respect, with `...` for all that comes before the answer.

        Raises:
            UserError: the target cannot be written.
        """
        return self._render_checked(dict.fromkeys(self._expected_tags(), "..."), target)

    def parse(self, text: str, kind: AnswerType) -> Answer:
        """Read a response; never raises.

        `problems` names every departure from the grammar, the worst first. `value` needs less than perfection: exactly
        one answer outside the thinking, of the right kind, and nothing after it. A flaw before it (no thinking, loose
        words) is the format reward's business and leaves the value alone.
        """
        return self._build_answer(self._split(text), kind)

    def parse_continuation(self, first_response: str, text: str, kind: AnswerType) -> Answer:
        """Read a response that was made to go on: its draft, and `text` from the trigger on.

        What the draft answered does not count, so a response has one answer after all: the last. What must come before
        an answer may stand in the draft or be said again, and the words of a trigger are no flaw.
        """
        first = 0 if self.style == "boxed" else text.find("{")
        if self.style == "tags":
            first = find_first_tag(text, (*self._all_leading_tags(), self.answer_tag))
        return self._build_answer(self._split(text[max(first, 0) :]), kind, self._split(first_response).sections)

    def find_last_answer(self, text: str) -> int | None:
        """Where the last answer of a response begins, its tag or box included; None where there is none to cut off."""
        return self._split(text).answer_start

    def _build_answer(
        self, parts: SplitResponse, kind: AnswerType, earlier_sections: Sequence[TaggedSection] = ()
    ) -> Answer:
        """The answer in a response's parts; `given` came before them."""
        value, flaw = (None, parts.content_problem) if parts.content is None else _parse_value(kind, parts.content)
        said = (*parts.sections, *earlier_sections)
        inner = {part.name: part.content for part in reversed(said)}  # of a part that stands twice, the first
        problems = [
            flaw,
            *parts.problems,
            *self._find_section_problems(parts.sections, earlier_sections),
            parts.outside_text_problem,
        ]
        return Answer(
            text=parts.content,
            thinking=inner.pop(self.think_tag, None),
            value=value,
            problems=tuple(dict.fromkeys(filter(None, problems))),
            sections=inner,
        )

    def _split(self, text: str) -> SplitResponse:
        before = self._all_leading_tags()
        match self.style:
            case "tags":
                return split_tags(text, (*before, self.answer_tag), self.answer_tag)
            case "boxed":
                return split_boxed(text, before)
            case "json":
                return split_json(text, (*before, self.answer_tag), self.answer_tag)

    def _all_leading_tags(self) -> tuple[str, ...]:
        """Names of the parts that come before an answer, whether they are asked for or not."""
        return (self.think_tag, *(section.tag for section in self.sections))

    def _expected_tags(self) -> list[str]:
        """Names of the parts that may come before the answer, in their order."""
        before = [section.tag for section in self.sections if not section.after_thinking]
        after = [section.tag for section in self.sections if section.after_thinking]
        return [*before, *([self.think_tag] if self.thinking != "none" else []), *after]

    def _is_required(self, tag: str) -> bool:
        if tag == self.think_tag:
            return self.thinking == "required"
        return any(section.required for section in self.sections if section.tag == tag)

    def _find_section_problems(
        self, parts: Sequence[TaggedSection], earlier_sections: Sequence[TaggedSection]
    ) -> list[str]:
        """What is wrong with the parts before the answer; those `given` earlier need not come again."""
        order, there = self._expected_tags(), {part.name for part in earlier_sections}
        inner: dict[str, list[str]] = {}
        for part in parts:
            inner.setdefault(part.name, []).append(part.content)
        flaws = [
            f"no {self._display_name(tag)}" for tag in order if tag not in {*inner, *there} and self._is_required(tag)
        ]
        for tag, texts in inner.items():
            if tag not in order:
                flaws.append(f"{self._display_name(tag)} not asked for")
            elif len(texts) > 1:
                flaws.append(f"{len(texts)} {'thoughts' if tag == self.think_tag else f'<{tag}>'}")
            elif not texts[0].strip():
                flaws.append(f"empty {self._display_name(tag)}")
        found = [tag for tag in inner if tag in order]
        if found != [tag for tag in order if tag in inner]:
            flaws.append("parts out of order")
        return flaws

    def _display_name(self, tag: str) -> str:
        return "thinking" if tag == self.think_tag else f"<{tag}>"

    def _render_checked(self, parts: Mapping[str, str], target: Target, *, opening: str = "") -> str:
        """A response of these parts, proven to parse."""
        try:
            content = format_target(target)
        except ValueError as error:
            raise _render_error(target, f"{error}: {str(target.value)!r}") from None
        text = opening + self._join_sections(parts, self._wrap_answer(target.answer_type, content))
        short = len(text) <= _MAX_CACHED_CHARS
        if (
            problems := _cached_problems(self, text, target.answer_type)
            if short
            else self.parse(text, target.answer_type).problems
        ):
            raise _render_error(target, problems[0])
        return text

    def _wrap_answer(self, kind: AnswerType, content: str) -> str:
        """What the answer's content stands in."""
        match self.style:
            case "tags":
                return f"<{self.answer_tag}>{content}</{self.answer_tag}>"
            case "boxed":
                return rf"\boxed{{{content}}}"
            case "json":
                return f'"{self.answer_tag}": {_to_json_string(content) if kind in NON_JSON_TYPES else content}'

    def _join_sections(self, parts: Mapping[str, str], answer: str) -> str:
        if self.style == "json":
            fields = [f'"{tag}": {_to_json_string(text)}' for tag, text in parts.items()]
            return f"{{{', '.join([*fields, answer])}}}"
        return "".join(f"<{tag}>{text}</{tag}>" for tag, text in parts.items()) + answer


def _parse_value(kind: AnswerType, content: str) -> tuple[Any, str]:
    """The value of an answer's content, or None and what is wrong with it."""
    text = content.strip()
    if not text:
        return None, "empty answer"
    try:
        return parse_answer_value(kind, text), ""
    except ValueError as error:
        excerpt = text if len(text) <= _MAX_EXCERPT_CHARS else text[:_MAX_EXCERPT_CHARS] + "..."
        return None, f"{error}: {excerpt!r}"


@lru_cache(maxsize=4096)  # answers without a thought come again and again
def _cached_problems(grammar: ResponseFormat, text: str, kind: AnswerType) -> tuple[str, ...]:
    return grammar.parse(text, kind).problems


def _render_error(target: Target, why: str) -> UserError:
    return UserError(f"a {target.answer_type} target {target.value!r} cannot be written as an answer: {why}")


def _describe_units(kind: AnswerType, frame: CoordinateSystem | None) -> str:
    if kind in (AnswerType.SPAN, AnswerType.SPANS):
        return ", in seconds"
    return f", coordinates {_UNITS[frame]}" if frame and kind in COORDINATE_TYPES else ""


def _to_json_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
