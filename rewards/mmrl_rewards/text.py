"""Rewards for text: equal to the target, sharing its words, or simply not repeating itself.

`column` names the column of `sample.meta` that lists more right texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from rapidfuzz.distance import LCSseq

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import reward

NgramOrder = Annotated[int, Field(ge=1, le=8)]
NgramCounts = Counter[tuple[str, ...]]

_MAX_CHARS = 400_000


@reward(name="text", answer_types=(AnswerType.TEXT,))
def exact(response: Response, sample: Sample, *, column: str | None = None) -> RewardValue:
    """1 if answer and target are equal after NFKC, case folding, stripping and collapsing white space, else 0.

    Source: exact match as in SQuAD (arXiv:1606.05250, 6.1). Departures: articles and punctuation are kept; Unicode is
    normalised.

    Raises:
        Unscorable: a target is not text, or is empty once normalised.
    """
    targets = strings.normalized_targets(sample, column)
    if response.answer.value is None:
        return RewardValue(0.0, response.answer.problems[0])
    text = strings.normalize(response.answer.value)
    equal = text.casefold() in [target.casefold() for target in targets]
    return RewardValue(float(equal), f"{strings.excerpt(text)}, expected {strings.excerpt(targets[0])}")


@reward(name="rouge", answer_types=(AnswerType.TEXT,), attack_tolerance=0.2)  # words that happen to agree
def rouge(
    response: Response, sample: Sample, *, variant: Literal["1", "2", "L"] = "L", column: str | None = None
) -> RewardValue:
    """ROUGE-1, ROUGE-2 or ROUGE-L: F1 = 2 m / (words in the answer + words in the target).

    m counts the words (for 2: the pairs of neighbours) in both, each as often as in the one that has fewer, or for L is
    the length of the longest common subsequence. Source: Lin 2004, eq. 1 and, with beta = 1, 2 to 4. Departures: F1,
    since recall alone pays rambling; the best of several targets; no stemming; words of every script, each ideograph
    one; an answer above 10 times the longest target's length + 1000 earns 0.

    Raises:
        Unscorable: a target is not text, or has no word (for 2: no two).
    """
    targets = strings.normalized_targets(sample, column)
    wanted = [strings.words(target) for target in targets]
    if min(map(len, wanted)) < (2 if variant == "2" else 1):
        raise Unscorable(f"a target of {targets!r:.80} has too few words for ROUGE-{variant}")
    refusal = _reject(response, targets)
    if refusal:
        return refusal
    given = strings.words(response.answer.value)
    value = max(_rouge_f1(variant, given, target) for target in wanted)
    return RewardValue(
        value, f"ROUGE-{variant} {value:.2f}: {strings.excerpt(response.answer.value)}, {_expected_text(targets)}"
    )


@reward(name="bleu", answer_types=(AnswerType.TEXT,))
def bleu(
    response: Response,
    sample: Sample,
    *,
    order: NgramOrder = 4,
    tokenize: Literal["13a", "intl", "zh", "char"] = "13a",
    column: str | None = None,
) -> RewardValue:
    """BLEU of one sentence, n-grams up to `order`: brevity penalty * geometric mean of the n-gram precisions.

    Source: Papineni et al. 2002, 2.3, as in sacrebleu (arXiv:1804.08771) with exponential smoothing and the effective
    order, so that short sentences can reach 1. Departures: NFKC and collapsed white space come first; an answer above
    10 times the longest target's length + 1000 earns 0.

    Raises:
        Unscorable: a target is not text, or is empty once normalised.
    """
    from sacrebleu.metrics.bleu import BLEU

    targets = strings.normalized_targets(sample, column)
    refusal = _reject(response, targets)
    if refusal:
        return refusal
    text = strings.normalize(response.answer.value)
    metric = BLEU(max_ngram_order=order, tokenize=tokenize, effective_order=True)
    value = _percent_to_fraction(metric.sentence_score(text, targets).score)
    return RewardValue(value, f"BLEU {value:.2f}: {strings.excerpt(text)}, {_expected_text(targets)}")


@reward(name="chrf", answer_types=(AnswerType.TEXT,), attack_tolerance=0.25)  # letters that happen to agree
def chrf(
    response: Response, sample: Sample, *, word_order: Annotated[int, Field(ge=0, le=4)] = 0, column: str | None = None
) -> RewardValue:
    """F-score of character n-grams up to 6, recall weighing twice as much; `word_order` 2 adds words: chrF++.

    Source: Popović 2015 and 2017, as in sacrebleu (arXiv:1804.08771). Departures: NFKC and collapsed white space come
    first; the best of several targets; an answer above 10 times the longest target's length + 1000 earns 0.

    Raises:
        Unscorable: a target is not text, or is empty once normalised.
    """
    from sacrebleu.metrics.chrf import CHRF

    targets = strings.normalized_targets(sample, column)
    refusal = _reject(response, targets)
    if refusal:
        return refusal
    text = strings.normalize(response.answer.value)
    value = _percent_to_fraction(CHRF(word_order=word_order).sentence_score(text, targets).score)
    return RewardValue(value, f"chrF {value:.2f}: {strings.excerpt(text)}, {_expected_text(targets)}")


@reward(name="repetition", low=-1.0, high=0.0, attack_tolerance=1.0)  # a penalty: silence is not fined
def repetition(response: Response, sample: Sample, *, order: Annotated[int, Field(ge=1, le=50)] = 6) -> RewardValue:
    """-(1 - distinct / all) over the n-grams of `order` words in the whole response; 0 where there are none.

    Source: the n-gram penalty of Yeo et al. (arXiv:2502.03373), in the form of VLM-R1, n = 6. Departures: case and
    punctuation do not make a word another; repeated boxes are left to `mmrl_rewards.detect`, which counts each box too
    many; only the first 400 000 characters are looked at.
    """
    grams = _count_ngrams(strings.words(response.text[:_MAX_CHARS]), order)
    if not grams:
        return RewardValue(0.0, f"no {order} words")
    value = len(grams) / grams.total() - 1.0
    return RewardValue(value, f"{len(grams)} distinct of {grams.total()} runs of {order} words")


def _reject(response: Response, targets: Sequence[str]) -> RewardValue | None:
    """Return the value of an answer that is missing or too long to compare, or None for others."""
    text = response.answer.value
    if text is None:
        return RewardValue(0.0, response.answer.problems[0])
    if strings.is_overlong(text, max(targets, key=len)):
        return RewardValue(0.0, f"{len(text)} characters, {_expected_text(targets)}")
    return None


def _rouge_f1(variant: str, answer: Sequence[str], target: Sequence[str]) -> float:
    if variant == "L":
        common, total = LCSseq.similarity(answer, target), len(answer) + len(target)
    else:
        given, wanted = _count_ngrams(answer, int(variant)), _count_ngrams(target, int(variant))
        common, total = (given & wanted).total(), given.total() + wanted.total()
    return 2.0 * common / total


def _count_ngrams(words: Sequence[str], order: int) -> NgramCounts:
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def _percent_to_fraction(percent: float) -> float:
    """Return a percentage as a fraction of at most 1; rounding may carry a perfect score past 100."""
    return min(1.0, percent / 100.0)


def _expected_text(targets: Sequence[str]) -> str:
    return f"expected {strings.excerpt(targets[0])}"
