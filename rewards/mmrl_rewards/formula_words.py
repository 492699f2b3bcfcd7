"""Tells words and units in a formula from products of variables."""

from __future__ import annotations

import re
from typing import Final

from mmrl_rewards.units import find_unit

# Not the \, of \\, which ends a row of a matrix.
SPACES: Final = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad|~|\s+")
BRACED: Final = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
TEXT: Final = rf"\\(?:text|mathrm|textbf|textit|mbox|textrm)\s*{BRACED}"
TEXT_COMMAND: Final = re.compile(TEXT)
HAN: Final = "[\u4e00-\u9fff]"
# A unit or a counter, without what negates, multiplies or continues a number.
_NO_UNIT: Final = "不非错没无万亿百十半双对打倍多余以几或负减加乘除是之的零一二三四五六七八九"
HAN_UNIT: Final = rf"(?:(?![{_NO_UNIT}]){HAN}(?<!千(?![米克瓦]))){{1,6}}(?<!方)"
_TRAILING_UNIT: Final = re.compile(
    rf"(?P<value>.*?(?:[a-z](?=\s*\\text)|[0-9}}%!)]|\\pi))(?P<space>\s*)"
    rf"(?P<unit>(?:[A-Za-z]|{TEXT})(?:\^\{{?-?[1-3]\}}?|\s|/|\\cdot|[A-Za-z.]|{TEXT})*)"
)
_UNIT: Final = re.compile(
    r"[numμcdkMG]?(?:[mgsAKTCFHWNJVlL]|Wb|eV|Hz|Pa|mol|cal|Wh|bar)|in|ft|yd|mi|lbs?|oz|sec|min|hrs?|h|mph|ha"
    r"|USD|EUR|sq|cu|rad|atm|dB|bpm|rpm|Ω"
)
# Things that are counted: "apples", "red apples", "square units", "miles per hour", but no verb and no multiple.
_COUNTED: Final = re.compile(
    r"(?:(?:[a-z]+ )?(?:[a-z]{2,}(?<!s)s|people|persons?|children|(?:wo)?men|unit|degree|feet|yuan))?"
    r"(?: ?per [a-z]+(?: [a-z]+)?| (?:old|long|wide|tall|high|deep|left))?",
    re.IGNORECASE,
)
_CHANGES_VALUE: Final = re.compile(
    "or|and|not|no|to|plus|minus|times|over|squared|cubed|pairs?|tens|scores?|dozens?|(?:hundre|lakh|crore|myria)d?s?"
    "|(?:thou|mill|bill)[a-z]+|hal(?:f|ves)|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten)(?:ths?|s|es)"
    "|(?:eleven|twelf|hundred)ths?|each|less|more|is|was|has|does|this|thus|as|its|perhaps|always|factorials"
    "|fails|exceeds|equals|unless|multiples",
    re.IGNORECASE,
)
_COMMAND: Final = re.compile(r"\\(?:begin|end)\s*\{[a-z*]+\}|\\operatorname\s*\{[^{}]*\}|\\[A-Za-z]+")
_LETTERS: Final = re.compile(r"[A-Za-z]+")
_NAMES: Final = re.compile(rf"[A-Za-zΩμ]+|{HAN}+")


def split_unit(formula: str) -> tuple[str, str]:
    r"""Return 5 and the unit of "5 cm", 5\text{ cm}^2, "5 m/s" and "5 apples", but no unit of the products 5m and 5 ab.

    Nor for "5 is wrong", "5 pairs" and H_2\text{O}: only units and what is counted are left out.
    """
    match = _TRAILING_UNIT.fullmatch(formula)
    if not match or re.search(r"_\{?[0-9]+\}?$", match["value"]):
        return formula, ""
    value, space, written = match["value"], match["space"], match["unit"]
    is_text = written.startswith("\\")
    unit = re.sub("[{}]", "", TEXT_COMMAND.sub(r" \1 ", written)).strip()
    names = _NAMES.findall(unit.replace(r"\cdot", " "))
    for name in names:
        is_name = is_text or _is_word(name) or _UNIT.fullmatch(name)
        if not is_name or _CHANGES_VALUE.fullmatch(name):
            return formula, ""
    is_counted = _COUNTED.fullmatch(" ".join(name for name in names if not _UNIT.fullmatch(name)))
    is_one = value == "1" and len(names) == 1
    if not (is_counted or is_one or re.fullmatch(HAN_UNIT, "".join(names)) or find_unit(unit)):
        return formula, ""
    has_variables = _LETTERS.search(_COMMAND.sub("", value.rpartition("=")[2])) is not None
    if not names or (not is_text and (has_variables or (not space and len(names[0]) == 1))):
        return formula, ""
    # 5\text{ cm} + 5\text{ cm} = 10\text{ cm}
    return re.sub(rf"(?<=[0-9}}])\s*{re.escape(written)}(?=\s*(?:[=+-]|\\approx))", "", value).strip(), unit


def has_words(formula: str) -> bool:
    """Return True if a formula has a word in it."""
    for match in TEXT_COMMAND.finditer(formula):
        if any(len(run) > 1 for run in _LETTERS.findall(match[1])):
            return True
    if re.search(HAN, formula):
        return True
    return any(map(_is_word, _LETTERS.findall(_COMMAND.sub(" ", formula))))


def _is_word(run: str) -> bool:
    """Return True if letters are a word rather than a product of variables."""
    if run in ("or", "and"):
        return False
    lower = run.lower()
    if len(run) == 2:
        return lower in ("no", "up") or (run == lower and "o" in run)
    is_consecutive = "".join(sorted(lower)) in "abcdefghijklmnopqrstuvwxyz"
    is_product = set(lower) <= set("abcdxyz") or (set(lower) & {"x", "z"} and not set(lower) & set("aeiou"))
    return len(run) > 2 and bool(set(lower) & set("aeiouy")) and not is_consecutive and not is_product


def plain_words(text: str) -> str:
    """Return a text in small letters, without commands and the full stop."""
    words = TEXT_COMMAND.sub(r" \1 ", SPACES.sub(" ", text)).replace("\\", "").replace("*", "")
    return " ".join(words.casefold().split()).rstrip(".!").strip('"')
