r"""Compares simple formulas by their values, in microseconds where math-verify takes milliseconds.

Simple are numbers, letters, \pi, \frac, \sqrt, the four operations and powers, equations of these, and lists of them.
Functions, indices, e, i, f(x), P(A), and what is read in two ways, as 1/2x, are left to math-verify. Letters stand for
fractions of 60 bits, once all positive, once all negative: formulas that are equal for both are equal, but for a chance
that is too small to count (Schwartz 1980, lemma 1).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from mpmath.ctx_mp import MPContext

Number: TypeAlias = Any  # a Fraction where it is exact, else a real number of mpmath

# From the innermost braces on; each rewrite removes a pair.
_GROUPS: Final = (
    (re.compile(r"(?<![\w.)])([0-9]+) ?\\frac\{([0-9]+)\}\{([0-9]+)\}"), r"(\1+\2/\3)"),
    (re.compile(r"\\frac ?\{([^{}]*)\} ?\{([^{}]*)\}"), r"((\1)/(\2))"),
    (re.compile(r"\\sqrt ?\{([^{}]*)\}"), r"_r(\1,2)"),
    (re.compile(r"\\sqrt ?\[([0-9]{1,2})\] ?\{([^{}]*)\}"), r"_r(\2,\1)"),
    (re.compile(r"(?<![\\}\]a-z ])\{([^{}]*)\}"), r"(\1)"),
)
_SIGNS: Final = (("\\cdot", "*"), ("\\times", "*"), ("\\div", "/"), ("\\pi", " π "), ("^", "**"))
_TOKEN: Final = re.compile(r"\*\*|_r|[0-9]+\.?[0-9]*|\.[0-9]+|[A-Za-zπ(),+*/-]")
_ENDS_VALUE: Final = re.compile(r"(?<!_)[\w)]$")
_LEFT_OUT: Final = re.compile(
    r"[ei]|[A-Zfgh] ?\(|/ ?(?:[0-9.]+|\w|\([^()]*\)) ?(?:\*\*(?:\w|\([^()]*\)))? ?[a-zA-Zπ(_]|[\w.)] +[0-9]|d[a-z]?\)?/\(?d[a-z]|[A-Za-zπ)][0-9]"
)
_DECIMAL: Final = re.compile(r"[+-]?[0-9]*\.[0-9]*")
_CONNECTIVE: Final = " or | and |,"
_LIST: Final = re.compile(rf"(\(|\[|\\\{{|)([^()\[\]]*?(?:{_CONNECTIVE})[^()\[\]]*?|(?<=\\\{{)[^()\[\]]*?)(\)|\]|\\\}}|)")
_NOT_SIMPLE: Final = (ValueError, ArithmeticError, SyntaxError)
_MAX_CHARS, _MAX_EXPONENT, _MAX_BITS = 200, 100, 10_000
_REALS: Final = MPContext()
_REALS.dps = 50
# Relative differences, between which nothing is decided: 200 characters cost a few of 50 digits.
_EQUAL, _DIFFERENT = _REALS.mpf(10) ** -40, _REALS.mpf(10) ** -25
_OPERATIONS: Final[Mapping[type[ast.AST], Callable[[Number, Number], Number]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Item(NamedTuple):
    """Holds the values of one formula for positive and negative letters; of an equation, left side - right side."""

    values: Sequence[Number]
    is_equation: bool
    is_decimal: bool  # a decimal fraction, which is compared to some places


def compare(target: str, answer: str, decimals: int) -> bool | None:
    """Return True if two formulas are equal, False if they are not, None if this cannot be decided here."""
    try:
        (brackets, expected), (other_brackets, given) = read_list(target), read_list(answer)
        equal = partial(_items_equal, decimals=decimals)
        if {brackets, other_brackets} <= {"", "{}"}:
            return all(any(map(partial(equal, item), given)) for item in expected) and all(
                any(map(partial(equal, item), expected)) for item in given
            )
        if brackets != other_brackets:
            return None
        return len(expected) == len(given) and all(map(equal, expected, given))
    except _NOT_SIMPLE:
        return None


def is_simple(formula: str) -> bool:
    """Return True if a formula can be read here and has a value."""
    try:
        return bool(read_list(formula))
    except _NOT_SIMPLE:
        return False


@lru_cache(maxsize=4096)  # siblings share their target, and often their answers
def read_list(formula: str) -> tuple[str, Sequence[Item]]:
    """Return the brackets of a list and its items. A formula alone is a list of one without brackets.

    Raises:
        ValueError, ArithmeticError, SyntaxError: a formula is not simple, or has no value.
    """
    match = _LIST.fullmatch(formula)
    if len(formula) > _MAX_CHARS:
        raise ValueError("too long")
    if not match:
        return "", (_read_item(formula),)
    items = re.split(_CONNECTIVE, match[2])
    return (match[1] + match[3]).replace("\\", ""), tuple(map(_read_item, items))


def _read_item(text: str) -> Item:
    left, equals, right = text.partition("=")
    tree = _parse(f"{left}-({right})" if equals else left)
    values = [_evaluate(tree, sign) for sign in (1, -1)]
    return Item(values, bool(equals), bool(_DECIMAL.fullmatch(text.strip())))


def _items_equal(first: Item, second: Item, decimals: int) -> bool:
    if first.is_equation != second.is_equation:
        raise ValueError("an equation and a formula")
    if first.is_equation:
        # An equation has the solutions of its multiples.
        (first_positive, first_negative), (second_positive, second_negative) = first.values, second.values
        if not _close(first_positive * second_negative, first_negative * second_positive) or not first_positive:
            raise ValueError("equations that may have the same solutions")
        return True
    if (first.is_decimal or second.is_decimal) and _close(*first.values) and _close(*second.values):
        return round(float(first.values[0]), decimals) == round(float(second.values[0]), decimals)
    return all(map(_close, first.values, second.values))


def _close(first: Number, second: Number) -> bool:
    """Return True if two numbers are equal. Raise ValueError if rounding leaves that open."""
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    first, second = _REALS.convert(first), _REALS.convert(second)
    difference, scale = abs(first - second), max(abs(first), abs(second))
    if scale * _EQUAL < difference < scale * _DIFFERENT:
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
        if _ENDS_VALUE.search(python) and (token in ("(", "_r") or token.isalpha()):
            python += "*"
        if token[0] in "0123456789.":
            number = Fraction(token)
            token = f"({number.numerator}/{number.denominator})" if "." in token else str(number)
        python += token
    return ast.parse(python, mode="eval").body


@lru_cache(maxsize=64)
def _letter_value(letter: str) -> Fraction:
    random = Random(letter)
    return Fraction(random.getrandbits(60) + 1, random.getrandbits(60) + 1)


def _evaluate(tree: ast.AST, sign: int) -> Number:
    """Return the value of a syntax tree, with letters of this sign."""
    match tree:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.Name(id="π"):
            return +_REALS.pi
        case ast.Name(id=letter):
            return sign * _letter_value(letter)
        case ast.UnaryOp(op=ast.USub()):
            return -_evaluate(tree.operand, sign)
        case ast.UnaryOp(op=ast.UAdd()):
            return _evaluate(tree.operand, sign)
        case ast.Call(args=[radicand, ast.Constant(value=int(degree))]):
            return _power(_evaluate(radicand, sign), Fraction(1, degree))
        case ast.BinOp(op=ast.Pow()):
            return _power(_evaluate(tree.left, sign), _evaluate(tree.right, sign))
        case ast.BinOp():
            operands = [_evaluate(tree.left, sign), _evaluate(tree.right, sign)]
            if not all(isinstance(operand, Fraction) for operand in operands):
                operands = list(map(_REALS.convert, operands))
            return _OPERATIONS[type(tree.op)](*operands)
    raise ValueError("not simple")


def _power(base: Number, exponent: Number) -> Number:
    is_exact = isinstance(base, Fraction)
    if not isinstance(exponent, Fraction) or abs(exponent) > _MAX_EXPONENT or (base == 0 and exponent <= 0):
        raise ValueError("not simple")
    if is_exact and max(base.numerator, base.denominator).bit_length() * abs(exponent) > _MAX_BITS:
        raise ValueError("too large")
    if exponent.denominator == 1:
        return base ** int(exponent)
    if base < 0:
        raise ValueError("not real")
    root = _REALS.root(base, exponent.denominator)
    exact = Fraction(int(_REALS.nint(root)))
    return (exact if is_exact and exact**exponent.denominator == base else root) ** int(exponent.numerator)
