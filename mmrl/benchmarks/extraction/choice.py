"""Rules that find the option a response chooses, from the most explicit to the least."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from mmrl.answer.language import REASONS
from mmrl.benchmarks.extraction import letters, open_answer, phrases
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.extraction.options import AnswerOptions, ChosenOption
from mmrl.benchmarks.extraction.text import HEAD_CHARS, CharSpan, content_words, iter_sentences_backwards, sentence_end

_CONDITIONAL_CLAUSE: Final = re.compile(rf"\s*(?:if|when|{REASONS}|given)\b[^,.\n]{{0,160}},", re.IGNORECASE)
_LEADING_YES_NO: Final = re.compile(r"\s*(?:\(?[A-Z]\)?\s*[).:]\s*)?(yes|no)\b(?! one)", re.IGNORECASE)
_TRUTH_WORD: Final = re.compile(r"\b(?:true|false|correct|incorrect)\b", re.IGNORECASE)
_NEGATED_BEFORE: Final = re.compile(r"\bnot(?: option)?\s*$", re.IGNORECASE)
_BUT_OPTION: Final = re.compile(r"\b(?:but|rather)\s+(?:option\s+)?\(?([A-Z])\b")
_OR_WORD: Final = re.compile(r"\bor\b|或")
_LATEX_WRAPPER: Final = re.compile(letters.LATEX_WRAPPER)
_BUT_WINDOW: Final = 12  # characters before "B is correct" in which a "not" negates it
_MENTION_WINDOW: Final = 40  # characters before such a letter in which an option's text may end with it
_MAX_SENTENCES: Final = 12  # sentences at the end of a response that may state its conclusion
_MAX_YES_NO_SENTENCES: Final = 20  # sentences at the start of a response that may answer a yes-or-no question
_MIN_SHARED_WORDS: Final = 0.5  # share of the question's words that a sentence must have to answer it


def option_in_span(text: str, span: CharSpan, rule: str, options: AnswerOptions) -> ChosenOption | None:
    """Return the option that the content of a box or of answer tags names, by letter, by text or as a number."""
    # Blanked out, not removed, so that places stay.
    inner = _LATEX_WRAPPER.sub(lambda match: " " * len(match[0]), text[slice(*span)])
    bare = inner.strip(" \t\r\n$\"'.")
    start = span.start + inner.find(bare)
    letter = bare.rstrip("} ")
    if len(letter) == 1 and letter.isascii() and letter.isalpha():
        option_index = options.index_of_letter(letter)
        if option_index is not None:
            return ChosenOption(option_index, rule, start, start + 1)
    found = (
        letters.label_at(bare, 0, options)
        or _exact_option(bare, options)
        or _only_option(list(options.find_mentions(bare, 0, len(bare))), rule)
        or _option_by_number(bare, options)
    )
    return found and ChosenOption(found.option_index, rule, start, start + len(bare))


def announced_option(text: str, options: AnswerOptions) -> ChosenOption | None:
    """Return the option after the last phrase that announces an answer, or the letter that is called correct."""
    for position in phrases.find_answer_phrases(text):
        found = _option_at(text, position, options)
        if found is not None:
            return found
    return _option_called_correct(text, options) or letters.taken_letter(text, options)


def is_ambiguous(text: str, options: AnswerOptions) -> bool:
    """Return True when a box, answer tags or the last announcement leaves open which of several options it means."""
    span = phrases.find_explicit_span(text)
    if span is None or not _OR_WORD.search(text, *span):
        return False
    return len({mention.option_index for mention in options.find_mentions(text, *span)}) > 1


def leading_option(text: str, options: AnswerOptions) -> ChosenOption | None:
    """Return the option that a text consists of or begins with."""
    # A list of options begins with letters, too, and chooses none.
    is_listing = len(letters.listed_letters(text)) > 1
    if options.yes_no_indices and not is_listing:
        yes_no = _LEADING_YES_NO.match(text)
        if yes_no:
            option_index = options.yes_no_indices[yes_no[1].lower() == "no"]
            return ChosenOption(option_index, "yes_no_first", yes_no.start(1), yes_no.end(1))
    start = len(text) - len(text.lstrip())
    label = letters.leading_label(text)
    labelled = options.index_of_letter(label[0]) if label else None
    if label is None or labelled is None:
        whole = _exact_option(text.strip(), options) if len(text) < HEAD_CHARS else None
        return whole and ChosenOption(whole.option_index, "whole_text", start, len(text.rstrip()))
    if is_listing or letters.second_letter(text, *label):
        return None
    end = label[1]
    rest = text[end : sentence_end(text, end)].strip(" \t\r\n:.)-,]")
    spelled = options.index_of_text(rest) if rest else None
    # Where the letter and the text name two options, the text counts: "A: no" is short for "Answer: no".
    if spelled is not None and spelled != labelled:
        return ChosenOption(spelled, "first_text", start, end + len(rest))
    return ChosenOption(labelled, "first_letter", start, end)


def implied_option(text: str, options: AnswerOptions, question: str) -> ChosenOption | None:
    """Return the option that a text implies: the only letter or option in it, or the one that it concludes."""
    text = letters.blank_out_listing(text, options)
    sentences = list(iter_sentences_backwards(text))
    labels = list(letters.find_labels(text, options))
    found = letters.last_letter(text, sentences[0], options) if sentences else None
    found = found or _only_option(labels, "only_letter") or _yes_no_option(text, options, question)
    if found is None and sentences:
        found = _option_in_sentence(text, sentences[0], labels, options, question)
    found = found or _only_option(list(options.find_mentions(text, 0, len(text))), "only_text")
    if found is not None:
        return found
    # Backwards, since a conclusion is near the end.
    for sentence in sentences[1:_MAX_SENTENCES]:
        found = _option_in_sentence(text, sentence, labels, options, question)
        if found is not None:
            return found
    number = open_answer.concluding_number(text, question)
    option_index = options.index_of_number(number.number) if number and number.number is not None else None
    if number is None or option_index is None:
        return None
    return ChosenOption(option_index, "concluding_number", number.start, number.end)


def _option_called_correct(text: str, options: AnswerOptions) -> ChosenOption | None:
    """Return the option of the last "B is correct" or "B is the answer" that is not denied."""
    matches: list[re.Match[str]] = []
    # Plain searches for words first: the patterns are slow on long responses without them.
    if any(word in text for word in phrases.CORRECTNESS_WORDS):
        matches += phrases.LETTER_IS_CORRECT.finditer(text)
    if "answer" in text or "solution" in text:
        matches += phrases.LETTER_IS_ANSWER.finditer(text)
    for match in sorted(matches, key=lambda match: -match.start()):
        letter_end = match.end(1) if match[1] else match.end(2)
        if _NEGATED_BEFORE.search(text, max(0, match.start() - _BUT_WINDOW), match.start()):
            # "not A but B is correct" chooses B.
            but_option = _BUT_OPTION.search(text, match.start(), match.end())
            if but_option is None:
                continue
            letter_end = but_option.end(1)
        option_index = _option_ending_at(text, letter_end, options)
        if option_index is not None and not phrases.NEGATION.search(match[0]):
            return ChosenOption(option_index, "judged_letter", match.start(), match.end())
    return None


def _option_ending_at(text: str, letter_end: int, options: AnswerOptions) -> int | None:
    """Return the option whose text ends with the letter there, such as "Vitamin C", else the option of the letter."""
    for mention in options.find_mentions(text, max(0, letter_end - _MENTION_WINDOW), letter_end):
        if mention.end == letter_end:
            return mention.option_index
    return options.index_of_letter(text[letter_end - 1])


def _option_in_sentence(
    text: str, sentence: CharSpan, labels: list[ChosenOption], options: AnswerOptions, question: str
) -> ChosenOption | None:
    """Return the option that one sentence states: its letter, its text, or the words that only it has."""
    inside = [label for label in labels if sentence.start <= label.start < sentence.end]
    if inside:
        # A sentence that names several letters chooses none, whatever texts it has besides.
        return _only_option(inside, "concluding_letter")
    # An opening clause such as "since the cat is red," gives a reason; the answer is after it.
    condition = _CONDITIONAL_CLAUSE.match(text, sentence.start, sentence.end)
    if condition:
        sentence = CharSpan(condition.end(), sentence.end)
    mentions = list(options.find_mentions(text, *sentence))
    # The text of an option that is in the question, too, may only be repeated from there.
    new_mentions = [
        mention for mention in mentions if text[mention.start : mention.end].lower() not in question.lower()
    ]
    found = _only_option(mentions, "concluding_text") or _only_option(new_mentions, "concluding_text")
    if found is not None:
        return found
    option_index = options.index_by_distinctive_words(text[sentence.start : sentence.end])
    if option_index is None:
        return None
    if phrases.NEGATION.search(text, *sentence) and not phrases.NEGATION.search(options.texts[option_index]):
        # "Hares would not be affected" does not choose "Hares would be affected".
        return None
    return ChosenOption(option_index, "distinctive_words", sentence.start, sentence.end)


def _option_at(text: str, position: int, options: AnswerOptions) -> ChosenOption | None:
    """Return the option named by the words that begin at a position."""
    label = letters.label_at(text, position, options)
    if label is not None:
        return label
    end = sentence_end(text, position)
    whole = _exact_option(text[position:end].strip(" \t\r\n\"'.:"), options)
    if whole is not None:
        return ChosenOption(whole.option_index, "announced_text", position, end)
    mentioned = _only_option(list(options.find_mentions(text, position, end)), "announced_text")
    if mentioned is not None:
        return mentioned
    number = _option_by_number(text[position:end], options)
    if number is None:
        return None
    return ChosenOption(number.option_index, "announced_number", position + number.start, position + number.end)


def _exact_option(text: str, options: AnswerOptions) -> ChosenOption | None:
    option_index = options.index_of_text(text) if len(text) < HEAD_CHARS else None
    return None if option_index is None else ChosenOption(option_index, "whole_text", 0, len(text))


def _option_by_number(text: str, options: AnswerOptions) -> ChosenOption | None:
    """Return the one option that equals numbers in a short text, if all options are numbers."""
    if not options.all_numeric:
        return None
    hits = []
    for number in find_numbers(text[:HEAD_CHARS]):
        option_index = options.index_of_number(number.value)
        if option_index is not None:
            hits.append(ChosenOption(option_index, "number", number.start, number.end))
    return hits[0] if len({hit.option_index for hit in hits}) == 1 else None


def _only_option(found: Sequence[ChosenOption], rule: str) -> ChosenOption | None:
    """Return the last of the places found, if all name one option."""
    if len({place.option_index for place in found}) != 1:
        return None
    return found[-1]._replace(rule=rule)


def _yes_no_option(text: str, options: AnswerOptions, question: str) -> ChosenOption | None:
    """Return yes or no by the sentence most like the question."""
    if options.yes_no_indices is None:
        return None
    sentence = _sentence_answering(text, question)
    if sentence is None:
        return None
    yes_index, no_index = options.yes_no_indices
    statement = text[slice(*sentence)]
    reversals = [
        bool(phrases.NEGATION.search(statement)) != bool(phrases.NEGATION.search(question)),
        phrases.DECLARED_FALSE.search(statement) is not None and _TRUTH_WORD.search(question) is None,
    ]
    for opposites in phrases.OPPOSITES:
        in_question, in_statement = _words_found(opposites, question), _words_found(opposites, statement)
        # The question has one of the two words alone, and the statement only the other.
        reversals.append(sum(in_question) == 1 and in_statement == in_question[::-1])
    # Two reversals cancel out.
    option_index = no_index if sum(reversals) % 2 else yes_index
    return ChosenOption(option_index, "yes_no_statement", sentence.start, sentence.end)


def _words_found(words: Iterable[re.Pattern[str]], text: str) -> list[bool]:
    """Return for each word whether a text has it."""
    return [word.search(text) is not None for word in words]


def _sentence_answering(text: str, question: str) -> CharSpan | None:
    """Return the last concluding sentence that has half of the question's words, else the one with most of them."""
    question_words = content_words(question)
    sentences = list(iter_sentences_backwards(text))[::-1][:_MAX_YES_NO_SENTENCES]
    # A sentence of the response that asks a question answers nothing.
    sentences = [sentence for sentence in sentences if not text[slice(*sentence)].rstrip().endswith("?")]
    if not sentences or not question_words:
        return None
    said = [content_words(text[slice(*sentence)]) for sentence in sentences]
    shares = [len(question_words & words) / len(question_words) for words in said]
    if max(shares) < _MIN_SHARED_WORDS:
        return None
    for sentence, share in zip(reversed(sentences), reversed(shares), strict=True):
        if share >= _MIN_SHARED_WORDS and phrases.is_conclusion(text, *sentence):
            return sentence
    return sentences[shares.index(max(shares))]
