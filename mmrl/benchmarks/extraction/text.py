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

TAIL_CHARS: Final = 4000
"""Characters at the end of a response in which a conclusion is looked for."""
HEAD_CHARS: Final = 400
"""Characters at its start in which an answer given first is looked for."""

# One character for one, so that places stay.
_ASCII_EQUIVALENTS: Final[Mapping[int, str]] = MappingProxyType(
    {0xFF01 + place: chr(0x21 + place) for place in range(94)}  # the fullwidth forms of ASCII
    | {ord(mark): "[" for mark in "\u3010"}
    | {ord(mark): "]" for mark in "\u3011"}
    | {ord(mark): "-" for mark in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"}
    | {ord(mark): "'" for mark in "\u2018\u2019"}
    | {ord(mark): '"' for mark in "\u201c\u201d"}
    | {ord(mark): " " for mark in "\u00a0\u2009\u200b\u202f\u3000"}
)
_THINKING_TAGS: Final = (
    *(("<think>", "</think>"), ("<thinking>", "</thinking>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""What models open and close their thinking with."""
_ANSWER_TAG: Final = re.compile(r"<(answer|final_answer|conclusion)>|<\|begin_of_box\|>", re.IGNORECASE)
"""What models open their answer with."""
_STOP_TOKENS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<eos>", "<end_of_turn>", "<|end|>")
_PROMPT_LABELS: Final = ("Hint", "Question", "Human", "User", "Instruction", "Problem", "Q", "问题", "提示")
"""What lines begin with that a model was asked, or invents to be asked."""
_INVENTED_TURN: Final = re.compile(
    rf"^[ \t*]*(?:{'|'.join(_PROMPT_LABELS)})(?:[ \t]+\d{{1,3}})?[*]*[ \t]*[:\uff1a]"
    r"|#{2,4}[ \t]*(?:Human|User|Assistant|Instruction|Input|Question)\b",
    re.MULTILINE,
)
_REPLY_LABEL: Final = re.compile(
    r"^[ \t#*]*(?:Answer|Solution|Response|Assistant|Final answer|A|答案|解|答)[*]*[ \t]*[:\uff1a]", re.M | re.I
)
_BRACES: Final = re.compile(r"\\.|[{}]", re.DOTALL)
_MAX_BOXED_CHARS: Final = 1000
_EMPHASIS: Final = re.compile(r"\*\*|__|`")
_SENTENCE_END: Final = re.compile(
    r"(?:[.!?][\"')\]]{0,3}(?=[ \t]+(?![a-z])|$)|[。\uff01\uff1f\uff1b]|\n)[ \t]*", re.MULTILINE
)


_WORD: Final = re.compile(r"[a-z]{3,}|\d+|[\u4e00-\u9fff]")
_STOP_WORDS: Final = frozenset(
    [
        *("the", "and", "are", "was", "were", "does", "did", "has", "have", "this", "that", "there", "with", "than"),
        *("for", "from", "its", "can", "could", "would", "will", "what", "which", "how"),
    ]
)


class CharSpan(NamedTuple):
    """A place in a response: from `start` to before `end`."""

    start: int
    end: int


def answer_span(response: str) -> CharSpan | None:
    """The part of a response that answers: after its thinking, before stop tokens and turns it invents.

    None where thinking was opened and never closed. A response that first repeats its prompt answers after that.
    """
    end = min((place for stop in _STOP_TOKENS if (place := response.find(stop)) >= 0), default=len(response))
    closed = [place + len(tag) for _, tag in _THINKING_TAGS if (place := response.rfind(tag, 0, end)) >= 0]
    if not closed and any(response.find(tag, 0, end) >= 0 for tag, _ in _THINKING_TAGS):
        return None
    return _first_turn(response, max(closed, default=0), end)


def _first_turn(response: str, start: int, end: int) -> CharSpan:
    """What comes before the first turn that the model invents; after the prompt, if it begins by repeating that."""
    may = "##" in response or any(word in response for word in _PROMPT_LABELS)  # to look for words first is much faster
    turn = _INVENTED_TURN.search(response, start, end) if may else None
    if turn is None:
        return CharSpan(start, end)
    if response[start : turn.start()].strip():
        return CharSpan(start, turn.start())
    reply = _REPLY_LABEL.search(response, turn.end(), end)
    if reply is None:
        return CharSpan(turn.end(), end)
    after = _INVENTED_TURN.search(response, reply.end(), end)
    return CharSpan(reply.start(), after.start() if after else end)


def to_plain_text(text: str) -> str:
    """The same text, as long: fullwidth forms and typographic signs in ASCII, emphasis blank."""
    if not text.isascii():
        text = text.translate(_ASCII_EQUIVALENTS)
    return _EMPHASIS.sub(lambda mark: " " * len(mark[0]), text) if "*" in text or "`" in text or "__" in text else text


def last_boxed_span(text: str) -> CharSpan | None:
    r"""The content of the last \boxed{..} or \fbox{..} whose braces balance within 1000 characters."""
    place = len(text)
    for _ in range(8):  # unbalanced boxes behind a good one; more of them is no answer
        place = max(text.rfind("\\boxed{", 0, place), text.rfind("\\fbox{", 0, place))
        if place < 0:
            return None
        start = text.index("{", place) + 1
        depth = 1
        for brace in _BRACES.finditer(text, start, start + _MAX_BOXED_CHARS):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return CharSpan(start, brace.start())
    return None


def first_answer_tag(text: str) -> str | None:
    """What stands in the first <answer>..</answer>."""
    start = text.find("<answer>")
    end = text.find("</answer>", start) if start >= 0 else -1
    return text[start + len("<answer>") : end] if end >= 0 else None


def last_answer_tag_span(text: str) -> CharSpan | None:
    """The content of the last <answer>..</answer> or its like; of one never closed, up to the end."""
    found = [*_ANSWER_TAG.finditer(text)] if "<" in text else []
    if not found:
        return None
    opening, start = found[-1], found[-1].end()
    closing = f"</{opening[1]}>" if opening[1] else "<|end_of_box|>"
    end = text.find(closing, start)
    return CharSpan(start, end if end >= 0 else len(text))


def iter_sentences_backwards(text: str) -> Iterator[CharSpan]:
    """Sentences and lines that are not blank, the last first."""
    cuts = [0, *(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]
    for start, end in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
        if text[start:end].strip():
            yield CharSpan(start, end)


@lru_cache(maxsize=4096)  # every sentence is compared with one question
def content_words(text: str) -> frozenset[str]:
    """Words and numbers of a text that say what it is about, in lower case."""
    return frozenset(_WORD.findall(text.lower())) - _STOP_WORDS


def sentence_start(text: str, position: int) -> int:
    """Where the sentence begins that `at` is in."""
    return (
        max(
            text.rfind("\n", 0, position),
            text.rfind(". ", 0, position),
            text.rfind("。", 0, position),
            position - 300,
            -1,
        )
        + 1
    )


def sentence_end(text: str, position: int) -> int:
    """Where the sentence ends that begins at `at`; blank lines before it do not count."""
    while position < len(text) and text[position] in " \t\r\n:":
        position += 1
    ends = [place for mark in ("\n", ". ", "。") if (place := text.find(mark, position, position + 300)) >= 0]
    return min([*ends, len(text), position + 300])
