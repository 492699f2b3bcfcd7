"""A response taken apart into its answer and what comes before it, in each of the three styles. Linear time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from mmrl.answer.text import parse_json

_BOX_OR_BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_ALLOWED_AFTER_BOX = " \t\r\n.$\\)]"  # what may follow a box: the end of its formula and of its sentence
_TEXT_MACRO = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


class TaggedSection(NamedTuple):
    """An outermost part of a response, with its place in the text."""

    name: str
    content: str
    start: int
    end: int


class SplitResponse(NamedTuple):
    """`content` stands in the answer; it is None where there is not exactly one, and `flaw` says why.

    `at` is where the last answer begins, its tag included.
    """

    content: str | None
    content_problem: str
    sections: Sequence[TaggedSection] = ()
    problems: Sequence[str] = ()
    outside_text_problem: str = ""
    answer_start: int | None = None


def split_tags(text: str, names: tuple[str, ...], answer_tag: str) -> SplitResponse:
    """<think>..</think><answer>..</answer>: the last of `names` is the answer's, and nothing stands outside."""
    parts, problems, _ = _find_tagged_sections(text, names)
    answers = [part for part in parts if part.name == answer_tag]
    content, flaw = _take_single_answer(answers, f"no {answer_tag} tag")
    if content is not None and text[answers[0].end :].strip():
        content, flaw = None, "text after the answer"
    if content is not None and (tag := _tag_pattern(names).search(content)):
        content, flaw = None, f"nested tags: {tag[0]} inside <{answer_tag}>"
    others = [part for part in parts if part.name != answer_tag]
    return SplitResponse(
        content, flaw, others, problems, _find_outside_text(text, parts), answers[-1].start if answers else None
    )


def split_boxed(text: str, names: tuple[str, ...]) -> SplitResponse:
    r"""<think>..</think> Some words. \boxed{..}: one box outside the tags, and after it no more than punctuation."""
    others, problems, end = _find_tagged_sections(text, names)
    starts = [0, *(part.end for part in others)]
    ends = [*(part.start for part in others), end]
    answers: list[TaggedSection] = []
    for gap in zip(starts, ends, strict=True):
        answers += _iter_boxes(text, *gap, problems)
    content, flaw = _take_single_answer(answers, r"no \boxed answer")
    if content is not None and text[answers[0].end :].strip(_ALLOWED_AFTER_BOX):
        content, flaw = None, "text after the answer"
    if content is not None and r"\boxed{" in content:
        content, flaw = None, r"\boxed inside \boxed"
    if content is not None and (plain := _TEXT_MACRO.fullmatch(content.strip())):
        content = plain[1]
    return SplitResponse(content, flaw, others, problems, answer_start=answers[-1].start if answers else None)


def split_json(text: str, names: tuple[str, ...], answer_tag: str) -> SplitResponse:
    """{"think": "..", "answer": ..}: one JSON object of which the answer is the last field, and nothing else."""
    try:
        found = parse_json(text.strip())
    except ValueError as error:
        return SplitResponse(None, f"no JSON object: {error}")
    if not isinstance(found, dict):
        return SplitResponse(None, "no JSON object")
    others = [
        TaggedSection(key, value, 0, 0) for key, value in found.items() if key in names and isinstance(value, str)
    ]
    others = [part for part in others if part.name != answer_tag]
    problems = [f"unknown field {key[:40]!r}" for key in found if key not in names]
    problems += [
        f"{key!r} is no text" for key in found.keys() & set(names) - {answer_tag} if not isinstance(found[key], str)
    ]
    if answer_tag not in found:
        return SplitResponse(None, f"no field {answer_tag!r}", others, problems)
    if next(reversed(found)) != answer_tag:
        return SplitResponse(None, "fields after the answer", others, problems)
    return SplitResponse(_to_text(found[answer_tag]), "", others, problems)


def find_first_tag(text: str, names: tuple[str, ...]) -> int:
    """Where the first tag of one of `names` begins; 0 where there is none."""
    tag = _tag_pattern(names).search(text)
    return tag.start() if tag else 0


@lru_cache(maxsize=64)
def _tag_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"<(?P<slash>/?)(?P<name>{'|'.join(names)})>")


def _find_tagged_sections(text: str, names: tuple[str, ...]) -> tuple[list[TaggedSection], list[str], int]:
    """The outermost pairs of tags, what is wrong with the other tags, and where one begins that is never closed."""
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
    r"""What stands in each outermost \boxed{..} between two places; braces balanced, escaped ones aside."""
    depth, opening = 0, start
    for match in _BOX_OR_BRACE.finditer(text, start, end):
        if depth == 0 and match[0] == r"\boxed{":
            depth, opening = 1, match.start()
        elif depth:
            depth += {"{": 1, r"\boxed{": 1, "}": -1}.get(match[0], 0)
            if depth == 0:
                yield TaggedSection("boxed", text[opening + len(r"\boxed{") : match.start()], opening, match.end())
    if depth:
        problems.append(r"\boxed never closed")


def _take_single_answer(answers: Sequence[TaggedSection], none: str) -> tuple[str | None, str]:
    """The content of the one answer, or None and what speaks against it."""
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
