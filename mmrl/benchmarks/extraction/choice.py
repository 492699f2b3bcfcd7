"""Which option a response chooses. Rules from the most explicit to the least; each says what it found and where."""

from __future__ import annotations

import re
from typing import Final

from mmrl.benchmarks.extraction import letters, open_answer, phrases
from mmrl.benchmarks.extraction.letters import ChosenOption
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.extraction.options import AnswerOptions, OptionMention
from mmrl.benchmarks.extraction.text import (
    HEAD_CHARS,
    CharSpan,
    content_words,
    iter_sentences_backwards,
    last_answer_tag_span,
    last_boxed_span,
    sentence_end,
)

_CONDITIONAL_CLAUSE: Final = re.compile(r"\s*(?:if|when|since|because|as|given)\b[^,.\n]{0,160},", re.IGNORECASE)
_LEADING_YES_NO: Final = re.compile(r"\s*(?:\(?[A-Z]\)?\s*[).:]\s*)?(yes|no)\b(?! one)", re.IGNORECASE)
_TRUTH_WORD: Final = re.compile(r"\b(?:true|false|correct|incorrect)\b", re.IGNORECASE)
_NEGATED_BEFORE: Final = re.compile(r"\bnot(?: option)?\s*$", re.IGNORECASE)
_BUT_OPTION: Final = re.compile(r"\b(?:but|rather)\s+(?:option\s+)?\(?([A-Z])\b")
_OR_WORD: Final = re.compile(r"\bor\b|或")
_LATEX_WRAPPER: Final = re.compile(letters.LATEX_WRAPPER)


def choose_option(text: str, options: AnswerOptions, question: str) -> ChosenOption | None:
    """What a plain text chooses, its announcements first."""
    return announced_option(text, options) or leading_option(text, options) or implied_option(text, options, question)


def option_in_span(text: str, span: CharSpan, options: AnswerOptions, rule: str) -> ChosenOption | None:
    """What the content of a box or of answer tags names: a letter, a text, or a number that is an option."""
    inner = _LATEX_WRAPPER.sub(lambda dress: " " * len(dress[0]), text[slice(*span)])
    bare = inner.strip(" \t\r\n$\"'.")
    start = span.start + inner.find(bare)
    letter = bare.rstrip("} ")
    if (
        len(letter) == 1
        and letter.isascii()
        and letter.isalpha()
        and (place := options.index_of_letter(letter)) is not None
    ):
        return ChosenOption(place, rule, start, start + 1)
    found = (
        letters.label_at(bare, 0, options)
        or _exact_option(bare, options)
        or _single_mention(_option_mentions(bare, 0, len(bare), options), rule)
        or _option_by_number(bare, options)
    )
    return found and ChosenOption(found.option_index, rule, start, start + len(bare))


def announced_option(text: str, options: AnswerOptions) -> ChosenOption | None:
    """What the last announcement of an answer names."""
    for at in phrases.find_answer_phrases(text):
        found = _option_at(text, at, options)
        if found is not None:
            return found
    judged = phrases.LETTER_IS_CORRECT.finditer(text) if any(word in text for word in phrases.CORRECTNESS_WORDS) else ()
    named = phrases.LETTER_IS_ANSWER.finditer(text) if "answer" in text or "solution" in text else ()
    for match in sorted((*judged, *named), key=lambda match: -match.start()):
        letter = match.end(1) if match[1] else match.end(2)
        if _NEGATED_BEFORE.search(text, max(0, match.start() - 12), match.start()):
            other = _BUT_OPTION.search(text, match.start(), match.end())
            if other is None:
                continue
            letter = other.end(1)
        covering = [
            one.option_index
            for one in _option_mentions(text, max(0, letter - 40), letter, options)
            if one.end == letter
        ]
        place = covering[0] if covering else options.index_of_letter(text[letter - 1])
        if place is not None and not phrases.NEGATION.search(match[0]):
            return ChosenOption(place, "judged_letter", match.start(), match.end())
    return letters.taken_letter(text, options)


def is_ambiguous(text: str, options: AnswerOptions) -> bool:
    """Whether a box, answer tags or else the last announcement leaves open which of several options it is."""
    at = next(phrases.find_answer_phrases(text), None)
    said = None if at is None else CharSpan(at, sentence_end(text, at))
    part = last_boxed_span(text) or last_answer_tag_span(text) or said
    if part is None or not _OR_WORD.search(text, *part):
        return False
    return len({mention.option_index for mention in _option_mentions(text, *part, options)}) > 1


def leading_option(text: str, options: AnswerOptions) -> ChosenOption | None:
    """An answer that stands alone, or first.

    Where a letter and the text after it name two options, the text counts: "A: no" is short for "Answer: no".
    """
    listing = len(letters.listed_letters(text)) > 1
    if options.yes_no_indices and not listing and (said := _LEADING_YES_NO.match(text)):
        return ChosenOption(options.yes_no_indices[said[1].lower() == "no"], "yes_no_first", said.start(1), said.end(1))
    label = letters.leading_label(text)
    place = options.index_of_letter(label[0]) if label else None
    if label is None or place is None:
        whole = _exact_option(text.strip(), options) if len(text) < HEAD_CHARS else None
        return whole and ChosenOption(whole.option_index, "whole_text", *_stripped_bounds(text))
    if listing or letters.second_letter(text, *label):
        return None
    start, end = len(text) - len(text.lstrip()), label[1]
    rest = text[end : sentence_end(text, end)].strip(" \t\r\n:.)-,]")
    spelled = options.index_of_text(rest) if rest else None
    if spelled is not None and spelled != place:
        return ChosenOption(spelled, "first_text", start, end + len(rest))
    return ChosenOption(place, "first_letter", start, end)


def implied_option(text: str, options: AnswerOptions, question: str) -> ChosenOption | None:
    """What a text says without announcing it: the only letter or option in it, or what its conclusion states."""
    text = letters.blank_out_listing(text, options)
    parts = [*iter_sentences_backwards(text)]
    labels = [*letters.find_labels(text, options)]
    only = labels[-1]._replace(rule="only_letter") if len({label.option_index for label in labels}) == 1 else None
    last = letters.last_letter(text, parts[0], options) if parts else None
    if found := last or only or _yes_no_option(text, options, question):
        return found
    for part in parts[:1]:
        if found := _option_in_sentence(text, part, labels, options, question):
            return found
    found = _single_mention(_option_mentions(text, 0, len(text), options), "only_text")
    if found is not None:
        return found
    for part in parts[1:12]:
        if found := _option_in_sentence(text, part, labels, options, question):
            return found
    return _option_by_concluding_number(text, options, question)


def _option_in_sentence(
    text: str, sentence_span: CharSpan, labels: list[ChosenOption], options: AnswerOptions, question: str
) -> ChosenOption | None:
    """What one sentence states: its letter, the text of an option, or the words that only one option has."""
    inside = [label for label in labels if sentence_span.start <= label.start < sentence_span.end]
    if inside:
        return (
            inside[-1]._replace(rule="concluding_letter")
            if len({label.option_index for label in inside}) == 1
            else None
        )
    if condition := _CONDITIONAL_CLAUSE.match(text, sentence_span.start, sentence_span.end):
        sentence_span = CharSpan(condition.end(), sentence_span.end)
    mentions = _option_mentions(text, sentence_span.start, sentence_span.end, options)
    fresh = [one for one in mentions if text[one.start : one.end].lower() not in question.lower()]
    if found := _single_mention(mentions, "concluding_text") or _single_mention(fresh, "concluding_text"):
        return found
    place = options.index_by_distinctive_words(text[sentence_span.start : sentence_span.end])
    if (
        place is not None
        and phrases.NEGATION.search(text, *sentence_span)
        and not phrases.NEGATION.search(options.texts[place])
    ):
        return None  # "hares would not be affected"
    return None if place is None else ChosenOption(place, "distinctive_words", sentence_span.start, sentence_span.end)


def _option_by_concluding_number(text: str, options: AnswerOptions, question: str) -> ChosenOption | None:
    """The option that the concluding number is."""
    found = open_answer.concluding_number(text, question, open_answer.numbers_in_question(question))
    place = options.index_of_number(found.number) if found and found.number is not None else None
    return None if found is None or place is None else ChosenOption(place, "concluding_number", found.start, found.end)


def _option_at(text: str, position: int, options: AnswerOptions) -> ChosenOption | None:
    """The option that the words from `at` on name."""
    label = letters.label_at(text, position, options)
    if label is not None:
        return label
    end = sentence_end(text, position)
    tail = text[position:end].strip(" \t\r\n\"'.:")
    whole = _exact_option(tail, options)
    if whole is not None:
        return ChosenOption(whole.option_index, "announced_text", position, end)
    found = _single_mention(_option_mentions(text, position, end, options), "announced_text")
    if found is not None:
        return found
    figure = _option_by_number(text[position:end], options)
    return figure and ChosenOption(
        figure.option_index, "announced_number", position + figure.start, position + figure.end
    )


def _exact_option(text: str, options: AnswerOptions) -> ChosenOption | None:
    place = options.index_of_text(text) if len(text) < HEAD_CHARS else None
    return None if place is None else ChosenOption(place, "whole_text", 0, len(text))


def _option_by_number(text: str, options: AnswerOptions) -> ChosenOption | None:
    """The option that the one number in a short text is."""
    if not options.all_numeric:
        return None
    places = {(options.index_of_number(one.value), one.start, one.end) for one in find_numbers(text[:HEAD_CHARS])}
    hits = [found for found in places if found[0] is not None]
    return (
        ChosenOption(hits[0][0] or 0, "number", hits[0][1], hits[0][2])
        if len({place for place, _, _ in hits}) == 1
        else None
    )


def _option_mentions(text: str, start: int, end: int, options: AnswerOptions) -> list[OptionMention]:
    return [*options.find_mentions(text, start, end)]


def _single_mention(mentions: list[OptionMention], rule: str) -> ChosenOption | None:
    """The option mentioned, if only one is."""
    if len({mention.option_index for mention in mentions}) != 1:
        return None
    return ChosenOption(mentions[-1].option_index, rule, mentions[-1].start, mentions[-1].end)


def _yes_no_option(text: str, options: AnswerOptions, question: str) -> ChosenOption | None:
    """Yes or no: said first; else what the sentence most like the question makes of it, by negation and opposites."""
    if options.yes_no_indices is None:
        return None
    yes, no = options.yes_no_indices
    asked = content_words(question)
    parts = [
        part for part in [*iter_sentences_backwards(text)][::-1][:20] if not text[slice(*part)].rstrip().endswith("?")
    ]
    shares = [len(asked & content_words(text[slice(*part)])) / len(asked) if asked else 0.0 for part in parts]
    if not shares or max(shares) < 0.5:
        return None
    concluding = [
        place for place, part in enumerate(parts) if shares[place] >= 0.5 and phrases.is_conclusion(text, *part)
    ]
    part = parts[concluding[-1] if concluding else shares.index(max(shares))]
    sentence = text[slice(*part)]
    against = bool(phrases.NEGATION.search(sentence)) ^ bool(phrases.NEGATION.search(question))
    against ^= bool(phrases.DECLARED_FALSE.search(sentence)) and not _TRUTH_WORD.search(question)
    for one, other in phrases.OPPOSITES:
        against ^= _is_opposite(question, sentence, one, other) or _is_opposite(question, sentence, other, one)
    return ChosenOption(no if against else yes, "yes_no_statement", part.start, part.end)


def _is_opposite(question: str, sentence: str, word: re.Pattern[str], opposite: re.Pattern[str]) -> bool:
    """Whether the question has the one word alone, and the sentence the other alone."""
    return bool(
        word.search(question) and opposite.search(sentence) and not (opposite.search(question) or word.search(sentence))
    )


def _stripped_bounds(text: str) -> tuple[int, int]:
    return len(text) - len(text.lstrip()), len(text.rstrip())
