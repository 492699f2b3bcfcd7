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
from unicodedata import normalize

from mmrl.answer import ANSWER_LEAD, parse_answer_value
from mmrl.types import AnswerType
from mmrl_rewards.chinese import to_english
from mmrl_rewards.formula_words import BRACED, HAN, HAN_UNIT, SPACES, TEXT, has_words, plain_words, split_unit
from mmrl_rewards.number_words import GROUPED_DIGITS, MINUS, SCALES, join_digits, split_number, write_exponents
from mmrl_rewards.units import find_unit

_SYMBOLS: Final = str.maketrans(
    {
        **{"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∖": r"\setminus "},
        **{"π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "ℝ": r"\mathbb{R}"},
        **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "≈": r"\approx ", "…": r"\ldots ", "°": r"^\circ "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "∛": r"\sqrt[3] "},
        **{"½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **{"⟨": "(", "⟩": ")", ";": ",", "，": ", ", "；": ", "},
        **{"∠": r"\angle ", "△": r"\triangle ", "∥": r"\parallel ", "⊥": r"\perp ", "≅": r"\cong "},
        **dict.fromkeys("∽∼", r"\sim "),
        **{"¢": r"\text{cent}", "。": ".", "º": r"^\circ ", "˚": r"^\circ ", "\u200b": ""},
        **{"′": "'", "∶": ":", "∴": r"\therefore ", "⇒": r"\Rightarrow "},
        **{chr(0x2080 + digit): f"_{{{digit}}}" for digit in range(10)},
    }
)
_FUNCTIONS: Final = "(?:arc)?(?:sin|cos|tan)h?|sec|csc|cot|log|ln|exp|min|max|gcd|det|lim|sqrt|pi|theta|alpha|beta"
_HAN_NUMBER: Final = re.compile("(?:百分之)?[0-9.零一二两三四五六七八九十百千万亿]+")
_ELLIPSIS: Final = r"\s*(?:\.\.\.|\\[lc]?dots)"
_UNIT_NAME: Final = r"(?:\\text\{)? ?([A-Za-z]+) ?\}?"
_FIGURES: Final = "triangle|angle|vec|overrightarrow|overleftrightarrow|widehat"
_DIRECTED_FIGURES: Final = frozenset({"vec", "overrightarrow"})
_CHOICES: Final = r"(?<![A-Za-z\\])(?P<kind>[CP])\((?P<n>[0-9]+), ?(?P<k>[0-9]+)\)"
# Words that keep what follows "Area: " and "the total is " from being the answer.
_NO_LABEL: Final = (
    r"(?![^:=]*\b(?i:not?|non|can\w*|never|none|except|wrong|false|about|least|most|or|if|sin|cos|tan|log|lambda)\b)"
)
_GREATER: Final = r">|\\geq?(?![a-z])"
_MOST_CHOSEN_FROM: Final = 100
_TERM: Final = r"([+-]?[^-+=,]*?)\\(?:mathbf|boldsymbol|bm|vec|hat)\s*\{([ijk])\}\s*"
_DEGREES: Final = r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)"
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
    kind, points = match["kind"], match["points"]
    if kind == "triangle":
        points = "".join(sorted(points))
    elif kind == r"\{":
        points = ",".join(sorted(points.replace(" ", "").split(",")))
    elif kind not in _DIRECTED_FIGURES:
        points = min(points, points[::-1])
    return " Q_{" + _code(kind + points) + "}"


def _code(text: str) -> str:
    """Return a text as a number."""
    return "".join(str(ord(letter)) for letter in text)


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


def _sum_of_quantities(match: re.Match[str]) -> str:
    """Return 2 hours 30 minutes as 2.5 hours."""
    size, name, smaller_size, smaller_name = match.groups()
    unit, smaller = find_unit(name), find_unit(smaller_name)
    if not unit or not smaller or unit.dimension != smaller.dimension or smaller.factor >= unit.factor:
        return match[0]
    return f"{float(size) + float(smaller_size) * smaller.factor / unit.factor:.10g} {name}"


def _ascending(match: re.Match[str]) -> str:
    """Return 2 > x > 1 as 1 < x < 2."""
    high, first, middle, second, low = match.groups()
    return low + ("<" if second == ">" else r"\le ") + middle + ("<" if first == ">" else r"\le ") + high


# Patterns and what replaces them, in this order: each relies on those before it.
_WRAPPINGS: Final = (
    (r"\\(?:mathbf|Bbb)\s*\{R\}", r"\\mathbb{R}"),
    # \textbf{5 cm}, \mathbf{\frac{3}{5}}, \color{red}{5}, and \text{Area: } and \text{The answer is } before a formula
    (r"\\(?:text)?color\s*\{[^{}]*\}\s*", ""),
    (rf"^\\(?:text|math)(?:bf|it|rm)?\s*{BRACED}[.!]?$|^\\(?:boldsymbol|bm|underline)\s*{BRACED}$", r"\1\2"),
    (r"^\\text\s*\{([^{}]*(?:\bis|[:=])\s*)\}", r"\1 "),
    (r"\s*\\text\s*\{\s*\(approx[^{}]*\)\s*\}$", ""),
    (r"^\(?([A-Z])[.)]$", r"\1"),
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
        rf"(?:{_NO_LABEL}[A-Za-z]{{3,}}(?: [a-z]{{2,}})*\s*[:=]|{TEXT}\s*=|=)?\s*(?=\S)",
        "",
    ),
    # 答案是5, 面积为5, 答:5
    (rf"^(?![^:是为]*[不非])(?:(?:{HAN}+[:,] *)*{HAN}*[:是为]|一?共有?)\s*(?!{HAN}|$)", ""),
    (rf"(?<!{HAN})(?:\\text\{{)?或者?\}}?(?!{HAN}|$)", " or "),
    (rf"(?<!{HAN})(?:\\text\{{)?[和与且、]\}}?(?!{HAN}|$)", " and "),
    (r"^([A-Za-z]) (?:is(?: equal to)?|equals) ", r"\1="),
    (r"\s+is the (?:final |correct )?answer[.!]?$", ""),
    (r"(?<=[^.])\.$", ""),
)
_RULES: Final = (
    # 1. Commands.
    (r"\*\*", "^"),
    (r"\\[dtc]frac", r"\\frac"),
    # \frac12
    (r"\\frac ?([0-9]) ?([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"(?:\\math(?:bin|rel))?\{:\}|\\colon(?![a-z]) ?", ":"),
    (r"\\lg(?![a-z])", r"\\log"),
    (r"\\var(?=(?:phi|epsilon)(?![a-z]))", r"\\"),
    (r"\\degree(?![a-z])", r"^\\circ"),
    (r"\\(?:text|mathrm)\s*\{\s*(\^?\s*\\[a-z]+)\s*\}", r"\1 "),
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
    (rf"\\(?:mathbf|boldsymbol|bm)\s*{BRACED}", r"\1"),
    # column vectors
    (
        r"(?:^|(?<==))\s*\\begin\{([pb])matrix\}([^&]*?(?:\\\\[^&]*?)+)\\end\{\1matrix\}$",
        lambda match: "(" + match[2].replace(r"\\", ",") + ")",
    ),
    (r"\\sqrt\s*(\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})", r"\\sqrt{\1}"),
    (r"(\\sqrt\[[0-9]\])\s*([0-9]|[a-z])", r"\1{\2}"),
    # \text{H}_2\text{O}
    (r"\\(?:text|mathrm)\s*\{((?:[A-Z][a-z]?)+)\}(?=_)", r"\1"),
    (r"(?<=_[0-9])\\(?:text|mathrm)\s*\{((?:[A-Z][a-z]?)+)\}", r"\1"),
    # 8 (units), 12平方厘米, 3/4 (75%), 5\sqrt{3} (\approx 8.66)
    (rf"(?<=[0-9])\s*\((?:{TEXT}|((?:[kcm]?m|(?:[a-z]+ )?[a-z]{{3,}}s)(?:\^[23])?))\)$", r"\\text{\1\2}"),
    (rf"(?<=[0-9A-Za-z}}%)])\s*/?\s*(?:\\text\s*\{{)?\s*\(?({HAN_UNIT})\)?\}}?$", r"\\text{\1}"),
    (r" \((\\approx|=) ?([^()]*)\)$", r" \1 \2"),
    (r"(?<=[0-9}]) \(([0-9.]+\\%)\)$", r" = \1"),
    # S_{\text{shaded}}, P(\text{red})
    (
        r"(?<=(?<![A-Za-z\\])[A-Za-z]_\{)(?:\\text\s*\{)?([A-Za-z \u4e00-\u9fff]{2,})(?:\}(?=\}))?(?=\})",
        lambda match: _code(match[1]),
    ),
    (r"(?<=P\()(?:\\text\s*\{)?([A-Za-z ]{3,})\}?(?=\))", lambda match: f"Q_{{{_code(match[1])}}}"),
    # 2. Counts and figures.
    # C_5^2, {}^5C_2, 5C2, and C(5, 2) next to an operator; by itself, C(5, 2) may be a point
    (r"(?<![A-Za-z\\])(?P<kind>[CAP])_(\{)?(?P<n>[0-9]+)(?(2)\})\^(\{)?(?P<k>[0-9]+)(?(4)\})", _choices),
    (r"(?<![A-Za-z\\])C_(?:\{(\w+)\}|(\w))\^(?:\{(\w+)\}|(\w))", r"\\binom{\1\2}{\3\4}"),
    (
        r"(?<![\w.)}])(?:\{\})?[_^]?(\{)?(?P<n>[0-9]+)(?(1)\}) ?(?P<kind>[CP])"
        r"_?(\{)?(?P<k>[0-9]+)(?(4)\})(?![0-9A-Za-z])",
        _choices,
    ),
    (
        r"^(?=.*[CP]\()(?!.*[ABD-OQ-Z] ?\()(?=.*(?:[*/=+-]|\\(?:cdot|times|frac|div))).*$",
        lambda match: re.sub(_CHOICES, _choices, match[0]),
    ),
    # the point A(2, 3)
    (r"^(?:\\text\s*\{\s*)?(?:(?:[Tt]he )?[Pp]oint\s*\}?\s*)?[A-Z]?'?:?\s*(?=\([^()]*,[^()]*\)$)", ""),
    (r"^([0-9]+) to ([0-9]+)$", r"\1:\2"),
    (r"\\overline ?\{([A-Z]{2})\}", r"\1"),
    (rf"\\(?P<kind>{_FIGURES}) ?(\{{)?(?P<points>[A-Z]+|[0-9])(?(2)\}})", _figure),
    # a set within a set, which math-verify would dissolve
    (r"(?P<kind>\\\{)(?P<points>[^{}]+)\\\}(?=(?:[^{}\\]|\\[^{}]|\\\{[^{}]*\\\})*\\\})", _figure),
    # 3. Digits.
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
    # 4. Functions and powers.
    # f(x) = x^2 is y = x^2.
    (r"^[a-z]\([a-z]\)\s*=(?!.*\\pm)(?=[^=]*$)", "y="),
    (r"^(?:(?:[Tt]here (?:is|are) )?[Nn]o (?:real )?solutions?|(?:the )?empty set)$", r"\\emptyset"),
    (r"^[Aa]ll real(?: number)?s$", r"\\mathbb{R}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])(?:infinity|oo)(?![A-Za-z])", r"\\infty "),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"(\\sqrt(?:\[3\])?)\s+([0-9]+|[a-z])", r"\1{\2}"),
    (r"\^\(([^()]*)\)|\^(\\frac\{[^{}]*\}\{[^{}]*\})", r"^{\1\2}"),
    (r"\^(-[0-9a-z]+)", r"^{\1}"),
    (rf"\\(sin|cos|tan)\s*(\()?\s*([0-9]+){_DEGREES}(?(2)\s*\))", r"\\\1(\\frac{\3\\pi}{180})"),
    # The constant of an antiderivative is C.
    (r"^((?:\\[a-z]+|[^A-Za-z\\]|[etuxy])+\+\s*)c$", r"\1C"),
    # 5. Units, which become text at the end, as in 5\text{USD}.
    # 10\frac{\text{m}}{\text{s}}, 8{\rm cm}, 8\mathrm N, 100\Omega
    (rf"(?<=[0-9])\s*\\frac\s*\{{{TEXT}\}}\s*\{{{TEXT}\}}$", r"\\text{\1/\2}"),
    (r"(?<=[0-9])\s*(?:\{\\rm\s*([^{}]*)\}|\\mathrm\s+([A-Za-z]))$", r"\\text{ \1\2}"),
    (r"(?<=[0-9])\s*(?:\\(?:text|mathrm)\s*\{\s*)?([kM]?)\s*\}?\s*\\Omega\s*\}?$", r"\\text{\1Ω}"),
    (r"\\(?:text|mathrm)\{\\mu ([A-Za-z]+)\}$|\\mu ?\\(?:text|mathrm)\{([A-Za-z])\}$", r"\\text{μ\1\2}"),
    (rf"^([0-9.]+) ?{_UNIT_NAME},? ?(?:and )?([0-9.]+) ?{_UNIT_NAME}$", _sum_of_quantities),
    # 35^\circ 30'
    (rf"([0-9]+){_DEGREES}\s*([0-9]{{1,2}})(?:'|\^\{{?\\prime\}}?)$", r"(\1+\\frac{\2}{60})^\\circ"),
    # 180^\circ - 150^\circ = 30^\circ
    (rf"{_DEGREES}(?=.*(?:\\circ|=))(?!.*(?:\\pi|sin|cos|tan|[CF]\}}?$))", " "),
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
    # 6. Relations.
    # {1, 2}, x \in (1, 2), {x | 1 < x < 2} and ]1, 2[
    (r"^\{([^{}]*,[^{}]*)\}$", r"\\{\1\\}"),
    (r"^(?:[a-zA-Z]|\([a-z](?:, ?[a-z])+\))\s*\\in(?![a-z])\s*", ""),
    (r"^\\\{\s*([a-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:|\\mid)(.*)\\\}$", r"\2"),
    (r"^([\[\]])([^\[\]()]*,[^\[\]()]*)([\[\]])$", _interval),
    # math-verify does not compare 2 > x > 1 with 1 < x < 2.
    (rf"^([^<>=]+?)({_GREATER})([^<>=]+?)({_GREATER})([^<>=]+)$", _ascending),
    # x \approx 5
    (r"^(?:[a-z]\s*)?\\approx\s*", ""),
    (r"\\mathrm\s*\{([a-zA-Z])\}", r"\1"),
)
_UNWRAPS: Final = tuple((re.compile(pattern), replacement) for pattern, replacement in _WRAPPINGS)
_REWRITES: Final = tuple((re.compile(pattern), replacement) for pattern, replacement in _RULES)
_COMMAS: Final = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_TIME: Final = re.compile(r"[0-9]{1,2} ?: ?[0-5][0-9]")
# 3:45 pm, 2020-12-25, and ABC, which names points in their order and is not a product
_NAME: Final = re.compile(r"[0-9:]+ ?[apAP]\.?[mM]\.?|[0-9]{4}-[0-9]{2}-[0-9]{2}|[A-Z]{3,}")
_RATIO_PART: Final = r"[^:=<>,|()\[\]]+"
_RATIO: Final = re.compile(rf"{_RATIO_PART}(?::{_RATIO_PART})+")  # 1:2:3
_FIGURES_RELATED: Final = re.compile(r"\\(?:sim|cong|parallel|perp)(?![a-z])")
_PLUS_MINUS: Final = re.compile(r"\\(?:pm|mp)(?![a-z])")
CONNECTIVE: Final = re.compile(",? +(?:or|and) +|, *")
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
    unwrapped = _unwrap(text)
    whole = _rewrite(unwrapped)
    formula, unit = split_unit(whole)
    related = _FIGURES_RELATED.search(unwrapped)
    if related:
        sides = sorted(unwrapped.replace(" ", "").split(related[0]))
        return Formula(related[0].join(sides), True)
    if _NAME.fullmatch(formula):
        return Formula(re.sub("[ .]", "", formula).lower(), True)
    if has_words(formula):
        return _read_words(unwrapped)
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


def _unwrap(text: str) -> str:
    """Return a text in known symbols, without what leads to the answer. Raises ValueError for unknown digits."""
    formula = write_exponents(re.sub(r",\\! ?", ",", text).replace(r"\!", "").translate(_SYMBOLS))
    if not formula.isascii():
        formula = normalize("NFKC", formula).translate(_SYMBOLS)
    formula = SPACES.sub(" ", formula).strip()
    if any(character.isdigit() and not character.isascii() for character in formula):
        raise ValueError("in digits of another script")
    for pattern, replacement in _UNWRAPS:
        formula = pattern.sub(replacement, formula).strip()
    return to_english(formula) if _HAN_NUMBER.fullmatch(formula) else formula


def _rewrite(formula: str) -> str:
    for pattern, replacement in _REWRITES:
        formula = pattern.sub(replacement, formula)
    return _join_thousands(formula.strip())


def _read_words(text: str) -> Formula:
    """Return a number in words as a number, and any other text as words."""
    words = plain_words(text)
    negated = MINUS.match(words)
    counted = split_number(words[negated.end() :] if negated else words)
    if counted is None or counted[1]:
        # Alice and Bob, and Bob, Alice
        return Formula(", ".join(sorted(re.split(",? and |, *", words))), True)
    number = -counted[0] if negated else counted[0]
    return Formula(str(number), False, number)


def _both_signs(formula: str) -> str:
    r"""Return x = 1 \pm 2 as x = 1 + 2, x = 1 - 2; lists in brackets are left to math-verify."""
    items = []
    for item in CONNECTIVE.split(formula):
        left, equals, right = item.rpartition("=")
        for sign, other in (("+", "-"), ("-", "+")):
            items.append(left + equals + right.replace(r"\pm", sign).replace(r"\mp", other))
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
