"""Rewards for classification: the name of a class, or a set of them."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Final

from pydantic import Field
from rapidfuzz import fuzz, process

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import reward, target_value
from mmrl_rewards.strings import excerpt

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})
_SEPARATORS_TO_SPACES: Final = str.maketrans("_-", "  ")


@reward(name="label", answer_types=(AnswerType.TEXT,))
def label(
    response: Response, sample: Sample, *, verbatim: bool = False, aliases: Mapping[str, str] = _NO_ALIASES
) -> RewardValue:
    """1 if the answer is the target's class, else 0.

    Names are equal after NFKC, case folding, collapsing white space and taking _ and - for spaces; `verbatim` they
    must be equal letter by letter, as in No-Thinking-RL. `aliases` says which class other names stand for. Source:
    CLS-RL (arXiv:2503.16188). Departures: equality, never containment, which an empty answer and a list of all classes
    pass.

    Raises:
        Unscorable: the target is not text.
    """
    target = target_value(sample, AnswerType.TEXT)
    content = response.answer.value
    if content is None:
        return RewardValue(0.0, response.answer.problems[0])
    other_names = {_normalize(name): stands_for for name, stands_for in aliases.items()}
    named = other_names.get(_normalize(content), content)
    equal = named == target if verbatim else _normalize(named) == _normalize(target)
    return RewardValue(float(equal), f"{excerpt(content)}, expected {excerpt(target)}")


@reward(name="fuzzy", answer_types=(AnswerType.TEXT,))
def fuzzy(
    response: Response,
    sample: Sample,
    *,
    threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9,
    column: str | None = None,
) -> RewardValue:
    """1 if the answer is spelled like the target: 2 * common / (len(answer) + len(target)) >= threshold, else 0.

    `common` is the length of their longest common subsequence, names normalised as for `label`. With `column`, the
    list of all classes in `sample.meta[column]`, the target must be the nearest of them, too. Source: rapidfuzz's
    `ratio`, the default reward of VLM-R1 (arXiv:2504.07615). Departures: a threshold, since the bare ratio pays for
    letters that happen to agree.

    Raises:
        Unscorable: the target is not text, or the column holds no list of texts that the target is one of.
    """
    target = _normalize(target_value(sample, AnswerType.TEXT))
    classes = [target] if column is None else _read_classes(sample.meta.get(column), column, target)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    answer = _normalize(response.answer.value)
    nearest = process.extractOne(answer, classes, scorer=fuzz.ratio, score_cutoff=100 * threshold)
    if nearest is None:
        return RewardValue(0.0, f"{excerpt(answer)} is near none, expected {excerpt(target)}")
    name, ratio, _ = nearest
    return RewardValue(
        float(name == target), f"{excerpt(answer)} is {ratio:.0f} % {excerpt(name)}, expected {excerpt(target)}"
    )


@reward(name="labels", answer_types=(AnswerType.LIST,))
def labels(response: Response, sample: Sample) -> RewardValue:
    """|A & B| / |A | B| of the set of classes answered and the set expected, names normalised as for `label`.

    Source: the classification reward of Curr-ReFT (arXiv:2503.07065), an IoU of sets. Departures: two empty sets are
    equal, and an empty one is otherwise worth nothing.

    Raises:
        Unscorable: the target is not a list of texts.
    """
    expected = {_normalize(name) for name in target_value(sample, AnswerType.LIST)}
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    given = {_normalize(name) for name in response.answer.value}
    both, either = len(given & expected), len(given | expected)
    return RewardValue(both / either if either else 1.0, f"{both} shared of {len(given)}, expected {len(expected)}")


def _read_classes(names: object, column: str, target: str) -> list[str]:
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise Unscorable(f"the column {column!r} holds {names!r:.80}, not a list of classes")
    classes = [_normalize(name) for name in names]
    if target not in classes:
        raise Unscorable(f"the target {excerpt(target)} is none of the {len(classes)} classes in {column!r}")
    return classes


def _normalize(name: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", name).casefold().translate(_SEPARATORS_TO_SPACES).split())
