"""Rewards for multiple choice and for yes or no."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from string import ascii_uppercase
from typing import Final

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value

_MAX_CHARS: Final = 1000  # characters; a choice that takes more is none
_LISTED_OPTION: Final = re.compile(r"^[ \t]*\(?([A-Z])[.):][ \t]+(\S.*)$", re.MULTILINE)
_MARKUP: Final = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\{([^{}]*)\}|\*\*([^*]*)\*\*")
_LETTER: Final = re.compile(r"[(\[]?([A-Za-z])[)\]]?[.:]?")
_LETTER_AND_TEXT: Final = re.compile(r"[(\[]?([A-Z])(?:[)\]][.:]?|[.:])\s+(\S.*)", re.DOTALL)
_STATED_ANSWER: Final = re.compile(
    r"(?i:\b(?:answer|option|choice))(?:\s+is)?\s*:?\s*[(\[]?[A-Z](?=[)\].,:;!]|\s+is\b|\s*$)"
)
_LONE_LETTER: Final = re.compile(r"(?<![\w'])[A-Z](?![\w'])")
_YES_OR_NO: Final = re.compile(r"\b(?:yes|no)\b")


@reward(name="choice", answer_types=(AnswerType.CHOICE,))
def exact(response: Response, sample: Sample) -> RewardValue:
    """1 if the answer's letter is the target's, case aside, else 0.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Departures: none; the text of an option is no
    answer, only its letter is.

    Raises:
        Unscorable: the target is not one letter from A to Z.
    """
    target = target_value(sample, AnswerType.CHOICE)
    value = response.answer.value
    if value is None:
        return RewardValue(0.0, response.answer.problems[0])
    return RewardValue(float(value == target), f"{value}, expected {target}")


@reward(name="option", answer_types=(AnswerType.CHOICE,))
def option(response: Response, sample: Sample) -> RewardValue:
    """1 if the answer names the right option, by its letter, its text or both, else 0.

    B, (B), [B], **B**, B. red, red and "The answer is B." name B, where the question lists "B. red" on a line of its
    own. Two letters, a letter with another option's text and a sentence without a letter name none. Source: the answer
    matching of MathVista (arXiv:2310.02255). Departures: by rule, and nothing is rounded to the nearest option; of two
    options with equal text, either letter is right.

    Raises:
        Unscorable: the target is not one letter from A to Z, or is none of the options listed.
    """
    target = target_value(sample, AnswerType.CHOICE)
    options = _parse_options(sample)
    if options and target not in options:
        raise Unscorable(f"the target {target} is none of the options {', '.join(options)}")
    content = response.answer.text
    if content is None:
        return RewardValue(0.0, response.answer.problems[0])
    letters = _named_options(content, options) if len(content) <= _MAX_CHARS else ()
    if not letters:
        return RewardValue(0.0, f"names no option: {content[:40]!r}")
    return RewardValue(float(target in letters), f"{' or '.join(letters)}, expected {target}")


@reward(name="yes_no", answer_types=(AnswerType.TEXT,))
def yes_no(response: Response, sample: Sample) -> RewardValue:
    """1 if the answer begins with the right one of "yes" and "no" and nowhere says the other, case aside, else 0.

    Source: the yes/no questions of POPE (arXiv:2305.10355). Departures: whole words alone count, the first one says
    which, and an answer that says both or neither is wrong.

    Raises:
        Unscorable: the target is neither yes nor no.
    """
    target = target_value(sample, AnswerType.TEXT).strip().rstrip(".").casefold()
    if target not in ("yes", "no"):
        raise Unscorable(f"the target {sample.target.value!r:.80} is neither yes nor no")
    content = response.answer.text
    if content is None:
        return RewardValue(0.0, response.answer.problems[0])
    answer = content[:_MAX_CHARS].strip().casefold()
    said = set(_YES_OR_NO.findall(answer))
    if len(content) > _MAX_CHARS or len(said) != 1 or not _YES_OR_NO.match(answer):
        return RewardValue(0.0, f"neither yes nor no: {answer[:40]!r}")
    return RewardValue(float(said == {target}), f"{said.pop()}, expected {target}")


def _parse_options(sample: Sample) -> Mapping[str, str]:
    """Return the text of each option by its letter, from the last list of options in the question."""
    question = "\n".join(part for part in sample.parts if isinstance(part, str))
    lines = _LISTED_OPTION.findall(question)
    starts = [index for index, (letter, _) in enumerate(lines) if letter == "A"]
    last = lines[starts[-1] :] if starts else []
    in_order = takewhile(lambda pair: pair[0][0] == pair[1], zip(last, ascii_uppercase, strict=False))
    options = {letter: text for (letter, text), _ in in_order}
    return options if len(options) > 1 else {}


def _named_options(content: str, options: Mapping[str, str]) -> Sequence[str]:
    """Return the letters of the option that an answer names: several only if their texts are equal."""
    answer = _MARKUP.sub(lambda match: match[1] or match[2] or "", content).strip()
    alike = [letter for letter, text in options.items() if _normalize(text) == _normalize(answer)]
    if alike:
        return alike
    letters = set(_candidate_letters(answer, options))
    return tuple(letters) if len(letters) == 1 and letters <= set(options or ascii_uppercase) else ()


def _candidate_letters(answer: str, options: Mapping[str, str]) -> Iterator[str]:
    """Every letter that an answer may mean."""
    if alone := _LETTER.fullmatch(answer):
        yield alone[1].upper()
    elif (both := _LETTER_AND_TEXT.fullmatch(answer)) and _normalize(options.get(both[1], both[2])) == _normalize(
        both[2]
    ):
        yield both[1]
    elif _STATED_ANSWER.search(answer):
        yield from (letter for letter in _LONE_LETTER.findall(answer) if letter in (options or ascii_uppercase))


def _normalize(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
