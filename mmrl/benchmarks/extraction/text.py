"""Parts of a response that the rules work on: the answer after the thinking, sentences, the last box and answer tag.

Every function returns places in the text it was given, so that a verdict can quote the response. All take time linear
in the response, and rules that look for words read `TAIL_CHARS` characters at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from mmrl.types import Region

NoAnswerReason = Literal["", "no_answer", "refusal", "truncated"]
TAIL_CHARS: Final = 4000
"""Characters at the end of a response in which a conclusion is looked for."""
HEAD_CHARS: Final = 400  # characters of the longest text that may be an option

_FULLWIDTH_FORMS: Final = {0xFF01 + offset: chr(0x21 + offset) for offset in range(94)}
# One character for one, so that places stay.
_ASCII_EQUIVALENTS: Final[Mapping[int, str]] = MappingProxyType(
    _FULLWIDTH_FORMS
    | dict.fromkeys(map(ord, "\u3010"), "[")
    | dict.fromkeys(map(ord, "\u3011"), "]")
    | dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"), "-")
    | dict.fromkeys(map(ord, "\u2018\u2019"), "'")
    | dict.fromkeys(map(ord, "\u201c\u201d"), '"')
    | dict.fromkeys(map(ord, "\u00a0\u2009\u200b\u202f\u3000"), " ")
)
# Tags around the thinking of known models.
_THINKING_TAGS: Final = (
    *(("<think>", "</think>"), ("<thinking>", "</thinking>"), ("\u25c1think\u25b7", "\u25c1/think\u25b7")),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
# Tags that open the answer of known models.
_ANSWER_TAG: Final = re.compile(r"<(answer|final_answer|conclusion)>|<\|begin_of_box\|>", re.IGNORECASE)
_STOP_TOKENS: Final = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>", "<eos>", "<end_of_turn>", "<|end|>")
# Words that begin a line of the prompt, or of a further turn that the model invents.
_PROMPT_LABELS: Final = ("Hint", "Question", "Human", "User", "Instruction", "Problem", "Q", "问题", "提示")
_INVENTED_TURN: Final = re.compile(
    rf"^[ \t*]*(?:{'|'.join(_PROMPT_LABELS)})(?:[ \t]+\d{{1,3}})?[*]*[ \t]*[:\uff1a]"
    r"|#{2,4}[ \t]*(?:Human|User|Assistant|Instruction|Input|Question)\b",
    re.MULTILINE,
)
_REPLY_LABEL: Final = re.compile(
    r"^[ \t#*]*(?:Answer|Solution|Response|Assistant|Final answer|A|答案|解|答)[*]*[ \t]*[:\uff1a]", re.M | re.I
)
_BRACES: Final = re.compile(r"\\.|[{}]", re.DOTALL)
_MAX_BOXED_CHARS: Final = 1000  # characters of the longest box
_MAX_BOXES: Final = 8  # boxes at the end of a response that are looked at for one whose braces balance
_MAX_SENTENCE_CHARS: Final = 300  # characters that a sentence is followed in either direction
_EMPHASIS: Final = re.compile(r"\*\*|__|`")
_SENTENCE_END: Final = re.compile(
    r"(?:[.!?][\"')\]]{0,3}(?=[ \t]+(?![a-z])|$)|[。\uff01\uff1f\uff1b]|\n)[ \t]*", re.MULTILINE
)

_WORD: Final = re.compile(r"[a-z]{3,}|\d+|[\u4e00-\u9fff]")
_STOP_WORDS: Final = frozenset(
    {
        *("the", "and", "are", "was", "were", "does", "did", "has", "have", "this", "that", "there", "with", "than"),
        *("for", "from", "its", "can", "could", "would", "will", "what", "which", "how"),
    }
)


class CharSpan(NamedTuple):
    """A part of a text."""

    start: int  # first character
    end: int  # character after the last


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer found in a response, or the reason why there is none."""

    value: str | None  # letter of an option, or the answer as the response writes it; None when there is none
    rule: str  # name of the rule that found it, or of the one that ended the search
    start: int  # first character of the answer in the response
    end: int  # character after the answer
    no_answer_reason: NoAnswerReason = ""  # reason for a missing answer; empty when there is one
    number: float | None = None  # value of a number
    # Boxes or points of an answer with coordinates, in the response's coordinate system.
    regions: tuple[Region, ...] = ()


def answer_span(response: str) -> CharSpan | None:
    """Return the part of a response that answers; None where thinking was opened and never closed."""
    # Text after a stop token is not part of the answer.
    end = len(response)
    for token in _STOP_TOKENS:
        stop = response.find(token, 0, end)
        end = stop if stop >= 0 else end
    start = 0
    was_opened = was_closed = False
    for opening_tag, closing_tag in _THINKING_TAGS:
        was_opened |= response.find(opening_tag, 0, end) >= 0
        closing = response.rfind(closing_tag, 0, end)
        if closing >= 0:
            was_closed = True
            start = max(start, closing + len(closing_tag))
    if was_opened and not was_closed:
        return None
    # Some models repeat the prompt first, or invent the next turn.
    return _first_turn(response, start, end)


def to_plain_text(text: str) -> str:
    """Return a text of the same length with ASCII in place of fullwidth and typographic signs, and emphasis blank."""
    if not text.isascii():
        text = text.translate(_ASCII_EQUIVALENTS)
    if "*" in text or "`" in text or "__" in text:
        text = _EMPHASIS.sub(lambda match: " " * len(match[0]), text)
    return text


def last_boxed_span(text: str) -> CharSpan | None:
    r"""Return the content of the last \boxed{..} or \fbox{..} whose braces balance."""
    position = len(text)
    for _ in range(_MAX_BOXES):
        position = max(text.rfind("\\boxed{", 0, position), text.rfind("\\fbox{", 0, position))
        if position < 0:
            return None
        start = text.index("{", position) + 1
        depth = 1
        for brace in _BRACES.finditer(text, start, start + _MAX_BOXED_CHARS):
            # An escaped brace matches, too, and is not counted.
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return CharSpan(start, brace.start())
    return None


def first_answer_tag(text: str) -> str | None:
    """Return the content of the first <answer>..</answer>."""
    start = text.find("<answer>")
    end = text.find("</answer>", start) if start >= 0 else -1
    return text[start + len("<answer>") : end] if end >= 0 else None


def last_answer_tag_span(text: str) -> CharSpan | None:
    """Return the content of the last <answer>..</answer> or similar tags; to the end where they are never closed."""
    openings = list(_ANSWER_TAG.finditer(text)) if "<" in text else []
    if not openings:
        return None
    opening = openings[-1]
    closing_tag = f"</{opening[1]}>" if opening[1] else "<|end_of_box|>"
    end = text.find(closing_tag, opening.end())
    # A response that was cut off never closes them.
    return CharSpan(opening.end(), end if end >= 0 else len(text))


def iter_sentences_backwards(text: str) -> Iterator[CharSpan]:
    """Yield sentences and lines that are not blank, the last first."""
    cuts = [0, *map(re.Match.end, _SENTENCE_END.finditer(text)), len(text)]
    for start, end in zip(cuts[-2::-1], cuts[:0:-1], strict=True):
        if text[start:end].strip():
            yield CharSpan(start, end)


@lru_cache(maxsize=4096)  # every sentence is compared with one question
def content_words(text: str) -> frozenset[str]:
    """Return the words and numbers of a text in lower case, without words such as "the" and "what"."""
    return frozenset(_WORD.findall(text.lower())) - _STOP_WORDS


def sentence_start(text: str, position: int) -> int:
    """Return the start of the sentence that a position is in, searching a bounded way back."""
    # Bounded, so that a text without full stops takes linear time.
    boundary = position - _MAX_SENTENCE_CHARS
    for mark in ("\n", ". ", "。"):
        boundary = max(boundary, text.rfind(mark, 0, position))
    return boundary + 1


def sentence_end(text: str, position: int) -> int:
    """Return the end of the sentence that begins at a position or after blank lines, searching a bounded way on."""
    while position < len(text) and text[position] in " \t\r\n:":
        position += 1
    end = min(len(text), position + _MAX_SENTENCE_CHARS)
    for mark in ("\n", ". ", "。"):
        boundary = text.find(mark, position, end)
        end = boundary if boundary >= 0 else end
    return end


def _first_turn(response: str, start: int, end: int) -> CharSpan:
    """Return the part before the first turn that the model invents, without a repetition of the prompt at its start."""
    # Plain searches for words first: the pattern is much slower, and most responses have none of them.
    may_have_turn = "##" in response or any(word in response for word in _PROMPT_LABELS)
    turn = _INVENTED_TURN.search(response, start, end) if may_have_turn else None
    if turn is None:
        return CharSpan(start, end)
    if response[start : turn.start()].strip():
        return CharSpan(start, turn.start())
    reply = _REPLY_LABEL.search(response, turn.end(), end)
    if reply is None:
        return CharSpan(turn.end(), end)
    next_turn = _INVENTED_TURN.search(response, reply.end(), end)
    return CharSpan(reply.start(), next_turn.start() if next_turn else end)
