"""Phrases of responses, in English and Chinese: announcements of an answer, conclusions, refusals, negations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from mmrl.answer.language import CHOICE_NOUNS, CHOICE_VERBS, CONCLUSIONS
from mmrl.benchmarks.extraction.text import (
    CharSpan,
    last_answer_tag_span,
    last_boxed_span,
    sentence_end,
    sentence_start,
)


def _any_of(*patterns: str) -> str:
    return f"(?:{'|'.join(patterns)})"


_BE_VERB: Final = _any_of(
    *("is", "are", "was", "were", "equals", "becomes", "has to be"), "(?:would|will|should|must|could|can|might|may) be"
)
# "The other answer is" announces nothing.
_ANSWER_NOUN: Final = r"(?<!other )(?<!one )(?<!each )(?<!every )" + _any_of(
    "answers?", "option", "choice", "solution", "conclusion", "final (?:value|result|list)", "guess"
)
_ANSWER_QUALIFIER: Final = _any_of(CHOICE_NOUNS, "letter", "value", "number", "response")
_PREPOSITION: Final = _any_of("to", "for", "of", "that", "which", "from", "among", "here", "in", "based", "on", "given")

# Phrases that an answer follows.
ANSWER_PHRASE: Final = re.compile(
    # First characters of the alternatives: looking for one of them first saves a third of the time.
    r"(?=[acfgilorsw#答结故应选因所正])"
    + _any_of(
        rf"\b{_ANSWER_NOUN}(?:\s+{_ANSWER_QUALIFIER})*(?:[ \t]+{_PREPOSITION}\b[^.:=\n]{{0,120}}?)?\s*"
        r"(?:,[^,.\n]{0,60},\s*)?"
        rf"\b{_BE_VERB}\b(?!\s+(?:not|option\s+not)\b)(?:\s+that\b)?(?:\s*[:=])?",
        r"\b(?:answer|letter|correct (?:option|choice)(?: letter)?|final (?:value|list))s?[\"']?\s*[:=]",
        r"\bans\b\s*[:.=]|\banswer's\b",
        r"\b(?:(?:final|correct) (?:answer|result)|(?<=[\n#])answer|(?<=# )answer)[ \t]*$",
        r"(?<![^\n])(?:result|output)[ \t]*:",
        r"\b(?:actually|wait)\b[,:]?\s*(?:actually,?\s*)?\b(?:it|this|that)"
        r"(?:'s\b|\s+(?:is|should be|must be|would be)\b)",
        r"\banswer\s*(?:-|->|=>|→)\s",
        rf"\b(?:I|we)(?:\s+would|\s+will|\s+can|'d|'ll)?\s+(?:{CHOICE_VERBS}|guess)\b",
        r"\b(?:I|we)(?:\s+can)?\s+conclude that(?: the answer is)?\b",
        r"####",
        r"(?:答案|结果)(?:选项)?(?:应该|应|就)?(?:是|为|选(?!项)|:|\])",
        r"正确的是|(?<![\u4e00-\u9fff])答:",
        r"故选|应该选|选择|(?:应|因此|所以)选(?!项)|选项(?:应该)?(?:是|为|:)",
    ),
    re.IGNORECASE | re.MULTILINE,
)

# Every announcement contains one of these, in lower case.
_ANSWER_PHRASE_STEMS: Final = (
    *(*CHOICE_NOUNS.split("|"), *CHOICE_VERBS.split("|"), "guess", "solution", "conclusion", "final "),
    *("conclude", "####", "letter", "ans:", "ans.", "ans ", "actually", "wait", "result", "output"),
    *("答", "结果", "选", "正确"),
)

_NEGATION_WINDOW: Final = 40  # characters before an announcement in which a negation denies it
_MAX_PHRASES: Final = 60  # announcements at the end of a response that are looked at
# Words before an announcement that deny it, as in "this is not the answer".
NEGATED_BEFORE: Final = re.compile(
    r"\b(?:not|incorrect|wrong)\s+(?:the\s+)?(?:correct\s+)?$|n't\s+(?:the\s+)?(?:correct\s+)?$", re.I
)

# Words before a letter that exclude it.
ELIMINATED_BEFORE: Final = re.compile(
    r"\b(?:eliminat|ruled? out|ruling out|exclud|reject|discard)[^.\n]*$", re.IGNORECASE
)

# Words that call a letter the answer; `LETTER_IS_CORRECT` contains one of these.
CORRECTNESS_WORDS: Final = ("correct", "right", "best", "accurate", "appropriate", "likely", "closest")

# A letter that is called correct; group 1 or 2 is the letter.
LETTER_IS_CORRECT: Final = re.compile(
    r"(?:\boption|\bchoice|\banswer)?\s*(?:\(([A-Za-z])\)|\b([A-Z])\b[).]?)(?:[^.\n]{0,80}?)"
    r"\s+(?:is|would be|seems|appears to be)\s+(?:likely\s+|probably\s+)?(?:the\s+)?(?:most\s+)?"
    rf"{_any_of(*CORRECTNESS_WORDS)}\b"
)

# A letter that is called the answer; group 1 or 2 is the letter.
LETTER_IS_ANSWER: Final = re.compile(
    r"(?:\(([A-Za-z])\)|\b([A-Z])\b[).]?)\s+(?:is|would be)\s+the\s+(?:answer|solution)\b"
)

# Words that separate one of two cases from the other.
_ALTERNATIVE: Final = re.compile(r"\b(?:otherwise|else|if not)\b", re.IGNORECASE)

# Verbs that announce an answer only in an imagined case.
_MODAL_BE: Final = re.compile(r"\b(?:would|could|might|may) be\b", re.IGNORECASE)

# Words that make an announcement hold in one case only.
CONDITIONAL: Final = re.compile(r"\b(?:if|assuming|suppose|unless)\b", re.IGNORECASE)

CONCLUSION_WORD: Final = _any_of(
    *(CONCLUSIONS, "consequently", "in conclusion", "accordingly", "as a result", "finally", "overall")
)
CONCLUSION_START: Final = re.compile(
    rf"\s*(?:(?:and\s+|so\s+|but\s+)?(?:{CONCLUSION_WORD}|in (?:general|short|summary|total)|all in all|to sum up)\b"
    r"|based on\b|因此|所以|故|综上|于是)",
    re.IGNORECASE,
)
_CONCLUSION_AFTER_COMMA: Final = re.compile(rf"[,;] (?:and )?{CONCLUSION_WORD}\b", re.IGNORECASE)
# Beginnings of sentences that only say what will be done.
PLAN_START: Final = re.compile(
    r"\s*(?:to (?:find|determine|calculate|solve|answer|get|compute)\b|first\b|let's\b|we (?:need|have|know)\b)",
    re.IGNORECASE,
)

_CANNOT: Final = _any_of(
    *("can\\s?not", "can't", "could not", "couldn't", "unable to", "not able to", "no way to"),
    *(r"(?:not|n't) possible(?: for \w+)? to", r"impossible(?: for \w+)? to", "difficult to", "hard to"),
    *("(?:not|n't) clear", "unclear"),
)
_ANSWER_VERB: Final = _any_of(
    *("determine", "answer", "provide", "identify", "tell", "say", "calculate", "find", "solve", "know", "see", "view"),
    *("choose", "select", "pick", "access", "read", "open", "process", "analy[sz]e", "display"),
    *("give", "accurately", "make", "help", "confirm", "conclude", "estimate", "compute", "deduce", "infer", "assist"),
    "be (?:determined|answered|calculated|found|solved|concluded|identified|inferred)",
    *("which", "what", "whether", "how", "from", "if"),
)
_GIVEN_OPTIONS: Final = r"the (?!(?:other|remaining)\b)(?:\w+ ){0,2}?(?:options|choices|answers|alternatives)"
_INFORMATION_NOUN: Final = _any_of(
    "information", "context", "details?", "data", "image", "picture", "figure", "graph", "table"
)
REFUSAL: Final = re.compile(
    # First characters of the alternatives, as above.
    r"(?=[acdhinprsuw无不没抱需选])(?:\b"
    + _any_of(
        rf"{_CANNOT}\s+(?:\w+\s+){{0,3}}?{_ANSWER_VERB}\b",
        r"(?:do|does|did)(?: not|n't) (?:have (?:enough|sufficient|access|any)|contain (?:enough|any)|specify)\b",
        rf"\b(?:do|does|did)(?: not|n't) (?:know|provide|have the {_INFORMATION_NOUN}"
        r"|include (?:any|enough|information))\b",
        r"(?:have|has|having|with) no (?:\w+ )?(?:access|way)\b",
        rf"(?:needs?|require|without) (?:more|additional|further|any|the) (?:\w+ ){{0,3}}?{_INFORMATION_NOUN}\b",
        r"(?:not enough|insufficient|no) (?:\w+ ){0,2}?(?:information|context|data|details?)\b",
        r"please (?:provide|clarify|specify|share|upload)",
        r"(?:not|n't) (?:provided|given|specified|visible|mentioned|available|shown|included)\b",
        r"sorry\b|unfortunately\b|as an AI\b|as a (?:text-based|language)",
        rf"(?:not|n't) (?:among|in|one of|any of|listed (?:among|in)) {_GIVEN_OPTIONS}\b",
        rf"(?:none|neither) of {_GIVEN_OPTIONS}\b",
    )
    + "|无法|不能确定|没有提供|抱歉|需要更多|没有足够|选项中没有|不在选项)",
    re.IGNORECASE,
)

# Words with which a response continues to answer after it declined to.
RESUMPTION: Final = re.compile(
    rf"(?:(?<=[.!?\n;,])|^)\s*+(?:{CONCLUSION_WORD}\b"
    r"|(?:however|but|still|nevertheless|based on|from the)\b|因此|所以|但)",
    re.IGNORECASE,
)

NEGATION: Final = re.compile(
    r"\b(?:not|no|never|cannot|neither|nor|none|unlikely|impossible)\b|n't\b|不|没有", re.IGNORECASE
)

DECLARED_FALSE: Final = re.compile(r"\b(?:is|are|was) (?:false|incorrect|untrue)\b", re.IGNORECASE)

# Pairs of opposites; one in the question and the other in a statement negate it.
OPPOSITES: Final = tuple(
    (re.compile(rf"\b(?:{words})\b", re.IGNORECASE), re.compile(rf"\b(?:{opposites})\b", re.IGNORECASE))
    for words, opposites in (
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


def find_answer_phrases(text: str) -> Iterator[int]:
    """Yield the places after phrases that announce an answer, the last first."""
    if not _may_have_answer_phrase(text):
        return
    imagined = []
    has_several_cases: bool | None = None
    for match in list(ANSWER_PHRASE.finditer(text))[: -_MAX_PHRASES - 1 : -1]:
        opening = text[sentence_start(text, match.start()) : match.start()]
        is_conditional = CONDITIONAL.search(opening) is not None
        if is_conditional and has_several_cases is None:
            # Searched at most once, since it takes the time of the whole text.
            has_several_cases = bool(REFUSAL.search(text) or _ALTERNATIVE.search(text))
        if NEGATED_BEFORE.search(opening[-_NEGATION_WINDOW:]) or _ALTERNATIVE.search(opening):
            continue
        # What holds in one of several cases is not an answer. What would hold in an imagined case, as in "if it were
        # empty, the answer would be", comes after all others.
        if is_conditional and has_several_cases:
            continue
        if is_conditional and _MODAL_BE.search(match[0]):
            imagined.append(match.end())
        else:
            yield match.end()
    yield from imagined


def find_explicit_span(text: str) -> CharSpan | None:
    """Return the content of the last box or answer tags, else the sentence that the last announcement begins."""
    # Only the last announcement: a response may weigh several answers before.
    position = next(find_answer_phrases(text), None)
    announced = None if position is None else CharSpan(position, sentence_end(text, position))
    return last_boxed_span(text) or last_answer_tag_span(text) or announced


def find_refusal(text: str) -> tuple[int, int] | None:
    """Return the place where a text last declines to answer, or None."""
    matches = list(REFUSAL.finditer(text))
    return matches[-1].span() if matches else None


def is_conclusion(text: str, start: int, end: int) -> bool:
    """Return True for a sentence that begins with "so", "therefore" or the like, or has it after a comma."""
    return bool(CONCLUSION_START.match(text, start, end) or _CONCLUSION_AFTER_COMMA.search(text, start, end))


@lru_cache(maxsize=8)
def _may_have_answer_phrase(text: str) -> bool:
    """Return True when a word of an announcement is in the text; several rules ask about the same text."""
    # Looking for these words first halves the time of all rules together.
    lower = text.lower()
    return any(stem in lower for stem in _ANSWER_PHRASE_STEMS)
