"""The format of a response: its instruction, its parser, and the writer of demonstrations.

Splitting a response into its answer and the parts before it takes time linear in its length, in each of three styles.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from mmrl.answer.language import LATEX_TEXT
from mmrl.answer.text import ANSWER_PLACEHOLDERS, NON_JSON_TYPES, format_target, parse_answer_value, parse_json
from mmrl.answer.values import COORDINATE_TYPES
from mmrl.types import Answer, AnswerType, CoordinateSystem, Target, UserError
from mmrl.utils.messages import shorten

_MAX_EXCERPT_CHARS = 40
# Longer demonstrations have thinking and differ in every sample; they would only evict the others from the cache.
_MAX_CACHED_CHARS = 200
_UNITS = MappingProxyType(
    {
        CoordinateSystem.PX_ORIGINAL: "in pixels",
        CoordinateSystem.PX_RESIZED: "in pixels",
        CoordinateSystem.NORM_1: "as fractions of width and height",
        CoordinateSystem.NORM_1000: "from 0 to 1000",
    }
)
_TAG_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
# Escaped characters match too, so that their braces are passed over.
_BOX_OR_BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
# The end of the formula that a box is in, of bold type, and of its sentence, also in Chinese.
_ALLOWED_AFTER_BOX = " \t\r\n.,;!*$\\)]\u3002\uff0c\uff1b\uff01"
_TEXT_MACRO = re.compile(rf"\\(?:{LATEX_TEXT})\{{([^{{}}]*)\}}")


class ResponseSection(NamedTuple):
    """A part of a response besides thinking and answer, such as an observation."""

    tag: str  # name of the tag, or of the JSON field
    required: bool = True  # False if a response may leave it out
    after_thinking: bool = False  # it is between thinking and answer, rather than before both


class TaggedSection(NamedTuple):
    """An outermost part of a response."""

    name: str  # name of its tag or field
    content: str  # text between the tags
    start: int  # index at which its opening tag begins; 0 in JSON
    end: int  # index at which its closing tag ends; 0 in JSON


class SplitResponse(NamedTuple):
    """The parts of a response and the problems found in splitting it."""

    content: str | None  # text of the answer; None if there is not exactly one
    content_problem: str  # reason why there is no content; empty if there is
    sections: Sequence[TaggedSection] = ()  # parts before the answer
    problems: Sequence[str] = ()  # problems of tags and fields
    outside_text_problem: str = ""  # problem of text outside the parts
    answer_start: int | None = None  # index at which the last answer begins, its tag included


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """The format of a response, with the fields of `ResponseFormatConfig`."""

    thinking: Literal["none", "optional", "required"] = "none"  # thinking before the answer
    # Place of the answer: in <answer> tags; in \boxed{..}, after free text; or in the last field of a JSON object.
    style: Literal["tags", "boxed", "json"] = "tags"
    answer_tag: str = "answer"  # name of the answer's tag or field
    think_tag: str = "think"  # name of the thinking's tag or field
    sections: tuple[ResponseSection, ...] = ()  # other parts before the answer, in their order
    stop_at_answer: bool = False  # a response ends at the closing tag of its answer
    stop_strings: tuple[str, ...] = ()  # other strings that end a response

    def __post_init__(self) -> None:
        """Check the names of tags.

        Raises:
            UserError: a name cannot be a tag, or names two parts.
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

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names by which a reward's option `of` may ask for a part of a response."""
        thought = () if self.thinking == "none" else ("thought",)
        return ("answer", "response", *thought, *(section.tag for section in self.sections))

    def instruction(self, answer_type: AnswerType, coordinate_system: CoordinateSystem | None = None) -> str:
        """Return the sentence that asks for this format; coordinates are asked for in the model's own system."""
        placeholder, units = ANSWER_PLACEHOLDERS[answer_type], ""
        if answer_type in (AnswerType.SPAN, AnswerType.SPANS):
            units = ", in seconds"
        elif coordinate_system is not None and answer_type in COORDINATE_TYPES:
            units = f", coordinates {_UNITS[coordinate_system]}"
        if self.style == "json" or self.sections:
            required = self._expected_sections()
            optional = [tag for tag, is_required in required.items() if not is_required]
            omissions = f"; {' and '.join(optional)} may be left out" if optional else ""
            response = self._write(dict.fromkeys(required, "..."), answer_type, placeholder)
            return f"Answer as {response}{units}{omissions}."
        answer = self._write({}, answer_type, placeholder)
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
        opening_tags = tuple(f"<{tag}>" for tag in self._expected_sections())
        if self.style != "json" and thinking.lstrip().startswith(opening_tags):
            return self._render_checked({}, target, opening=thinking)
        return self._render_checked({self.think_tag: thinking} if self.thinking != "none" else {}, target)

    def strip_thinking(self, response: str) -> str:
        """Return a response in tags or boxed style without its thinking."""
        before, _, rest = response.partition(f"<{self.think_tag}>")
        _, closing_tag, after = rest.partition(f"</{self.think_tag}>")
        return before.rstrip() + after.lstrip() if closing_tag else response

    def find_answer_opening(self, response: str) -> int | None:
        """Return the index at which the tag, box or field of the answer begins, or None if there is none."""
        openings = {"tags": f"<{self.answer_tag}>", "boxed": r"\boxed{", "json": f'"{self.answer_tag}"'}
        start = response.rfind(openings[self.style])
        return start if start >= 0 else None

    def build_example(self, target: Target) -> str:
        """Return a fully correct response, with `...` in every part before the answer.

        Raises:
            UserError: the target cannot be written.
        """
        return self._render_checked(dict.fromkeys(self._expected_sections(), "..."), target)

    def parse(self, text: str, answer_type: AnswerType, earlier_sections: Sequence[TaggedSection] = ()) -> Answer:
        """Read a response; never raises.

        `problems` names every departure from the format, the worst first. `value` only requires exactly one
        answer outside the thinking, of the right type, with nothing after it. A flaw before the answer (missing
        thinking, loose words) is left to the format reward and does not affect the value.

        Args:
            text: the response.
            answer_type: type of the answer.
            earlier_sections: for a continuation, the parts of the first response, which need not come again.
        """
        parts = _SPLITTERS[self.style](text, self._tags)
        value, problem = None, parts.content_problem
        if parts.content is not None:
            content = parts.content.strip()
            try:
                value = parse_answer_value(answer_type, content) if content else None
                problem = "" if content else "empty answer"
            except ValueError as error:
                problem = f"{error}: {shorten(content, _MAX_EXCERPT_CHARS)!r}"
        # In reverse, so that the first of two sections with one name wins.
        contents = {}
        for section in reversed((*parts.sections, *earlier_sections)):
            contents[section.name] = section.content
        counts = Counter(section.name for section in parts.sections)
        section_problems = self._find_section_problems(contents, counts)
        problems = [problem, *parts.problems, *section_problems, parts.outside_text_problem]
        return Answer(
            text=parts.content,
            thinking=contents.pop(self.think_tag, None),
            value=value,
            problems=tuple(dict.fromkeys(filter(None, problems))),
            sections=contents,
            repeated=tuple("thought" if tag == self.think_tag else tag for tag, count in counts.items() if count > 1),
        )

    def parse_trial(self, text: str, answer_type: AnswerType) -> Answer:
        """Parse a response that mmrl itself wrote; the results for short texts are cached."""
        if len(text) > _MAX_CACHED_CHARS:
            return self.parse(text, answer_type)
        return _parse_cached(self, text, answer_type)

    def parse_continuation(self, first_response: str, text: str, answer_type: AnswerType) -> Answer:
        """Read a response that was continued after a forced trigger; `text` begins with the trigger.

        An answer in the first response does not count; only the one after the trigger does. The parts
        before an answer may be in the first response or be repeated, and the words of a trigger are not a flaw.
        """
        start = 0 if self.style == "boxed" else text.find("{")
        if self.style == "tags":
            # The words of the trigger end where the first tag begins.
            first_tag = _tag_pattern(self._tags).search(text)
            start = first_tag.start() if first_tag else 0
        first_sections = _SPLITTERS[self.style](first_response, self._tags).sections
        return self.parse(text[max(start, 0) :], answer_type, first_sections)

    def find_last_answer(self, text: str) -> int | None:
        """Return the index at which the last answer begins, tag or box included, or None if there is none."""
        return _SPLITTERS[self.style](text, self._tags).answer_start

    @property
    def _tags(self) -> tuple[str, ...]:
        """Tags or fields of all parts, the answer's last."""
        # Thinking is split off even where the format has none: it is then a separate problem, not loose words.
        return (self.think_tag, *(section.tag for section in self.sections), self.answer_tag)

    def _expected_sections(self) -> dict[str, bool]:
        """Return the parts that may come before the answer, in order: name to True if it is required."""
        before: dict[str, bool] = {}
        after: dict[str, bool] = {}
        for section in self.sections:
            (after if section.after_thinking else before)[section.tag] = section.required
        thinking = {} if self.thinking == "none" else {self.think_tag: self.thinking == "required"}
        return {**before, **thinking, **after}

    def _find_section_problems(self, contents: Mapping[str, str], counts: Mapping[str, int]) -> list[str]:
        """Return what is wrong with the parts before the answer; those of a first response are not in `counts`."""
        expected = self._expected_sections()
        names = {tag: "thinking" if tag == self.think_tag else f"<{tag}>" for tag in (*expected, *counts)}
        problems = [f"no {names[tag]}" for tag in expected if expected[tag] and tag not in contents]
        for tag, count in counts.items():
            if tag not in expected:
                problems.append(f"{names[tag]} not asked for")
            elif count > 1:
                problems.append(f"{count} {'thoughts' if tag == self.think_tag else f'<{tag}>'}")
            elif not contents[tag].strip():
                problems.append(f"empty {names[tag]}")
        found_order = [tag for tag in counts if tag in expected]
        if found_order != [tag for tag in expected if tag in counts]:
            problems.append("parts out of order")
        return problems

    def _render_checked(self, sections: Mapping[str, str], target: Target, *, opening: str = "") -> str:
        """Return the response with these sections after checking that it parses without a problem."""
        try:
            text = opening + self._write(sections, target.answer_type, format_target(target))
        except ValueError as error:
            problems: Sequence[str] = [f"{error}: {str(target.value)!r}"]
        else:
            problems = self.parse_trial(text, target.answer_type).problems
        if problems:
            refusal = f"a {target.answer_type} target {target.value!r} cannot be written as an answer"
            hint = ", which `response_format` requires" if problems[0].startswith("no ") else ""
            raise UserError(f"{refusal}: {problems[0]}{hint}")
        return text

    def _write(self, sections: Mapping[str, str], answer_type: AnswerType, content: str) -> str:
        """Return a response with these sections and the answer `content`, in tags, a box or JSON."""
        if self.style == "json":
            fields = [f'"{tag}": {json.dumps(text, ensure_ascii=False)}' for tag, text in sections.items()]
            # The content of other types is JSON already.
            value = json.dumps(content, ensure_ascii=False) if answer_type in NON_JSON_TYPES else content
            fields.append(f'"{self.answer_tag}": {value}')
            return f"{{{', '.join(fields)}}}"
        tagged = "".join(f"<{tag}>{text}</{tag}>" for tag, text in sections.items())
        if self.style == "boxed":
            return rf"{tagged}\boxed{{{content}}}"
        return f"{tagged}<{self.answer_tag}>{content}</{self.answer_tag}>"


# Demonstrations without thinking are few and come again in every epoch.
@lru_cache(maxsize=4096)
def _parse_cached(response_format: ResponseFormat, text: str, answer_type: AnswerType) -> Answer:
    return response_format.parse(text, answer_type)


def check_opening(text: str, opening: str, sample_id: str) -> None:
    """Check that a response begins with the opening that its prompt already holds: an opened thought, or nothing.

    Raises:
        UserError: it does not.
    """
    if not text.startswith(opening.strip()):
        raise UserError(
            f"sample {sample_id}: the chat template opens a thought, and the response {text[:60]!r} has none; set "
            "model.chat: {enable_thinking: false}, or give it one"
        )


def split_tags(text: str, tags: tuple[str, ...]) -> SplitResponse:
    """Split `<think>..</think><answer>..</answer>`, no text outside; `tags` are of all parts, the answer's last."""
    answer_tag = tags[-1]
    parts, problems, _ = _find_tagged_sections(text, tags)
    answers = [part for part in parts if part.name == answer_tag]
    ends = [0, *(part.end for part in parts)]
    gaps = [text[end : part.start].strip() for end, part in zip(ends, parts, strict=False)]
    content, problem = _take_single_answer(text, answers, f"no {answer_tag} tag")
    inner_tag = None if content is None else _tag_pattern(tags).search(content)
    if inner_tag:
        content, problem = None, f"nested tags: {inner_tag[0]} inside <{answer_tag}>"
    return SplitResponse(
        content=content,
        content_problem=problem,
        sections=[part for part in parts if part.name != answer_tag],
        problems=problems,
        outside_text_problem="text outside the tags" if any(gaps) else "",
        answer_start=answers[-1].start if answers else None,
    )


def _split_boxed(text: str, tags: tuple[str, ...]) -> SplitResponse:
    r"""Split `<think>..</think> Some words. \boxed{..}`: one box outside the tags, followed by punctuation at most."""
    sections, problems, end = _find_tagged_sections(text, tags[:-1])
    starts = [0, *(section.end for section in sections)]
    ends = [*(section.start for section in sections), end]
    answers: list[TaggedSection] = []
    for gap_start, gap_end in zip(starts, ends, strict=True):
        answers += _iter_boxes(text, gap_start, gap_end, problems)
    content, problem = _take_single_answer(text, answers, r"no \boxed answer", _ALLOWED_AFTER_BOX)
    if content is not None and r"\boxed{" in content:
        content, problem = None, r"\boxed inside \boxed"
    # Models write letters and words as \text{B}, since a box holds a formula.
    text_macro = None if content is None else _TEXT_MACRO.fullmatch(content.strip())
    if text_macro:
        content = text_macro[1]
    answer_start = answers[-1].start if answers else None
    return SplitResponse(content, problem, sections, problems, answer_start=answer_start)


def _split_json(text: str, names: tuple[str, ...]) -> SplitResponse:
    """Split `{"think": "..", "answer": ..}`: one JSON object with the answer as its last field, and nothing else."""
    answer_tag = names[-1]
    try:
        fields = parse_json(text.strip())
    except ValueError as error:
        return SplitResponse(None, f"no JSON object: {error}")
    if not isinstance(fields, dict):
        return SplitResponse(None, "no JSON object")
    sections, not_text = [], []
    for key, value in fields.items():
        if key not in names or key == answer_tag:
            continue
        if isinstance(value, str):
            sections.append(TaggedSection(key, value, 0, 0))
        else:
            not_text.append(f"{key!r} is not text")
    problems = [f"unknown field {key[:40]!r}" for key in fields if key not in names] + not_text
    if answer_tag not in fields:
        return SplitResponse(None, f"no field {answer_tag!r}", sections, problems)
    if next(reversed(fields)) != answer_tag:
        return SplitResponse(None, "fields after the answer", sections, problems)
    answer = fields[answer_tag]
    if not isinstance(answer, str):
        answer = "" if answer is None else json.dumps(answer, ensure_ascii=False)
    return SplitResponse(answer, "", sections, problems)


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
            if match[0] == "}":
                depth -= 1
            elif match[0] in ("{", r"\boxed{"):
                depth += 1
            if depth == 0:
                yield TaggedSection("boxed", text[opening + len(r"\boxed{") : match.start()], opening, match.end())
    if depth:
        problems.append(r"\boxed never closed")


def _take_single_answer(
    text: str, answers: Sequence[TaggedSection], missing: str, allowed_after: str | None = None
) -> tuple[str | None, str]:
    """Return the content of the only answer, or None and the problem; `missing` is the problem of no answer.

    Only `allowed_after` may follow the answer: these characters, or white space for None.
    """
    if not answers:
        return None, missing
    if len(answers) > 1:
        return None, "two answers" if len(answers) == 2 else f"{len(answers)} answers"
    if text[answers[0].end :].strip(allowed_after):
        return None, "text after the answer"
    return answers[0].content, ""


_SPLITTERS: Mapping[str, Callable[[str, tuple[str, ...]], SplitResponse]] = MappingProxyType(
    {"tags": split_tags, "boxed": _split_boxed, "json": _split_json}
)
"""By style: splits a response, given the tags or fields of all parts, the answer's last."""
