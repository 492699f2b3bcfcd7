"""Rewards for reading text in an image: transcriptions, short readings, the fields of a form.

`of` names the part of the response that is compared. `column` names a column of `sample.meta` that lists further
correct answers or, for another part than the answer, all its correct texts. The best match counts. A rambling answer
earns nothing: error rates reach 1 at twice the target's length.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache

from rapidfuzz.distance import Levenshtein

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import Of, part_value, reward, target_value
from mmrl_rewards.geometry import Threshold

_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")


@reward(name="ocr_exact", answer_types=(AnswerType.TEXT,))
def exact(response: Response, sample: Sample, *, column: str | None = None, of: Of = "answer") -> RewardValue:
    """Return 1 if answer and target have the same letters and digits in the same order, ignoring case, else 0.

    Source: word accuracy of scene text recognition, case-insensitive and alphanumeric (arXiv:1904.01906, 4.1).
    Departures: letters and digits of all scripts count, after NFKC.
    Unscorable: a target is not text, or has no letter and no digit.
    """
    targets = strings.normalized_targets(sample, column, of)
    kept = list(map(_keep_alphanumeric, targets))
    if "" in kept:
        raise Unscorable(f"the target {targets[kept.index('')]!r:.80} has no letter and no digit")
    text = strings.normalize(part_value(response, AnswerType.TEXT, of))
    given = _keep_alphanumeric(text)
    value = float(given in kept)
    target = targets[kept.index(given) if value else 0]
    return RewardValue(value, f"exact {value:.2f}: {strings.excerpt(text)}, expected {strings.excerpt(target)}")


@reward(name="cer", answer_types=(AnswerType.TEXT,), attack_tolerance=0.2)  # letters that happen to agree
def cer(
    response: Response, sample: Sample, *, ignore_case: bool = False, column: str | None = None, of: Of = "answer"
) -> RewardValue:
    """Return max(0, 1 - CER), CER = Levenshtein(answer, target) / len(target), in code points.

    Source: the character error rate of OCR evaluation, e.g. Rice, Jenkins and Nartker 1995.
    Departures: the value is clipped at 0. NFKC, stripping and collapsing white space come first.
    Unscorable: a target is not text, or is empty once normalised.
    """
    targets = strings.normalized_targets(sample, column, of)
    text = part_value(response, AnswerType.TEXT, of)
    return _best_over_targets("1 - CER", text, targets, _one_minus_error_rate, ignore_case)


@reward(name="wer", answer_types=(AnswerType.TEXT,))
def wer(
    response: Response, sample: Sample, *, ignore_case: bool = False, column: str | None = None, of: Of = "answer"
) -> RewardValue:
    """Return max(0, 1 - WER), WER = Levenshtein(answer, target) / len(target), in words between white space.

    Source: the word error rate of speech recognition, as reward 1 - WER for OCR in Video-R1 (arXiv:2503.21776).
    Departures: the value is clipped at 0. NFKC comes first. Punctuation belongs to its word.
    Unscorable: a target is not text, or is empty once normalised.
    """

    def measure(text: str, target: str) -> float:
        return _one_minus_error_rate(text.split(), target.split())

    targets = strings.normalized_targets(sample, column, of)
    text = part_value(response, AnswerType.TEXT, of)
    return _best_over_targets("1 - WER", text, targets, measure, ignore_case)


@reward(name="anls", answer_types=(AnswerType.TEXT,))
def anls(
    response: Response, sample: Sample, *, threshold: Threshold = 0.5, column: str | None = None, of: Of = "answer"
) -> RewardValue:
    """Return 1 - NL if NL < `threshold`, else 0, where NL = Levenshtein(answer, target) / length of the longer text.

    Case is ignored.

    Source: average normalised Levenshtein similarity (ST-VQA, arXiv:1905.13648, eq. 1), for one question.
    Departures: NFKC, stripping and collapsing white space come first.
    Unscorable: a target is not text, or is empty once normalised.
    """

    def measure(text: str, target: str) -> float:
        distance = Levenshtein.normalized_distance(text, target, score_cutoff=threshold)
        return 1.0 - distance if distance < threshold else 0.0

    targets = strings.normalized_targets(sample, column, of)
    text = part_value(response, AnswerType.TEXT, of)
    return _best_over_targets("ANLS", text, targets, measure, ignore_case=True)


@reward(name="fields", answer_types=(AnswerType.JSON,))
def fields(response: Response, sample: Sample, *, of: Of = "answer") -> RewardValue:
    """Return the F1 of the fields of a form: 2 * correct / (fields in the answer + fields in the target).

    A field is a value with its path of keys, such as `menu.price` in {"menu": [{"price": ..}]}. Positions in a list do
    not count. A field is correct if path and value are equal, the value after NFKC, case folding and collapsing white
    space. Numbers are compared as written.

    Source: entity F1 of key information extraction, SROIE task 3 (arXiv:2103.10213).
    Departures: forms may be nested, as in CORD.
    Unscorable: the target has no field.
    """
    targets = Counter(_iter_leaves(target_value(sample, AnswerType.JSON)))
    if not targets:
        raise Unscorable(f"the target {sample.target.value!r:.80} has no field")
    answers = Counter(_iter_leaves(part_value(response, AnswerType.JSON, of)))
    correct, num_answers, num_targets = (answers & targets).total(), answers.total(), targets.total()
    reason = f"{correct} right of {num_answers} fields, expected {num_targets}"
    return RewardValue(2.0 * correct / (num_answers + num_targets), reason)


def _best_over_targets(
    name: str, text: str, targets: Sequence[str], measure: Callable[[str, str], float], ignore_case: bool
) -> RewardValue:
    """Return the highest `measure` of a text and a target. Among equal ones, the reason shows the first target."""
    text = strings.normalize(text)
    if ignore_case:
        text, targets = text.casefold(), [target.casefold() for target in targets]
    values = [measure(text, target) for target in targets]
    value = max(values)
    target = targets[values.index(value)]
    return RewardValue(value, f"{name} {value:.2f}: {strings.excerpt(text)}, expected {strings.excerpt(target)}")


def _one_minus_error_rate(answer: Sequence[Hashable], target: Sequence[Hashable]) -> float:
    """Return max(0, 1 - Levenshtein(answer, target) / len(target))."""
    # The value is 0 from this distance on, so a rambling answer need not be compared to its end.
    max_distance = len(target)
    return max(0.0, 1.0 - Levenshtein.distance(answer, target, score_cutoff=max_distance) / max_distance)


@lru_cache(maxsize=256)  # siblings share their targets
def _keep_alphanumeric(text: str) -> str:
    """Return the letters and digits of a text in folded case."""
    return _NOT_ALPHANUMERIC.sub("", text.casefold())


def _iter_leaves(form: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield path and normalised value of everything in a form that is neither object nor list."""
    # A list of what is still to be visited, since an answer may be nested more deeply than Python calls may be.
    waiting: list[tuple[tuple[str, ...], object]] = [((), form)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            # One sign for every position, because the order of a list does not count.
            waiting += [((*path, "*"), inner) for inner in value]
        else:
            yield path, strings.normalize(value if isinstance(value, str) else json.dumps(value)).casefold()
