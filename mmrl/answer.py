"""The answer grammar: one statement drives prompt text, stop string, demonstrations, parser and format reward.

A response is `<think>...</think><answer>...</answer>`, the first part never, possibly or always there, with nothing but
whitespace around the parts. What stands in the answer depends on its kind:

    NUMBER  3, -2.5, 1,234 (groups of exactly three), 6e23      ASCII digits only; no unit, no second number
    CHOICE  B, (B), B., B)                                      one letter, read as upper case
    BOX     [x1, y1, x2, y2] or (x1, y1, x2, y2)                x1 < x2, y1 < y2, plain decimals, ASCII digits only
    TEXT    anything but the tags themselves                    stripped; not empty

Digits of other scripts, fullwidth ones too, are refused rather than normalised: there is one way to write an answer,
and a policy that drifts from it should be told so. Parsing takes time linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from mmrl.types import Answer, Frame, Kind, Target, UserError

_TAG = re.compile(r"<(?P<slash>/?)(?P<name>think|answer)>")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+|(?=\.[0-9]))(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_CHOICE = re.compile(r"\(([A-Za-z])\)|([A-Za-z])[.)]?")
_COORDINATE = r"([+-]?[0-9]{1,9}(?:\.[0-9]*)?)"
_CORNERS = r"\s*" + r"(?:\s*,\s*|\s+)".join([_COORDINATE] * 4) + r"\s*"
_BOX = re.compile(rf"\[{_CORNERS}\]|\({_CORNERS}\)")

_LONGEST_NUMBER = 40
_LONGEST_BOX = 200
_EXCERPT = 40

_FORMS = MappingProxyType(
    {Kind.TEXT: "text", Kind.CHOICE: "letter", Kind.NUMBER: "number", Kind.BOX: "[x1, y1, x2, y2]"},
)
_UNITS = MappingProxyType(
    {
        Frame.PX_ORIGINAL: "in pixels",
        Frame.PX_RESIZED: "in pixels",
        Frame.NORM_1: "as fractions of width and height",
        Frame.NORM_1000: "from 0 to 1000",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """How a response is written; `think` says whether it opens with its thinking."""

    stop: ClassVar[tuple[str, ...]] = ("</answer>",)
    """Strings after which a response is complete."""

    think: Literal["none", "optional", "required"] = "none"

    def instruction(self, kind: Kind, frame: Frame | None = None) -> str:
        """The sentence that asks for this format; for a box, `frame` is the model's native one."""
        form = f"<answer>{_FORMS[kind]}</answer>"
        units = f", coordinates {_UNITS[frame]}" if kind is Kind.BOX and frame else ""
        match self.think:
            case "none":
                return f"Answer as {form}{units}."
            case "optional":
                return f"Answer as {form}{units}; you may think first in <think>...</think>."
            case "required":
                return f"Think first, then answer: <think>...</think>{form}{units}."

    def render(self, target: Target, thought: str | None = None) -> str:
        """The canonical response for imitation. A box must be in the model's frame; its corners are rounded.

        A thought is left out where the grammar has no thinking.

        Raises:
            UserError: the result would not parse: a missing thought, a target not of its kind, tags inside either.
        """
        thinking = f"<think>{thought}</think>" if thought is not None and self.think != "none" else ""
        text = f"{thinking}<answer>{_written(target)}</answer>"
        problems = self.parse(text, target.kind).problems
        if problems:
            raise UserError(f"a {target.kind} target {target.value!r} cannot be written as an answer: {problems[0]}")
        return text

    def parse(self, text: str, kind: Kind) -> Answer:
        """Read a response; never raises.

        `problems` names every departure from the grammar, the worst first. `value` needs less than perfection: exactly
        one answer outside the thinking, of the right kind, and nothing after it. A flaw before it (no thinking, loose
        words) is the format reward's business and leaves the value alone.
        """
        blocks, problems = _blocks(text)
        answers = [block for block in blocks if block.name == "answer"]
        thoughts = [block for block in blocks if block.name == "think"]
        content, flaw = _sole_answer(text, answers)
        value = None
        if content is not None:
            value, flaw = _read(kind, content)
        thought = thoughts[0].inner if thoughts else None
        problems = [flaw, *problems, self._thinking_flaw(thoughts), _loose_text(text, blocks)]
        return Answer(text=content, thought=thought, value=value, problems=tuple(dict.fromkeys(filter(None, problems))))

    def _thinking_flaw(self, thoughts: list[_Block]) -> str:
        if not thoughts:
            return "no thinking" if self.think == "required" else ""
        if self.think == "none":
            return "thinking not asked for"
        if len(thoughts) > 1:
            return f"{len(thoughts)} thoughts"
        return "" if thoughts[0].inner.strip() else "empty thinking"


class _Block(NamedTuple):
    """An outermost pair of tags, with its place in the text."""

    name: str
    inner: str
    start: int
    end: int


def _blocks(text: str) -> tuple[list[_Block], list[str]]:
    """The outermost pairs of tags in order, and what is wrong with the tags that form no such pair."""
    blocks: list[_Block] = []
    problems: list[str] = []
    opening: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        if opening is None and not tag["slash"]:
            opening = tag
        elif opening is None:
            problems.append(f"stray {tag[0]}")
        elif tag["slash"] and tag["name"] == opening["name"]:
            blocks.append(_Block(tag["name"], text[opening.end() : tag.start()], opening.start(), tag.end()))
            opening = None
        else:
            problems.append(f"nested tags: {tag[0]} inside {opening[0]}")
    if opening is not None:
        problems.append(f"{opening[0]} never closed")
    return blocks, problems


def _sole_answer(text: str, answers: list[_Block]) -> tuple[str | None, str]:
    """The content of the one answer, or None and what speaks against it."""
    if not answers:
        return None, "no answer tag"
    if len(answers) > 1:
        return None, "two answers" if len(answers) == 2 else f"{len(answers)} answers"
    if text[answers[0].end :].strip():
        return None, "text after the answer"
    if tag := _TAG.search(answers[0].inner):
        return None, f"nested tags: {tag[0]} inside <answer>"
    return answers[0].inner, ""


def _loose_text(text: str, blocks: list[_Block]) -> str:
    ends = [0, *(block.end for block in blocks)]
    gaps = (text[end : block.start] for end, block in zip(ends, blocks, strict=False))
    return "text outside the tags" if any(gap.strip() for gap in gaps) else ""


def _read(kind: Kind, content: str) -> tuple[Any, str]:
    """The value of an answer's content, or None and what is wrong with it."""
    text = content.strip()
    if not text:
        return None, "empty answer"
    try:
        return _READERS[kind](text), ""
    except ValueError as error:
        excerpt = text if len(text) <= _EXCERPT else text[:_EXCERPT] + "..."
        return None, f"{error}: {excerpt!r}"


def _number(text: str) -> int | float:
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        raise ValueError("not a number")
    digits = text.replace(",", "")
    value = int(digits) if digits.lstrip("+-").isdigit() else float(digits)
    if not isfinite(value):
        raise ValueError("number too large")
    return value


def _choice(text: str) -> str:
    match = _CHOICE.fullmatch(text) if len(text) <= len("(B)") else None
    if not match:
        raise ValueError("not one letter")
    return (match[1] or match[2]).upper()


def _box(text: str) -> tuple[float, ...]:
    match = _BOX.fullmatch(text) if len(text) <= _LONGEST_BOX else None
    if not match:
        raise ValueError("not a box")
    x1, y1, x2, y2 = (float(corner) for corner in match.groups() if corner is not None)
    if not (x1 < x2 and y1 < y2):
        raise ValueError("inverted or empty box")
    return x1, y1, x2, y2


_READERS: Mapping[Kind, Callable[[str], Any]] = MappingProxyType(
    {Kind.TEXT: str, Kind.CHOICE: _choice, Kind.NUMBER: _number, Kind.BOX: _box}
)


def _written(target: Target) -> str:
    """A target as it stands in a demonstration: numbers without a trailing .0, corners rounded to whole units."""
    value = target.value
    match target.kind:
        case Kind.NUMBER if isinstance(value, float):
            return _short(value)
        case Kind.BOX if isinstance(value, Sequence) and all(isfinite(corner) for corner in value):
            digits = 3 if target.frame is Frame.NORM_1 else None
            return f"[{', '.join(_short(round(corner, digits)) for corner in value)}]"
        case _:
            return str(value)


def _short(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)
