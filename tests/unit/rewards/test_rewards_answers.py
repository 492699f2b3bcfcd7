"""Rewards for closed answers, maths, order and screen actions against oracles that share no code with them.

Values by hand, attacks and unusable targets are rows of the case tables.
"""

import itertools
import json
import logging
import random
import threading
from collections import Counter
from pathlib import Path

import math_verify
import numpy as np
import pytest
import scipy.constants
import scipy.stats
from factories import make_response, make_sample

from mmrl.answer import ResponseFormat
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, ResizeMap, Size, UserError
from mmrl_rewards import choice, classify, format, gui, jigsaw, maths, number, schema
from mmrl_rewards.cases import load_case_table
from mmrl_rewards.contract import bind
from mmrl_rewards.formulas import read_formula
from mmrl_rewards.units import find_unit

CASES = Path(__file__).parents[3] / "rewards" / "cases"
SCREEN = Size(400, 800)


def pair(answer_type, target, text, *, question="?", thinking="optional"):
    """A response and its sample, with a screenshot of 400 x 800 pixels."""
    answer = ResponseFormat(thinking=thinking).parse(text, answer_type)
    response = make_response(text, answer, resize_maps=(ResizeMap(SCREEN, SCREEN),))
    units = CoordinateSystem.PX_ORIGINAL if answer_type is AnswerType.ACTION else None
    parts = (ImageRef(path="p.png", sha256=""), question)
    return response, make_sample(target, answer_type, parts=parts, coordinate_system=units)


def value(reward, answer_type, target, answer, options=None, *, question="?"):
    given = pair(answer_type, target, f"<answer>{answer}</answer>", question=question)
    return bind(reward, options or {})(*given).value


def shuffled(rng, count):
    return rng.sample(range(1, count + 1), count)


def inverse(order):
    return [order.index(thing) + 1 for thing in range(1, len(order) + 1)]


def seams_that_fit(target, answer, form, rows, columns):
    """Lay out tiles as pixels that hold their home position, and count the seams that fit."""
    homes = {}  # tile shown -> (row, column) in the photograph
    for a, b in enumerate(target, start=1):
        tile, home = (b, a) if form == "tiles" else (a, b)
        homes[tile] = divmod(home - 1, columns)
    photograph = np.zeros((rows, columns, 2), dtype=int)
    for a, b in enumerate(answer, start=1):
        tile, place = (b, a) if form == "tiles" else (a, b)
        photograph[divmod(place - 1, columns)] = homes[tile]
    beside = (photograph[:, 1:] - photograph[:, :-1] == (0, 1)).all(-1)
    below = (photograph[1:] - photograph[:-1] == (1, 0)).all(-1)
    return (beside.sum() + below.sum()) / (beside.size + below.size)


@pytest.mark.parametrize("form", ["tiles", "places"])
@pytest.mark.parametrize("grid", [(1, 2), (1, 4), (4, 1), (2, 2), (2, 3), (3, 3)])
def test_neighbours_equal_the_seams_that_fit(grid, form):
    rng = random.Random(0)
    options = {"grid": list(grid), "answer": form}
    for _ in range(60):
        target, answer = (shuffled(rng, grid[0] * grid[1]) for _ in range(2))
        expected = seams_that_fit(target, answer, form, *grid)
        assert value(jigsaw.neighbours, AnswerType.PERMUTATION, target, answer, options) == pytest.approx(expected)
        assert value(jigsaw.neighbours, AnswerType.PERMUTATION, target, target, options) == 1


@pytest.mark.parametrize(
    ("reward", "options", "chance"),
    [
        (jigsaw.positions, {}, 1 / 4),
        (jigsaw.neighbours, {"grid": [2, 2]}, (2**2 + 2**2) / (4 * 4 * 3)),
        (jigsaw.neighbours, {"grid": [1, 4]}, 3**2 / (3 * 4 * 3)),
        (jigsaw.order, {}, 1 / 2),
    ],
)
def test_a_blind_answer_earns_the_stated_chance_level_which_above_chance_subtracts(reward, options, chance):
    orders = list(itertools.permutations(range(1, 5)))
    for fixed in (list(orders[0]), [3, 1, 4, 2]):
        plain, above = (
            [
                value(reward, AnswerType.PERMUTATION, list(target), fixed, {**options, "above_chance": above_chance})
                for target in orders
            ]
            for above_chance in (False, True)
        )
        assert np.mean(plain) == pytest.approx(chance)
        assert above == pytest.approx([max(0, (share - chance) / (1 - chance)) for share in plain])


@pytest.mark.parametrize("form", ["tiles", "places"])
def test_order_equals_scipys_kendall_tau(form):
    rng = random.Random(2)
    for _ in range(200):
        count = rng.randint(2, 9)
        orders = target, answer = shuffled(rng, count), shuffled(rng, count)
        tau = scipy.stats.kendalltau(*(map(inverse, orders) if form == "tiles" else orders)).statistic
        got = value(jigsaw.order, AnswerType.PERMUTATION, target, answer, {"answer": form})
        assert got == pytest.approx(max(0, tau))


def common_subsequence(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def test_fuzzy_equals_the_textbook_subsequence():
    rng = random.Random(3)
    for _ in range(300):
        answer, target = ("".join(rng.choices("abc", k=rng.randint(1, 12))) for _ in range(2))
        ratio = 2 * common_subsequence(answer, target) / (len(answer) + len(target))
        assert value(classify.fuzzy, AnswerType.TEXT, target, answer, {"threshold": 0.6}) == float(ratio >= 0.6 - 1e-12)


UNITS = {
    "m": ("mm", "µm", "um", "dm", "km", "in", "ft", "feet", "yd", "mi", "mile", "inches", "metre", "centimeters"),
    "m^2": ("mm^2", "cm²", "ha", "ft^2", "square feet"),
    "L": ("ml", "mL", "l", "liter", "litres", "cm^3", "m^3"),
    "kg": ("mg", "g", "t", "tonne", "oz", "lb", "pounds"),
    "s": ("ms", "sec", "min", "h", "hr", "hours", "day", "weeks", "year", "yr"),
    "m/s": ("km/h", "mph"),
    "rad": ("°", "deg", "degrees", "radian"),
    "N": ("kN", "kg m/s^2"),
    "W": ("kW", "MW", "mW", "J/s"),
    "V": ("mV", "kV"),
    "Hz": ("kHz", "GHz"),
    "ohm": ("kΩ", "ohms"),
    "GB": ("MB", "bytes"),
    "$": ("USD", "dollars", "cents"),
    "€": ("EUR", "euros"),
    "£": ("GBP",),
}
"""Units by another of the same dimension."""


def test_units_equal_scipys_constants():
    known = {
        "m": {"in": "inch", "ft": "foot", "yd": "yard", "mi": "mile"},
        "s": {"min": "minute", "h": "hour", "day": "day", "week": "week"},
        "kg": {"oz": "oz", "lb": "pound"},
        "m/s": {"mph": "mph", "km/h": "kmh"},
        "m^2": {"ha": "hectare"},
        "m^3": {"L": "liter"},
        "rad": {"°": "degree"},
    }
    for si, constants in known.items():
        for name, constant in constants.items():
            size = find_unit(name).factor / find_unit(si).factor
            assert size == pytest.approx(getattr(scipy.constants, constant), rel=1e-12), name


def test_a_quantity_equals_itself_in_every_unit_of_its_dimension_and_in_no_other():
    names = {name: dimension for dimension, others in UNITS.items() for name in (dimension, *others)}
    for (name, dimension), (other_name, other_dimension) in itertools.product(names.items(), repeat=2):
        ratio = find_unit(name).factor / find_unit(other_name).factor
        for size, expected in ((7, float(dimension == other_dimension)), (7.1, 0.0)):
            answer = f"{size * ratio!r} {other_name}"
            assert value(number.quantity, AnswerType.TEXT, f"7 {name}", answer) == expected, answer


def test_text_that_is_not_a_unit_is_none():
    for name in ("", "zorks", "5", "cm 3", "m1000", "import os", "lambda: 1", "__class__", "()" * 20, "a" * 1000):
        assert find_unit(name) is None, name


OPTION_FORMS = (
    *("{l}", "({l})", "{l}.", "[{l}]", "**{l}**", "{l}. {t}", "({l}) {t}", "{t}"),
    *("The answer is {l}.", "Answer: {l}"),
)


def test_option_follows_its_text_when_options_are_shuffled():
    rng = random.Random(4)
    texts = ["red", "light blue", "3.5 cm", "The sea", r"$x^2$"]
    for _ in range(40):
        rng.shuffle(texts)
        question = "Which?" + "".join(f"\n{letter}. {text}" for letter, text in zip("ABCDE", texts, strict=True))
        right, wrong = rng.sample(range(5), 2)
        for form, (index, expected) in itertools.product(OPTION_FORMS, ((right, 1), (wrong, 0))):
            answer = form.format(l="ABCDE"[index], t=texts[index])
            got = value(choice.option, AnswerType.CHOICE, "ABCDE"[right], answer, question=question)
            assert got == expected, answer


def test_graded_numbers_are_those_of_video_r1():
    """Within the 1e-9 that its code adds to error and target."""
    numbers = random.Random(0)
    for _ in range(500):
        target = round(numbers.choice((-1, 1)) * 10 ** numbers.uniform(-3, 5), 6)
        given = round(target * numbers.uniform(-0.5, 2.5), 6)
        published = 1.0 - min(1.0, max(0.0, (abs(given - target) + 1e-9) / (abs(target) + 1e-9)))
        assert value(number.graded, AnswerType.NUMBER, target, repr(given)) == pytest.approx(published, abs=2e-6)


# Numbers that ours reads as such, a pair, and a set.
READ_OTHERWISE = {
    *(("3", "3.0000001"), ("1000", "1e3")),
    *(("(1,2)", "y=2,x=1"), ("x<-1, x>3", r"(-\infty,-1)\cup(3,\infty)")),
    ("-1", "i^2"),  # a variable to math-verify
    ("0", "A-a"),  # and these are one
    ("f(2) = 4", "4"),  # a name to ours
    *(("5", "2+3 = 5 = x"), ("1.414", r"\sqrt{2}\approx 1.414")),  # chains to ours
    *(("12", r"11.7 \approx 12"), ("(1,2)", "(1,2) = (1,2)")),
    (r"\sqrt{\frac{2h}{g}}", r"\frac{\sqrt{2h}}{\sqrt{g}}"),  # positive to ours
}


def test_maths_equals_math_verify():
    """Wherever neither formula is rewritten before math-verify reads it."""
    compared = 0
    for row in load_case_table(CASES / "maths.json"):
        response, sample = row.build()
        answer = response.answer.value
        if row.expected == "unscorable" or sample.target.answer_type is not AnswerType.LATEX:
            continue
        if answer is None or row.args or len(answer) > 300:
            continue
        formulas = sample.target.value, answer
        read = list(map(read_formula, formulas)) if row.expected else []
        if not read or any(formula.is_words for formula in read) or [formula.text for formula in read] != [*formulas]:
            continue
        if any(" or " in formula for formula in formulas):  # math-verify reads its letters as variables
            continue
        readings = (math_verify.parse(f"${formula}$") for formula in formulas)
        theirs = math_verify.verify(*readings, allow_set_relation_comp=True)
        assert (maths.equal(response, sample).value == float(theirs)) != (formulas in READ_OTHERWISE), formulas
        compared += 1
    assert compared > 25


def test_both_signs_are_not_taken_from_commands_that_begin_like_pm():
    congruence = r"x\equiv 3\pmod{7}"
    assert read_formula(congruence).text == congruence
    assert read_formula(r"x=1\pm 2").text == "x=1+ 2, x=1- 2"


def test_maths_works_in_a_thread_and_logs_nothing(caplog):
    maths._verify.cache_clear()
    maths._parse_formula.cache_clear()
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    got = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: got.append(value(maths.equal, AnswerType.LATEX, "1/2", "0.5")))
        thread.start()
        thread.join()
    assert got == [1]
    assert not caplog.records


@pytest.mark.parametrize(
    ("malformed", "words"),
    [
        ({"type": "objct"}, r"at \$.type: 'objct'"),
        ({"properties": {"a": {"pattern": "("}}}, r"at \$.properties.a.pattern: '\('"),
        ({"$ref": "https://example.org/form.json"}, "leads nowhere"),
        ({"items": {"$ref": "#/$defs/line"}, "$defs": {}}, r"\$ref '#/\$defs/line' leads nowhere"),
        ([], "must be an object"),
    ],
)
def test_a_malformed_schema_is_refused_when_it_is_bound(malformed, words):
    with pytest.raises(UserError, match=f"reward 'schema', option 'schema' = .*{words}"):
        bind(schema.valid, {"schema": malformed})


def random_action(rng):
    place = {"coordinate": [rng.uniform(0, 400), rng.uniform(0, 800)]} if rng.random() < 0.8 else {}
    words = {"text": " ".join(rng.choices("abc", k=rng.randint(1, 4)))} if rng.random() < 0.5 else {}
    return {"action": rng.choice(["click", "type"]), **place, **words}


def test_gui_step_is_the_least_of_action_click_and_argument():
    rng = random.Random(5)
    outcomes = Counter()
    for _ in range(600):
        target, answer = random_action(rng), random_action(rng)
        name, click, argument, step = (
            value(reward, AnswerType.ACTION, target, json.dumps(answer))
            for reward in (gui.action, gui.click, gui.argument, gui.step)
        )
        assert step == min(name, click, argument)
        outcomes[step, click] += 1
        if target["action"] == answer["action"] and "coordinate" in target and "coordinate" in answer:
            offset = np.subtract(target["coordinate"], answer["coordinate"]) / SCREEN
            assert click == float(np.linalg.norm(offset) <= 0.14)
    assert len(outcomes) == 3


TOKENS = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]


def test_the_partial_format_is_whole_exactly_where_the_response_format_finds_no_problem():
    rng = random.Random(8)
    texts = ["".join(rng.choices(TOKENS, k=rng.randint(0, 9))) for _ in range(3000)]
    texts += ["".join(parts) for parts in itertools.permutations(["<think>a</think>", "<answer>b</answer>", " ", "\n"])]
    num_whole = 0
    for text in texts:
        response, sample = pair(AnswerType.TEXT, "b", text, thinking="required")
        strict, partial = format.tags(response, sample).value, format.partial(response, sample).value
        assert (partial == 1) == (strict == 1), text
        assert partial in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
        num_whole += strict == 1
    assert num_whole > 5
