"""Rewards for multiple choice and for yes or no. `of` names the part of the response that is read."""

from __future__ import annotations

import re
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from mmrl.answer.language import HEDGES, WRONG
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.choice_grammar import parse_options, read_choice, strip_markup
from mmrl_rewards.contract import Of, part_text, part_value, question_text, reward, target_value
from mmrl_rewards.count import is_named

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
_DOUBT: Final = re.compile(
    r"\?|可能|也许|或|不确定|不知道"
    rf"|\b(?:{HEDGES}|unsure|uncertain|not sure|wait|or (?:not|else)|don't know|cannot tell"
    rf"|can't tell|guess)\b|^\w+\W+(?:is|was|isn't|if|unless|only if|{WRONG}|just kidding)\b"
)
# "Yes, it isn't safe" may be right, but "Yes, there isn't any", "Yes, it isn't" and "No, it is" contradict themselves.
_SHORT_ANSWER: Final = (
    r"^\w+\W+(?:it|there|s?he|they|that|this|i|we)(?: (?:is|are|was|were|does|do|did|has|have|can|ca|will|wo)|'s|'re)"
)
_AGAINST: Final = {
    "no": re.compile(rf"{_SHORT_ANSWER}$"),
    "yes": re.compile(
        rf"[不没否](?!错)|{_SHORT_ANSWER}(?: ?not|n't)$"
        r"|^\w+\W+(?:(?:there (?:is|are|was|were)|(?:i|we) (?:do|can|ca|could|did))(?: ?not|n't| none| nothing)"
        r"|not(?! only)|none|nothing|never)\b"
    ),
}


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
    if not letters:
        return RewardValue(0.0, f"names no option: {text[:40]!r}")
    return RewardValue(float(target in letters), f"{' or '.join(letters)}, expected {target}")


@reward(name="yes_no", answer_types=(AnswerType.TEXT,))
def yes_no(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return 1 if the answer begins with the target's "yes" or "no" and contains nothing against it, else 0.

    "Yeah" and 是的 are yes, "nope" and 不是 no. The other word, a word of doubt and "Yes, it isn't" are against it.

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
    words = {_WORDS[word] for word in _SAID.findall(answer)}
    thing = _NO_THING.match(answer)
    is_idiom = thing and not is_named(thing[1], question)
    if len(words) != 1 or not _SAID.match(answer) or _DOUBT.search(answer) or is_idiom:
        return neither
    said = words.pop()
    return neither if _AGAINST[said].search(answer) else said
