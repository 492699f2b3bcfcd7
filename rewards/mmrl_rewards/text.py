"""Rewards for short text: names, readings, transcriptions."""

from __future__ import annotations

import unicodedata

from mmrl.types import Kind, Response, Sample, Term, Unscorable
from mmrl_rewards.contract import gold, reward

_EXCERPT = 40


@reward(name="text", kinds=(Kind.TEXT,))
def exact(response: Response, sample: Sample) -> Term:
    """1 if answer and target are equal after NFKC, case folding, stripping and collapsing white space, else 0.

    Source: exact match as in SQuAD (arXiv:1606.05250, 6.1). Departures: articles and punctuation are kept; Unicode is
    normalised.

    Raises:
        Unscorable: the target is not text, or is empty once normalised.
    """
    target = _target_text(sample)
    text = response.answer.value
    if text is None:
        return Term(0.0, response.answer.problems[0])
    return Term(float(_normal(text).casefold() == target.casefold()), f"{_shown(text)}, expected {_shown(target)}")


@reward(name="similarity", kinds=(Kind.TEXT,), attack_tolerance=0.2)  # letters that happen to agree
def similarity(response: Response, sample: Sample) -> Term:
    """max(0, 1 - CER), CER = Levenshtein(answer, target) / len(target), in code points; case counts.

    Source: the character error rate of OCR evaluation, e.g. Rice, Jenkins and Nartker 1995. Departures: clipped at 0;
    NFKC, stripping and collapsed white space come first.

    Raises:
        Unscorable: the target is not text, or is empty once normalised.
    """
    target = _target_text(sample)
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    text = _normal(response.answer.value)
    # The distance is at least the difference in length, so a rambling answer needs no computing.
    edits = len(text) - len(target) if len(text) >= 2 * len(target) else _levenshtein(text, target)
    value = max(0.0, 1.0 - edits / len(target))
    return Term(value, f"similarity {value:.2f}: {_shown(text)}, expected {_shown(target)}")


def _target_text(sample: Sample) -> str:
    target = gold(sample, Kind.TEXT)
    if not _normal(target):
        raise Unscorable(f"the target {target!r} is empty once normalised")
    return _normal(target)


def _normal(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).split())


def _levenshtein(text: str, target: str) -> int:
    """Edit distance by Myers' bit-vectors in Hyyrö's form (J. Exp. Algorithmics 10, 2005); a column is one integer."""
    places: dict[str, int] = {}
    for i, char in enumerate(target):
        places[char] = places.get(char, 0) | 1 << i
    mask, last = (1 << len(target)) - 1, 1 << (len(target) - 1)
    rises, falls, distance = mask, 0, len(target)
    for char in text:
        match = places.get(char, 0)
        diagonal = ((((match & rises) + rises) ^ rises) | match | falls) & mask
        up, down = falls | (mask & ~(diagonal | rises)), rises & diagonal
        distance += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & mask, (down << 1) & mask
        rises, falls = down | (mask & ~(diagonal | up)), up & diagonal
    return distance


def _shown(text: str) -> str:
    return repr(text if len(text) <= _EXCERPT else text[:_EXCERPT] + "...")
