r"""Value of a formula as the authors' code of MATH-Vision computes it: LaTeX to Python, and Python run.

Source: the grammar of latex2sympy2 1.9.1 (github.com/OrangeX4/latex2sympy, PS.g4), which their code calls. It reads the
longest beginning of a text that is a formula, so "70. Therefore .." is 70, "4:30" a quotient, "6\frac{1}{2}" a product;
"5 cm", "x+1", "45°" and "1, 2" have no value. Departures: nothing is run; comparisons, integrals, sums, limits,
matrices and functions beyond those below have no value, nor have numbers of more than 4096 bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

# Words of their lexer. After a number they end the formula: "2 rows" is 2, and "2 lines" has no value.
_WORDS: Final = (
    *("tr", "eye", "eig", "svd", "gcd", "lcm", "cols", "rows", "rank", "rref", "diag", "ones", "orth", "norm", "ceil"),
    *("zeros", "floor", "hstack", "vstack", "matrix", "nullspace", "arsinh", "arcosh", "artanh"),
)
_TOKEN: Final = re.compile(
    r"\s*((?:[0-9]*(?:,[0-9]{3})*\.[0-9]+|[0-9]+(?:,[0-9]{3})*)(?:\\%)?|\\[a-z]+|\\[{}]"
    rf"|{'|'.join(_WORDS)}|.|$)",
    re.DOTALL,
)
_BLANKS: Final = re.compile(r"\\displaystyle|\\q?quad|~|\\,|\$")
_SIGNS: Final[Mapping[str, Callable[[float, float], float]]] = MappingProxyType(
    {
        **dict.fromkeys(("*", "\\times", "\\cdot"), lambda left, right: left * right),
        **dict.fromkeys(("/", "\\div", "\\over", ":"), lambda left, right: left / right),
    }
)
_FUNCTIONS: Final[Mapping[str, Callable[[float], float]]] = MappingProxyType(
    {
        **{"\\sin": math.sin, "\\cos": math.cos, "\\tan": math.tan, "\\log": math.log10},
        **{"\\arcsin": math.asin, "\\arccos": math.acos, "\\arctan": math.atan},
        **{"\\sinh": math.sinh, "\\cosh": math.cosh, "\\tanh": math.tanh},
    }
)
_OPERATORS: Final = frozenset({*_FUNCTIONS, "\\frac", "\\binom", "\\sqrt", "e"})
_CLOSING: Final[Mapping[str, str]] = MappingProxyType({"(": ")", "{": "}", "[": "]", "\\{": "\\}"})
_IGNORED_AFTER_FORMULA: Final = frozenset(
    {
        *("", ")", "}", "]", ".", "_", "'", "&", *_WORDS),
        *("\\}", "\\rbrace", "\\right", "\\rightarrow", "\\to", "\\choose", "\\rfloor"),
    }
)
_MAX_BITS: Final = 4096  # of a whole number
_MAX_FACTORIAL: Final = 400  # largest number with a factorial


def evaluate_latex(text: str) -> float | None:
    """Return the value of a formula in lower case, rounded to two decimals; None where the authors' code raises."""
    try:
        return round(_Formula(_BLANKS.sub(" ", text)).value(), 2)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None


class _Formula:
    """Parser of one formula. Each method reads the part that it names; it raises ValueError if that is not there."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
        self._end = 0  # place after the token
        self._token = ""  # the token that is read next; empty at the end of the text
        self._advance()

    def value(self) -> float:
        result = self._sum()
        if self._token not in _IGNORED_AFTER_FORMULA:
            raise ValueError(self._token)
        return result

    def _advance(self) -> str:
        """Go to the next token, and return the one before."""
        token = self._token
        match = _TOKEN.match(self._text, self._end)
        self._token, self._end = (match[1], match.end()) if match else ("", self._end)
        return token

    def _sum(self) -> float:
        result = self._product()
        while self._token in ("+", "-"):
            is_plus = self._advance() == "+"
            term = self._product()
            result = _check_size(result + term if is_plus else result - term)
        return result

    def _product(self, *, allow_functions: bool = True) -> float:
        result = self._signed(allow_functions)
        while self._token in _SIGNS:
            combine = _SIGNS[self._advance()]
            result = _check_size(combine(result, self._signed(allow_functions)))
        return result

    def _signed(self, allow_functions: bool) -> float:
        r"""Return a run of factors without a sign between them, such as "2\pi", after any plus and minus."""
        sign = 1
        while self._token in ("+", "-"):
            sign = -sign if self._advance() == "-" else sign
        result = self._power()
        # The argument of a function without brackets ends before the next function.
        while self._begins_factor(allow_functions):
            result = _check_size(result * self._power())
        return sign * result

    def _begins_factor(self, allow_functions: bool) -> bool:
        token = self._token
        if token in _IGNORED_AFTER_FORMULA or token in _SIGNS:
            return False
        if not allow_functions and (token in _FUNCTIONS or token == "\\sqrt"):
            return False
        return token[0].isalnum() or token[0] == "\\" or token in _CLOSING or len(token) > 1

    def _power(self) -> float:
        result = self._operand()
        while self._token == "^":
            result = _checked_power(result, self._superscript())
        while self._token == "!":
            self._advance()
            # As in their code, a fraction has no factorial.
            result = math.factorial(_check_factorial(result))
        return result

    def _superscript(self) -> float:
        """Return the number, constant or formula in braces after a ^."""
        self._expect("^")
        return self._group("{") if self._token == "{" else self._atom()

    def _operand(self) -> float:
        if self._token in _CLOSING:
            return self._group(self._token)
        if self._token not in _OPERATORS:
            return self._atom()
        operator = self._advance()
        if operator in _FUNCTIONS:
            power = self._superscript() if self._token == "^" else 1
            argument = self._group("(") if self._token == "(" else self._product(allow_functions=False)
            result = _checked_power(_FUNCTIONS[operator](argument), power)
        elif operator == "\\sqrt":
            root = self._group("[") if self._token == "[" else 2
            radicand = self._group("{")
            result = math.sqrt(radicand) if root == 2 else _checked_power(radicand, 1 / root)
        elif operator == "e":
            exponent = self._superscript()
            if exponent == 1:
                raise ValueError("e")  # their code writes E, which Python does not know
            result = math.exp(exponent)
        elif operator == "\\frac":
            result = self._group("{") / self._group("{")
        else:
            result = math.comb(_check_factorial(self._group("{")), _check_factorial(self._group("{")))
        return result

    def _atom(self) -> float:
        token = self._advance()
        if token == "\\pi":
            return math.pi
        # Letters and all other commands are unknowns, which have no value.
        if not token.isascii():
            raise ValueError(token)
        digits = token.removesuffix("\\%").replace(",", "")
        number = float(digits) if "." in digits else int(digits)
        if token.endswith("\\%"):
            number /= 100
        return int(number) if number == math.floor(number) else number

    def _group(self, opening: str) -> float:
        self._expect(opening)
        result = self._sum()
        self._expect(_CLOSING[opening])
        return result

    def _expect(self, token: str) -> None:
        if self._advance() != token:
            raise ValueError(token)


def _checked_power(base: float, exponent: float) -> float:
    """Return a power; raise an ArithmeticError or ValueError for one that is not real or too large."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _MAX_BITS:
        raise OverflowError(exponent)
    result: float | complex = base**exponent
    if isinstance(result, complex):
        raise ValueError(result)
    return result


def _check_factorial(value: float) -> int:
    """Return a whole number; raise for a fraction, and for a number whose factorial would take time."""
    if value != int(value) or value > _MAX_FACTORIAL:
        raise ValueError(value)
    return int(value)


def _check_size(value: float) -> float:
    """Return the value; raise for a whole number so long that arithmetic would take time, and for infinity."""
    if value.bit_length() > _MAX_BITS if isinstance(value, int) else not math.isfinite(value):
        raise OverflowError("too large")
    return value
