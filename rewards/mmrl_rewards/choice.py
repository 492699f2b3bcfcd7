"""Rewards for multiple choice and for yes or no."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Final

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import BadAnswer, answer_value, reward, target_value

_MAX_CHARS: Final = 1000  # a longer answer names no choice
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
    """Return 1 if the answer's letter is the target's, ignoring case, else 0.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2).
    Departures: none. The text of an option does not count as an answer, only its letter does.
    Unscorable: the target is not one letter from A to Z.
    """
    target = target_value(sample, AnswerType.CHOICE)
    value = answer_value(response)
    return RewardValue(float(value == target), f"{value}, expected {target}")


@reward(name="option", answer_types=(AnswerType.CHOICE,))
def option(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the answer names the correct option by its letter, its text or both, else 0.

    If the question lists "B. red" on a line of its own, these name B: B, (B), [B], **B**, B. red, red, and "The answer
    is B." These name no option: two letters, a letter with another option's text, and a sentence without a letter.

    Source: the answer matching of MathVista (arXiv:2310.02255).
    Departures: rules decide instead of a model, and no answer is mapped to the most similar option. If two options have
    equal texts, either letter is correct.
    Unscorable: the target is not one letter from A to Z, or the question lists options without it.
    """
    target = target_value(sample, AnswerType.CHOICE)
    options = _parse_options(sample)
    if options and target not in options:
        raise Unscorable(f"the target {target} is none of the options {', '.join(options)}")
    content = _answer_text(response)
    letters = _named_options(content, options) if len(content) <= _MAX_CHARS else ()
    if not letters:
        return RewardValue(0.0, f"names no option: {content[:40]!r}")
    return RewardValue(float(target in letters), f"{' or '.join(letters)}, expected {target}")


@reward(name="yes_no", answer_types=(AnswerType.TEXT,))
def yes_no(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the answer begins with the target's "yes" or "no" and does not contain the other word, else 0.

    Source: the yes/no questions of POPE (arXiv:2305.10355).
    Departures: only whole words count, ignoring case. An answer with both words or neither is wrong, as is one of more
    than 1000 characters.
    Unscorable: the target is neither yes nor no.
    """
    target = target_value(sample, AnswerType.TEXT).strip().rstrip(".").casefold()
    if target not in ("yes", "no"):
        raise Unscorable(f"the target {sample.target.value!r:.80} is neither yes nor no")
    content = _answer_text(response)
    answer = content[:_MAX_CHARS].strip().casefold()
    words = set(_YES_OR_NO.findall(answer))
    if len(content) > _MAX_CHARS or len(words) != 1 or not _YES_OR_NO.match(answer):
        return RewardValue(0.0, f"neither yes nor no: {answer[:40]!r}")
    return RewardValue(float(words == {target}), f"{words.pop()}, expected {target}")


def _answer_text(response: Response) -> str:
    """Return the answer as written."""
    if response.answer.text is None:
        raise BadAnswer(response.answer.problems[0])
    return response.answer.text


def _parse_options(sample: Sample) -> Mapping[str, str]:
    """Return the text of each option by its letter, from the last list of options in the question.

    The list ends where the letters A, B, C, ... break off. The result is empty if it has fewer than two options.
    """
    question = "\n".join(part for part in sample.parts if isinstance(part, str))
    lines = _LISTED_OPTION.findall(question)
    # Examples of other questions may come first, so the last list is the question's own.
    starts = [index for index, (letter, _) in enumerate(lines) if letter == "A"]
    last_list = lines[starts[-1] :] if starts else []
    options: dict[str, str] = {}
    for (letter, text), expected_letter in zip(last_list, ascii_uppercase, strict=False):
        if letter != expected_letter:
            break
        options[letter] = text
    return options if len(options) > 1 else {}


def _named_options(content: str, options: Mapping[str, str]) -> Sequence[str]:
    """Return the letters of the option that an answer names.

    More than one letter is returned only if their options have equal texts.
    """
    answer = _MARKUP.sub(r"\1\2", content).strip()
    same_text = [letter for letter, text in options.items() if _normalize(text) == _normalize(answer)]
    if same_text:
        return same_text
    letters = set(_candidate_letters(answer, options))
    # An answer that may mean two options names none.
    return tuple(letters) if len(letters) == 1 and letters <= set(options or ascii_uppercase) else ()


def _candidate_letters(answer: str, options: Mapping[str, str]) -> Sequence[str]:
    """Return every letter that an answer may mean, in the order of the text."""
    alone = _LETTER.fullmatch(answer)
    if alone:
        return [alone[1].upper()]
    letter_and_text = _LETTER_AND_TEXT.fullmatch(answer)
    if letter_and_text:
        # "B. red" names B only if red is the text of B; without listed options there is no text to compare with.
        letter, text = letter_and_text.groups()
        if _normalize(options.get(letter, text)) == _normalize(text):
            return [letter]
    if not _STATED_ANSWER.search(answer):
        return []
    known_letters = options or ascii_uppercase
    return [letter for letter in _LONE_LETTER.findall(answer) if letter in known_letters]


def _normalize(text: str) -> str:
    """Return the text with case folded, white space collapsed and final full stops removed."""
    return " ".join(text.casefold().split()).rstrip(".")
