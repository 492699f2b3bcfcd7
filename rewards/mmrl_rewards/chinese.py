"""Rewrites short answers in Chinese as the English that the grammars of choices, counts and quantities read.

The words and units that are read are listed in `chinese.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_CHINESE: Final = re.compile("[\u3001\u4e00-\u9fff]")
_DIGITS: Final = {**{character: digit for digit, character in enumerate("零一二三四五六七八九")}, "两": 2}
_POWERS: Final = {"": 1, "十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8}
_DIGIT: Final = "[一二两三四五六七八九]"
# 五 after 百 or 千 is not a separate digit without 零: 二百五 may be 250.
_BELOW_10000: Final = rf"(?:{_DIGIT}千)?(?:零?{_DIGIT}百)?(?:零?{_DIGIT}?十)?(?:零?(?<![百千]){_DIGIT})?"
_NUMBER: Final = re.compile(
    rf"零|(?:{_BELOW_10000}(?<=.)亿)?(?:{_BELOW_10000}(?<=.)万)?零?{_BELOW_10000}|([0-9.,]+)([百千万亿]?)"
)
_NUMERAL: Final = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?[百千万亿]?(?![A-Za-z0-9])|[零一二两三四五六七八九十百千万亿]+)"
_NUMERALS: Final = re.compile(
    rf"(?<![A-Za-z0-9.])(?!一[共定般样起些直])(?:百分之(?P<percent>{_NUMERAL})|(?P<parts>{_NUMERAL})分之(?P<share>{_NUMERAL})|{_NUMERAL})"
)
# `words` are Chinese words by what they mean in the grammars, `measures` the words between a number and a thing,
# `things` what questions often ask for. Of units, a longer name comes before its own parts.
_TABLE: Final = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_ENGLISH: Final = {word: english for english, words in _TABLE["words"].items() for word in words.split()}
UNITS: Final[Mapping[str, str]] = _TABLE["units"]
"""Symbols of units by their Chinese names."""
MEASURES: Final[str] = _TABLE["measures"]
_HALF: Final = re.compile(rf"(?:(?<!{_DIGIT})({_DIGIT}|十|[0-9]+)个)?半(?={'|'.join(UNITS)})")  # 两个半小时
_OPTION: Final = re.compile(r"(?<=[A-Z])(?:选项|项)|(?<=^[A-Z])、(?![A-Z]\b)", re.ASCII)  # B选项 and B、狗
_ARTICLE: Final = re.compile(rf"一?[{MEASURES}](?={{[A-Z]}})")  # 一只{B}
# Of two words with the same beginning, the longer one comes first.
_WORD: Final = re.compile("|".join(sorted(_ENGLISH, key=len, reverse=True)))


def to_english(text: str) -> str:
    """Return a text with Chinese numerals as digits, 5% for 百分之五, and the words of `chinese.json` in English.

    Other words stay as they are, and so does a numeral that may be two numbers.
    """
    if not _CHINESE.search(text):
        return text
    text = _HALF.sub(lambda match: f" {_read_numeral(match[1] or '零')}.5 ", text)
    text = _OPTION.sub(lambda match: ". " if match[0] == "、" else " ", _ARTICLE.sub(" a ", text))
    translated = _WORD.sub(lambda match: f" {_ENGLISH[match[0]]} ", _NUMERALS.sub(_write_numeral, text))
    return " ".join(re.sub(r" ?([,;:.!])(?=[ (]*[^\W0-9]| [0-9])", r"\1 ", translated).split())


def names_thing(text: str, question: str) -> bool:
    """Return True if a word in Chinese is of the question, which may ask for the thing in English; 图 is no thing."""
    english = _TABLE["things"].get(text, "(?!)")
    is_asked = text in question or re.search(rf"\b(?:{english})", question, re.IGNORECASE)
    return bool(is_asked) and not text.startswith("图")


def _write_numeral(match: re.Match[str]) -> str:
    numerals = [match[group] for group in ("share", "parts", "percent") if match[group]] or [match[0]]
    numbers = [_read_numeral(numeral) for numeral in numerals]
    return match[0] if None in numbers else f" {'/'.join(map(str, numbers))}{'%' if match['percent'] else ''} "


def _read_numeral(text: str) -> str | None:
    """Return 205 for 二百零五 and 20000 for 2万, or None if a text is not one numeral."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if match[1]:
        return f"{float(match[1].replace(',', '')) * _POWERS[match[2]]:.0f}" if match[2] else text
    total = section = digit = 0
    for character in text:
        power = _POWERS.get(character, 1)
        if power == 1:
            digit = _DIGITS[character]
        elif power < 10**4:
            section, digit = section + (digit or 1) * power, 0
        else:
            total, section, digit = total + (section + digit) * power, 0, 0
    return str(total + section + digit)
