"""Rewards for text: equality with the target, shared words, and few repetitions.

`of` names the part of the response that is compared. `column` names a column of `sample.meta` that lists further
correct texts or, for another part than the answer, all its correct texts. ROUGE, BLEU and chrF give 0 to an answer of
more than 10 times the longest target's length + 1000 characters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from rapidfuzz.distance import LCSseq

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import strings
from mmrl_rewards.contract import BadAnswer, Of, part_text, part_value, reward

NgramOrder = Annotated[int, Field(ge=1, le=8)]
NgramCounts = Counter[tuple[str, ...]]

_MAX_CHARS = 400_000  # of a response that `repetition` reads


@reward(name="text", answer_types=(AnswerType.TEXT,))
def exact(response: Response, sample: Sample, *, column: str | None = None, of: Of = "answer") -> RewardValue:
    """Return 1 if answer and target are equal after NFKC, case folding, stripping and collapsing white space, else 0.

    Source: exact match as in SQuAD (arXiv:1606.05250, 6.1).
    Departures: articles and punctuation are kept, and Unicode is normalised.
    Unscorable: a target is not text, or is empty once normalised.
    """
    targets = strings.normalized_targets(sample, column, of)
    text = strings.normalize(part_value(response, AnswerType.TEXT, of))
    equal = text.casefold() in [target.casefold() for target in targets]
    return RewardValue(float(equal), f"{strings.excerpt(text)}, expected {strings.excerpt(targets[0])}")


@reward(name="rouge", answer_types=(AnswerType.TEXT,), attack_tolerance=0.2)  # words that happen to agree
def rouge(
    response: Response,
    sample: Sample,
    *,
    variant: Literal["1", "2", "L"] = "L",
    column: str | None = None,
    of: Of = "answer",
) -> RewardValue:
    """Return ROUGE-1, ROUGE-2 or ROUGE-L as F1 = 2 m / (n-grams in the answer + n-grams in the target), in [0, 1].

    For variants 1 and 2, m counts the words or pairs of neighbouring words in both, each as often as in the text that
    has fewer. For L, m is the length of the longest common subsequence of words.

    Source: Lin 2004, eq. 1 and, with beta = 1, 2 to 4.
    Departures: the value is F1, because recall alone rewards rambling. The best of several targets counts. Words are
    not stemmed, and each ideograph is a word. Long answers earn 0, as the module states.
    Unscorable: a target is not text, or has no word (for variant 2, no two).
    """
    targets = strings.normalized_targets(sample, column, of)
    wanted = [strings.words(target) for target in targets]
    if min(map(len, wanted)) < (2 if variant == "2" else 1):
        raise Unscorable(f"a target of {targets!r:.80} has too few words for ROUGE-{variant}")
    text = _read_part(response, targets, of)
    given = strings.words(text)
    value = max(_rouge_f1(variant, given, target) for target in wanted)
    reason = f"ROUGE-{variant} {value:.2f}: {strings.excerpt(text)}, expected {strings.excerpt(targets[0])}"
    return RewardValue(value, reason)


@reward(name="bleu", answer_types=(AnswerType.TEXT,))
def bleu(
    response: Response,
    sample: Sample,
    *,
    order: NgramOrder = 4,
    tokenize: Literal["13a", "intl", "zh", "char"] = "13a",
    column: str | None = None,
    of: Of = "answer",
) -> RewardValue:
    """Return BLEU of one sentence, in [0, 1]: brevity penalty * geometric mean of the n-gram precisions up to `order`.

    Source: Papineni et al. 2002, 2.3, as in sacrebleu (arXiv:1804.08771) with exponential smoothing and the effective
    order, so that short sentences can reach 1.
    Departures: NFKC and collapsing white space come first. Long answers earn 0, as the module states.
    Unscorable: a target is not text, or is empty once normalised.
    """
    from sacrebleu.metrics.bleu import BLEU

    targets = strings.normalized_targets(sample, column, of)
    text = strings.normalize(_read_part(response, targets, of))
    metric = BLEU(max_ngram_order=order, tokenize=tokenize, effective_order=True)
    # Per cent; rounding may carry a perfect score past 100.
    value = min(1.0, metric.sentence_score(text, targets).score / 100.0)
    return RewardValue(value, f"BLEU {value:.2f}: {strings.excerpt(text)}, expected {strings.excerpt(targets[0])}")


@reward(name="chrf", answer_types=(AnswerType.TEXT,), attack_tolerance=0.25)  # letters that happen to agree
def chrf(
    response: Response,
    sample: Sample,
    *,
    word_order: Annotated[int, Field(ge=0, le=4)] = 0,
    column: str | None = None,
    of: Of = "answer",
) -> RewardValue:
    """Return the F-score of character n-grams up to 6, in [0, 1], with recall weighted twice.

    With `word_order` 2 it is chrF++.

    Source: Popović 2015 and 2017, as in sacrebleu (arXiv:1804.08771).
    Departures: NFKC and collapsing white space come first. The best of several targets counts. Long answers earn 0, as
    the module states.
    Unscorable: a target is not text, or is empty once normalised.
    """
    from sacrebleu.metrics.chrf import CHRF

    targets = strings.normalized_targets(sample, column, of)
    text = strings.normalize(_read_part(response, targets, of))
    # Per cent; rounding may carry a perfect score past 100.
    value = min(1.0, CHRF(word_order=word_order).sentence_score(text, targets).score / 100.0)
    return RewardValue(value, f"chrF {value:.2f}: {strings.excerpt(text)}, expected {strings.excerpt(targets[0])}")


# An empty response gets the maximum.
@reward(name="repetition", low=-1.0, high=0.0, attack_tolerance=1.0, judges_answer=False)
def repetition(
    response: Response, sample: Sample, *, order: Annotated[int, Field(ge=1, le=50)] = 6, of: Of = "response"
) -> RewardValue:
    """Return -(1 - distinct / all) over the n-grams of `order` words in the response, in [-1, 0]; 0 if there are none.

    With `of`, only that part is read, and a response without it gets -1.

    Source: the n-gram penalty of Yeo et al. (arXiv:2502.03373), in the form of VLM-R1, n = 6.
    Departures: words are compared without case and punctuation. Repeated boxes are left to `mmrl_rewards.detect`, which
    counts each superfluous box. Only the first 400 000 characters are read.
    """
    text = response.text if of == "response" else part_text(response, of)
    grams = _count_ngrams(strings.words(text[:_MAX_CHARS]), order)
    if not grams:
        return RewardValue(0.0, f"no {order} words")
    value = len(grams) / grams.total() - 1.0
    return RewardValue(value, f"{len(grams)} distinct of {grams.total()} runs of {order} words")


def _read_part(response: Response, targets: Sequence[str], of: Of) -> str:
    """Return the text of a part. One that is too long to compare raises BadAnswer."""
    text: str = part_value(response, AnswerType.TEXT, of)
    # An answer so long could contain the target by chance alone.
    if len(text) > 10 * max(map(len, targets)) + 1000:
        raise BadAnswer(f"{len(text)} characters, expected {strings.excerpt(targets[0])}")
    return text


def _rouge_f1(variant: str, answer: Sequence[str], target: Sequence[str]) -> float:
    """Return the F1 of two texts, given as words, for ROUGE variant 1, 2 or L."""
    if variant == "L":
        common, total = LCSseq.similarity(answer, target), len(answer) + len(target)
    else:
        answer_ngrams, target_ngrams = _count_ngrams(answer, int(variant)), _count_ngrams(target, int(variant))
        common, total = (answer_ngrams & target_ngrams).total(), answer_ngrams.total() + target_ngrams.total()
    return 2.0 * common / total


def _count_ngrams(words: Sequence[str], order: int) -> NgramCounts:
    """Return how often each run of `order` words occurs."""
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))
