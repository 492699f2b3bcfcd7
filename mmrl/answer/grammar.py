"""How a response is asked for, read and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mmrl.answer.sections import Part, Parts, first_tag, in_box, in_json, in_tags
from mmrl.answer.text import FORMS, WORDS, read, written
from mmrl.answer.values import FRAMED
from mmrl.types import Answer, Frame, Kind, Target, UserError

_EXCERPT, _SHORT = 40, 200
_UNITS = MappingProxyType(
    {
        Frame.PX_ORIGINAL: "in pixels",
        Frame.PX_RESIZED: "in pixels",
        Frame.NORM_1: "as fractions of width and height",
        Frame.NORM_1000: "from 0 to 1000",
    }
)
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


class Section(NamedTuple):
    """A part of a response besides thinking and answer, such as an observation."""

    tag: str
    required: bool = True
    after_thinking: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    r"""How a response is written; `think` says whether it opens with its thinking.

    `style` says where the answer stands: in <answer> tags; in \boxed{..}, with free words before it; or as the last
    field of one JSON object, whose other fields are the thinking and the sections.
    """

    think: Literal["none", "optional", "required"] = "none"
    style: Literal["tags", "boxed", "json"] = "tags"
    answer_tag: str = "answer"
    think_tag: str = "think"
    sections: tuple[Section, ...] = ()
    stop_at_answer: bool = False
    more_stops: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises UserError for a name that cannot be a tag, or stands for two parts."""
        names = [self.answer_tag, self.think_tag, *(section.tag for section in self.sections)]
        for name in names:
            if not _NAME.fullmatch(name):
                raise UserError(f"answer: {name!r} cannot be a tag: use letters, digits, - and _, a letter first")
            if names.count(name) > 1:
                raise UserError(f"answer: two parts of a response are named {name!r}")

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings after which a response is complete, though it has not ended itself with EOS."""
        return (*((f"</{self.answer_tag}>",) if self.stop_at_answer else ()), *self.more_stops)

    def instruction(self, kind: Kind, frame: Frame | None = None) -> str:
        """The sentence that asks for this format; for coordinates, `frame` is the model's native one."""
        answer, units = self._enclosed(kind, FORMS[kind]), _units(kind, frame)
        if self.style == "json" or self.sections:
            tags = self._order()
            optional = [tag for tag in tags if not self._required(tag)]
            omissions = f"; {' and '.join(optional)} may be left out" if optional else ""
            return f"Answer as {self._assembled(dict.fromkeys(tags, '...'), answer)}{units}{omissions}."
        thinking = f"<{self.think_tag}>...</{self.think_tag}>"
        match self.think:
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
            return self._checked({}, target)
        if self.style != "json" and thought.lstrip().startswith(tuple(f"<{tag}>" for tag in self._order())):
            return self._checked({}, target, opening=thought)
        return self._checked({self.think_tag: thought} if self.think != "none" else {}, target)

    def without_thinking(self, response: str) -> str:
        """A response in tags or boxed style without its thinking."""
        tag = re.escape(self.think_tag)
        return re.sub(rf"\s*<{tag}>.*?</{tag}>\s*", "", response, count=1, flags=re.DOTALL)

    def answer_start(self, response: str) -> int | None:
        """Where the part of a response begins that holds its answer; None where it has none."""
        opening = {"tags": f"<{self.answer_tag}>", "boxed": r"\boxed{", "json": f'"{self.answer_tag}"'}[self.style]
        start = response.rfind(opening)
        return start if start >= 0 else None

    def specimen(self, target: Target) -> str:
        """A response that is right in every respect, with `...` for all that comes before the answer.

        Raises:
            UserError: the target cannot be written.
        """
        return self._checked(dict.fromkeys(self._order(), "..."), target)

    def parse(self, text: str, kind: Kind) -> Answer:
        """Read a response; never raises.

        `problems` names every departure from the grammar, the worst first. `value` needs less than perfection: exactly
        one answer outside the thinking, of the right kind, and nothing after it. A flaw before it (no thinking, loose
        words) is the format reward's business and leaves the value alone.
        """
        return self._answer(self._apart(text), kind)

    def parse_second(self, draft: str, text: str, kind: Kind) -> Answer:
        """Read a response that was made to go on: its draft, and `text` from the trigger on.

        What the draft answered does not count, so a response has one answer after all: the last. What must come before
        an answer may stand in the draft or be said again, and the words of a trigger are no flaw.
        """
        first = 0 if self.style == "boxed" else text.find("{")
        if self.style == "tags":
            first = first_tag(text, (*self._before(), self.answer_tag))
        return self._answer(self._apart(text[max(first, 0) :]), kind, self._apart(draft).others)

    def answer_at(self, text: str) -> int | None:
        """Where the last answer of a response begins, its tag or box included; None where there is none to cut off."""
        return self._apart(text).at

    def _answer(self, parts: Parts, kind: Kind, given: Sequence[Part] = ()) -> Answer:
        """The answer in a response's parts; `given` came before them."""
        value, flaw = (None, parts.flaw) if parts.content is None else _value(kind, parts.content)
        said = (*parts.others, *given)
        inner = {part.name: part.inner for part in reversed(said)}  # of a part that stands twice, the first
        problems = [flaw, *parts.problems, *self._opening_flaws(parts.others, given), parts.loose]
        return Answer(
            text=parts.content,
            thought=inner.pop(self.think_tag, None),
            value=value,
            problems=tuple(dict.fromkeys(filter(None, problems))),
            sections=inner,
        )

    def _apart(self, text: str) -> Parts:
        before = self._before()
        match self.style:
            case "tags":
                return in_tags(text, (*before, self.answer_tag), self.answer_tag)
            case "boxed":
                return in_box(text, before)
            case "json":
                return in_json(text, (*before, self.answer_tag), self.answer_tag)

    def _before(self) -> tuple[str, ...]:
        """Names of the parts that come before an answer, whether they are asked for or not."""
        return (self.think_tag, *(section.tag for section in self.sections))

    def _order(self) -> list[str]:
        """Names of the parts that may come before the answer, in their order."""
        before = [section.tag for section in self.sections if not section.after_thinking]
        after = [section.tag for section in self.sections if section.after_thinking]
        return [*before, *([self.think_tag] if self.think != "none" else []), *after]

    def _required(self, tag: str) -> bool:
        if tag == self.think_tag:
            return self.think == "required"
        return any(section.required for section in self.sections if section.tag == tag)

    def _opening_flaws(self, parts: Sequence[Part], given: Sequence[Part]) -> list[str]:
        """What is wrong with the parts before the answer; those `given` earlier need not come again."""
        order, there = self._order(), {part.name for part in given}
        inner: dict[str, list[str]] = {}
        for part in parts:
            inner.setdefault(part.name, []).append(part.inner)
        flaws = [f"no {self._called(tag)}" for tag in order if tag not in {*inner, *there} and self._required(tag)]
        for tag, texts in inner.items():
            if tag not in order:
                flaws.append(f"{self._called(tag)} not asked for")
            elif len(texts) > 1:
                flaws.append(f"{len(texts)} {'thoughts' if tag == self.think_tag else f'<{tag}>'}")
            elif not texts[0].strip():
                flaws.append(f"empty {self._called(tag)}")
        found = [tag for tag in inner if tag in order]
        if found != [tag for tag in order if tag in inner]:
            flaws.append("parts out of order")
        return flaws

    def _called(self, tag: str) -> str:
        return "thinking" if tag == self.think_tag else f"<{tag}>"

    def _checked(self, parts: Mapping[str, str], target: Target, *, opening: str = "") -> str:
        """A response of these parts, proven to parse."""
        try:
            content = written(target)
        except ValueError as error:
            raise _refusal(target, f"{error}: {str(target.value)!r}") from None
        text = opening + self._assembled(parts, self._enclosed(target.kind, content))
        short = len(text) <= _SHORT
        if problems := _problems(self, text, target.kind) if short else self.parse(text, target.kind).problems:
            raise _refusal(target, problems[0])
        return text

    def _enclosed(self, kind: Kind, content: str) -> str:
        """What the answer's content stands in."""
        match self.style:
            case "tags":
                return f"<{self.answer_tag}>{content}</{self.answer_tag}>"
            case "boxed":
                return rf"\boxed{{{content}}}"
            case "json":
                return f'"{self.answer_tag}": {_quoted(content) if kind in WORDS else content}'

    def _assembled(self, parts: Mapping[str, str], answer: str) -> str:
        if self.style == "json":
            fields = [f'"{tag}": {_quoted(text)}' for tag, text in parts.items()]
            return f"{{{', '.join([*fields, answer])}}}"
        return "".join(f"<{tag}>{text}</{tag}>" for tag, text in parts.items()) + answer


def _value(kind: Kind, content: str) -> tuple[Any, str]:
    """The value of an answer's content, or None and what is wrong with it."""
    text = content.strip()
    if not text:
        return None, "empty answer"
    try:
        return read(kind, text), ""
    except ValueError as error:
        excerpt = text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."
        return None, f"{error}: {excerpt!r}"


@lru_cache(maxsize=4096)  # answers without a thought come again and again
def _problems(grammar: Grammar, text: str, kind: Kind) -> tuple[str, ...]:
    return grammar.parse(text, kind).problems


def _refusal(target: Target, why: str) -> UserError:
    return UserError(f"a {target.kind} target {target.value!r} cannot be written as an answer: {why}")


def _units(kind: Kind, frame: Frame | None) -> str:
    if kind in (Kind.SPAN, Kind.SPANS):
        return ", in seconds"
    return f", coordinates {_UNITS[frame]}" if frame and kind in FRAMED else ""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
