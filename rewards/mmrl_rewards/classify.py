"""Rewards for classification: the name of a class, or a set of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import Field
from rapidfuzz import fuzz, process

from mmrl.types import Kind, Response, Sample, Term, Unscorable
from mmrl_rewards.contract import gold, reward
from mmrl_rewards.strings import shown

_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_JOINTS: Final = str.maketrans("_-", "  ")


@reward(name="label", kinds=(Kind.TEXT,))
def label(response: Response, sample: Sample, *, verbatim: bool = False, aliases: Mapping[str, str] = _NONE) -> Term:
    """1 if the answer is the target's class, else 0.

    Names are equal after NFKC, case folding, collapsing white space and taking _ and - for spaces; `verbatim` they
    must be equal letter by letter, as in No-Thinking-RL. `aliases` says which class other names stand for. Source:
    CLS-RL (arXiv:2503.16188). Departures: equality, never containment, which an empty answer and a list of all classes
    pass.

    Raises:
        Unscorable: the target is not text.
    """
    target = gold(sample, Kind.TEXT)
    content = response.answer.value
    if content is None:
        return Term(0.0, response.answer.problems[0])
    other_names = {_normal(name): stands_for for name, stands_for in aliases.items()}
    named = other_names.get(_normal(content), content)
    equal = named == target if verbatim else _normal(named) == _normal(target)
    return Term(float(equal), f"{shown(content)}, expected {shown(target)}")


@reward(name="fuzzy", kinds=(Kind.TEXT,))
def fuzzy(
    response: Response,
    sample: Sample,
    *,
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9,
    column: str | None = None,
) -> Term:
    """1 if the answer is spelled like the target: 2 * common / (len(answer) + len(target)) >= threshold, else 0.

    `common` is the length of their longest common subsequence, names normalised as for `label`. With `column`, the
    list of all classes in `sample.meta[column]`, the target must be the nearest of them, too. Source: rapidfuzz's
    `ratio`, the default reward of VLM-R1 (arXiv:2504.07615). Departures: a threshold, since the bare ratio pays for
    letters that happen to agree.

    Raises:
        Unscorable: the target is not text, or the column holds no list of texts that the target is one of.
    """
    target = _normal(gold(sample, Kind.TEXT))
    classes = [target] if column is None else _classes(sample.meta.get(column), column, target)
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    answer = _normal(response.answer.value)
    nearest = process.extractOne(answer, classes, scorer=fuzz.ratio, score_cutoff=100 * threshold)
    if nearest is None:
        return Term(0.0, f"{shown(answer)} is near none, expected {shown(target)}")
    name, ratio, _ = nearest
    return Term(float(name == target), f"{shown(answer)} is {ratio:.0f} % {shown(name)}, expected {shown(target)}")


@reward(name="labels", kinds=(Kind.LIST,))
def labels(response: Response, sample: Sample) -> Term:
    """|A & B| / |A | B| of the set of classes answered and the set expected, names normalised as for `label`.

    Source: the classification reward of Curr-ReFT (arXiv:2503.07065), an IoU of sets. Departures: two empty sets are
    equal, and an empty one is otherwise worth nothing.

    Raises:
        Unscorable: the target is not a list of texts.
    """
    expected = {_normal(name) for name in gold(sample, Kind.LIST)}
    if response.answer.value is None:
        return Term(0.0, response.answer.problems[0])
    given = {_normal(name) for name in response.answer.value}
    both, either = len(given & expected), len(given | expected)
    return Term(both / either if either else 1.0, f"{both} shared of {len(given)}, expected {len(expected)}")


def _classes(names: object, column: str, target: str) -> list[str]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise Unscorable(f"the column {column!r} holds {names!r:.80}, not a list of classes")
    classes = [_normal(name) for name in names]
    if target not in classes:
        raise Unscorable(f"the target {shown(target)} is none of the {len(classes)} classes in {column!r}")
    return classes


def _normal(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().translate(_JOINTS).split())
