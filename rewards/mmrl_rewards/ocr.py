"""Rewards for what was read: transcriptions, short readings, the fields of a form.

Each compares with the best of several right answers where `column` names the column of `sample.meta` that lists more of
them. A rambling answer earns nothing: what is twice as long as the target is wholly wrong.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Annotated

from pydantic import Field
from rapidfuzz.distance import Levenshtein

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import reward, target_value

Threshold = Annotated[float, Field(gt=0.0, le=1.0)]


@reward(name="ocr_exact", answer_types=(AnswerType.TEXT,))
def exact(response: Response, sample: Sample, *, column: str | None = None) -> RewardValue:
    """1 if answer and target have the same letters and digits in the same order, case aside, else 0.

    Source: word accuracy of scene text recognition, case-insensitive and alphanumeric (arXiv:1904.01906, 4.1).
    Departures: letters and digits of all scripts, after NFKC.

    Raises:
        Unscorable: a target is not text, or has no letter and no digit.
    """
    targets = strings.normalized_targets(sample, column)
    if empty := [target for target in targets if not _keep_alphanumeric(target)]:
        raise Unscorable(f"the target {empty[0]!r:.80} has no letter and no digit")
    return _best_over_targets(
        "exact", response, targets, lambda text, target: float(_keep_alphanumeric(text) == _keep_alphanumeric(target))
    )


@reward(name="cer", answer_types=(AnswerType.TEXT,), attack_tolerance=0.2)  # letters that happen to agree
def cer(response: Response, sample: Sample, *, ignore_case: bool = False, column: str | None = None) -> RewardValue:
    """max(0, 1 - CER), CER = Levenshtein(answer, target) / len(target), in code points.

    Source: the character error rate of OCR evaluation, e.g. Rice, Jenkins and Nartker 1995. Departures: clipped at 0;
    NFKC, stripping and collapsed white space come first.

    Raises:
        Unscorable: a target is not text, or is empty once normalised.
    """
    measure = _one_minus_error_rate
    return _best_over_targets(
        "1 - CER", response, _fold_case(strings.normalized_targets(sample, column), ignore_case), measure, ignore_case
    )


@reward(name="wer", answer_types=(AnswerType.TEXT,))
def wer(response: Response, sample: Sample, *, ignore_case: bool = False, column: str | None = None) -> RewardValue:
    """max(0, 1 - WER), WER = Levenshtein(answer, target) / len(target), in words between white space.

    Source: the word error rate of speech recognition, as reward 1 - WER for OCR in Video-R1 (arXiv:2503.21776).
    Departures: clipped at 0; NFKC comes first. Punctuation stays with its word.

    Raises:
        Unscorable: a target is not text, or is empty once normalised.
    """

    def measure(text: str, target: str) -> float:
        return _one_minus_error_rate(text.split(), target.split())

    return _best_over_targets(
        "1 - WER", response, _fold_case(strings.normalized_targets(sample, column), ignore_case), measure, ignore_case
    )


@reward(name="anls", answer_types=(AnswerType.TEXT,))
def anls(response: Response, sample: Sample, *, threshold: Threshold = 0.5, column: str | None = None) -> RewardValue:
    """1 - NL if NL < `threshold`, else 0; NL = Levenshtein(answer, target) / the longer one's length, case aside.

    Source: average normalised Levenshtein similarity (ST-VQA, arXiv:1905.13648, eq. 1), for one question. Departures:
    NFKC, stripping and collapsed white space come first.

    Raises:
        Unscorable: a target is not text, or is empty once normalised.
    """

    def measure(text: str, target: str) -> float:
        distance = Levenshtein.normalized_distance(text, target, score_cutoff=threshold)
        return 1.0 - distance if distance < threshold else 0.0

    return _best_over_targets(
        "ANLS", response, _fold_case(strings.normalized_targets(sample, column), True), measure, ignore_case=True
    )


@reward(name="fields", answer_types=(AnswerType.JSON,))
def fields(response: Response, sample: Sample) -> RewardValue:
    """F1 of the fields of a form: 2 * right / (fields in the answer + fields in the target).

    A field is a value and its path of keys, `menu.price` in {"menu": [{"price": ..}]}: places in a list do not count.
    It is right if both are equal, the value after NFKC, case folding and collapsing white space; numbers compare as
    they are written. Source: entity F1 of key information extraction, SROIE task 3 (arXiv:2103.10213). Departures:
    nested forms, as in CORD.

    Raises:
        Unscorable: the target has no field.
    """
    targets = Counter(_iter_leaves(target_value(sample, AnswerType.JSON)))
    if not targets:
        raise Unscorable(f"the target {sample.target.value!r:.80} has no field")
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    answers = Counter(_iter_leaves(response.answer.value))
    right, of = (answers & targets).total(), (answers.total(), targets.total())
    return RewardValue(2.0 * right / sum(of), f"{right} right of {of[0]} fields, expected {of[1]}")


def _best_over_targets(
    name: str,
    response: Response,
    targets: Sequence[str],
    measure: Callable[[str, str], float],
    ignore_case: bool = False,
) -> RewardValue:
    """Return the highest value of the answer over the targets."""
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    text = strings.normalize(response.answer.value)
    text = text.casefold() if ignore_case else text
    value, target = max(((measure(text, target), target) for target in targets), key=lambda pair: pair[0])
    return RewardValue(value, f"{name} {value:.2f}: {strings.excerpt(text)}, expected {strings.excerpt(target)}")


def _fold_case(targets: Sequence[str], ignore_case: bool) -> Sequence[str]:
    return [target.casefold() for target in targets] if ignore_case else targets


def _one_minus_error_rate(answer: Sequence[Hashable], target: Sequence[Hashable]) -> float:
    most = len(target)  # edits after which there is nothing left to earn, so that rambling costs no time
    return max(0.0, 1.0 - Levenshtein.distance(answer, target, score_cutoff=most) / most)


def _keep_alphanumeric(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _iter_leaves(form: object) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and value of everything in a form that is neither object nor list."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), form)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*path, "*"), inner) for inner in value]
        else:
            yield path, strings.normalize(value if isinstance(value, str) else json.dumps(value)).casefold()
