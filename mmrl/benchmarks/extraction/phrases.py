"""Words that announce an answer, conclude, decline or hedge, in English and Chinese."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from mmrl.benchmarks.extraction.text import sentence_start


def _any(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


_BE: Final = _any(
    *("is", "are", "was", "were", "equals", "becomes", "has to be"),
    "(?:would|will|should|must|could|can|might|may) be",
)
_ANSWER: Final = r"(?<!other )(?<!one )(?<!each )(?<!every )" + _any(
    "answers?", "option", "choice", "solution", "conclusion", "final (?:value|result|list)", "guess"
)
_SORT: Final = _any("letter", "option", "choice", "answer", "value", "number", "response")
_OF: Final = _any("to", "for", "of", "that", "which", "from", "among", "here", "in", "based", "on", "given")

ANNOUNCED: Final = re.compile(
    r"(?=[acfgilorsw#答结故应选因所正])"  # what one of these begins with: it saves a third of the time
    + _any(
        rf"\b{_ANSWER}(?:\s+{_SORT})*(?:[ \t]+{_OF}\b[^.:=\n]{{0,120}}?)?\s*(?:,[^,.\n]{{0,60}},\s*)?"
        rf"\b{_BE}\b(?!\s+(?:not|option\s+not)\b)(?:\s+that\b)?(?:\s*[:=])?",
        r"\b(?:answer|letter|correct (?:option|choice)(?: letter)?|final (?:value|list))s?[\"']?\s*[:=]",
        r"\bans\b\s*[:.=]|\banswer's\b",
        r"\b(?:(?:final|correct) (?:answer|result)|(?<=[\n#])answer|(?<=# )answer)[ \t]*$",
        r"(?<![^\n])(?:result|output)[ \t]*:",
        r"\b(?:actually|wait)\b[,:]?\s*(?:actually,?\s*)?\b(?:it|this|that)"
        r"(?:'s\b|\s+(?:is|should be|must be|would be)\b)",
        r"\banswer\s*(?:-|->|=>|→)\s",
        r"\b(?:I|we)(?:\s+would|\s+will|\s+can|'d|'ll)?\s+(?:choose|select|pick|go with|guess)\b",
        r"\b(?:I|we)(?:\s+can)?\s+conclude that(?: the answer is)?\b",
        r"####",
        r"(?:答案|结果)(?:选项)?(?:应该|应|就)?(?:是|为|选(?!项)|:|\])",
        r"正确的是|(?<![\u4e00-\u9fff])答:",
        r"故选|应该选|选择|(?:应|因此|所以)选(?!项)|选项(?:应该)?(?:是|为|:)",
    ),
    re.IGNORECASE | re.MULTILINE,
)
"""An answer follows."""

_STEMS: Final = (
    *("answer", "option", "choice", "solution", "conclusion", "final ", "choose", "select", "pick", "go with", "guess"),
    *("conclude", "####", "letter", "ans:", "ans.", "ans ", "actually", "wait", "result", "output"),
    *("答", "结果", "选", "正确"),
)
"""One of these is in every announcement."""

_NEAR: Final = 40  # characters
_MOST: Final = 60
"""Announcements at the end of a response that are looked at: nobody needs more."""
DENIED: Final = re.compile(
    r"\b(?:not|incorrect|wrong)\s+(?:the\s+)?(?:correct\s+)?$|n't\s+(?:the\s+)?(?:correct\s+)?$", re.I
)
"""What comes before the announcement of an answer that is none."""

DISMISSED: Final = re.compile(r"\b(?:eliminat|ruled? out|ruling out|exclud|reject|discard)[^.\n]*$", re.IGNORECASE)
"""What comes before letters that are no answer."""

JUDGEMENTS: Final = ("correct", "right", "best", "accurate", "appropriate", "likely", "closest")
"""What a letter is said to be."""

JUDGED: Final = re.compile(
    r"(?:\boption|\bchoice|\banswer)?\s*(?:\(([A-Za-z])\)|\b([A-Z])\b[).]?)(?:[^.\n]{0,80}?)"
    r"\s+(?:is|would be|seems|appears to be)\s+(?:likely\s+|probably\s+)?(?:the\s+)?(?:most\s+)?"
    rf"{_any(*JUDGEMENTS)}\b"
)
"""A letter that is said to be right."""

NAMED: Final = re.compile(r"(?:\(([A-Za-z])\)|\b([A-Z])\b[).]?)\s+(?:is|would be)\s+the\s+(?:answer|solution)\b")
"""A letter that is said to be the answer."""

_ALTERNATIVE: Final = re.compile(r"\b(?:otherwise|else|if not)\b", re.IGNORECASE)
"""What an answer in one of two cases is told apart by."""

_MIGHT: Final = re.compile(r"\b(?:would|could|might|may) be\b", re.IGNORECASE)

CONDITION: Final = re.compile(r"\b(?:if|assuming|suppose|unless)\b", re.IGNORECASE)
"""What makes an announcement hold only in some case."""

SO: Final = _any(
    *("therefore", "thus", "hence", "so", "consequently", "in conclusion", "accordingly"),
    *("as a result", "finally", "overall"),
)
CONCLUDES: Final = re.compile(
    rf"\s*(?:(?:and\s+|so\s+|but\s+)?(?:{SO}|in (?:general|short|summary|total)|all in all|to sum up)\b"
    r"|based on\b|因此|所以|故|综上|于是)",
    re.IGNORECASE,
)
_SO_THEN: Final = re.compile(rf"[,;] (?:and )?{SO}\b", re.IGNORECASE)
PLANS: Final = re.compile(
    r"\s*(?:to (?:find|determine|calculate|solve|answer|get|compute)\b|first\b|let's\b|we (?:need|have|know)\b)",
    re.IGNORECASE,
)
"""How a sentence that only sets out begins."""

_CANNOT: Final = _any(
    *("can\\s?not", "can't", "could not", "couldn't", "unable to", "not able to", "no way to"),
    *(r"(?:not|n't) possible(?: for \w+)? to", r"impossible(?: for \w+)? to", "difficult to", "hard to"),
    *("(?:not|n't) clear", "unclear"),
)
_KNOW: Final = _any(
    *("determine", "answer", "provide", "identify", "tell", "say", "calculate", "find", "solve", "know", "see", "view"),
    *("choose", "select", "pick", "access", "read", "open", "process", "analy[sz]e", "display"),
    *("give", "accurately", "make", "help", "confirm", "conclude", "estimate", "compute", "deduce", "infer", "assist"),
    "be (?:determined|answered|calculated|found|solved|concluded|identified|inferred)",
    *("which", "what", "whether", "how", "from", "if"),
)
_OFFERED: Final = r"the (?!(?:other|remaining)\b)(?:\w+ ){0,2}?(?:options|choices|answers|alternatives)"
_DATA: Final = _any("information", "context", "details?", "data", "image", "picture", "figure", "graph", "table")
REFUSED: Final = re.compile(
    r"(?=[acdhinprsuw无不没抱需选])(?:\b"
    + _any(
        rf"{_CANNOT}\s+(?:\w+\s+){{0,3}}?{_KNOW}\b",
        r"(?:do|does|did)(?: not|n't) (?:have (?:enough|sufficient|access|any)|contain (?:enough|any)|specify)\b",
        rf"\b(?:do|does|did)(?: not|n't) (?:know|provide|have the {_DATA}|include (?:any|enough|information))\b",
        r"(?:have|has|having|with) no (?:\w+ )?(?:access|way)\b",
        rf"(?:needs?|require|without) (?:more|additional|further|any|the) (?:\w+ ){{0,3}}?{_DATA}\b",
        r"(?:not enough|insufficient|no) (?:\w+ ){0,2}?(?:information|context|data|details?)\b",
        r"please (?:provide|clarify|specify|share|upload)",
        r"(?:not|n't) (?:provided|given|specified|visible|mentioned|available|shown|included)\b",
        r"sorry\b|unfortunately\b|as an AI\b|as a (?:text-based|language)",
        rf"(?:not|n't) (?:among|in|one of|any of|listed (?:among|in)) {_OFFERED}\b",
        rf"(?:none|neither) of {_OFFERED}\b",
    )
    + "|无法|不能确定|没有提供|抱歉|需要更多|没有足够|选项中没有|不在选项)",
    re.IGNORECASE,
)
"""What declines to answer."""

RESUMES: Final = re.compile(
    rf"(?:(?<=[.!?\n;,])|^)\s*(?:{SO}\b|(?:however|but|still|nevertheless|based on|from the)\b|因此|所以|但)",
    re.IGNORECASE,
)
"""What goes on to answer after declining to."""

NEGATION: Final = re.compile(
    r"\b(?:not|no|never|cannot|neither|nor|none|unlikely|impossible)\b|n't\b|不|没有", re.IGNORECASE
)
"""What turns a statement round."""

FALSE: Final = re.compile(r"\b(?:is|are|was) (?:false|incorrect|untrue)\b", re.IGNORECASE)
"""What turns the statement round that it is said of."""

OPPOSITES: Final = tuple(
    (re.compile(rf"\b(?:{one})\b", re.IGNORECASE), re.compile(rf"\b(?:{other})\b", re.IGNORECASE))
    for one, other in (
        ("more|greater|larger|bigger|higher|longer|taller|above|exceeds?", "less|fewer|smaller|lower|shorter|below"),
        ("maximum|highest|largest|most|greatest|biggest", "minimum|lowest|smallest|least|fewest"),
        ("more|greater|larger|bigger|higher|less|fewer|smaller|lower", "equal|same"),
        ("older|oldest", "younger|youngest"),
        ("smooth|smoothest|smoother", "rough|roughest|rougher"),
        ("same|equal|identical|similar", "different|unequal|differs?"),
        ("before", "after"),
        ("left", "right"),
        ("increas(?:e|es|ed|ing)", "decreas(?:e|es|ed|ing)"),
        ("odd", "even"),
        ("full", "empty"),
        ("open", "closed|shut"),
        ("wider|widest", "narrower|narrowest"),
        ("thicker|thickest", "thinner|thinnest"),
        ("faster|fastest", "slower|slowest"),
        ("true|correct", "false|incorrect"),
    )
)
"""Words of which one in the question and the other in a statement turn it round."""


def announcements(text: str) -> Iterator[int]:
    """Where announced answers begin, the last first; not those denied, or that hold only if something is known.

    What the answer would be if things were otherwise comes after all others.
    """
    if not _may_announce(text):
        return
    supposed = []
    undecided: bool | None = None
    for match in [*ANNOUNCED.finditer(text)][: -_MOST - 1 : -1]:
        opening = text[sentence_start(text, match.start()) : match.start()]
        case = CONDITION.search(opening)
        if case and undecided is None:
            undecided = bool(REFUSED.search(text) or _ALTERNATIVE.search(text))
        if DENIED.search(opening[-_NEAR:]) or _ALTERNATIVE.search(opening) or (case and undecided):
            continue
        if case and _MIGHT.search(match[0]):
            supposed.append(match.end())
        else:
            yield match.end()
    yield from supposed


@lru_cache(maxsize=8)
def _may_announce(text: str) -> bool:
    """Whether a word of an announcement is there: looking for these first halves the time of all rules together."""
    lower = text.lower()
    return any(stem in lower for stem in _STEMS)


def declined(text: str) -> tuple[int, int] | None:
    """Where a text declines to answer, the last time; None where it does not."""
    found = [*REFUSED.finditer(text)]
    return found[-1].span() if found else None


def concludes(text: str, start: int, end: int) -> bool:
    """Whether a sentence concludes: "so", "therefore" and their like begin it, or follow a comma in it."""
    return bool(CONCLUDES.match(text, start, end) or _SO_THEN.search(text, start, end))
