"""A response before anything is read from it: the part that answers, its sentences, its last box and answer tag.

Every function keeps places: what it returns are indices into the response as the model wrote it. All take time linear
in the response, and what looks for words looks at `TAIL` characters at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple

TAIL: Final = 4000
"""Characters at the end of a response in which a conclusion is looked for."""
HEAD: Final = 400
"""Characters at its start in which an answer given first is looked for."""

# One character for one, so that places stay.
_PLAIN: Final[Mapping[int, str]] = MappingProxyType(
    {0xFF01 + place: chr(0x21 + place) for place in range(94)}  # the fullwidth forms of ASCII
    | {ord(mark): "[" for mark in "\u3010"}
    | {ord(mark): "]" for mark in "\u3011"}
    | {ord(mark): "-" for mark in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"}
    | {ord(mark): "'" for mark in "\u2018\u2019"}
    | {ord(mark): '"' for mark in "\u201c\u201d"}
    | {ord(mark): " " for mark in "\u00a0\u2009\u200b\u202f\u3000"}
)
_THINKING: Final = (
    *(("<think>", "</think>"), ("<thinking>", "</thinking>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""What models open and close their thinking with."""
_TAGS: Final = re.compile(r"<(answer|final_answer|conclusion)>|<\|begin_of_box\|>", re.IGNORECASE)
"""What models open their answer with."""
_STOPS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<eos>", "<end_of_turn>", "<|end|>")
_ASKING: Final = ("Hint", "Question", "Human", "User", "Instruction", "Problem", "Q", "问题", "提示")
"""What lines begin with that a model was asked, or invents to be asked."""
_TURN: Final = re.compile(
    rf"^[ \t*]*(?:{'|'.join(_ASKING)})(?:[ \t]+\d{{1,3}})?[*]*[ \t]*[:\uff1a]"
    r"|#{2,4}[ \t]*(?:Human|User|Assistant|Instruction|Input|Question)\b",
    re.MULTILINE,
)
_REPLY: Final = re.compile(
    r"^[ \t#*]*(?:Answer|Solution|Response|Assistant|Final answer|A|答案|解|答)[*]*[ \t]*[:\uff1a]", re.M | re.I
)
_BRACES: Final = re.compile(r"\\.|[{}]", re.DOTALL)
_LONGEST_BOX: Final = 1000
_EMPHASIS: Final = re.compile(r"\*\*|__|`")
_SENTENCE: Final = re.compile(
    r"(?:[.!?][\"')\]]{0,3}(?=[ \t]+(?![a-z])|$)|[。\uff01\uff1f\uff1b]|\n)[ \t]*", re.MULTILINE
)


_WORD: Final = re.compile(r"[a-z]{3,}|\d+|[\u4e00-\u9fff]")
_DULL: Final = frozenset(
    [
        *("the", "and", "are", "was", "were", "does", "did", "has", "have", "this", "that", "there", "with", "than"),
        *("for", "from", "its", "can", "could", "would", "will", "what", "which", "how"),
    ]
)


class Span(NamedTuple):
    """A place in a response: from `start` to before `end`."""

    start: int
    end: int


def answering(response: str) -> Span | None:
    """The part of a response that answers: after its thinking, before stop tokens and turns it invents.

    None where thinking was opened and never closed. A response that first repeats its prompt answers after that.
    """
    end = min((place for stop in _STOPS if (place := response.find(stop)) >= 0), default=len(response))
    closed = [place + len(tag) for _, tag in _THINKING if (place := response.rfind(tag, 0, end)) >= 0]
    if not closed and any(response.find(tag, 0, end) >= 0 for tag, _ in _THINKING):
        return None
    return _first_turn(response, max(closed, default=0), end)


def _first_turn(response: str, start: int, end: int) -> Span:
    """What comes before the first turn that the model invents; after the prompt, if it begins by repeating that."""
    may = "##" in response or any(word in response for word in _ASKING)  # to look for words first is much faster
    turn = _TURN.search(response, start, end) if may else None
    if turn is None:
        return Span(start, end)
    if response[start : turn.start()].strip():
        return Span(start, turn.start())
    reply = _REPLY.search(response, turn.end(), end)
    if reply is None:
        return Span(turn.end(), end)
    after = _TURN.search(response, reply.end(), end)
    return Span(reply.start(), after.start() if after else end)


def plain(text: str) -> str:
    """The same text, as long: fullwidth forms and typographic signs in ASCII, emphasis blank."""
    if not text.isascii():
        text = text.translate(_PLAIN)
    return _EMPHASIS.sub(lambda mark: " " * len(mark[0]), text) if "*" in text or "`" in text or "__" in text else text


def last_box(text: str) -> Span | None:
    r"""The content of the last \boxed{..} or \fbox{..} whose braces balance within 1000 characters."""
    place = len(text)
    for _ in range(8):  # unbalanced boxes behind a good one; more of them is no answer
        place = max(text.rfind("\\boxed{", 0, place), text.rfind("\\fbox{", 0, place))
        if place < 0:
            return None
        start = text.index("{", place) + 1
        depth = 1
        for brace in _BRACES.finditer(text, start, start + _LONGEST_BOX):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return Span(start, brace.start())
    return None


def first_tag(text: str) -> str | None:
    """What stands in the first <answer>..</answer>."""
    start = text.find("<answer>")
    end = text.find("</answer>", start) if start >= 0 else -1
    return text[start + len("<answer>") : end] if end >= 0 else None


def last_tag(text: str) -> Span | None:
    """The content of the last <answer>..</answer> or its like; of one never closed, up to the end."""
    found = [*_TAGS.finditer(text)] if "<" in text else []
    if not found:
        return None
    opening, start = found[-1], found[-1].end()
    closing = f"</{opening[1]}>" if opening[1] else "<|end_of_box|>"
    end = text.find(closing, start)
    return Span(start, end if end >= 0 else len(text))


def sentences(text: str) -> Iterator[Span]:
    """Sentences and lines that are not blank, the last first."""
    cuts = [0, *(match.end() for match in _SENTENCE.finditer(text)), len(text)]
    for start, end in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
        if text[start:end].strip():
            yield Span(start, end)


@lru_cache(maxsize=4096)  # every sentence is compared with one question
def content_words(text: str) -> frozenset[str]:
    """Words and numbers of a text that say what it is about, in lower case."""
    return frozenset(_WORD.findall(text.lower())) - _DULL


def sentence_start(text: str, at: int) -> int:
    """Where the sentence begins that `at` is in."""
    return max(text.rfind("\n", 0, at), text.rfind(". ", 0, at), text.rfind("。", 0, at), at - 300, -1) + 1


def sentence_end(text: str, at: int) -> int:
    """Where the sentence ends that begins at `at`; blank lines before it do not count."""
    while at < len(text) and text[at] in " \t\r\n:":
        at += 1
    ends = [place for mark in ("\n", ". ", "。") if (place := text.find(mark, at, at + 300)) >= 0]
    return min([*ends, len(text), at + 300])
