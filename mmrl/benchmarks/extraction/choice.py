"""Which option a response chooses. Rules from the most explicit to the least; each says what it found and where."""

from __future__ import annotations

import re
from typing import Final

from mmrl.benchmarks.extraction import letters, open_answer, phrases
from mmrl.benchmarks.extraction.letters import Choice
from mmrl.benchmarks.extraction.numbers import numbers
from mmrl.benchmarks.extraction.options import Mention, Options
from mmrl.benchmarks.extraction.text import HEAD, Span, content_words, last_box, last_tag, sentence_end, sentences

_CONDITIONAL: Final = re.compile(r"\s*(?:if|when|since|because|as|given)\b[^,.\n]{0,160},", re.IGNORECASE)
_SAID: Final = re.compile(r"\s*(?:\(?[A-Z]\)?\s*[).:]\s*)?(yes|no)\b(?! one)", re.IGNORECASE)
_TRUTH: Final = re.compile(r"\b(?:true|false|correct|incorrect)\b", re.IGNORECASE)
_NOT: Final = re.compile(r"\bnot(?: option)?\s*$", re.IGNORECASE)
_BUT: Final = re.compile(r"\b(?:but|rather)\s+(?:option\s+)?\(?([A-Z])\b")
_OR: Final = re.compile(r"\bor\b|或")
_DRESS: Final = re.compile(letters.DRESS)


def chosen(text: str, options: Options, question: str) -> Choice | None:
    """What a plain text chooses, its announcements first."""
    return announced(text, options) or first(text, options) or implied(text, options, question)


def content(text: str, span: Span, options: Options, rule: str) -> Choice | None:
    """What the content of a box or of answer tags names: a letter, a text, or a number that is an option."""
    inner = _DRESS.sub(lambda dress: " " * len(dress[0]), text[slice(*span)])
    bare = inner.strip(" \t\r\n$\"'.")
    start = span.start + inner.find(bare)
    letter = bare.rstrip("} ")
    if len(letter) == 1 and letter.isascii() and letter.isalpha() and (place := options.place(letter)) is not None:
        return Choice(place, rule, start, start + 1)
    found = (
        letters.label(bare, 0, options)
        or _whole(bare, options)
        or _sole(_texts(bare, 0, len(bare), options), rule)
        or _figure(bare, options)
    )
    return found and Choice(found.place, rule, start, start + len(bare))


def announced(text: str, options: Options) -> Choice | None:
    """What the last announcement of an answer names."""
    for at in phrases.announcements(text):
        found = _named(text, at, options)
        if found is not None:
            return found
    judged = phrases.JUDGED.finditer(text) if any(word in text for word in phrases.JUDGEMENTS) else ()
    named = phrases.NAMED.finditer(text) if "answer" in text or "solution" in text else ()
    for match in sorted((*judged, *named), key=lambda match: -match.start()):
        letter = match.end(1) if match[1] else match.end(2)
        if _NOT.search(text, max(0, match.start() - 12), match.start()):
            other = _BUT.search(text, match.start(), match.end())
            if other is None:
                continue
            letter = other.end(1)
        covering = [one.place for one in _texts(text, max(0, letter - 40), letter, options) if one.end == letter]
        place = covering[0] if covering else options.place(text[letter - 1])
        if place is not None and not phrases.NEGATION.search(match[0]):
            return Choice(place, "judged_letter", match.start(), match.end())
    return letters.taken(text, options)


def undecided(text: str, options: Options) -> bool:
    """Whether a box, answer tags or else the last announcement leaves open which of several options it is."""
    at = next(phrases.announcements(text), None)
    said = None if at is None else Span(at, sentence_end(text, at))
    part = last_box(text) or last_tag(text) or said
    if part is None or not _OR.search(text, *part):
        return False
    return len({mention.place for mention in _texts(text, *part, options)}) > 1


def first(text: str, options: Options) -> Choice | None:
    """An answer that stands alone, or first.

    Where a letter and the text after it name two options, the text counts: "A: no" is short for "Answer: no".
    """
    listing = len(letters.listing(text)) > 1
    if options.yes_no and not listing and (said := _SAID.match(text)):
        return Choice(options.yes_no[said[1].lower() == "no"], "yes_no_first", said.start(1), said.end(1))
    label = letters.first_label(text)
    place = options.place(label[0]) if label else None
    if label is None or place is None:
        whole = _whole(text.strip(), options) if len(text) < HEAD else None
        return whole and Choice(whole.place, "whole_text", *_stripped(text))
    if listing or letters.several(text, *label):
        return None
    start, end = len(text) - len(text.lstrip()), label[1]
    rest = text[end : sentence_end(text, end)].strip(" \t\r\n:.)-,]")
    spelled = options.spelled(rest) if rest else None
    if spelled is not None and spelled != place:
        return Choice(spelled, "first_text", start, end + len(rest))
    return Choice(place, "first_letter", start, end)


def implied(text: str, options: Options, question: str) -> Choice | None:
    """What a text says without announcing it: the only letter or option in it, or what its conclusion states."""
    text = letters.without_listing(text, options)
    parts = [*sentences(text)]
    labels = [*letters.labelled(text, options)]
    only = labels[-1]._replace(rule="only_letter") if len({label.place for label in labels}) == 1 else None
    last = letters.last(text, parts[0], options) if parts else None
    if found := last or only or _yes_no(text, options, question):
        return found
    for part in parts[:1]:
        if found := _stated(text, part, labels, options, question):
            return found
    found = _sole(_texts(text, 0, len(text), options), "only_text")
    if found is not None:
        return found
    for part in parts[1:12]:
        if found := _stated(text, part, labels, options, question):
            return found
    return _concluded(text, options, question)


def _stated(text: str, part: Span, labels: list[Choice], options: Options, question: str) -> Choice | None:
    """What one sentence states: its letter, the text of an option, or the words that only one option has."""
    inside = [label for label in labels if part.start <= label.start < part.end]
    if inside:
        return inside[-1]._replace(rule="concluding_letter") if len({label.place for label in inside}) == 1 else None
    if condition := _CONDITIONAL.match(text, part.start, part.end):
        part = Span(condition.end(), part.end)
    mentions = _texts(text, part.start, part.end, options)
    fresh = [one for one in mentions if text[one.start : one.end].lower() not in question.lower()]
    if found := _sole(mentions, "concluding_text") or _sole(fresh, "concluding_text"):
        return found
    place = options.distinct(text[part.start : part.end])
    if place is not None and phrases.NEGATION.search(text, *part) and not phrases.NEGATION.search(options.texts[place]):
        return None  # "hares would not be affected"
    return None if place is None else Choice(place, "distinctive_words", part.start, part.end)


def _concluded(text: str, options: Options, question: str) -> Choice | None:
    """The option that the concluding number is."""
    found = open_answer.concluded(text, question, open_answer.known(question))
    place = options.numbered(found.number) if found and found.number is not None else None
    return None if found is None or place is None else Choice(place, "concluding_number", found.start, found.end)


def _named(text: str, at: int, options: Options) -> Choice | None:
    """The option that the words from `at` on name."""
    label = letters.label(text, at, options)
    if label is not None:
        return label
    end = sentence_end(text, at)
    tail = text[at:end].strip(" \t\r\n\"'.:")
    whole = _whole(tail, options)
    if whole is not None:
        return Choice(whole.place, "announced_text", at, end)
    found = _sole(_texts(text, at, end, options), "announced_text")
    if found is not None:
        return found
    figure = _figure(text[at:end], options)
    return figure and Choice(figure.place, "announced_number", at + figure.start, at + figure.end)


def _whole(text: str, options: Options) -> Choice | None:
    place = options.spelled(text) if len(text) < HEAD else None
    return None if place is None else Choice(place, "whole_text", 0, len(text))


def _figure(text: str, options: Options) -> Choice | None:
    """The option that the one number in a short text is."""
    if not options.numeric:
        return None
    places = {(options.numbered(one.value), one.start, one.end) for one in numbers(text[:HEAD])}
    hits = [found for found in places if found[0] is not None]
    return (
        Choice(hits[0][0] or 0, "number", hits[0][1], hits[0][2]) if len({place for place, _, _ in hits}) == 1 else None
    )


def _texts(text: str, start: int, end: int, options: Options) -> list[Mention]:
    return [*options.mentions(text, start, end)]


def _sole(mentions: list[Mention], rule: str) -> Choice | None:
    """The option mentioned, if only one is."""
    if len({mention.place for mention in mentions}) != 1:
        return None
    return Choice(mentions[-1].place, rule, mentions[-1].start, mentions[-1].end)


def _yes_no(text: str, options: Options, question: str) -> Choice | None:
    """Yes or no: said first; else what the sentence most like the question makes of it, by negation and opposites."""
    if options.yes_no is None:
        return None
    yes, no = options.yes_no
    asked = content_words(question)
    parts = [part for part in [*sentences(text)][::-1][:20] if not text[slice(*part)].rstrip().endswith("?")]
    shares = [len(asked & content_words(text[slice(*part)])) / len(asked) if asked else 0.0 for part in parts]
    if not shares or max(shares) < 0.5:
        return None
    concluding = [place for place, part in enumerate(parts) if shares[place] >= 0.5 and phrases.concludes(text, *part)]
    part = parts[concluding[-1] if concluding else shares.index(max(shares))]
    sentence = text[slice(*part)]
    against = bool(phrases.NEGATION.search(sentence)) ^ bool(phrases.NEGATION.search(question))
    against ^= bool(phrases.FALSE.search(sentence)) and not _TRUTH.search(question)
    for one, other in phrases.OPPOSITES:
        against ^= _turned(question, sentence, one, other) or _turned(question, sentence, other, one)
    return Choice(no if against else yes, "yes_no_statement", part.start, part.end)


def _turned(question: str, sentence: str, one: re.Pattern[str], other: re.Pattern[str]) -> bool:
    """Whether the question has the one word alone, and the sentence the other alone."""
    return bool(
        one.search(question) and other.search(sentence) and not (other.search(question) or one.search(sentence))
    )


def _stripped(text: str) -> tuple[int, int]:
    return len(text) - len(text.lstrip()), len(text.rstrip())
