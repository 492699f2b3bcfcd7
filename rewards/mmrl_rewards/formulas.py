r"""Rewrites a formula, as people and models write it, into LaTeX that math-verify reads rightly.

math-verify 0.9 reads `12\,500` as 12 + 500, `1 000` as 1 x 000, "cat" as c x a x t and 101_2 as 101, and it cannot read
0.\overline{3} or √2. What it would misread is rewritten here, or refused.
"""

# ruff: noqa: RUF001  # characters that look like others are what this file rewrites
from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from math import comb, gcd, perm
from typing import Final, NamedTuple

from mmrl.answer import ANSWER_LEAD, parse_answer_value
from mmrl.types import AnswerType
from mmrl_rewards.number_words import GROUPED_DIGITS, MINUS, SCALES, join_digits, split_number, write_exponents

_SYMBOLS: Final = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∖": r"\setminus "},
        **{"π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "ℝ": r"\mathbb{R}"},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "≈": r"\approx ", "…": r"\ldots ", "°": r"^\circ "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "∛": r"\sqrt[3] "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **{"⟨": "(", "⟩": ")", ";": ",", "，": ", "},
        **{"∠": r"\angle ", "△": r"\triangle ", "∥": r"\parallel ", "⊥": r"\perp ", "≅": r"\cong ", "∽": r"\sim "},
        **{"。": ".", "：": ":", "（": "(", "）": ")", "∴": r"\therefore ", "⇒": r"\Rightarrow "},
        **{chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)},
    }
)
# Not the \, of \\, which ends a row of a matrix.
_SPACES: Final = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad|~|\s+")
_TEXT: Final = r"\\(?:text|mathrm|textbf|textit|mbox|textrm)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
_TEXT_COMMAND: Final = re.compile(_TEXT)
_FUNCTIONS: Final = "(?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|log|ln|exp|min|max|gcd|det|lim|sqrt|pi|theta|alpha|beta"
_ELLIPSIS: Final = r"\s*(?:\.\.\.|\\[lc]?dots)"
_DIRECTED_FIGURES: Final = frozenset({"vec", "overrightarrow"})
_CHOICES: Final = r"(?<![A-Za-z\\])(?P<kind>[CP])\((?P<n>[0-9]+), ?(?P<k>[0-9]+)\)"
_GREATER: Final = r">|\\geq?(?![a-z])"
_MOST_CHOSEN_FROM: Final = 100
_TERM: Final = r"([+-]?[^-+=,]*?)\\(?:mathbf|boldsymbol|bm|vec|hat)\s*\{([ijk])\}\s*"
_DEGREES: Final = r"\s*\^\s*\{?\s*\\circ\s*\}?"
_CURRENCY: Final = r"(?:(?:US)?\\\$|[€£¥]|^(?:USD|EUR|GBP|JPY)\b)"
_CURRENCIES: Final = {r"\$": "USD", r"US\$": "USD", "€": "EUR", "£": "pounds", "¥": "JPY"}


def _repeating_decimal(match: re.Match[str]) -> str:
    """Return a decimal fraction as a common one; the groups are the whole, the fixed and the repeated digits."""
    whole, fixed, repeated = match[1], match[2], "".join(filter(None, match.groups()[2:]))
    shift, cycle = 10 ** len(fixed), 10 ** len(repeated) - 1
    value = Fraction(int((whole + fixed) or "0"), shift) + Fraction(int(repeated), shift * cycle)
    return str(value.numerator) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _interval(match: re.Match[str]) -> str:
    """Return ]1, 2[ as (1, 2)."""
    return ("(" if match[1] == "]" else "[") + match[2] + (")" if match[3] == "[" else "]")


def _figure(match: re.Match[str]) -> str:
    """Return a figure or a set as one letter with an index, the same for all orders of points or items that name it."""
    kind, points = match[1], match[2]
    if kind == "triangle":
        points = "".join(sorted(points))
    elif kind == r"\{":
        points = ",".join(sorted(points.replace(" ", "").split(",")))
    elif kind not in _DIRECTED_FIGURES:
        points = min(points, points[::-1])
    return " q_{" + "".join(str(ord(letter)) for letter in kind + points) + "}"


def _column(match: re.Match[str]) -> str:
    r"""Return 3\mathbf{i} - 2\mathbf{j} as a column of its components."""
    sizes = dict.fromkeys("ijk" if "{k}" in match[0] else "ij", "")
    for size, letter in re.findall(_TERM, match[0]):
        sizes[letter] += f"{size}1" if size.strip() in ("", "+", "-") else size
    rows = r"\\".join(size or "0" for size in sizes.values())
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}"


def _currency_last(match: re.Match[str]) -> str:
    r"""Return \$5 as 5\text{USD}, in the currencies that a formula names."""
    signs = dict.fromkeys(re.findall(_CURRENCY, match[0]))
    return re.sub(_CURRENCY, "", match[0]) + rf"\text{{{''.join(_CURRENCIES.get(sign, sign) for sign in signs)}}}"


def _ratio(match: re.Match[str]) -> str:
    """Return 3:4 as a fraction and 1:2:3 as the fractions of its last part."""
    *parts, last = match[0].split(":")
    fractions = [rf"\frac{{{part}}}{{{last}}}" for part in parts]
    return fractions[0] if len(fractions) == 1 else f"({','.join(fractions)})"


def _choices(match: re.Match[str]) -> str:
    """Return C_5^2, 5C2 and C(5, 2) as the number of choices of 2 of 5; A_5^2 and P_5^2 count arrangements."""
    n, k = int(match["n"]), int(match["k"])
    if not k <= n <= _MOST_CHOSEN_FROM:
        return match[0]
    return str(comb(n, k) if match["kind"] == "C" else perm(n, k))


def _ascending(match: re.Match[str]) -> str:
    """Return 2 > x > 1 as 1 < x < 2."""
    high, first, middle, second, low = match.groups()
    return low + ("<" if second == ">" else r"\le ") + middle + ("<" if first == ">" else r"\le ") + high


# Patterns and what replaces them, in this order: each relies on those before it.
_RULES: Final = (
    # 1. What surrounds a formula.
    # Bold: **5** or **Answer:** 5, and not the powers of x**2 + y**2.
    (r"(?<!\S)\*\*([^*\s](?:[^*]*[^*\s])?)\*\*(?=[\s.,:;!]|$)", r"\1"),
    # #### 5, `5`, *5* and ```latex 5 ```
    (r"^#+\s+", ""),
    (r"^(`{1,3}|\*)(?:latex |math )?\s*([^`*]+?)\s*\1$", r"\2"),
    # \boxed{1}\boxed{3} would be a product.
    (r"\}\s*\\boxed", "?"),
    (r"\\boxed(?=\{)", ""),
    # The answer is 5, \therefore 5, Answer: **5, Area = 5, \text{Area} = 5, = 5, \text{5 cm}, x equals 5
    (
        rf"^(?:\\(?:therefore|implies|Rightarrow)(?![a-z])\s*)?(?i:{ANSWER_LEAD})"
        rf"(?:(?!not)[A-Za-z]{{3,}}\s*=|{_TEXT}\s*=|=)?\s*(?=\S)",
        "",
    ),
    (r"^([A-Za-z]) (?:is(?: equal to)?|equals) ", r"\1="),
    (r"^\\(?:text|mathrm)\s*\{([0-9][^{}]*)\}$", r"\1"),
    (r"\s+is the (?:final |correct )?answer[.!]?$", ""),
    (r"(?<=[^.])\.$", ""),
    # 2. Commands.
    (r"\*\*", "^"),
    (r"\\[dtc]frac", r"\\frac"),
    # \frac12
    (r"\\frac ?([0-9]) ?([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"(?:\\math(?:bin|rel))?\{:\}|\\colon(?![a-z]) ?", ":"),
    (r"\\lg(?![a-z])", r"\\log"),
    (r"\\log_(?:e|\{e\})", r"\\ln "),
    (r"\\(max|min|gcd|lcm)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
    (r"(?<=[a-z])\s*!=", r"\\ne "),
    (r"\\varnothing|^\\\{\s*\\\}$", r"\\emptyset"),
    (r"\\langle", "("),
    (r"\\rangle", ")"),
    (r"\\limits|\\(?:left|right|[bB]ig+[lr]?)(?=\s*(?:[()\[\]|.]|\\[{}]))", ""),
    (r"\\text\s*\{\s*,?\s*(or|and)\s*\}", r" \1 "),
    (r"(?<=[0-9)}])(or|and)(?=[0-9A-Za-z(\\-])", r" \1 "),
    (r"\\(?:lor|vee)(?![a-z])", " or "),
    (r"\\(?:land|wedge)(?![a-z])", " and "),
    # a system of equations in lines; not a function in cases, whose lines have an &
    (
        r"^(?:\\\{)?\s*\\begin\{(cases|array|aligned)\}(?:\{[lcr]*\})?"
        r"((?:[^&=]+&?=[^&=]+?(?:\\\\|(?=\\end)))+)\\end\{\1\}(?:\\right)?\.?$",
        lambda match: ", ".join(row.strip(" ,").replace("&", "") for row in match[2].split(r"\\")),
    ),
    (rf"(?:^|(?<==))(?:{_TERM})+$", _column),
    (r"\\(?:mathbf|boldsymbol|bm|vec|hat)\s*\{([ijk])\}", r"q_{\1}"),
    (r"\\(?:mathbf|Bbb)\s*\{R\}", r"\\mathbb{R}"),
    (r"\\(?:mathbf|boldsymbol|bm)\s*\{([^{}]*)\}", r"\1"),
    # 3. Counts and figures.
    # C_5^2, {}^5C_2, 5C2, and C(5, 2) next to an operator; by itself, C(5, 2) may be a point
    (r"(?<![A-Za-z\\])(?P<kind>[CAP])_\{?(?P<n>[0-9]+)\}?\^\{?(?P<k>[0-9]+)\}?", _choices),
    (
        r"(?<![\w.)}])(?:\{\})?[_^]?\{?(?P<n>[0-9]+)\}? ?(?P<kind>[CP])_?\{?(?P<k>[0-9]+)\}?(?![0-9A-Za-z])",
        _choices,
    ),
    (
        r"^(?=.*[CP]\()(?!.*[ABD-OQ-Z] ?\()(?=.*(?:[*/=+-]|\\(?:cdot|times|frac|div))).*$",
        lambda match: re.sub(_CHOICES, _choices, match[0]),
    ),
    # the point A(2, 3)
    (r"^[A-Z]\s*(?=\([^()]*,[^()]*\)$)", ""),
    (r"^([0-9]+) to ([0-9]+)$", r"\1:\2"),
    (r"\\overline ?\{([A-Z]{2})\}", r"\1"),
    (r"\\(triangle|angle|vec|overrightarrow|overleftrightarrow|widehat) ?\{?([A-Z]+|[0-9])\}?", _figure),
    # a set within a set, which math-verify would dissolve
    (r"(\\\{)([^{}]+)\\\}(?=(?:[^{}\\]|\\[^{}]|\\\{[^{}]*\\\})*\\\})", _figure),
    # 4. Digits.
    # 1.234,5 and 1.234.567
    (
        r"^[+-]?[1-9][0-9]{0,2}(?:(?:\.[0-9]{3})+,[0-9]+|(?:\.[0-9]{3}){2,})$",
        lambda match: match[0].replace(".", "").replace(",", "."),
    ),
    # 12 500 and 3.141 592
    (GROUPED_DIGITS, join_digits),
    (r"(?<=[0-9])\{,\}(?=[0-9])", "."),
    (r"(?<=[0-9])'(?=[0-9]{3})", ""),
    # 0.\overline{3}, 0.(3), 0.\dot{1}4285\dot{7}, 0.333... and, cut off, 3.14...
    (r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{?([0-9]+)\}?", _repeating_decimal),
    (r"([0-9]*)\.([0-9]*)\(([0-9]+)\)", _repeating_decimal),
    (r"([0-9]*)\.([0-9]*)\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?", _repeating_decimal),
    (r"([0-9]*)\.([0-9]*?)([0-9]{1,9}?)\3+" + _ELLIPSIS, _repeating_decimal),
    (rf"([0-9]*\.[0-9]+){_ELLIPSIS}", r"\1"),
    # 101_2 and 6e23
    (r"(?<![\w.}])([0-9]+)_\{?([0-9]+)\}?", lambda match: str(int(match[1], int(match[2])))),
    (r"(?<=[0-9])[eE]([+-]?[0-9]+)(?![0-9A-Za-z])", r"\\times 10^{\1}"),
    (r"(?<=[0-9])\s*[xX*]\s*(?=10\s*\^)", r"\\times "),
    # math-verify reads 2(3) as the mixed number 2 3.
    (r"(?<![A-Za-z0-9_^{.])([0-9]+(?:\.[0-9]+)?)\s*\((?=[^(),]*\))", r"\1\\cdot ("),
    # 1 1/2
    (r"(?<![0-9A-Za-z.)}])([0-9]+) ([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}"),
    # 5. Functions and powers.
    # f(x) = x^2 is y = x^2.
    (r"^[a-z]\([a-z]\)\s*=(?=[^=]*$)", "y="),
    (
        r"^(?:\\text\s*\{)?\s*(?:(?:[Tt]here (?:is|are) )?[Nn]o (?:real )?solutions?|(?:the )?empty set)\s*\}?$",
        r"\\emptyset",
    ),
    (r"^(?:\\text\s*\{)?\s*[Aa]ll real(?: number)?s\s*\}?$", r"\\mathbb{R}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])", r"\\infty "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(\\sqrt(?:\[3\])?)\s+([0-9]+|[a-z])", r"\1{\2}"),
    (r"\^\(([^()]*)\)", r"^{\1}"),
    (r"\^(-[0-9a-z]+)", r"^{\1}"),
    (rf"\\(sin|cos|tan)\s*(\()?\s*([0-9]+){_DEGREES}(?(2)\s*\))", r"\\\1(\\frac{\3\\pi}{180})"),
    # The constant of an antiderivative is C.
    (r"^((?:\\[a-z]+|[^A-Za-z\\]|[etuxy])+\+\s*)c$", r"\1C"),
    # 6. Units, which become text at the end, as in 5\text{USD}.
    (rf"^.*{_CURRENCY}.*$", _currency_last),
    # 20^\circ C, 90^\circ, 30'
    (rf"{_DEGREES}\s*(?:\\(?:text|mathrm)\s*\{{\s*)?([CF])(?:\s*\}})?$", r"\\text{°\1}"),
    (rf"(?<=[a-z0-9}}%!)]){_DEGREES}\s*$", r"\\text{degrees}"),
    (r"^([+-]?[0-9.]+)\s*(?:''|\^\{?\\prime\s*\\prime\}?)$", r"\1\\text{arcsec}"),
    (r"^([+-]?[0-9.]+)\s*(?:'|\^\{?\\prime\}?)$", r"\1\\text{arcmin}"),
    # 3 million, 50 percent
    (
        r"(?<=[0-9])\s*(?:\\text\{)?\s*(thousand|million|billion|trillion)\b\s*\}?",
        lambda match: rf"\times {SCALES[match[1]]} ",
    ),
    (r"(?<=[0-9])\s*(?:\\text\{\s*percent\s*\}|percent\b)", r"\\%"),
    # 7. Relations.
    # x \in (1, 2), {x | 1 < x < 2} and ]1, 2[
    (r"^[a-zA-Z]\s*\\in(?![a-z])\s*", ""),
    (r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid)(.*)\\\}$", r"\2"),
    (r"^([\[\]])([^\[\]()]*,[^\[\]()]*)([\[\]])$", _interval),
    # math-verify does not compare 2 > x > 1 with 1 < x < 2.
    (rf"^([^<>=]+?)({_GREATER})([^<>=]+?)({_GREATER})([^<>=]+)$", _ascending),
    # x \approx 5
    (r"^(?:[a-z]\s*)?\\approx\s*", ""),
    (r"^\\(?:text|mathrm)\s*\{\s*([A-Za-z])\s*\}$", r"\1"),
    (r"\\mathrm\s*\{([a-zA-Z])\}", r"\1"),
)
_REWRITES: Final = tuple((re.compile(pattern), replacement) for pattern, replacement in _RULES)
_COMMAS: Final = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_TRAILING_UNIT: Final = re.compile(
    rf"(?P<value>.*?(?:[a-z](?=\s*\\text)|[0-9}}%!)]|\\pi))(?P<space>\s*)"
    rf"(?P<unit>(?:[A-Za-z]+\.?|{_TEXT})(?:\^\{{?-?[1-3]\}}?|\s|/|\\cdot|[A-Za-z]+|{_TEXT})*)"
)
_UNIT: Final = re.compile(
    r"[nmcdk]?m|in|ft|yd|mi|[mk]?g|lbs?|oz|m?s|sec|min|hrs?|h|m[lL]|[lL]|k?[NJWV]|k?Hz|k?Pa|mph|ha|USD|EUR|sq|cu"
)
_CHANGES_VALUE: Final = re.compile(
    "or|and|not|to|plus|minus|times|over|squared|cubed|dozens?|hundreds?|(?:thou|mill|bill)[a-z]+|hal(?:f|ves)"
    "|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred)ths?|each|less|more",
    re.IGNORECASE,
)
_COMMAND: Final = re.compile(r"\\(?:begin|end)\s*\{[a-z*]+\}|\\operatorname\s*\{[^{}]*\}|\\[A-Za-z]+")
_LETTERS: Final = re.compile(r"[A-Za-z]+")
_TIME: Final = re.compile(r"[0-9]{1,2} ?: ?[0-5][0-9]")
# 3:45 pm, 2020-12-25, and ABC, which names points in their order and is not a product
_NAME: Final = re.compile(r"[0-9:]+ ?[apAP]\.?[mM]\.?|[0-9]{4}-[0-9]{2}-[0-9]{2}|[A-Z]{3,}")
_RATIO_PART: Final = r"[^:=<>,|()\[\]]+"
_RATIO: Final = re.compile(rf"{_RATIO_PART}(?::{_RATIO_PART})+")  # 1:2:3
_FIGURES_RELATED: Final = re.compile(r"\\(?:sim|cong|parallel|perp)(?![a-z])")
_PLUS_MINUS: Final = re.compile(r"\\pm(?![a-z])")
CONNECTIVE: Final = re.compile(" or | and |, *")
_BRACKET_OR_INEQUALITY: Final = re.compile(r"[\[<>]|\\\{|^\(")
_UNREADABLE: Final = re.compile(rf"(?<![_^0-9.])[0-9.]*[0-9] +[0-9]|{_ELLIPSIS}|[?#]|(?<!\\)&(?!.*\\end)")
_MAX_CHARS: Final = 300  # characters; parsing takes milliseconds for each ten


class Formula(NamedTuple):
    """Holds a formula as math-verify reads it, or a text that is not mathematics."""

    text: str  # LaTeX without delimiters; words in lower case
    is_words: bool  # to be compared as text
    number: float | None = None  # value of a plain number
    unit: str = ""  # unit that was taken off


@lru_cache(maxsize=4096)  # siblings often share their answers
def read_formula(text: str) -> Formula:
    """Return a formula without units, grouped digits and other forms that math-verify misreads.

    A formula with a word in it is words: "cat", "no", "x is odd", "about 3"; so is 3:45 pm. The runs of letters
    xyz, abc and mgh are products: they have no vowel, or are typical names of variables.

    Raises:
        ValueError: the text is longer than 300 characters, has digits of another script, two numbers side by side, as
            3 4 has, or an ellipsis that is not of a decimal fraction.
    """
    if len(text) > _MAX_CHARS:
        raise ValueError(f"longer than {_MAX_CHARS} characters")
    number = _plain_number(text)
    if number is not None and "e" not in text.lower():
        return Formula(text.replace(",", ""), False, number)
    whole = _rewrite(text)
    formula = _drop_unit(whole)
    unit = re.sub("[{}]", "", _TEXT_COMMAND.sub(r" \1 ", whole[len(formula) :])).strip()
    if _FIGURES_RELATED.search(formula):
        return Formula(text.replace(" ", ""), True)
    if _NAME.fullmatch(formula):
        return Formula(re.sub("[ .]", "", formula).lower(), True)
    if _has_words(formula):
        return _read_words(text)
    if _TIME.fullmatch(formula):
        formula = formula.replace(" ", "").lstrip("0")
        if gcd(*map(int, whole.split(":"))) > 1:  # a ratio would be in lowest terms
            return Formula(formula, True)
    formula = _RATIO.sub(_ratio, formula)
    if _UNREADABLE.search(formula) or not formula:
        raise ValueError("not one formula")
    chosen = re.fullmatch(_CHOICES, text)
    value = _plain_number(_choices(chosen) if chosen else formula)
    if _PLUS_MINUS.search(formula) and not _BRACKET_OR_INEQUALITY.search(formula):
        formula = _both_signs(formula)
    return Formula(formula, False, value, unit or ("%" if formula.endswith("%") else ""))


def _rewrite(text: str) -> str:
    """Return a text after all rewrites. Raises ValueError for digits of another script."""
    formula = write_exponents(re.sub(r",\\! ?", ",", text).replace(r"\!", "").translate(_SYMBOLS))
    formula = _SPACES.sub(" ", formula).strip()
    if any(character.isdigit() and not character.isascii() for character in formula):
        raise ValueError("in digits of another script")
    for pattern, replacement in _REWRITES:
        formula = pattern.sub(replacement, formula)
    return _join_thousands(formula.strip())


def _read_words(text: str) -> Formula:
    """Return a number in words as a number, and any other text as words."""
    words = _plain_words(text)
    negated = MINUS.match(words)
    counted = split_number(words[negated.end() :] if negated else words)
    if counted is None or counted[1]:
        return Formula(words, True)
    number = -counted[0] if negated else counted[0]
    return Formula(str(number), False, number)


def _both_signs(formula: str) -> str:
    r"""Return x = 1 \pm 2 as x = 1 + 2, x = 1 - 2; lists in brackets are left to math-verify."""
    items = []
    for item in CONNECTIVE.split(formula):
        left, equals, right = item.rpartition("=")
        for sign, other in (("+", "-"), ("-", "+")):
            items.append(left + equals + _PLUS_MINUS.sub(sign, right).replace(r"\mp", other))
    return ", ".join(items)


def _plain_number(text: str) -> float | None:
    try:
        # Whole numbers beyond 2^53 stay exact: 262537412640768744.0 is one.
        number: float = parse_answer_value(AnswerType.NUMBER, re.sub(r"(?<=[0-9])\.0+$", "", text))
    except ValueError:
        return None
    return number


def _join_thousands(formula: str) -> str:
    """Return a formula with 12,500 as 12500; within brackets only if items are separated by a comma and a space."""
    joined, end = "", 0
    for match in _COMMAS.finditer(formula):
        before = formula[: match.start()]
        depth = sum(map(before.count, ("(", "[", r"\{"))) - sum(map(before.count, (")", "]", r"\}")))
        is_grouped = depth <= 0 or ", " in formula
        joined += formula[end : match.start()] + (match[0].replace(",", "") if is_grouped else match[0])
        end = match.end()
    return joined + formula[end:]


def _drop_unit(formula: str) -> str:
    r"""Return 5 for "5 cm", 5\text{ cm}^2, "5 m/s" and "5 apples", but not for 5m and 5 ab, which are products."""
    match = _TRAILING_UNIT.fullmatch(formula)
    if not match:
        return formula
    value, space, unit = match["value"], match["space"], match["unit"]
    is_text = unit.startswith("\\")
    names = _LETTERS.findall(_TEXT_COMMAND.sub(r" \1 ", unit).replace(r"\cdot", " "))
    for name in names:
        is_name = is_text or _is_word(name) or _UNIT.fullmatch(name)
        if not is_name or _CHANGES_VALUE.fullmatch(name):
            return formula
    has_variables = _LETTERS.search(_COMMAND.sub("", value.rpartition("=")[2])) is not None
    if not names or (not is_text and (has_variables or (not space and len(names[0]) == 1))):
        return formula
    return value.strip()


def _has_words(formula: str) -> bool:
    for match in _TEXT_COMMAND.finditer(formula):
        if any(len(run) > 1 for run in _LETTERS.findall(match[1])):
            return True
    return any(map(_is_word, _LETTERS.findall(_COMMAND.sub(" ", formula))))


def _is_word(run: str) -> bool:
    """Return True if letters are a word rather than a product of variables."""
    if run in ("or", "and"):
        return False
    lower = run.lower()
    if len(run) == 2:
        return run == lower and "o" in run
    is_consecutive = "".join(sorted(lower)) in "abcdefghijklmnopqrstuvwxyz"
    return len(run) > 2 and bool(set(lower) & set("aeiou")) and not is_consecutive and not set(lower) <= set("abcdxyz")


def _plain_words(text: str) -> str:
    words = _TEXT_COMMAND.sub(r" \1 ", _SPACES.sub(" ", text)).replace("\\", "").replace("*", "")
    return " ".join(words.casefold().split()).rstrip(".!")
