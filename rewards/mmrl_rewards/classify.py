"""Rewards for classification. The target is the name of one class or a set of names.

`of` names the part of the response that is compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal

from rapidfuzz import fuzz, process

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards.contract import Of, part_value, reward, target_value
from mmrl_rewards.geometry import Threshold
from mmrl_rewards.strings import excerpt, normalize

_NO_ALIASES: Final[Mapping[str, str]] = MappingProxyType({})
_SEPARATOR: Final = re.compile(r"_|(?<=\w)-(?=\w)")  # no sign, as in "A-" and "-1"
_BOLD: Final = re.compile(r"\*\*(.+)\*\*")


@reward(name="label", answer_types=(AnswerType.TEXT,))
def label(
    response: Response,
    sample: Sample,
    *,
    verbatim: bool = False,
    aliases: Mapping[str, str] = _NO_ALIASES,
    of: Of = "answer",
) -> RewardValue:
    """Return 1 if the answer is the target's class, else 0.

    Names are compared without bold type and a full stop at the end, after NFKC, case folding, collapsing white space
    and replacing _ and, within a name, - by spaces. With `verbatim`, they must be equal character by character, as in
    No-Thinking-RL. `aliases` maps other names to the class they mean.

    Source: CLS-RL (arXiv:2503.16188).
    Departures: names must be equal. Containment would accept an empty answer and a list of all classes.
    Unscorable: the target is not text.
    """
    target = target_value(sample, AnswerType.TEXT)
    content: str = part_value(response, AnswerType.TEXT, of)
    # Aliases are normalised as answers are, while the class they stand for stays as written, for `verbatim`.
    other_names = {_normalize(name): stands_for for name, stands_for in aliases.items()}
    named = other_names.get(_normalize(content), content)
    equal = named == target if verbatim else _normalize(named) == _normalize(target)
    return RewardValue(float(equal), f"{excerpt(content)}, expected {excerpt(target)}")


@reward(name="fuzzy", answer_types=(AnswerType.TEXT,))
def fuzzy(
    response: Response,
    sample: Sample,
    *,
    threshold: Threshold = 0.9,
    column: str | None = None,
    of: Of = "answer",
) -> RewardValue:
    """Return 1 if the spelling of the answer is close to the target's, else 0.

    The similarity 2 * common / (len(answer) + len(target)) must reach `threshold`, in (0, 1]. `common` is the length of
    the longest common subsequence of the names, normalised as in `label`. If `column` is given, the list of all classes
    is in `sample.meta[column]`, and the target must also be the most similar class. Without it, one digit may differ.

    Source: rapidfuzz's `ratio`, the default reward of VLM-R1 (arXiv:2504.07615).
    Departures: there is a threshold, because the plain ratio rewards letters that agree by chance.
    Unscorable: the target is not text, or the column is not a list of texts that contains the target.
    """
    target = _normalize(target_value(sample, AnswerType.TEXT))
    classes = [target]
    if column is not None:
        names = sample.meta.get(column)
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise Unscorable(f"the column {column!r} holds {names!r:.80}, not a list of classes")
        classes = [_normalize(name) for name in names]
        if target not in classes:
            raise Unscorable(f"the target {excerpt(target)} is none of the {len(classes)} classes in {column!r}")
    answer = _normalize(part_value(response, AnswerType.TEXT, of))
    # rapidfuzz counts in per cent.
    nearest = process.extractOne(answer, classes, scorer=fuzz.ratio, score_cutoff=100 * threshold)
    if nearest is None:
        return RewardValue(0.0, f"{excerpt(answer)} is near none, expected {excerpt(target)}")
    name, ratio, _ = nearest
    reason = f"{excerpt(answer)} is {ratio:.0f} % {excerpt(name)}, expected {excerpt(target)}"
    return RewardValue(float(name == target), reason)


@reward(name="labels", answer_types=(AnswerType.LIST, AnswerType.TEXT))
def labels(
    response: Response, sample: Sample, *, measure: Literal["iou", "f1"] = "iou", of: Of = "answer"
) -> RewardValue:
    """Return |A & B| / |A | B|, in [0, 1], of the set of answered classes and the set of expected classes.

    With `measure` f1 the value is 2 |A & B| / (|A| + |B|). If the target is text, both sets are names between commas.
    Names are normalised as in `label`.

    Source: the classification reward of Curr-ReFT (arXiv:2503.07065), an IoU of sets; F1 for several letters in
    HumanOmniV2 (arXiv:2506.21277).
    Departures: two empty sets earn 1. If only one set is empty, the value is 0. Curr-ReFT also splits at spaces.
    Unscorable: the target is neither a list of texts nor text.
    """
    answer_type = AnswerType.TEXT if sample.target.answer_type is AnswerType.TEXT else AnswerType.LIST
    expected = _split_names(target_value(sample, answer_type))
    given = _split_names(part_value(response, answer_type, of))
    shared, size = len(given & expected), len(given) + len(expected)
    value = 1.0
    if size:
        value = 2.0 * shared / size if measure == "f1" else shared / (size - shared)
    return RewardValue(value, f"{shared} shared of {len(given)}, expected {len(expected)}")


def _split_names(value: str | Sequence[str]) -> set[str]:
    """Return the normalised names of a list, or those between the commas of a text."""
    # A full-width comma separates names, too.
    names = normalize(value).split(",") if isinstance(value, str) else value
    return {_normalize(name) for name in names} - {""}


def _normalize(name: str) -> str:
    """Return the name as `label` compares it."""
    words = " ".join(_SEPARATOR.sub(" ", normalize(name).casefold()).split()).removesuffix(".")
    return _BOLD.sub(r"\1", words).removesuffix(".")
