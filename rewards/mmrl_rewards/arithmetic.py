r"""Compares simple formulas by their values to 60 digits, in microseconds where math-verify takes milliseconds.

Simple formulas have numbers, letters, \pi, \frac, \sqrt, the four operations and powers; equations and lists of these
are simple, too. Functions, indices, e, i, f(x), P(A), d/dx and ambiguous formulas, such as 1/2x, are left to
math-verify. Each letter stands for an arbitrary number, once with all positive and once with all negative. Formulas
that agree both times are equal, except with negligible probability (Schwartz 1980, lemma 1).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import isclose, log10
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from mpmath.ctx_mp import MPContext

_Real: TypeAlias = Any  # mpmath has no types

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
            # Towers of powers, and large ones, take too long.
            rf"\*\*(?:\([^()]*\*\*|\([^)]*\(|{_FACTOR}\*\*|[0-9]{{4}})",
        )
    )
)
_DECIMAL: Final = re.compile(r"[+-]?[0-9]*\.[0-9]*")
_CONNECTIVE: Final = " or | and |,"
_PLAIN: Final = r"[^()\[\]]*?"
# A list has a connective. Only a set may hold a single item, as \{1\} does.
_LIST: Final = re.compile(rf"(\(|\[|\\\{{|)({_PLAIN}(?:{_CONNECTIVE}){_PLAIN}|(?<=\\\{{){_PLAIN})(\)|\]|\\\}}|)")
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
    """A formula of a list."""

    values: tuple[_Real, _Real]  # for positive and negative letters; of an equation, left side - right side
    is_equation: bool
    is_decimal: bool  # a decimal fraction, which is compared to some places
    is_percent: bool


def compare(target: str, answer: str, decimals: int) -> bool | None:
    """Return True if two formulas are equal, False if they are not, None if this cannot be decided here."""
    try:
        brackets, expected = _read_list(target)
        other_brackets, given = _read_list(answer)
        equal = partial(_items_equal, decimals=decimals)
        if {brackets, other_brackets} <= {"", "{}"}:  # sets: each item has an equal one on the other side
            for items, others in ((expected, given), (given, expected)):
                for item in items:
                    if not any(equal(item, other) for other in others):
                        return False
            return True
        if brackets != other_brackets:
            return None
        return len(expected) == len(given) and all(map(equal, expected, given))
    except _NOT_SIMPLE:
        return None


@lru_cache(maxsize=4096)  # siblings share their target, and often their answers
def _read_list(formula: str) -> tuple[str, Sequence[_Item]]:
    """Return the brackets of a list and its items. A single formula is a list of one without brackets."""
    match = _LIST.fullmatch(formula)
    if len(formula) > _MAX_CHARS:
        raise ValueError("too long")
    if not match:
        return "", (_read_item(formula),)
    return (match[1] + match[3]).replace("\\", ""), tuple(map(_read_item, re.split(_CONNECTIVE, match[2])))


def _read_item(text: str) -> _Item:
    number = text.strip().removesuffix("%").removesuffix("\\")
    left, equals, right = number.partition("=")
    tree = _parse(f"{left}-({right})" if equals else left)
    values = _evaluate(tree, 1), _evaluate(tree, -1)
    return _Item(values, bool(equals), bool(_DECIMAL.fullmatch(number)), number != text.strip())


def _items_equal(first: _Item, second: _Item, decimals: int) -> bool:
    """Return True if two formulas are equal, decimal fractions to `decimals` places; ValueError if that is open."""
    positive, negative = first.values
    other_positive, other_negative = second.values
    if first.is_equation or second.is_equation:
        # Multiples of an equation have the same solutions.
        are_equations = first.is_equation and second.is_equation and positive and other_positive
        if are_equations and _close(positive * other_negative, negative * other_positive):
            return True
        raise ValueError("equations that may have the same solutions")
    if first.is_percent != second.is_percent:
        # 50% is 50 or 0.5.
        factor = _REALS.mpf(1) / 100 if first.is_percent else 100
        whole = first._replace(is_percent=second.is_percent)
        share = whole._replace(values=(positive * factor, negative * factor))
        return _items_equal(whole, second, decimals) or _items_equal(share, second, decimals)
    if (first.is_decimal or second.is_decimal) and positive == negative and other_positive == other_negative:
        if 0 < abs(positive) < _DIFFERENT:
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
        before, text = text, _ON_NUMBERS.sub(_apply, text)
    return _HUGE.search(text) is not None


def _apply(match: re.Match[str]) -> str:
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
    return _REALS.mpf(sign * random.getrandbits(60)) / random.getrandbits(60)


def _evaluate(tree: ast.AST, sign: int) -> _Real:
    """Return the value of a syntax tree, with letters of this sign."""
    match tree:
        case ast.Constant(value=value):
            return _REALS.mpf(repr(value))
        case ast.Name(id=letter):
            return +_REALS.pi if letter == "π" else _letter_value(letter, sign)
        case ast.UnaryOp():
            return _OPERATIONS[type(tree.op)](_evaluate(tree.operand, sign))
        case ast.BinOp(op=ast.Pow()):
            return _power(_evaluate(tree.left, sign), _evaluate(tree.right, sign))
        case ast.BinOp() if type(tree.op) in _OPERATIONS:  # not //
            return _OPERATIONS[type(tree.op)](_evaluate(tree.left, sign), _evaluate(tree.right, sign))
        case ast.Call(args=[radicand, ast.Constant(value=degree)]):
            return _power(_evaluate(radicand, sign), 1 / _REALS.mpf(degree))
    raise ValueError("not simple")


def _power(base: _Real, exponent: _Real) -> _Real:
    if base <= 0 and (base == 0 or exponent != int(exponent)):
        raise ValueError("no real power, or one by convention")
    return base**exponent
