"""Rewards for mathematics, compared by math-verify."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache, partial
from typing import Annotated, Any, Final, TypeAlias

from pydantic import Field

from mmrl.answer import validate_value
from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.arithmetic import compare, is_huge, numbers_equal
from mmrl_rewards.contract import BadAnswer, Of, part_text, reward
from mmrl_rewards.formulas import CONNECTIVE, Formula, read_formula
from mmrl_rewards.strings import excerpt
from mmrl_rewards.units import find_unit

_Reading: TypeAlias = Any  # of sympy
# $x$ is $5$, but not $5 + $6
_MATHS: Final = re.compile(r"(?<!\\)\$\$?(?=\S)([^$]+?)(?<=[^\\\s])\$\$?(?![0-9])|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_ANSWER_TYPES: Final = (AnswerType.LATEX, AnswerType.TEXT, AnswerType.NUMBER)
_INEQUALITY: Final = re.compile(r"[<>]|\\(?:le|ge|leq|geq|lt|gt|ne|neq)(?![a-z])")
_SET: Final = re.compile(r"\\\{((?:(?!\\[{}]|\\emptyset).)+)\\\}")
_DECIMAL_COMMA: Final = re.compile(r"[+-]?[0-9]+,[0-9]+")
_EQUALS: Final = re.compile("=")
_IN_BRACKETS: Final = re.compile(r"\([^()]*\)")  # of P(X > 2)
_LETTER: Final = re.compile(r"[A-Za-z]")
_FUNCTION_OF: Final = re.compile(r"(?<=[A-Za-z])'?\([^()]*\)")
_OPERATION: Final = re.compile(r"[0-9+*/^!-]|\\(?:frac|sqrt|cdot|times|div|pi)")
_FUNCTION: Final = r"\\(?:(?:arc)?(?:sin|cos|tan)|log|ln|exp)h?(?![a-z])"
# Of a variable, such as \ln x and |x|, but not \sin A and |AB|, which are numbers.
_OPERATION_ON_VARIABLE: Final = re.compile(rf"(?:{_FUNCTION}|\\?\||\\l(?:floor|ceil)|\[|\\\{{)[^A-Za-z\\]*[a-z]")
_IN_NUMBERS: Final = re.compile(rf"{_OPERATION.pattern}|{_FUNCTION}|\\infty")
_QUOTIENT: Final = re.compile(r"(?:\\frac)?(?:[A-Z/]+|d[a-z]/?d[a-z])")  # AB/CD, dy/dx
_TUPLE_OF_NAMES: Final = re.compile(r"\(?([A-Za-z](?:, ?[A-Za-z])+)\)? ?= ?\(?([^()=]+)\)?")
_TO_EVALUATE: Final = re.compile(r"\\(?:int|lim)(?![a-z])|\\(?:sum|prod)_[^^]*\^\{?(?:\\infty|[a-z])|\\sum.*\\sum")
_EXCERPT_CHARS: Final = 60


@reward(name="maths", answer_types=_ANSWER_TYPES, timeout_s=5.0)
def equal(
    response: Response, sample: Sample, *, decimals: Annotated[int, Field(ge=0, le=12)] = 6, of: Of = "answer"
) -> RewardValue:
    r"""Return 1 if the answer is mathematically equal to the target, as \frac{1}{2}, 1/2 and 0.5 are, else 0.

    Decimal fractions are compared to `decimals` places, so with 3 places 0.333 equals 1/3; other fractions are compared
    exactly. Order counts in (1, 2), but not in 1, 2 and \{1, 2\}; 1, 2 equals both. Repetition counts in 1, 1, 2, but
    not in \{1, 1, 2\}. b = 3, a = 2 equals 3, 2 and (2, 3). x = 3 and f(2) = 3 equal 3, 50% equals both 50 and 0.5,
    1 < x < 2 equals the interval (1, 2), 3:4 equals 3/4, and 12\,500 equals 12,500; 1,5 is two numbers in a target. An
    equation equals its multiples, and no value: x^2 + y^2 = 1 is not 1, and |x| = 5 is not 5. x = 2 + 3 = 5 is 5, as is
    4.9 \approx 5, x = 5 = 6 is nothing, and 2(x + 1) = 2x + 2 is 2x + 2. Letters under a root are positive. Units that
    pint knows are converted, and %, $, degrees and what is counted, as in 5 apples, are units; a unit on only one side
    does not count, 2m is a product, 5 pairs is not 5. Degrees are radians beside \pi. C(5, 2) is both 10 and a point,
    and 10:20 is a time. "The answer is", "The area is" and "Area:" may come first, also in Chinese.
    \triangle ABC is \triangle CAB, and \angle ABC is \angle CBA, but not \angle BCA. Words, such as yes or \text{none},
    are compared as text, case aside, and lists of words in any order; number words are compared as numbers.

    9^{9^{9}} and other numbers of a thousand digits equal only themselves as they are written, and integrals and sums
    to n no value. Other comparisons, too, can take minutes, so a call has a time limit. math-verify's own limit uses
    SIGALRM, which fails outside the main thread, so it is switched off.

    Source: math-verify (github.com/huggingface/Math-Verify), `verify(gold, answer, allow_set_relation_comp=True)`.
    Departures: the whole answer must be one formula, and no number is extracted from it. Formulas are rewritten first
    where math-verify misreads them, as `mmrl_rewards/formulas.py` lists. More than 300 characters are not a formula.
    Plain numbers, and simple formulas as in `mmrl_rewards/arithmetic.py`, are compared by their values.
    Unscorable: the target has another type, is empty, is not one formula, is not defined, as 3/0, or math-verify cannot
    read it, so that no answer would equal it.
    """
    if sample.target.answer_type not in _ANSWER_TYPES:
        written = sample.target.answer_type
        raise Unscorable(f"the target is a {written}, this reward compares {', '.join(_ANSWER_TYPES)}")
    try:
        target = _read_target(_formula_text(validate_value(sample.target.answer_type, sample.target.value)))
    except ValueError as error:
        raise Unscorable(f"the target {sample.target.value!r:.80} is {error}") from error
    try:
        answer = read_formula(_formula_text(part_text(response, of)))
        is_equal = _formulas_equal(target, answer, decimals)
    except ValueError as error:
        raise BadAnswer(f"the answer is {error}") from error
    reason = f"{excerpt(answer.text, _EXCERPT_CHARS)}, expected {excerpt(target.text, _EXCERPT_CHARS)}"
    return RewardValue(float(is_equal), reason)


def _formula_text(value: str | float) -> str:
    """Return a formula on one line and without delimiters, from an answer of any type.

    Raises:
        ValueError: the value is not one formula.
    """
    # Written out, since the e in 6e23 would be Euler's number.
    written = _MATHS.sub(r"\1\2\3", value) if isinstance(value, str) else f"{Decimal(repr(value)):f}"
    formula: str = validate_value(AnswerType.LATEX, " ".join(written.split()))
    return formula


@lru_cache(maxsize=4096)  # siblings share their target
def _read_target(text: str) -> Formula:
    """Return a target's formula.

    Raises:
        ValueError: nothing would equal the target: it is not one formula, or not defined.
    """
    formula = read_formula(text)
    if not _formulas_equal(formula, formula, 6):
        raise ValueError("not a formula that math-verify can read")
    return formula


def _formulas_equal(target: Formula, answer: Formula, decimals: int) -> bool:
    """Return True if two formulas are equal, as words, as numbers to `decimals` places, or to math-verify.

    Raises:
        ValueError: math-verify cannot compare the two.
    """
    if target.is_words or answer.is_words:
        return target == answer
    text, other_text = target.text.replace(" ", ""), answer.text.replace(" ", "")
    # An integral or a double sum repeats the question, where the target is its value.
    is_question = _TO_EVALUATE.search(other_text) and not _TO_EVALUATE.search(text)
    if is_question or is_huge(text) or is_huge(other_text):
        return text == other_text
    if target.unit != answer.unit and text + target.unit == other_text + answer.unit:
        return True  # 2 m, written for the product 2m
    return _values_equal(target, answer, decimals)


def _values_equal(target: Formula, answer: Formula, decimals: int) -> bool:
    """Return True if two formulas that are not words are equal after conversion to one unit."""
    target, answer = _adapt(target, answer), _adapt(answer, target)
    conversion = _find_conversion(answer.unit, target.unit)
    if conversion is None:
        return False
    scale, offset = conversion
    expected, given = target.number, _read_number(answer, target)
    if expected is not None and given is not None:
        if conversion != (1.0, 0.0):  # without one, whole numbers stay exact
            given = given * scale + offset
        return numbers_equal(expected, given, decimals)
    texts = _without_names(target.text, answer.text)
    if texts is None:
        return False
    wanted_text, given_text = texts
    if scale != 1.0:
        ratio = Fraction(scale).limit_denominator(10**6)
        given_text = rf"({given_text})\cdot \frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    if wanted_text.startswith("(") or given_text.startswith("("):
        wanted_text, given_text = _list_as_pair(wanted_text), _list_as_pair(given_text)
    return _texts_equal(wanted_text, given_text, decimals)


def _texts_equal(target: str, answer: str, decimals: int) -> bool:
    """Return True if two formulas without names and units are equal. Raises ValueError if that cannot be told.

    In a set, and in 1 or 2, neither order nor repetition counts; in a list without brackets, repetition does.
    """
    (is_set, items), (other_is_set, other_items) = _read_items(target), _read_items(answer)
    is_list = not _INEQUALITY.search(target + answer)
    if is_list and (is_set or other_is_set):
        if any(_find_equal(item, other_items, decimals) is None for item in items):
            return False
        return all(_find_equal(item, items, decimals) is not None for item in other_items)
    if is_list and len(items) + len(other_items) > 2:
        for item in items:
            equal = _find_equal(item, other_items, decimals)
            if equal is None:
                return False
            other_items.remove(equal)
        return not other_items
    verdict = compare(target, answer, decimals)
    if verdict is not None:
        return verdict
    try:
        return _verify(target, answer, decimals)
    except MemoryError:
        raise
    except Exception as error:  # sympy raises many kinds, such as TypeError for 1 \le i and AttributeError for (1,2)=x
        raise ValueError(f"a formula that math-verify cannot compare: {error}") from error


def _find_equal(item: str, others: Sequence[str], decimals: int) -> str | None:
    """Return the first of the others that equals an item, or None. Raises as `_texts_equal`."""
    return next((other for other in others if _texts_equal(item, other, decimals)), None)


def _find_conversion(unit: str, wanted: str) -> tuple[float, float] | None:
    """Return scale and offset from one unit to another, 1 and 0 if pint lacks one; None if they measure two things."""
    if not unit or not wanted or unit == wanted:
        return 1.0, 0.0
    source, target = find_unit(unit), find_unit(wanted)
    # 25 degrees may be of temperature.
    if source is None or target is None or {source.dimension, target.dimension} == {"radian", "kelvin"}:
        return 1.0, 0.0
    if source.dimension != target.dimension:
        return None
    return source.factor / target.factor, (source.offset - target.offset) / target.factor


def _adapt(formula: Formula, other: Formula) -> Formula:
    r"""Return a formula for comparison with another: degrees in radians beside \pi, C(5, 2) as 10 beside no pair.

    Of \sqrt{2} \approx 1.414, 1.414 is compared with a plain number, and \sqrt{2} with others.
    """
    exact, approximately, rounded = formula.text.rpartition(r"\approx")
    if approximately:
        rounded = rounded.strip()
        written = f"{rounded}." if rounded.isdigit() else rounded  # a decimal fraction, so that \frac{35}{3} is 12
        _check_numbers([*exact.split("="), written], len(rounded.partition(".")[2]))
        return formula._replace(text=(exact if other.number is None else rounded).strip())
    if formula.number is not None and formula.text.startswith("(") and not other.text.startswith("("):
        return formula._replace(text=f"{formula.number}")
    if not formula.unit.startswith("degree") or r"\pi" not in other.text or r"\pi" in formula.text:
        return formula
    return Formula(rf"({formula.text})\cdot \frac{{\pi}}{{180}}", is_words=False)


def _read_number(answer: Formula, target: Formula) -> float | None:
    """Return the value of a plain number, or of one with a decimal comma if the target is a number with decimals."""
    # Compared with a whole number, 3,0 is the list of 3 and 0.
    if target.number is not None and target.number % 1 and _DECIMAL_COMMA.fullmatch(answer.text):
        return float(answer.text.replace(",", "."))
    return answer.number


def _without_names(target: str, answer: str) -> tuple[str, str] | None:
    """Return two formulas, without the names of their values if only one has a name or both have the same name.

    None if they cannot be equal: one is an equation and the other a value, or they are values of f(2) and f(3), or of
    a and b and of x and y.
    """
    pairs, other_pairs = _named_values(target), _named_values(answer)
    if pairs and other_pairs and len(pairs + other_pairs) > 2:
        (names, values), (other_names, other_values) = zip(*pairs, strict=True), zip(*other_pairs, strict=True)
        if {*names} == {*other_names} and len({*names}) == len(names) == len(other_names):
            return _as_tuple(sorted(pairs)), _as_tuple(sorted(other_pairs))
        # x = 1, x = 2 and x_1 = 1, x_2 = 2
        is_same = len({name.partition("_")[0] for name in names + other_names}) == 1
        return (_as_set(values), _as_set(other_values)) if is_same else None
    target, answer = _in_order(target, pairs, answer), _in_order(answer, other_pairs, target)
    (name, value), (other_name, other_value) = map(_split_name, (target, answer))
    if {name, other_name} == {None, ""}:
        return None
    if name == other_name or "" in (name, other_name):
        return value, other_value
    # f(2) and f(3); other names may be variables in equations.
    are_values = name is not None and other_name is not None and "(" in name + other_name
    return None if are_values else (target, answer)


def _in_order(formula: str, pairs: Sequence[tuple[str, str]], other: str) -> str:
    """Return "b = 3, a = 2" as (3,2), in the order in which it is written, but beside a tuple by letters, as (2,3)."""
    if " or " in formula or not len(dict(pairs)) == len(pairs) > 1:
        return formula
    return _as_tuple(sorted(pairs) if other.startswith("(") else pairs)


def _as_tuple(pairs: Sequence[tuple[str, str]]) -> str:
    return f"({','.join(value for _, value in pairs)})"


def _as_set(values: Sequence[str]) -> str:
    return values[0] if len(values) == 1 else rf"\{{{', '.join(values)}\}}"


def _read_items(formula: str) -> tuple[bool, list[str]]:
    """Return True for a set, and the items of a set or of a list."""
    braced = _SET.fullmatch(formula)
    items = _split_items(braced[1] if braced else formula)
    return braced is not None or (len(items) > 1 and " or " in formula), items


def _split_items(formula: str, separator: re.Pattern[str] = CONNECTIVE) -> list[str]:
    """Return what "or", "and" and commas, or another separator, separate outside of brackets."""
    items: list[str] = []
    end = 0
    for match in separator.finditer(formula):
        item = formula[end : match.start()]
        if sum(map(item.count, "([{")) == sum(map(item.count, ")]}")):
            items.append(item)
            end = match.end()
    return [*items, formula[end:]]


def _named_values(formula: str) -> list[tuple[str, str]]:
    """Return the names and values in "b = 3, a = 2", (b, a) = (3, 2) and "x = 1, 2"; [] for others."""
    pairs: list[tuple[str, str]] = []
    match = _TUPLE_OF_NAMES.fullmatch(formula)
    if match:
        names, values = match[1].replace(" ", "").split(","), match[2].split(",")
        return list(zip(names, values, strict=True)) if len(names) == len(values) else []
    for part in _split_items(formula):
        name, value = _split_name(part)
        if name == "" and pairs:
            name = pairs[-1][0]
        if not name or _INEQUALITY.search(part):
            return []
        pairs.append((name, value))
    return pairs


def _split_name(formula: str) -> tuple[str | None, str]:
    """Return the name and the value in f(2) = 4. The name is "" for a bare value, None for any other equation.

    The value of x = 2 + 3 = 5 is 5. Raises ValueError for x = 5 = 6.
    """
    if len(_split_items(formula)) > 1:
        pairs = _named_values(formula)
        names = {name for name, _ in pairs}
        # As in x = 1, x = 2 and x = 1, 2.
        return (names.pop(), _as_set([value for _, value in pairs])) if len(names) == 1 else ("", formula)
    parts = [part.strip() for part in _split_items(formula, _EQUALS)]
    if len(parts) == 1 or _INEQUALITY.search(_IN_BRACKETS.sub("", formula)):
        return "", formula
    if all(compare(part, parts[-1], 6) for part in parts[:-1]):
        return "", parts[-1]  # x^2 - 4 = (x - 2)(x + 2)
    _check_numbers(parts, 6)
    if _is_number(parts[0]):
        if _is_number(parts[-1]):
            return "", parts[-1]
        parts.reverse()  # 4 = x^2 + y^2 is x^2 + y^2 = 4.
    name = re.sub(r"[{} ]", "", parts[0])
    bare = _FUNCTION_OF.sub("", re.sub(r"_\w+|\^-1(?=\()", "", name))
    is_equation = _OPERATION.search(bare) or _OPERATION_ON_VARIABLE.match(parts[0])
    return (None, f"{parts[0]}={parts[-1]}") if is_equation and not _QUOTIENT.fullmatch(bare) else (name, parts[-1])


def _is_number(formula: str) -> bool:
    return not _LETTER.search(_IN_NUMBERS.sub("", formula))


def _check_numbers(chain: Sequence[str], decimals: int) -> None:
    """Raise ValueError if the numbers in a = b = c differ. Formulas with letters may be anything."""
    numbers = list(filter(_is_number, chain))
    if not all(_texts_equal(number, numbers[-1], decimals) for number in numbers[:-1]):
        raise ValueError("different numbers that are said to be equal")


def _list_as_pair(formula: str) -> str:
    """Return "1, 2" as (1, 2)."""
    is_list = "," in formula and not re.search(r"[=<>()\[\]]|\\[lg]e|\\\{", formula)
    return f"({formula})" if is_list else formula


@lru_cache(maxsize=4096)  # siblings often share their answers
def _verify(target: str, answer: str, decimals: int) -> bool:
    """Return math-verify's verdict, unless a check of a known fault has one; False if it cannot read one of the two."""
    from math_verify import verify  # takes a second

    gold, given = _parse_formula(target), _parse_formula(answer)
    if not gold or not given:
        return False
    compare_numbers = partial(_compare_numbers, decimals=decimals)
    for compare_readings in (_compare_equations, compare_numbers, _compare_inequality):
        verdict = compare_readings(gold[0], given[0])
        if verdict is not None:
            return verdict
    found: bool = verify(gold, given, float_rounding=decimals, allow_set_relation_comp=True, timeout_seconds=None)
    return found


def _compare_equations(expected: _Reading, given: _Reading) -> bool | None:
    """Return True if equations are multiples: math-verify takes x^2/4 + y^2/9 = 1 for x^2/9 + y^2/4 = 1."""
    from sympy import Eq, Expr, cancel, fraction

    if not all(isinstance(reading, Eq) and isinstance(reading.rhs, Expr) for reading in (expected, given)):
        return None
    numerators = [fraction(cancel(equation.lhs - equation.rhs))[0] for equation in (expected, given)]
    if 0 in numerators:
        return numerators == [0, 0]
    # A factor x would add the solution x = 0, and infinity turns all into 0.
    ratio = cancel(numerators[0] / numerators[1])
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _compare_numbers(expected: _Reading, given: _Reading, decimals: int) -> bool | None:
    """Return True if fractions are equal, or the leading digits of small numbers: math-verify rounds them all."""
    from sympy import Expr

    if not all(isinstance(reading, Expr) and reading.is_number for reading in (expected, given)):
        return None
    exact = expected.doit(), given.doit()
    if all(number.is_Rational for number in exact):
        return bool(exact[0] == exact[1])
    expected, given = expected.n(), given.n()
    if not 1e-100 < abs(expected) < 0.5 * 10.0**-decimals:  # sympy takes some zeros for 1e-125
        return None
    return bool(abs(given - expected) <= abs(expected) * 10.0**-decimals)


def _compare_inequality(expected: _Reading, given: _Reading) -> bool | None:
    """Return False for an inequality beside a finite set: math-verify takes 1 < x < 3 for the set of its ends."""
    from sympy import And, Eq, Or, Rel, Set

    for relation, other in ((expected, given), (given, expected)):
        is_inequality = isinstance(relation, And | Or | Rel) and not isinstance(relation, Eq)
        is_finite = isinstance(other, Set) and other.is_finite_set
        if is_inequality and is_finite and not relation.as_set().is_finite_set:
            return False
    return None


@lru_cache(maxsize=256)
def _parse_formula(formula: str) -> list[Any]:
    """Return math-verify's readings of a formula, empty if it cannot read it or its value is not defined.

    Relations that are joined by "or", "and" or a comma become the set of their solutions.
    """
    from sympy import And, Or, nan, zoo

    parts = CONNECTIVE.split(formula)
    is_relation = ["=" in part or _INEQUALITY.search(part) is not None for part in parts]
    if len(parts) == 1 or not all(is_relation) or not _INEQUALITY.search(formula):
        found = _parse(formula)
        return [] if any(value.has(nan, zoo) for value in found) else found
    relations = [reading[0] for reading in map(_parse, parts) if reading]
    if len(relations) < len(parts):
        return []
    try:
        solutions = And(*relations).as_set()
        # A comma means "or" where no x satisfies all relations, as in x < 1, x > 3.
        if " or " in formula or (solutions.is_empty and " and " not in formula):
            solutions = Or(*relations).as_set()
    except (NotImplementedError, ValueError, AttributeError):  # of several variables
        return [(Or if " or " in formula else And)(*relations)]
    return [solutions]


def _parse(formula: str) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse
    from sympy import I, Symbol

    # math-verify makes all letters small, and A - a would be 0.
    for letter in set(filter(str.isupper, formula)):
        if re.search(rf"(?<![\\A-Za-z]){letter.lower()}(?![A-Za-z])", formula):
            formula = re.sub(rf"(?<![\\A-Za-z]){letter}(?![A-Za-z])", f"{letter}_{{9}}", formula)

    # math-verify warns at every call that its own time limit is switched off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # By default, math-verify would read 2m as 2.
    config = LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True))
    found: list[Any] = parse(
        f"${formula}$", extraction_config=(config,), fallback_mode="no_fallback", parsing_timeout=None
    )
    # math-verify reads i as a variable, real or not; here it is the imaginary unit. Not by `subs`, which remembers its
    # results: a chain a < b < c could come back with its parts in another order.
    units = {Symbol("i", real=is_real): I for is_real in (True, False, None)}
    return [value.xreplace(units) if hasattr(value, "xreplace") else value for value in found]
