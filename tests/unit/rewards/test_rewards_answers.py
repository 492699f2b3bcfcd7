"""Rewards for closed answers, maths, order and screen actions against oracles, attacks and noise."""

import itertools
import json
import logging
import math
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
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, ResizeMap, RewardValue, Size, Unscorable, UserError
from mmrl_rewards import choice, classify, count, format, gui, jigsaw, maths, number, schema
from mmrl_rewards.cases import load_case_table
from mmrl_rewards.contract import Reward, bind

CASES = Path(__file__).parents[3] / "rewards" / "cases"
SCREEN = Size(400, 800)
RESIZE = ResizeMap(SCREEN, Size(224, 448))


def pair(kind, target, answer, *, question="?", frame=None, meta=None, grammar=None, raw=False):
    """Response and sample for an answer in its tags (or `raw` text), on a screenshot of 400 x 800."""
    text = answer if raw else f"<answer>{answer}</answer>"
    parsed = (grammar or ResponseFormat(thinking="optional")).parse(text, kind)
    units = CoordinateSystem.PX_ORIGINAL
    response = make_response(text, parsed, resize_maps=(RESIZE,), coordinate_system=frame or units)
    parts = (ImageRef(path="p.png", sha256=""), question)
    units = units if kind is AnswerType.ACTION else None
    return response, make_sample(target, kind, parts=parts, coordinate_system=units, meta=meta or {})


def value(reward, kind, target, answer, *, options=None, **more):
    return bind(reward, options or {})(*pair(kind, target, answer, **more)).value


def shuffled(rng, things):
    order = list(range(1, things + 1))
    rng.shuffle(order)
    return order


def inverse(order):
    return [order.index(thing) + 1 for thing in range(1, len(order) + 1)]


def slow_neighbours(target, answer, says, rows, columns):
    """Lay out tiles as pixels that hold their home position, and count the seams that fit."""
    media_owners = {}  # tile shown -> (row, column) in the photograph
    for a, b in enumerate(target, start=1):
        tile, home = (b, a) if says == "tiles" else (a, b)
        media_owners[tile] = divmod(home - 1, columns)
    photograph = np.zeros((rows, columns, 2), dtype=int)
    for a, b in enumerate(answer, start=1):
        tile, place = (b, a) if says == "tiles" else (a, b)
        photograph[divmod(place - 1, columns)] = media_owners[tile]
    beside = (photograph[:, 1:] - photograph[:, :-1] == (0, 1)).all(-1)
    below = (photograph[1:] - photograph[:-1] == (1, 0)).all(-1)
    return (beside.sum() + below.sum()) / (beside.size + below.size)


@pytest.mark.parametrize("says", ["tiles", "places"])
@pytest.mark.parametrize("grid", [(1, 2), (1, 4), (4, 1), (2, 2), (2, 3), (3, 3)])
def test_neighbours_equal_looking_at_every_seam(grid, says):
    rng = random.Random(0)
    options = {"grid": list(grid), "answer": says}
    for _ in range(60):
        target, answer = (shuffled(rng, grid[0] * grid[1]) for _ in range(2))
        expected = slow_neighbours(target, answer, says, *grid)
        given = value(jigsaw.neighbours, AnswerType.PERMUTATION, target, answer, options=options)
        assert given == pytest.approx(expected)
        assert value(jigsaw.neighbours, AnswerType.PERMUTATION, target, target, options=options) == 1


def test_both_ways_to_write_an_order_earn_the_same():
    rng = random.Random(1)
    for _ in range(50):
        target, answer = shuffled(rng, 6), shuffled(rng, 6)
        for reward, options in ((jigsaw.positions, {}), (jigsaw.order, {}), (jigsaw.neighbours, {"grid": [2, 3]})):
            says = [{}, {}] if reward is jigsaw.positions else [{"answer": "tiles"}, {"answer": "places"}]
            tiles = value(reward, AnswerType.PERMUTATION, target, answer, options={**options, **says[0]})
            places = value(
                reward, AnswerType.PERMUTATION, inverse(target), inverse(answer), options={**options, **says[1]}
            )
            assert tiles == pytest.approx(places)


@pytest.mark.parametrize(
    ("reward", "options", "chance"),
    [
        (jigsaw.exact, {}, 1 / 24),
        (jigsaw.positions, {}, 1 / 4),
        (jigsaw.neighbours, {"grid": [2, 2]}, (2**2 + 2**2) / (4 * 4 * 3)),
        (jigsaw.neighbours, {"grid": [1, 4]}, 3**2 / (3 * 4 * 3)),
        (jigsaw.order, {"above_chance": False}, 1 / 2),
    ],
)
def test_a_fixed_answer_earns_the_stated_chance_level(reward, options, chance):
    orders = list(itertools.permutations(range(1, 5)))
    for fixed in (list(orders[0]), [3, 1, 4, 2]):
        blind = [value(reward, AnswerType.PERMUTATION, list(target), fixed, options=options) for target in orders]
        assert np.mean(blind) == pytest.approx(chance)


@pytest.mark.parametrize(
    ("reward", "options"), [(jigsaw.positions, {}), (jigsaw.neighbours, {"grid": [2, 2]}), (jigsaw.order, {})]
)
def test_above_chance_pays_less_than_chance_for_a_blind_answer(reward, options):
    orders = list(itertools.permutations(range(1, 5)))
    raw, above = (
        [
            value(reward, AnswerType.PERMUTATION, list(t), [1, 2, 3, 4], options={**options, "above_chance": corrected})
            for t in orders
        ]
        for corrected in (False, True)
    )
    assert np.mean(above) < np.mean(raw)
    for before, after in zip(raw, above, strict=True):
        assert after == pytest.approx(max(0, (before - np.mean(raw)) / (1 - np.mean(raw))))


def test_order_equals_scipys_kendall_tau():
    rng = random.Random(2)
    for _ in range(200):
        things = rng.randint(2, 9)
        target, answer = shuffled(rng, things), shuffled(rng, things)
        tau = scipy.stats.kendalltau(inverse(answer), inverse(target)).statistic
        assert value(jigsaw.order, AnswerType.PERMUTATION, target, answer) == pytest.approx(max(0, tau))
        tau = scipy.stats.kendalltau(answer, target).statistic
        places = {"answer": "places"}
        assert value(jigsaw.order, AnswerType.PERMUTATION, target, answer, options=places) == pytest.approx(max(0, tau))


def slow_common(a, b):
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
        ratio = 2 * slow_common(answer, target) / (len(answer) + len(target))
        near = value(classify.fuzzy, AnswerType.TEXT, target, answer, options={"threshold": 0.6})
        assert near == float(ratio >= 0.6 - 1e-12)


def test_units_agree_with_scipy():
    known = {
        **{"in": "inch", "ft": "foot", "yd": "yard", "mi": "mile", "min": "minute", "h": "hour", "day": "day"},
        **{"week": "week", "oz": "oz", "lb": "pound", "mph": "mph", "km/h": "kmh", "ha": "hectare", "L": "liter"},
    }
    for name, constant in known.items():
        assert number.UNITS[name].factor == pytest.approx(getattr(scipy.constants, constant), rel=1e-12)
    assert number.UNITS["rad"].factor == pytest.approx(math.degrees(1), rel=1e-15)


def test_a_quantity_is_the_same_in_every_unit_of_its_measure_and_in_no_other():
    for (name, unit), (other_name, other) in itertools.product(number.UNITS.items(), repeat=2):
        given = f"{7 * unit.factor / other.factor!r} {other_name}"
        assert value(number.quantity, AnswerType.TEXT, f"7 {name}", given) == float(unit.dimension == other.dimension)
        if unit.dimension == other.dimension:
            wrong = f"{7.1 * unit.factor / other.factor!r} {other_name}"
            assert value(number.quantity, AnswerType.TEXT, f"7 {name}", wrong) == 0


def test_option_follows_its_text_when_options_are_shuffled():
    rng = random.Random(4)
    texts = ["red", "light blue", "3.5 cm", "The sea", r"$x^2$"]
    ways = [
        "{l}",
        "({l})",
        "{l}.",
        "[{l}]",
        "**{l}**",
        "{l}. {t}",
        "({l}) {t}",
        "{t}",
        "The answer is {l}.",
        "Answer: {l}",
    ]
    for _ in range(40):
        rng.shuffle(texts)
        question = "Which?" + "".join(f"\n{letter}. {text}" for letter, text in zip("ABCDE", texts, strict=True))
        right, given = rng.sample(range(5), 2)
        for way in ways:
            for index, expected in ((right, 1), (given, 0)):
                answer = way.format(l="ABCDE"[index], t=texts[index])
                got = value(choice.option, AnswerType.CHOICE, "ABCDE"[right], answer, question=question)
                assert got == expected, answer


DEPARTURES = {("3", "3.0000001"), ("1000", "1e3")}  # plain numbers are compared as such


def test_maths_equals_math_verify():
    rows = [
        row
        for row in load_case_table(CASES / "maths.json")
        if row.sample.answer_type is AnswerType.LATEX and row.expected != "unscorable"
    ]
    compared = 0
    for row in rows:
        response, sample = row.build()
        if response.answer.value is None or row.args or len(response.answer.value) > 300:
            continue
        gold, answer = (f"${formula}$" for formula in (sample.target.value, response.answer.value))
        bare = math_verify.verify(math_verify.parse(gold), math_verify.parse(answer))
        departs = (sample.target.value, response.answer.value) in DEPARTURES
        assert (maths.equal(response, sample).value == float(bare)) != departs, (gold, answer)
        compared += 1
    assert compared > 40


def test_maths_works_in_a_thread_and_is_quiet(caplog):
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
    ("malformed", "complaint"),
    [
        ({"type": "objct"}, r"at \$.type: 'objct' is not valid"),
        ({"properties": {"a": {"pattern": "("}}}, r"at \$.properties.a.pattern: '\(' is not a 'regex'"),
        ({"$ref": "https://example.org/form.json"}, "leads nowhere in it"),
        ({"items": {"$ref": "#/$defs/line"}, "$defs": {}}, r"\$ref '#/\$defs/line' leads nowhere in it"),
        ([], "must be an object"),
    ],
)
def test_a_malformed_schema_is_refused_when_the_config_is_read(malformed, complaint):
    with pytest.raises(UserError, match=f"reward 'schema', option 'schema' = .*{complaint}"):
        bind(schema.valid, {"schema": malformed})


def random_action(rng):
    places = {"coordinate": [rng.uniform(0, 400), rng.uniform(0, 800)]} if rng.random() < 0.8 else {}
    words = {"text": " ".join(rng.choices("abc", k=rng.randint(1, 4)))} if rng.random() < 0.5 else {}
    return {"action": rng.choice(["click", "type"]), **places, **words}


def test_gui_step_is_the_least_of_its_parts():
    rng = random.Random(5)
    outcomes = Counter()
    for _ in range(600):
        target, answer = random_action(rng), random_action(rng)
        given = json.dumps(answer)
        parts = [
            value(gui.action, AnswerType.ACTION, target, given),
            value(gui.click, AnswerType.ACTION, target, given),
        ]
        parts.append(value(gui.argument, AnswerType.ACTION, target, given))
        step = value(gui.step, AnswerType.ACTION, target, given)
        assert step == min(parts)
        outcomes[step, parts[1]] += 1
        if target["action"] == answer["action"] and "coordinate" in target and "coordinate" in answer:
            offset = np.subtract(target["coordinate"], answer["coordinate"]) / SCREEN
            assert parts[1] == float(np.linalg.norm(offset) <= 0.14)
    assert len(outcomes) == 3


def clicked(place):
    return json.dumps({"action": "click", "coordinate": place})


@pytest.mark.parametrize("frame", list(CoordinateSystem))
def test_a_click_is_judged_alike_in_every_frame(frame):
    rng = random.Random(6)
    for _ in range(200):
        target = {"action": "click", "coordinate": [rng.uniform(0, 400), rng.uniform(0, 800)]}
        place = [x + rng.uniform(-80, 80) for x in target["coordinate"]]
        converted = list(RESIZE.convert(place, CoordinateSystem.PX_ORIGINAL, frame))
        meta = {"box": [0, 0, *target["coordinate"]]}
        for options in ({}, {"column": "box"}):
            pixels, other = (
                value(gui.step, AnswerType.ACTION, target, click, options=options, frame=measured, meta=meta)
                for click, measured in ((clicked(place), CoordinateSystem.PX_ORIGINAL), (clicked(converted), frame))
            )
            assert other == pixels


def test_the_f1_of_an_argument_equals_counting():
    rng = random.Random(7)
    for _ in range(200):
        target, answer = (rng.choices("abcd", k=rng.randint(1, 6)) for _ in range(2))
        left = list(target)
        shared = sum(1 for word in answer if word in left and (left.remove(word) or True))
        precision, recall = shared / len(answer), shared / len(target)
        expected = 2 * precision * recall / (precision + recall) if shared else 0
        actions = [{"action": "type", "text": " ".join(words)} for words in (target, answer)]
        got = value(gui.argument, AnswerType.ACTION, actions[0], json.dumps(actions[1]), options={"measure": "f1"})
        assert got == pytest.approx(expected)


TOKENS = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]


def test_the_partial_format_is_whole_exactly_where_the_grammar_has_no_complaint():
    rng = random.Random(8)
    grammar = ResponseFormat(thinking="required")
    whole = 0
    texts = ["".join(rng.choices(TOKENS, k=rng.randint(0, 9))) for _ in range(3000)]
    texts += ["".join(parts) for parts in itertools.permutations(["<think>a</think>", "<answer>b</answer>", " ", "\n"])]
    for text in texts:
        given = pair(AnswerType.TEXT, "b", text, grammar=grammar, raw=True)
        strict, partial = format.tags(*given).value, format.partial(*given).value
        assert (partial == 1) == (strict == 1), text
        assert partial in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
        whole += strict == 1
    assert whole > 5


def test_count_reads_number_words():
    for n in range(21):
        assert value(count.exact, AnswerType.NUMBER, n, f"{count._NUMBER_WORDS[n]} cups", options={"words": True}) == 1
    for target, answer in itertools.product(range(6), range(-2, 9)):
        expected = max(0, 1 - abs(answer - target) / max(1, target))
        assert value(count.graded, AnswerType.NUMBER, target, answer) == pytest.approx(expected)


NOISE = [
    *(
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        "[",
        "]",
        "{",
        "}",
        '"',
        ":",
        ",",
        "1",
        "-",
        ".",
        "e9",
        "B",
        "yes",
    ),
    *(
        "no",
        '{"action": "click"',
        '"coordinate": [1, 2]',
        "NaN",
        "null",
        "\\frac",
        "\\boxed{",
        "$",
        "%",
        "cm",
        "°",
        "٣",
    ),
    *("\x00", "\ud800", "\u202e", "\U0001f600", "３", "²", "\n", " ", "+", "!", "=", "<", ">"),
]
SUBJECTS = {
    AnswerType.CHOICE: "B",
    AnswerType.TEXT: "3",
    AnswerType.NUMBER: 3,
    AnswerType.LATEX: "x+1",
    AnswerType.LIST: ["a"],
    AnswerType.PERMUTATION: [2, 1, 3, 4],
    AnswerType.JSON: {"a": 1},
    AnswerType.ACTION: {"action": "click", "coordinate": [1, 2], "text": "a b"},
}


@pytest.mark.parametrize(
    "module", [choice, number, count, classify, jigsaw, gui, format, maths], ids=lambda m: m.__name__
)
def test_no_response_makes_a_reward_fail(module):
    rng = random.Random(9)
    rewards = [member for member in vars(module).values() if isinstance(member, Reward)]
    assert rewards
    texts = ["".join(rng.choices(NOISE, k=rng.randint(0, 12))) for _ in range(150 if module is not maths else 60)]
    for reward, text in itertools.product(rewards, [*texts, *(f"<answer>{text}</answer>" for text in texts)]):
        for kind in reward.answer_types or (AnswerType.TEXT,):
            target = "yes" if reward is choice.yes_no else SUBJECTS[kind]
            given = pair(kind, target, text, raw=True, meta={"rows": 2, "columns": 2})
            term = reward(*given)
            assert isinstance(term, RewardValue)
            assert 0 <= term.value <= 1
            assert "\n" not in term.reason
            assert len(term.reason) < 250


@pytest.mark.parametrize(
    ("reward", "kind", "target", "options"),
    [
        (maths.equal, AnswerType.BOX, [1, 2, 3, 4], {}),
        (maths.equal, AnswerType.LATEX, "{", {}),
        (number.quantity, AnswerType.TEXT, "3 parsec", {}),
        (choice.yes_no, AnswerType.TEXT, "unsure", {}),
        (jigsaw.neighbours, AnswerType.PERMUTATION, [1, 2, 3], {"grid": [2, 2]}),
        (gui.click, AnswerType.ACTION, {"action": "click", "coordinate": [1, 2]}, {"column": "box"}),
    ],
)
def test_unusable_targets_are_unscorable_before_the_answer_is_read(reward, kind, target, options):
    for text in ("", "<answer>1</answer>"):
        with pytest.raises(Unscorable):
            bind(reward, options)(*pair(kind, target, text, raw=True))
