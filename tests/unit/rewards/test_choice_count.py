"""The grammars of choices and counts, against answers composed of parts whose meaning is known."""

import itertools
import random

import pytest
from factories import make_response, make_sample

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType
from mmrl_rewards import choice, count
from mmrl_rewards.contract import bind

FORMAT = ResponseFormat()
TEXTS = {"A": "a red car", "B": "two blue bikes", "C": "the tram", "D": "None of the above", "E": "3.5 cm"}
QUESTION = "Which one?" + "".join(f"\n{letter}. {text}" for letter, text in TEXTS.items())
NAMES = ("{l}", "({l})", "**{l}**", "option {l}", "{l}. {t}", "({l}) {t}", "{t}", "{t} ({l})", r"\boxed{{{l}}}")
STATEMENTS = (
    *("{n}", "{n}.", "It is {n}.", "So it must be {n}.", "The answer is {n}."),
    *("The correct option is: {n}", "Answer: {n}"),
    *("{n} is correct.", "{n} is the right answer", "I choose {n}.", "We would pick {n}", "Therefore, {n}"),
    "My final answer is {n}.",
)
DENIALS = (
    *("it is not {n}", "{n} is wrong", "it can't be {n}", "{n} is not correct", "not {n}", "{n} can be ruled out"),
    *("the answer isn't {n}", "{n} is incorrect", "I would not choose {n}"),
)
HEDGES = ("{n} or {m}", "{n} and {m}", "either {n} or {m}", "maybe {n}", "it could be {n}", "{n}? {m}?", "{n}, or {m}")


def score(fn, answer_type, target, answer, *, question="How many?", **args):
    sample = make_sample(target, answer_type, parts=(question,))
    text = f"<answer>{answer}</answer>"
    return bind(fn, args)(make_response(text, FORMAT.parse(text, answer_type)), sample).value


def score_option(target, answer):
    return score(choice.option, AnswerType.CHOICE, target, answer, question=QUESTION)


def fill(form, letter):
    return form.format(l=letter, t=TEXTS[letter])


def test_a_statement_names_its_option_and_no_other():
    rng = random.Random(1)
    for name, statement in itertools.product(NAMES, STATEMENTS):
        right, wrong = rng.sample(sorted(TEXTS), 2)
        answer = statement.format(n=fill(name, right))
        assert (score_option(right, answer), score_option(wrong, answer)) == (1.0, 0.0), answer


def test_a_denial_names_no_option_and_leaves_a_statement_beside_it_as_it_is():
    rng = random.Random(2)
    for name, denial, statement in itertools.product(NAMES[:4], DENIALS, STATEMENTS):
        right, wrong = rng.sample(sorted(TEXTS), 2)
        denied = denial.format(n=fill(name, wrong))
        for answer in (denied, f"{denied}."):
            assert score_option(wrong, answer) == score_option(right, answer) == 0.0, answer
        stated = statement.format(n=fill(name, right)).rstrip(".")
        for answer in (f"{denied}, so {stated}", f"{denied}. {stated}.", f"{stated} because {denied}."):
            assert (score_option(right, answer), score_option(wrong, answer)) == (1.0, 0.0), answer
        # The option that is stated must not be the one denied.
        contradiction = f"{statement.format(n=fill(name, wrong)).rstrip('.')}. But {denied}."
        assert score_option(wrong, contradiction) == 0.0, contradiction


def test_an_answer_that_hedges_or_contradicts_itself_names_no_option():
    rng = random.Random(3)
    for name, hedge in itertools.product(NAMES[:4], HEDGES):
        first, second = rng.sample(sorted(TEXTS), 2)
        answer = hedge.format(n=fill(name, first), m=fill(name, second))
        assert score_option(first, answer) == score_option(second, answer) == 0.0, answer
    for first, second in itertools.permutations(TEXTS, 2):
        for form in ("({l}) {t}", "{l}. {t}", "{t} ({l})", "The answer is {l}: {t}."):
            answer = form.format(l=first, t=TEXTS[second])
            assert score_option(first, answer) == score_option(second, answer) == 0.0, answer
        two = f"{STATEMENTS[4].format(n=first)} {STATEMENTS[4].format(n=second)}"
        assert score_option(first, two) == score_option(second, two) == 0.0, two


@pytest.mark.parametrize(
    "text", ["The answer is B. " * 50_000, "(" * 900, "A " * 400, "{A}" * 300, "not (A) and " * 80]
)
def test_a_hostile_answer_is_read_in_time(text):
    assert score_option("B", text) == 0.0


SMALL = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = {2: "twenty", 3: "thirty", 4: "forty", 5: "fifty", 6: "sixty", 7: "seventy", 8: "eighty", 9: "ninety"}


def spell(number):
    """The number in words, by place."""
    if number >= 100:
        rest = f" and {spell(number % 100)}" if number % 100 else ""
        return f"{SMALL[number // 100]} hundred{rest}"
    if number >= 20:
        return TENS[number // 10] + (f"-{SMALL[number % 10]}" if number % 10 else "")
    return SMALL[number]


COUNTS = ("{n}", "{n} cats", "There are {n} cats.", "The answer is {n}.", "exactly {n} small black cats", "{n} ({d})")
NO_COUNTS = (
    *("not {n}", "{n} or {m}", "{n} to {m}", "about {n}", "at least {n}", "{n} percent", "{n}, {m}"),
    *("minus {n}", "{n}?"),
    *("{n} cats and {m} dogs", "more than {n}", "{n} and a half", "{n} out of {m}", "between {n} and {m}", "{n} ({m})"),
)


def score_count(target, answer):
    return score(count.exact, AnswerType.NUMBER, target, answer, words=True)


def test_numbers_are_read_in_digits_and_words():
    for number in range(1000):
        form = COUNTS[number % len(COUNTS)]
        for written in (str(number), spell(number), spell(number).replace("-", " ").replace(" and ", " ").capitalize()):
            answer = form.format(n=written, d=number)
            assert (score_count(number, answer), score_count(number + 1, answer)) == (1.0, 0.0), answer
    for dozens in range(1, 20):
        assert (
            score_count(12 * dozens, f"{spell(dozens)} dozen eggs") == score_count(12 * dozens, f"{dozens} dozen") == 1
        )


def test_what_states_no_single_count_earns_nothing():
    for number, form in itertools.product((0, 1, 3, 21, 105), NO_COUNTS):
        for write in (str, spell):
            answer = form.format(n=write(number), m=write(number + 1))
            for target in (number, number + 1, 2 * number + 1):
                assert score_count(target, answer) == 0.0, answer
