r"""The grammar of an answer that names one option of a multiple-choice question, in words or by its letter.

Names are marked first: (B) stands for the letter B, however it is written, and {B} for the text of option B. The
grammar of the marked answer, ignoring case, is:

    answer    = clause {("." | ";" | "!" | "," | "but" | "so" | "because" | "rather than" | ..) clause}
    name      = ["option"] (B) | [article] {B} | ["option"] (B) {B} | {B} (B)
    subject   = ["the" | "my" | ..] {"correct" | "final" | ..} ("answer" | "option" | "choice" | ..)
    statement = name
              | subject ["is" | ":" | ..] name
              | name ("is" | "must be" | "seems" | ..) ["the"] {"correct" | ..} ["answer" | "option" | ..]
              | ("I" | "we" | "let's") ("choose" | "pick" | ..) name
              | ["it" | "that" | "this"] ("is" | "must be" | .. | "leaves") name
    denial    = ["it" | subject] ("is not" | "cannot be" | "neither" | "rather than" | ..) name {("or" | "nor") name}
              | name {("and" | "or" | ..) name} words with "not", "wrong", "ruled out" ..

The answer names an option if its statements name this one only, and no denial does. Other clauses may name others only
after "because" and the like or, without a word of doubt, beside a statement of the second, third or fourth form.
So "A or B", "probably B", "all of the above", "B. No, wait" and "(A) dog", where A is a cat, name none. After "wait",
"no" or "actually" at the start of a clause, only what follows counts. An option's text beside words of the question,
as in "The animal is a dog" and "3 cars", is a name. Spaces do not count in a text, and a number in words is its digits.
A few words after a letter that are not of its option's text contradict it, as in "The answer is B. purple dog".
`chinese.py` puts an answer in Chinese into the words of this grammar first.

A letter is ASCII and stands alone. Lower-case letters and I count only where a name must follow, and the A of "A dog"
is an article. The rewards read no answer of more than 1000 characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from string import ascii_uppercase
from typing import Final

from mmrl_rewards.chinese import to_english
from mmrl_rewards.number_words import split_number

# Anything else, after a letter, is taken for the text of an option.
_SENTENCE: Final = re.compile(
    r"(?:i|we|it|they|he|she|this|that|there)(?!\w)|(?:\S+ ){3}\S|(?:ok|done|thanks|thank you)$", re.IGNORECASE
)
_LISTED_OPTION: Final = re.compile(r"^[ \t]*\(?([A-Z])[.):][ \t]+(\S.*)$", re.MULTILINE)
_MARKUP: Final = re.compile(
    r"\\(?:boxed|text|textbf|mathrm|mathbf)\{([^{}]*)\}|\*\*([^*]*)\*\*|__([^_]*)__"
    r"|\*([^*]+)\*|`([^`]*)`|(?<!\\)\$([^$]*)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|^#+ (.*)"
)
_FRACTION: Final = re.compile(r"\\[dt]?frac\{(\w+)\}\{(\w+)\}")
_DEGREE: Final = re.compile(r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ\b)")
_EXPONENT: Final = re.compile(r"(?<=\^)\{([+-]?\w+)\}")
_LATEX_SPACE: Final = re.compile(r"\\[,;: ]|(?<=\w)~|\\(?=[$%])")
_STRAIGHT: Final = str.maketrans(
    "\u2018\u2019\u3002\uff0c\uff1a\uff1b\uff01\uff1f\uff08\uff09\u2212\uff0e", "''.,:;!?()-."
)
_QUOTE: Final = re.compile(r"[\"\u201c\u201d]|(?<!\w)'|'(?!\w)")
_LETTER: Final = re.compile(r"[(\[]?([A-Za-z])[)\]]?[.:!,]?")
_UNLISTED: Final = re.compile(r"^[(\[]?[A-Za-z][)\].:](?= (?!(?:is|are|was|and|or|nor|can\w*|isn't)\b)\w)")
_ARTICLE: Final = re.compile(r"^(?:an?|the) ")

_LETTER_IN_TEXT: Final = re.compile(
    r"[(\[]([A-Za-z])[)\]]|(?<![\w'{])([A-Za-z])\)|(?<![\w'{])([B-HJ-Z])(?![\w'])"
    # Lower-case letters, and I, where a name has to be.
    r"|^([a-z])(?=[.:] )"
    r"|(?:(?<= is )|(?<= be )|(?<=: )|(?<= or )|(?<= nor ))([a-zI])(?=[ .,;!]*(?:$|[.,;] | (?:and|or|nor) ))"
    r"|(?<=\b(?:option|choice|answer|letter|choose|select) )([a-zI])(?![\w'])"
    # An A before a word is an article, unless the word belongs to a statement.
    r"|(?<![\w'{])(A)(?![\w'])(?! (?!(?:is|was|are|and|or|nor|but|not|because|since|as|must|can|cannot|could|would"
    r"|should|may|might|does|has|rather|instead|so)\b)[a-z])"
)
# "(A) {A}" is one name, and "(A) {B}" a contradiction. "(A). {B} is wrong" is two clauses.
_BETWEEN: Final = "[ .:,(=\u2013\u2014-]*(?:(?:an?|the) )?"
_SAME_NAME: Final = re.compile(
    rf"(?:\(([A-Z])\){_BETWEEN}\{{\1\}}\)?|(?:(?:an?|the) )?\{{([A-Z])\}} \(\2\))"
    r"(?= *(?:[.,;:!)]|$)| (?:is|was|must|would|should|can|cannot|because|since|as|so|but|and|or|rather)\b)",
    re.IGNORECASE,
)
_OTHER_NAME: Final = re.compile(
    rf"\([A-Z]\){_BETWEEN}\{{[A-Z]\}}\)?(?= *(?:[.,;!)]|$))|\{{[A-Z]\}} \([A-Z]\)", re.IGNORECASE
)
_ARTICLE_AT_START: Final = re.compile(r"(?:^|(?<=[.:;)] ))A (?=\{[A-Z]\})")
_COLON: Final = re.compile(r"(?<=is|er|on|ce):(?= )", re.IGNORECASE)  # after "is", "answer", "option", "choice"
# "The animal is a dog" and "There are 3 cars" name an option if their other words are from the question.
_DESCRIPTION: Final = re.compile(
    r"((?:[a-z'-]+ )*?)(?:(?:is|are|was|were) )?(?:(?:an?|the) )?(\{[A-Z]\})((?: [a-z'-]+)*)[.!]?", re.IGNORECASE
)
_COMMON_WORDS: Final = frozenset(
    {"the", "a", "an", "this", "there", "answer", "number", "total", "of", "in", "image", "picture"}
    | {"i", "see", "shows", "depicts"}
)
_MARKED: Final = re.compile(r"[({]([A-Z])[)}]")

_LABEL: Final = r"\([A-Z]\)"
_TEXT: Final = r"(?:(?:an?|the) )?\{[A-Z]\}"
_NAME: Final = rf"(?:(?:the )?(?:option|choice|answer|letter)s? )?(?:{_LABEL}|{_TEXT})"
_NAMES: Final = rf"(?:both |either |all of )?{_NAME}(?:(?: ?[/&,] ?| and | or | nor |, (?:and|or|nor) ){_NAME})*"
_ADJECTIVE: Final = (
    r"(?:only|single|final|correct|right|best|true|proper|valid|appropriate"
    r"|most (?:likely|appropriate|accurate|suitable))"
)
_SUBJECT: Final = (
    rf"(?:(?:the|my|our) )?(?:{_ADJECTIVE} )*(?:answer|ans|option|choice|solution|letter|response|one)"
    r"(?: (?:to|for|of) (?:the|this) (?:question|image|picture))?"
)
_BE: Final = r"(?:is|was|(?:would|should|must|has to|will|can only) be|(?:seems|looks|appears)(?: like| to be)?)"
_ADVERB: Final = r"(?:(?:clearly|definitely|certainly|undoubtedly|indeed|obviously|therefore|thus|simply|surely|then) )"
_CHOOSE: Final = r"(?:choose|chose|pick|picked|select|selected|(?:go|going|went) with|say|answer|take|(?:opt|vote) for)"
_LEAD: Final = (
    rf"(?:{_ADVERB}|so |and |only |hence |yes |finally |this means (?:that )?"
    r"|(?:(?:i|we) (?:conclude|know)|(?:i am|i'm) (?:sure|certain)|it (?:seems|appears)) (?:that )?"
    r"|(?P<thinks>(?:i|we) (?:think|believe) (?:that )?))*"
)
_STATEMENTS: Final = tuple(
    re.compile(_LEAD + pattern, re.IGNORECASE)
    for pattern in (
        rf"(?P<firm>{_SUBJECT})(?: ?(?:{_BE}|[:=]|-+>?))* ?{_ADVERB}*(?P<name>{_NAME})",
        rf"(?P<name>{_NAME}) (?P<firm>{_BE}) ?{_ADVERB}*(?:(?:the|my) )?(?:{_ADJECTIVE} ?)*"
        r"(?:answer|option|choice|one)?",
        rf"(?P<firm>(?:(?:(?:i|we)(?:'d| would|'ll| will| must|'m| am|'re| are)?|let's) )?{_CHOOSE}) (?P<name>{_NAME})",
        rf"(?:(?:it|that|this)(?:'s| {_BE})|{_BE}|(?:(?:that|which|this) )?leav(?:es|ing)(?: only)?) {_ADVERB}*"
        rf"(?P<name>{_NAME})",
        rf"(?P<name>{_NAME})",
    )
)
_NOT: Final = r"(?:not|n't|never|cannot)"
_DENIALS: Final = tuple(
    re.compile(_LEAD + pattern, re.IGNORECASE)
    for pattern in (
        rf"(?:(?:{_SUBJECT}|(?:it|that|this)(?:'s)?|i|we) ?)?"
        rf"(?:(?:is|was|ca|can|could|must|should|would|will|wo|do|does|did)? ?{_NOT}"
        r"|(?:is )?(?:neither|none of)|rul(?:e|es|ed|ing) out|eliminat\w+|exclud\w+|reject\w*"
        r"|rather than|instead of|over)"
        rf"(?: be| {_CHOOSE}| (?:think|believe) (?:that )?(?:it|the answer) is)?(?: either)? (?P<names>{_NAMES})"
        rf"(?: (?:{_BE}|are) {_ADJECTIVE})?",
        rf"(?:neither|no) (?P<names>{_NAMES})[^(){{}}]*",
        rf"(?P<names>{_NAMES}) [^(){{}}]*(?:\b{_NOT}|n't|\b(?:wrong|incorrect|false|impossible|invalid|inaccurate"
        r"|eliminated|excluded|rejected|ruled out))\b[^(){}]*",
    )
)
# "Neither A, B nor C" is one clause.
_LISTED_NAMES: Final = re.compile(rf"{_NAME}(?:, {_NAME})+,? (?:and|or|nor) {_NAME}", re.IGNORECASE)
_CLAUSE_END: Final = re.compile(
    r"(?P<sentence>[.;!]+(?= |$))|,(?= )| [-\u2013\u2014]+ |:(?= )"
    r"|\b(?P<reason>because|since|as|given|due to|which|while|whereas)\b|\b(?:but|so|therefore|thus|hence)\b"
    r"| and (?=not )| (?=(?:rather than|instead of|over|not) [({])",
    re.IGNORECASE,
)
_DOUBT: Final = re.compile(
    r"\b(?:or|maybe|perhaps|possibl[ey]|probably|could|may|might|also|either|both|too|likely|plausible|equally|unless|if"
    r"|except|other than)\b",
    re.IGNORECASE,
)
_CONDITION: Final = re.compile(r"(?:if|unless)\b", re.IGNORECASE)
_RETRACTION: Final = re.compile(
    r"(?:or|maybe|perhaps|possibly|probably)$"
    r"|.*\b(?:guess\w*|unsure|uncertain|(?:not|don't|cannot|can't) (?:sure|know|tell|say))\b"
    r"|(?:it|this|that)(?:'s| is) (?:not (?:right|correct|true)|wrong|false|incorrect)\b",
    re.IGNORECASE,
)
# After "wait" or "no", only what follows counts.
_CORRECTION: Final = re.compile(
    r"(?:^|[.,;!?\u2026\u2013\u2014-]+ ?)(?:no(?= wait|[,.;!\u2026-]|$)|(?:wait|actually|sorry|i mean|hmm+)\b)",
    re.IGNORECASE,
)
_ALL_BUT: Final = re.compile(r"\?|\b(?:all|any\w*|every\w*) but\b|\b(?:none of|neither) [({][A-Z][)}],", re.IGNORECASE)


def read_choice(answer: str, question: str) -> Sequence[str]:
    """Return the letters of the option that an answer names, none if it does not name one option.

    More than one letter is returned only if their options have equal texts.
    """
    options = parse_options(question)
    plain = strip_markup(answer.replace("\n", " ; ")).strip("; ")
    if not options:
        plain = _UNLISTED.sub(r"\g<0>. ", plain)  # "(B) red" without options to compare with
    letter = _LETTER.fullmatch(plain)
    if letter and letter[1].upper() in (options or ascii_uppercase):
        return (letter[1].upper(),)
    same_text = _options_with_text(plain, options)
    if same_text:
        return same_text
    marked = _mark_names(plain, options)
    described = _DESCRIPTION.fullmatch(marked)
    if described and _words(described[1] + described[3]) <= _words(question) | _COMMON_WORDS:
        marked = described[2]
    named = _stated_letter(marked, options)
    if named is None or named not in (options or ascii_uppercase):
        return ()
    return _options_with_text(options[named], options) if options else (named,)


@lru_cache(maxsize=4096)
def parse_options(question: str) -> Mapping[str, str]:
    """Return the text of each option by its letter, from the last list of options in the question.

    The list ends where the letters A, B, C, ... break off. The result is empty if it has fewer than two options.
    """
    lines = _LISTED_OPTION.findall(question)
    # Examples of other questions may come first, so the last list is the question's own.
    starts = [index for index, (letter, _) in enumerate(lines) if letter == "A"]
    last_list = lines[starts[-1] :] if starts else []
    options: dict[str, str] = {}
    for (letter, text), expected_letter in zip(last_list, ascii_uppercase, strict=False):
        if letter != expected_letter:
            break
        options[letter] = strip_markup(text)
    return options if len(options) > 1 else {}


@lru_cache(maxsize=4096)
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall("[a-z'-]+", text.lower()))


def strip_markup(text: str) -> str:
    """Return a text without Markdown, LaTeX and quotes, with ASCII's punctuation and single spaces."""
    plain = _EXPONENT.sub(r"\1", _DEGREE.sub("°", text.translate(_STRAIGHT)))
    # Repeated for a fraction of units in bold within a box.
    for _ in range(4 if "\\" in plain else 2):
        plain = _FRACTION.sub(r"\1/\2", _MARKUP.sub(lambda match: match[match.lastindex or 0], plain))
    return " ".join(_QUOTE.sub("", _LATEX_SPACE.sub(" ", plain)).split())


def _options_with_text(text: str, options: Mapping[str, str]) -> Sequence[str]:
    """Return the letters of the options that have this text, or the one that has it but for articles or spaces."""
    for normalize in (_normalize, _drop_article, _squeeze):
        letters = tuple(letter for letter, option in options.items() if normalize(option) == normalize(text))
        if letters:
            return letters if len(letters) == 1 or normalize is _normalize else ()
    return ()


def _mark_names(answer: str, options: Mapping[str, str]) -> str:
    """Return the answer with every letter as (B) and every text of an option as {B}."""
    answer = answer.replace("{", " ").replace("}", " ")
    letters: dict[str, str] = {}
    for letter, option in options.items():
        text = _drop_article(option)
        # A single letter is always read as a letter.
        if text and not (len(text) == 1 and text.isalpha()):
            letters.setdefault(text, letter)
    if letters:
        # The longest text first, since it may contain another.
        alternatives = "|".join(re.escape(text) for text in sorted(letters, key=len, reverse=True))
        # Chinese has no spaces between words.
        pattern = re.compile(rf"(?<![^\W\u4e00-\u9fff])(?:{alternatives})(?![^\W\u4e00-\u9fff])", re.IGNORECASE)
        answer = pattern.sub(lambda match: f"{{{letters.get(match[0].casefold(), '?')}}}", answer)
        answer = _ARTICLE_AT_START.sub("", answer)
    answer = _LETTER_IN_TEXT.sub(lambda match: f"({match[match.lastindex or 0].upper()})", to_english(answer))
    return _COLON.sub("", answer)


def _stated_letter(marked: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the only option that a marked answer names; None if it names none, or several."""
    marked = _SAME_NAME.sub(lambda match: f"({match[1] or match[2]})", marked)
    marked = _CORRECTION.split(marked)[-1]
    marked = _LISTED_NAMES.sub(lambda match: re.sub(r",(?! (?:and|or|nor)) ", "/", match[0]).replace(",", ""), marked)
    if _ALL_BUT.search(marked) or _OTHER_NAME.search(marked):
        return None
    stated: set[str] = set()
    denied: set[str] = set()
    others: list[str] = []  # clauses that name options and are neither statement nor denial
    is_firm = False
    before = ""  # the clause before, if it is a statement
    for clause, is_reason in _split_clauses(marked):
        label, before = before[-2:-1] if before.endswith(")") else "", ""
        denial = next(filter(None, (pattern.fullmatch(clause) for pattern in _DENIALS)), None)
        if denial:
            denied.update(_MARKED.findall(denial["names"]))
            continue
        statement = next(filter(None, (pattern.fullmatch(clause) for pattern in _STATEMENTS)), None)
        # "I think it is {B}" describes the picture, where "I think it is (B)" answers.
        if statement and not (statement["thinks"] and "{" in statement["name"]):
            before = clause
            stated.update(_MARKED.findall(statement["name"]))
            is_firm = is_firm or bool(statement.groupdict().get("firm"))
        elif is_reason:
            continue
        elif _MARKED.search(clause) and not _CONDITION.match(clause):
            others.append(clause)
        elif _CONDITION.match(clause) or _RETRACTION.match(clause):
            return None
        elif label in options and not (_SENTENCE.match(clause) or _is_part(clause, options[label])):
            return None  # "B. purple", where purple is not in the text of B
    rivals = [text for text in others if set(_MARKED.findall(text)) - stated]
    if rivals and (not is_firm or any(map(_DOUBT.search, rivals))):
        return None
    return stated.pop() if len(stated) == 1 and not stated & denied else None


def _split_clauses(marked: str) -> Iterator[tuple[str, bool]]:
    """Yield the clauses of a marked answer, each with True if it is in a sentence after "because" or the like."""
    start, is_reason = 0, False
    for end in (*_CLAUSE_END.finditer(marked), None):
        text = marked[start : end.start() if end else len(marked)].strip(" .,:;!")
        if text:
            yield text, is_reason
        if end:
            start = end.end()
            is_reason = bool(end["reason"]) or (is_reason and not end["sentence"])


def _is_part(text: str, option: str) -> bool:
    """Return True if all words of a text, article aside, are in the text of an option."""
    return {*_drop_article(text).split()} <= {*_normalize(option).split()}


def _normalize(text: str) -> str:
    """Return the text with case folded, white space collapsed, and final full stops removed."""
    return " ".join(text.casefold().split()).rstrip(".!")


def _drop_article(text: str) -> str:
    """Return the normalised text without the article that it begins with."""
    return _ARTICLE.sub("", _normalize(text))


def _squeeze(text: str) -> str:
    """Return the normalised text without article and spaces, a number in words at its start as its digits."""
    plain = _drop_article(text)
    found = split_number(_normalize(text)) or split_number(plain)
    return f"{found[0]}{''.join(found[1])}" if found else plain.replace(" ", "")
