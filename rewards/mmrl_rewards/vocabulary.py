"""Words that the grammars of answers share: words of doubt, of denial, and those that describe nothing themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from mmrl.answer.language import ARTICLES, HEDGES, WRONG

_VERY: Final = r"(?:(?:be|so|too|very|quite|really|most|highly|fully|totally|entirely|completely|absolutely|100%) )*"
_DOUBT: Final = re.compile(
    rf"\b(?:{HEDGES}|presumably|supposedly|arguably|unsure|uncertain|unclear|ambiguous|guess\w*"
    rf"|(?:not|n't|cannot|never) {_VERY}(?:sure|certain|clear|confident|know|tell|say|determined?)"
    r"|(?:hard|difficult|impossible) to (?:tell|say|know|determine|be sure)"
    r"|(?:it|that|this|there|i|we) (?:could(?! not| see| count)|may|might))\b"
    rf"|(?:\b(?:it|that|this|there)(?:'s| is| are) |^|[,.;:!(-] ?){_VERY}(?:un)?likely\b"
)
_DENIAL: Final = re.compile(
    rf"\b(?:{WRONG}|not?|none|never|nothing|nobody|neither|nor|without|cannot|except|untrue|missing|absent|lack(?:s|ing)?)\b"
    "|n't"
)
PLACES: Final = frozenset(("of", "in", "on", "at", "to", "by", "from", "for", "with"))
_PLAIN: Final = re.compile(
    rf"{ARTICLES}|th(?:is|at|ese|ose|ere|ey)|here|it|s?he|i|we|you|a?m|is|s|(?:a)?re|was|were|be(?:en|ing)?|do(?:es)?|did"
    r"|has|have|had|can|image|picture|photo|scene|answer|number|total|show(?:s|n|ing)?|depicts?|contains?|seen?|visible"
    r"|present|appears|clearly|definitely|certainly"
)
IN_IMAGE: Final = re.compile(r"\b(?:of|in|on|from) (?:the|this) (?:image|picture|photo|scene)\b")
_WORD: Final = re.compile(r"[a-z]+n't|[a-z0-9]+(?:-[a-z0-9]+)*")
_ENDING: Final = re.compile(r"(?<=\w{3})(?:ing|ed|es|s|e)$")


def is_doubtful(text: str, asked: str = "") -> bool:
    """Return True if a text in small letters contains a word of doubt that what is asked does not contain."""
    last_words = [match[0].split()[-1].removeprefix("un") for match in _DOUBT.finditer(text)]
    return any(not re.search(rf"\b{word}\b", asked) for word in last_words)


def is_denied(text: str) -> bool:
    """Return True if a text in small letters contains "not" or another word of denial."""
    return _DENIAL.search(text) is not None


@lru_cache(maxsize=4096)
def asked_in(question: str) -> str:
    """Return the last sentence of a question that ends in a question mark, in small letters; "" without one."""
    sentences: list[str] = re.findall("[^.?!\u3002\uff1f\n]+(?=[?\uff1f])", question)
    return sentences[-1].casefold() if sentences else ""


@lru_cache(maxsize=4096)  # of questions, above all
def content_words(text: str) -> Sequence[str]:
    """Return a text's words without their endings, and without those of place, of denial and of no content."""
    words = [word for word in _WORD.findall(IN_IMAGE.sub("", text)) if word not in PLACES and not is_denied(word)]
    return tuple(_ENDING.sub("", word) for word in words if not _PLAIN.fullmatch(word))
