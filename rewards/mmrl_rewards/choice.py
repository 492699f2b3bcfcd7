"""Rewards for multiple choice and for yes or no. `of` names the part of the response that is read."""

from __future__ import annotations

import re
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from mmrl.answer.language import WRONG
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.chinese import MEASURES, names_thing, to_english
from mmrl_rewards.choice_grammar import parse_options, read_choice, strip_markup
from mmrl_rewards.contract import Of, part_text, part_value, question_text, reward, target_value
from mmrl_rewards.count import is_named
from mmrl_rewards.vocabulary import PLACES, asked_in, content_words, is_denied, is_doubtful

_MAX_CHARS: Final = 1000  # a longer answer names no option, and says neither yes nor no
_WORDS: Final = MappingProxyType(
    {
        **dict.fromkeys(("yes", "yeah", "yep", "yup", "是", "是的", "对", "对的", "有"), "yes"),
        **dict.fromkeys(("no", "nope", "nah", "否", "不", "不是", "不是的", "不对", "没有"), "no"),
    }
)
# The grammar of `yes_no`, without markup and quotes: a word of `_WORDS`, alone or before any text that is not against
# it, in doubt or about the word ("Yes is wrong"). A word right after "no" is the question's: "No dogs", not "No doubt".
_SAID: Final = re.compile(rf"(?<![\w-])(?:{'|'.join(_WORDS)})(?![\w-])")
_NO_THING: Final = re.compile(r"no (?!(?:it|there|he|she|they|that|this|the|i|we) )([a-z]+)")
_UNSAID: Final = re.compile(
    r"\?|或|\b(?:wait|or (?:not|else))\b"
    rf"|^\w+\W+(?:is|was|isn't|if|unless|only if|{WRONG}|just kidding)\b"
)
# 有狗 and 没有狗 answer as 有 and 没有 do, if the question asks about dogs.
_HAS: Final = re.compile(
    r"(?:(?<!\w)|(?<=[,.;:!])图片?[中里上])(?P<has>没?有)"
    rf"(?:(?<!没有)[0-9一二两三四五六七八九十]*[{MEASURES}])?(?P<thing>[^\W没不还或吗呢吧么a-z0-9]+)(?!\w)"
)
_CLAUSE_END: Final = re.compile(
    r"[.,;:!()\u2013\u2014-]+(?: |$)|\b(?:but|however|although|though|because|since|so|and)\b"
)
_PRONOUNS: Final = frozenset(("it", "he", "she", "they", "that", "this", "i", "we"))
_LETTERS: Final = re.compile("[a-z]+")
# Of any question. "Yes, it isn't safe" may be right, but "Yes, there isn't any" contradicts itself.
_AGAINST_YES: Final = re.compile(
    r"[不没否](?!错)"
    r"|^\w+\W+(?:(?:there (?:is|are|was|were)|(?:i|we) (?:do|can|ca|could|did))(?: ?not|n't| none| nothing)"
    r"|not(?! only)|none|nothing|never)\b"
)


@reward(name="choice", answer_types=(AnswerType.CHOICE,))
def exact(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return 1 if the answer's letter is the target's, ignoring case, else 0.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2).
    Departures: none. The text of an option does not count as an answer, only its letter does.
    Unscorable: the target is not one letter from A to Z.
    """
    target = target_value(sample, AnswerType.CHOICE)
    value = part_value(response, AnswerType.CHOICE, of)
    return RewardValue(float(value == target), f"{value}, expected {target}")


@reward(name="option", answer_types=(AnswerType.CHOICE,))
def option(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return 1 if the answer names the correct option by its letter, its text or both, else 0.

    If the question lists "B. red" on its own line, these name B: B, (b), **B**, B. red, red, "The answer is B.",
    "B seems right", "I choose B", "not A but B" and "A. Wait, no, B". These name no option: two letters, a letter with
    another option's text, "It cannot be B", and an option that is only thought probable. `choice_grammar` has the whole
    grammar, which reads 选B and 答案是B, too.

    Source: the answer matching of MathVista (arXiv:2310.02255).
    Departures: rules decide instead of a model, and no answer is mapped to the most similar option. If two options have
    equal texts, either letter is correct.
    Unscorable: the target is not one letter from A to Z, or the question lists options without it.
    """
    target = target_value(sample, AnswerType.CHOICE)
    question = question_text(sample)
    options = parse_options(question)
    if options and target not in options:
        raise Unscorable(f"the target {target} is none of the options {', '.join(options)}")
    return _score_option(part_text(response, of)[: _MAX_CHARS + 1], question, target)


@lru_cache(maxsize=4096)  # siblings share their question, and often their answers
def _score_option(text: str, question: str, target: str) -> RewardValue:
    """Return the value of an answer to a question, by the letter of its correct option."""
    letters = read_choice(text, question) if len(text) <= _MAX_CHARS else ()
    if not letters or not _agrees(text, parse_options(question).get(letters[0], ""), question):
        return RewardValue(0.0, f"names no option: {text[:40]!r}")
    return RewardValue(float(target in letters), f"{' or '.join(letters)}, expected {target}")


def _agrees(text: str, option: str, question: str) -> bool:
    """Return False if the option named is Yes or No and the answer speaks against it, as in "Yes, it isn't"."""
    meant = _WORDS.get(strip_markup(option).casefold().strip("."))
    answer = strip_markup(text).casefold()
    starts = [match.start() for match in _SAID.finditer(answer) if _WORDS[match[0]] == meant]
    return not starts or _read_yes_or_no(answer[starts[0] :], question) == meant


@reward(name="yes_no", answer_types=(AnswerType.TEXT,))
def yes_no(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return 1 if the answer begins with the target's "yes" or "no" and contains nothing against it, else 0.

    "Yeah" and 是的 are yes, "nope" and 不是 no. Against it are the other word, a word of doubt, "Yes, it isn't", and
    "No, there is a dog" if the question asks for one.

    Source: the yes/no questions of POPE (arXiv:2305.10355).
    Departures: only whole words count, ignoring case. An answer with both words or neither is wrong, as is one of more
    than 1000 characters.
    Unscorable: the target is neither yes nor no.
    """
    target = target_value(sample, AnswerType.TEXT).strip().rstrip(".").casefold()
    if target not in ("yes", "no"):
        raise Unscorable(f"the target {sample.target.value!r:.80} is neither yes nor no")
    said = _read_yes_or_no(part_text(response, of)[: _MAX_CHARS + 1], question_text(sample))
    return RewardValue(float(said == target), f"{said}, expected {target}")


@lru_cache(maxsize=4096)  # siblings often give the same answer
def _read_yes_or_no(text: str, question: str) -> str:
    """Return "yes", "no", or that a text says neither, with its start."""
    neither = f"neither yes nor no: {text[:40]!r}"
    if len(text) > _MAX_CHARS:
        return neither
    answer = strip_markup(text).casefold().strip(" \"'([.!)]")
    answer = _HAS.sub(lambda match: match["has"] if names_thing(match["thing"], question) else match[0], answer)
    words = {_WORDS[word] for word in _SAID.findall(answer)}
    thing = _NO_THING.match(answer)
    is_idiom = thing and not is_named(thing[1], question)
    if len(words) != 1 or not _SAID.match(answer) or _UNSAID.search(answer) or is_idiom:
        return neither
    said = words.pop()
    asked = asked_in(question)
    rest = answer if thing else _SAID.sub("", answer, count=1)
    is_against = (said == "yes" and _AGAINST_YES.search(answer)) or _contradicts(said, rest, asked)
    return neither if is_against or is_doubtful(to_english(answer), asked) else said


def _contradicts(said: str, text: str, asked: str) -> bool:
    """Return True if the first clause that answers what is asked, such as "it is there", says the opposite of `said`.

    Such a clause has all words of content of the question and no other, or a pronoun for the first of them.
    """
    wanted, asked_words = content_words(asked), {*_LETTERS.findall(asked)}
    for clause in () if is_denied(asked) else _CLAUSE_END.split(text):
        words = {*_LETTERS.findall(clause)}
        found = content_words(clause)
        if found == ("one",) and not asked_words.isdisjoint(("a", "an", "any")):
            found = ()
        has_pronoun = not words.isdisjoint(_PRONOUNS)
        if found:
            stands_for = has_pronoun and asked_words.isdisjoint(_PRONOUNS)
            answers = found == (wanted[-len(found) :] if stands_for else wanted)
        else:
            answers = len(words) > 1 and (has_pronoun or "there" in words)
        if answers and words & PLACES <= asked_words:
            return is_denied(clause) == (said == "yes")
    return False
