r"""Compares simple formulas by their values, in microseconds where math-verify takes milliseconds.

Simple formulas have numbers, letters, \pi, \frac, \sqrt, the four operations and powers; equations and tuples of these
are simple, too. Functions, indices, e, i, f(x), P(A), d/dx and ambiguous formulas, such as 1/2x, are left to
math-verify. Each letter stands for an arbitrary number, once with all positive and once with all negative. Formulas
that agree both times are equal, except with negligible probability (Schwartz 1980, lemma 1). Values are fractions,
which are compared exactly, until a root or \pi makes them real numbers of 60 digits.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from math import isclose, log10
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from mpmath.ctx_mp import MPContext

_Real: TypeAlias = Any  # a Fraction, or of mpmath, which has no types

# LaTeX to Python, repeated from the innermost braces outwards: each replacement removes a pair of braces.
_GROUPS: Final = (
    # A mixed number, 1\frac{1}{2}, is a sum; \frac after other things is a factor.
    (re.compile(r"(?<![\w.)])([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}"), r"(\1+\2/\3)"),
    (re.compile(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt ?\{([^{}]*)\}"), r"_r(\1,2)"),
    (re.compile(r"\\sqrt ?\[([0-9]{1,2})\] ?\{([^{}]*)\}"), r"_r(\2,\1)"),
    # Plain braces, not the braces of \{, of a command or of the second part of \frac.
    (re.compile(r"(?<![\\}\]a-z ])\{([^{}]*)\}"), r"(\1)"),
)
_SIGNS: Final = (("\\cdot", "*"), ("\\times", "*"), ("\\div", "/"), ("\\pi", " π "), ("^", "**"))
_TOKEN: Final = re.compile(r"\*\*|_r|[0-9]+\.?[0-9]*|\.[0-9]+|[A-Za-zπ(),+*/-]")
_ENDS_VALUE: Final = re.compile(r"(?<!_)[\w.)]$")
_FACTOR: Final = r"(?:[0-9.]+|\w|\([^()]*\)) ?"
_LEFT_OUT: Final = re.compile(
    "|".join(
        (
            "[ei]",
            r"[A-Zfgh] ?\(",  # f(x), P(A)
            r"d[a-z]?\)?/\(?d[a-z]",  # dy/dx
            rf"/ ?{_FACTOR}(?:\*\*{_FACTOR})?[a-zA-Zπ(_]",  # 1/2x
            r"[\w.)] +[0-9]|[A-Za-zπ)][0-9]",  # 1 2, x2
            # Towers of powers take too long.
            rf"\*\*(?:\([^()]*\*\*|\([^)]*\(|{_FACTOR}\*\*)",
        )
    )
)
_DECIMAL: Final = re.compile(r"[+-]?[0-9]*\.[0-9]*")
_TUPLE: Final = re.compile(r"([(\[])([^()\[\]]*,[^()\[\]]*)([)\]])")
_NUMBER: Final = r"([0-9]+)(?:\.[0-9]+)?"
# Powers, from the top of a tower down, and products and sums of two numbers in braces.
_ON_NUMBERS: Final = re.compile(
    rf"(?:\({_NUMBER}\)|(?<![_.0-9]){_NUMBER})(\^)(?:\{{{_NUMBER}\}}|{_NUMBER}(?![.^]))"
    rf"|(?<=[{{(]){_NUMBER}(\*|\\cdot|\\times|[+-]){_NUMBER}"
)
_HUGE: Final = re.compile(
    # 10000!, (n!)!, 2^{10!}, \binom{10000}{2}, x^{10000}, (x^{10})^{10} and \sum_{k=1}^{100} k
    r"[0-9]{5}!|![)}]*!|\^\{[^{}]*(?:[5-9]|[0-9]{2})!|binom\{?[0-9]{5}|\^[({-]*[0-9]{5}"
    r"|\^\{?[0-9]{2,}\}?[)}]+\^\{?[0-9]{2}|\\(?:sum|prod)_[^^]*\^\{?[0-9]{3}|huge"
)
_MAX_DIGITS: Final = 1000  # of a number
_MAX_CHARS: Final = 200
_MAX_BITS: Final = 200_000  # of an exact power
_NOT_SIMPLE: Final = (ValueError, ArithmeticError, SyntaxError)
_REALS: Final = MPContext()
_REALS.dps = 60
# A difference between these two decides nothing: rounding in 200 characters of formula costs a few digits.
_EQUAL, _DIFFERENT = _REALS.mpf(10) ** -40, _REALS.mpf(10) ** -25
_OPERATIONS: Final[Mapping[type[ast.AST], Callable[..., _Real]]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.USub: operator.neg, ast.UAdd: operator.pos},
}


class _Item(NamedTuple):
    """A formula, or an item of a tuple."""

    # For positive and negative letters, None if not real for the latter. Of an equation, left side - right side.
    values: tuple[_Real, _Real | None]
    is_equation: bool
    is_decimal: bool  # a decimal fraction, which is compared to some places
    is_percent: bool


def compare(target: str, answer: str, decimals: int) -> bool | None:
    """Return True if two formulas are equal, False if they are not, None if this cannot be decided here."""
    try:
        brackets, expected = _read_tuple(target)
        other_brackets, given = _read_tuple(answer)
        equal = partial(_items_equal, decimals=decimals)
        if brackets != other_brackets:
            return None
        return len(expected) == len(given) and all(map(equal, expected, given))
    except _NOT_SIMPLE:
        return None


@lru_cache(maxsize=4096)  # siblings share their target, and often their answers
def _read_tuple(formula: str) -> tuple[str, Sequence[_Item]]:
    """Return the brackets of a tuple and its items. A single formula is a tuple of one without brackets."""
    match = _TUPLE.fullmatch(formula)
    if len(formula) > _MAX_CHARS:
        raise ValueError("too long")
    if not match:
        return "", (_read_item(formula),)
    return match[1] + match[3], tuple(map(_read_item, match[2].split(",")))


def _read_item(text: str) -> _Item:
    number = text.strip().removesuffix("%").removesuffix("\\")
    left, equals, right = number.partition("=")
    tree = _parse(f"{left}-({right})" if equals else left)
    positive = _evaluate(tree, 1)
    try:
        negative = _evaluate(tree, -1)
    except ValueError:
        if equals:
            raise
        negative = None  # \sqrt{x} has no real value; in physics, letters are positive
    return _Item((positive, negative), bool(equals), bool(_DECIMAL.fullmatch(number)), number != text.strip())


def _items_equal(first: _Item, second: _Item, decimals: int) -> bool:
    """Return True if two formulas are equal, decimal fractions to `decimals` places; ValueError if that is open."""
    positive, negative = first.values
    other_positive, other_negative = second.values
    if negative is None or other_negative is None:
        negative, other_negative = positive, other_positive
    if first.is_equation or second.is_equation:
        # Multiples of an equation have the same solutions.
        are_equations = first.is_equation and second.is_equation and positive and other_positive
        if are_equations and _close(_product(positive, other_negative), _product(negative, other_positive)):
            return True
        raise ValueError("equations that may have the same solutions")
    if first.is_percent != second.is_percent:
        # 50% is 50 or 0.5.
        factor = Fraction(1, 100) if first.is_percent else Fraction(100)
        whole = first._replace(is_percent=second.is_percent)
        share = whole._replace(values=(_product(positive, factor), _product(negative, factor)))
        return _items_equal(whole, second, decimals) or _items_equal(share, second, decimals)
    if (first.is_decimal or second.is_decimal) and positive == negative and other_positive == other_negative:
        if not isinstance(positive, Fraction) and 0 < abs(positive) < _DIFFERENT:
            raise ValueError("a tiny number, or zero but for rounding")
        return numbers_equal(float(positive), float(other_positive), decimals)
    return _close(positive, other_positive) and _close(negative, other_negative)


def numbers_equal(expected: float, given: float, decimals: int) -> bool:
    """Return True if two numbers are equal to `decimals` places, below the last place in their leading digits."""
    if round(expected, decimals) == 0 and expected != 0:
        return isclose(expected, given, rel_tol=10.0**-decimals)
    return round(expected, decimals) == round(given, decimals)


def _close(first: _Real, second: _Real) -> bool:
    """Return True if two numbers are equal. Raise ValueError if rounding leaves that open."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    first, second = _as_real(first), _as_real(second)
    difference, scale = abs(first - second), max(abs(first), abs(second))
    if scale * _EQUAL < difference < max(scale, 1) * _DIFFERENT:
        raise ValueError("nearly equal")
    return bool(difference <= scale * _EQUAL)


def _parse(formula: str) -> ast.expr:
    """Return the syntax tree of a formula in Python."""
    text, before = formula.strip(), ""
    while text != before:
        before = text
        for pattern, replacement in _GROUPS:
            text = pattern.sub(replacement, text)
    for sign, replacement in _SIGNS:
        text = text.replace(sign, replacement)
    tokens = _TOKEN.findall(text)
    if _LEFT_OUT.search(text) or "".join(tokens) != text.replace(" ", ""):
        raise ValueError("not simple")
    python = ""
    for token in tokens:
        is_product = _ENDS_VALUE.search(python) and (token in ("(", "_r") or token.isalpha())
        python += f"*{token}" if is_product else token
    return ast.parse(python, mode="eval").body


@lru_cache(maxsize=4096)  # siblings share their target, and often their answers
def is_huge(formula: str) -> bool:
    r"""Return True if a number or power in a formula without spaces is too large for sympy. e and \pi count as 3."""
    if not re.search(r"\^|!|binom", formula):
        return False
    text, before = re.sub(r"(?<![A-Za-z\\])e(?![A-Za-z])|\\pi(?![a-z])", "3", formula), ""
    while text != before and len(text) < _MAX_DIGITS:
        before, text = text, _ON_NUMBERS.sub(_calculate, text)
    return _HUGE.search(text) is not None


def _calculate(match: re.Match[str]) -> str:
    """Return the result of an operation on two whole numbers; "huge" for one of too many digits."""
    left, sign, right = filter(None, match.groups())
    base, number = int(left), int(right)
    if sign != "^":
        return str(base + number if sign in "+-" else base * number)
    return str(base**number) if number * log10(max(base, 1)) < _MAX_DIGITS else "huge"


@lru_cache(maxsize=128)
def _letter_value(letter: str, sign: int) -> _Real:
    # Other numbers for each sign: an even function has the same value for x and -x.
    random = Random(f"{letter}{sign}")
    return Fraction(sign * random.getrandbits(60), random.getrandbits(60))


def _as_real(value: _Real) -> _Real:
    return _REALS.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _apply(operation: Callable[..., _Real], left: _Real, right: _Real) -> _Real:
    """Return the result of an operation, exact for two fractions."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return operation(left, right)
    return operation(_as_real(left), _as_real(right))


_product: Final = partial(_apply, operator.mul)


def _evaluate(tree: ast.AST, sign: int) -> _Real:
    """Return the value of a syntax tree, with letters of this sign."""
    match tree:
        case ast.Constant(value=value):
            return Fraction(repr(value))
        case ast.Name(id=letter):
            return +_REALS.pi if letter == "π" else _letter_value(letter, sign)
        case ast.UnaryOp():
            return _OPERATIONS[type(tree.op)](_evaluate(tree.operand, sign))
        case ast.BinOp(op=ast.Pow()):
            return _power(_evaluate(tree.left, sign), _evaluate(tree.right, sign))
        case ast.BinOp() if type(tree.op) in _OPERATIONS:  # not //
            return _apply(_OPERATIONS[type(tree.op)], _evaluate(tree.left, sign), _evaluate(tree.right, sign))
        case ast.Call(args=[radicand, ast.Constant(value=int(degree))]):
            return _power(_evaluate(radicand, sign), Fraction(1, degree))
    raise ValueError("not simple")


def _power(base: _Real, exponent: _Real) -> _Real:
    if base <= 0 and (base == 0 or exponent != int(exponent)):
        raise ValueError("no real power, or one by convention")
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= _MAX_BITS:
            return base ** int(exponent)
    return _as_real(base) ** _as_real(exponent)
