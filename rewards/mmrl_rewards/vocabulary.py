"""Words that the grammars of answers share: words of doubt, of denial, and those that describe nothing themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from mmrl.answer.language import WRONG

_VERY: Final = r"(?:(?:be|so|too|very|quite|really|most|highly|fully|totally|entirely|completely|absolutely|100%) )*"
_DOUBT: Final = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|presumably|supposedly|arguably|unsure|uncertain|unclear|ambiguous|guess\w*"
    rf"|(?:not|n't|cannot|never) {_VERY}(?:sure|certain|clear|confident|know|tell|say|determined?)"
    r"|(?:hard|difficult|impossible) to (?:tell|say|know|determine|be sure)"
    rf"|(?:it|that|this|there)(?:'s| is| are) {_VERY}(?:un)?likely"
    r"|(?:it|that|this|there|i|we) (?:could(?! not| see| count)|may|might))\b"
    rf"|(?:^|[,.;:!(-] ?){_VERY}(?:un)?likely\b"
)
_DENIALS: Final = {
    *("no", "not", "none", "never", "nothing", "nobody", "neither", "nor", "without", "cannot", "except", "untrue"),
    *("missing", "absent", "lack", "lacks", "lacking", *WRONG.split("|")),
}
PLACES: Final = frozenset(("of", "in", "on", "at", "to", "by", "from", "for", "with"))
_PLAIN_WORDS: Final = {
    *("a", "an", "the", "this", "that", "these", "those", "there", "here", "i", "we", "you", "he", "she", "it", "they"),
    *("am", "m", "is", "s", "are", "re", "was", "were", "be", "been", "being"),
    *("do", "does", "did", "has", "have", "had", "can", "image", "picture", "photo", "scene", "answer", "number"),
    *("show", "shows", "shown", "showing", "depict", "depicts", "contain", "contains", "see", "seen", "visible"),
    *("present", "appears", "clearly", "definitely", "certainly", "total"),
}
IN_IMAGE: Final = re.compile(r"\b(?:of|in|on|from) (?:the|this) (?:image|picture|photo|scene)\b")
_WORD: Final = re.compile(r"[a-z]+n't|[a-z0-9]+(?:-[a-z0-9]+)*")
_ENDING: Final = re.compile(r"(?<=\w{3})(?:ing|ed|es|s|e)$")


def is_doubtful(text: str, asked: str = "") -> bool:
    """Return True if a text in small letters contains a word of doubt that what is asked does not contain."""
    return any(
        not re.search(rf"\b{match[0].split()[-1].removeprefix('un')}\b", asked) for match in _DOUBT.finditer(text)
    )


@lru_cache(maxsize=4096)
def asked_in(question: str) -> str:
    """Return the last sentence of a question that ends in a question mark, in small letters; "" without one."""
    sentences: list[str] = re.findall("[^.?!\u3002\uff1f\n]+(?=[?\uff1f])", question)
    return sentences[-1].casefold() if sentences else ""


def stem(word: str) -> str:
    """Return a word without the ending of its plural or participle: "point" for "points" and "pointing"."""
    return _ENDING.sub("", word)


def content_words(text: str) -> Sequence[str]:
    """Return the stems of a text's words, without those of place, of denial and those that describe nothing."""
    words = [word for word in _WORD.findall(IN_IMAGE.sub("", text)) if not is_denied(word)]
    return [stem(word) for word in words if word not in _PLAIN_WORDS and word not in PLACES]


def is_denied(text: str) -> bool:
    """Return True if a text in small letters contains "not" or another word of denial."""
    return any(word in _DENIALS or word.endswith("n't") for word in _WORD.findall(text))
