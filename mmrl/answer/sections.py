"""Splitting of a response into its answer and the parts before it, in each of the three styles, in linear time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mmrl.answer.text import parse_json

_BOX_OR_BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
# The end of the formula that a box stands in, and of its sentence.
_ALLOWED_AFTER_BOX = " \t\r\n.$\\)]"
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


class TaggedSection(NamedTuple):
    """An outermost part of a response."""

    name: str
    """Name of its tag or field."""
    content: str
    """Text between the tags."""
    start: int
    """Index at which its opening tag begins; 0 in JSON."""
    end: int
    """Index at which its closing tag ends; 0 in JSON."""


class SplitResponse(NamedTuple):
    """The parts of a response and the problems found in splitting it."""

    content: str | None
    """Text of the answer; None if there is not exactly one."""
    content_problem: str
    """Reason why there is no content; empty if there is."""
    sections: Sequence[TaggedSection] = ()
    """Parts before the answer."""
    problems: Sequence[str] = ()
    """Problems of tags and fields."""
    outside_text_problem: str = ""
    """Problem of text outside the parts."""
    answer_start: int | None = None
    """Index at which the last answer begins, its tag included."""


def split_tags(text: str, names: tuple[str, ...], answer_tag: str) -> SplitResponse:
    """Split `<think>..</think><answer>..</answer>`; `names` are the tags of all parts, with no text outside them."""
    parts, problems, _ = _find_tagged_sections(text, names)
    answers = [part for part in parts if part.name == answer_tag]
    content, problem = _take_single_answer(answers, f"no {answer_tag} tag")
    if content is not None and text[answers[0].end :].strip():
        content, problem = None, "text after the answer"
    inner_tag = None if content is None else _tag_pattern(names).search(content)
    if inner_tag:
        content, problem = None, f"nested tags: {inner_tag[0]} inside <{answer_tag}>"
    return SplitResponse(
        content=content,
        content_problem=problem,
        sections=[part for part in parts if part.name != answer_tag],
        problems=problems,
        outside_text_problem=_find_outside_text(text, parts),
        answer_start=answers[-1].start if answers else None,
    )


def split_boxed(text: str, names: tuple[str, ...]) -> SplitResponse:
    r"""Split `<think>..</think> Some words. \boxed{..}`: one box outside the tags, followed by punctuation at most."""
    sections, problems, end = _find_tagged_sections(text, names)
    starts = [0, *(section.end for section in sections)]
    ends = [*(section.start for section in sections), end]
    answers: list[TaggedSection] = []
    for gap_start, gap_end in zip(starts, ends, strict=True):
        answers += _iter_boxes(text, gap_start, gap_end, problems)
    content, problem = _take_single_answer(answers, r"no \boxed answer")
    if content is not None and text[answers[0].end :].strip(_ALLOWED_AFTER_BOX):
        content, problem = None, "text after the answer"
    if content is not None and r"\boxed{" in content:
        content, problem = None, r"\boxed inside \boxed"
    text_macro = None if content is None else _TEXT_MACRO.fullmatch(content.strip())
    if text_macro:
        content = text_macro[1]
    answer_start = answers[-1].start if answers else None
    return SplitResponse(content, problem, sections, problems, answer_start=answer_start)


def split_json(text: str, names: tuple[str, ...], answer_tag: str) -> SplitResponse:
    """Split `{"think": "..", "answer": ..}`: one JSON object with the answer as its last field, and nothing else."""
    try:
        fields = parse_json(text.strip())
    except ValueError as error:
        return SplitResponse(None, f"no JSON object: {error}")
    if not isinstance(fields, dict):
        return SplitResponse(None, "no JSON object")
    sections = []
    for key, value in fields.items():
        if key in names and key != answer_tag and isinstance(value, str):
            sections.append(TaggedSection(key, value, 0, 0))
    problems = [f"unknown field {key[:40]!r}" for key in fields if key not in names]
    for key in fields.keys() & set(names) - {answer_tag}:
        if not isinstance(fields[key], str):
            problems.append(f"{key!r} is no text")
    if answer_tag not in fields:
        return SplitResponse(None, f"no field {answer_tag!r}", sections, problems)
    if next(reversed(fields)) != answer_tag:
        return SplitResponse(None, "fields after the answer", sections, problems)
    return SplitResponse(_to_text(fields[answer_tag]), "", sections, problems)


def find_first_tag(text: str, names: tuple[str, ...]) -> int:
    """Return the index at which the first tag of one of `names` begins; 0 if there is none."""
    tag = _tag_pattern(names).search(text)
    return tag.start() if tag else 0


@lru_cache(maxsize=64)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(?P<slash>/?)(?P<name>{'|'.join(names)})>")


def _find_tagged_sections(text: str, names: tuple[str, ...]) -> tuple[list[TaggedSection], list[str], int]:
    """Return the outermost pairs of tags, the problems of other tags, and the index of a tag that is never closed.

    The index is the length of the text if every tag is closed.
    """
    parts: list[TaggedSection] = []
    problems: list[str] = []
    opening: re.Match[str] | None = None
    for tag in _tag_pattern(names).finditer(text):
        if opening is None and not tag["slash"]:
            opening = tag
        elif opening is None:
            problems.append(f"stray {tag[0]}")
        elif tag["slash"] and tag["name"] == opening["name"]:
            parts.append(TaggedSection(tag["name"], text[opening.end() : tag.start()], opening.start(), tag.end()))
            opening = None
        else:
            problems.append(f"nested tags: {tag[0]} inside {opening[0]}")
    if opening is None:
        return parts, problems, len(text)
    problems.append(f"{opening[0]} never closed")
    return parts, problems, opening.start()


def _iter_boxes(text: str, start: int, end: int, problems: list[str]) -> Iterator[TaggedSection]:
    r"""Yield each outermost `\boxed{..}` between two indices; escaped braces do not count."""
    depth, opening = 0, start
    for match in _BOX_OR_BRACE.finditer(text, start, end):
        if depth == 0 and match[0] == r"\boxed{":
            depth, opening = 1, match.start()
        elif depth:
            # Escaped characters match too, so that their braces are passed over.
            if match[0] == "}":
                depth -= 1
            elif match[0] in ("{", r"\boxed{"):
                depth += 1
            if depth == 0:
                yield TaggedSection("boxed", text[opening + len(r"\boxed{") : match.start()], opening, match.end())
    if depth:
        problems.append(r"\boxed never closed")


def _take_single_answer(answers: Sequence[TaggedSection], none: str) -> tuple[str | None, str]:
    """Return the content of the only answer, or None and the problem; `none` is the problem of no answer."""
    if not answers:
        return None, none
    if len(answers) > 1:
        return None, "two answers" if len(answers) == 2 else f"{len(answers)} answers"
    return answers[0].content, ""


def _find_outside_text(text: str, parts: Sequence[TaggedSection]) -> str:
    ends = [0, *(part.end for part in parts)]
    gaps = (text[end : part.start] for end, part in zip(ends, parts, strict=False))
    return "text outside the tags" if any(gap.strip() for gap in gaps) else ""


def _to_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
