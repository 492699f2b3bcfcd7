"""Rewards for spans of time, in seconds. `of` names the part of the response that is compared."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from mmrl.types import AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry, matching
from mmrl_rewards.contract import Of, part_value, reward, target_value

TimeSpan = tuple[float, float]


@reward(name="span_iou", answer_types=(AnswerType.SPAN,))
def iou(
    response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None, of: Of = "answer"
) -> RewardValue:
    """Return the temporal intersection over union, |A & B| / |A | B|, in [0, 1].

    With `threshold`, in (0, 1], the value is 1 if tIoU reaches it and else 0.

    Source: tIoU as in ActivityNet and TALL (arXiv:1705.02101); the soft form as reward in Time-R1 (arXiv:2503.13377).
    Departures: none.
    Unscorable: the target is not two finite numbers with 0 <= start < end.
    """
    target = target_value(sample, AnswerType.SPAN)
    answer = part_value(response, AnswerType.SPAN, of)
    value = _temporal_iou(answer, target)
    reason = f"tIoU {value:.2f}: {_format_span(answer)} vs {_format_span(target)}"
    return RewardValue(value if threshold is None else float(value >= threshold), reason)


@reward(name="span_aligned", answer_types=(AnswerType.SPAN,))
def aligned(response: Response, sample: Sample, *, column: str = "duration", of: Of = "answer") -> RewardValue:
    """Return tIoU x (1 - |start - start'| / T) x (1 - |end - end'| / T), in [0, 1].

    T is the length of the video in seconds, in `sample.meta[column]`.

    Source: the timestamp-aware IoU of Time-R1 (arXiv:2503.13377).
    Departures: no factor falls below 0. An answer far beyond the video would make two factors negative and their
    product positive. A target may end after the video, as some published ones do.
    Unscorable: the target is not two finite numbers with 0 <= start < end, or the column holds no length.
    """
    target, seconds = target_value(sample, AnswerType.SPAN), sample.meta.get(column)
    if not isinstance(seconds, int | float) or not 0 < seconds < inf:
        raise Unscorable(f"column {column!r} holds {seconds!r:.40}, not the length of a video in seconds")
    answer = part_value(response, AnswerType.SPAN, of)
    start = max(0.0, 1.0 - abs(answer[0] - target[0]) / seconds)
    end = max(0.0, 1.0 - abs(answer[1] - target[1]) / seconds)
    overlap = _temporal_iou(answer, target)
    reason = f"tIoU {overlap:.2f}, start {start:.2f}, end {end:.2f}: {_format_span(answer)} vs {_format_span(target)}"
    return RewardValue(overlap * start * end, reason)


@reward(name="spans_iou", answer_types=(AnswerType.SPANS,))
def union_iou(
    response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None, of: Of = "answer"
) -> RewardValue:
    """Return |A & B| / |A | B| in seconds, in [0, 1].

    A is the time that the answer's spans cover and B the time that the target's spans cover. The division of that time
    into spans has no effect, unlike in `f1`. With `threshold`, in (0, 1], the value is 1 if the IoU reaches it and else
    0.

    Source: the Jaccard index of two sets of moments. Departures: none.
    Unscorable: the target is not a list of at least one span.
    """
    answers, targets = _read_spans(response, sample, of)
    # |A & B| = |A| + |B| - |A | B|
    union = _covered_seconds([*answers, *targets])
    value = min(1.0, max(0.0, (_covered_seconds(answers) + _covered_seconds(targets) - union) / union))
    reason = f"tIoU {value:.2f}: {len(answers)} spans vs {len(targets)}"
    return RewardValue(value if threshold is None else float(value >= threshold), reason)


@reward(name="spans_f1", answer_types=(AnswerType.SPANS,))
def f1(
    response: Response, sample: Sample, *, threshold: geometry.Threshold | None = None, of: Of = "answer"
) -> RewardValue:
    """Return 2 sum(tIoU of matched spans) / (answers + targets), in [0, 1], over the best one-to-one matching.

    With `threshold`, in (0, 1], it is the usual F1: a pair counts 1 if tIoU >= threshold and else 0.

    Source: F1 is 2 P R / (P + R) with precision and recall summed over soft matches; assignment by scipy.
    Departures: none.
    Unscorable: the target is not a list of at least one span.
    """
    answers, targets = _read_spans(response, sample, of)
    rows = []
    for answer in answers:
        rows.append([_temporal_iou(answer, target) for target in targets])
    overlaps = np.array(rows, dtype=np.float64).reshape(len(answers), len(targets))
    matched = matching.match_one_to_one(overlaps if threshold is None else (overlaps >= threshold).astype(np.float64))
    return RewardValue(matched.f1, f"F1 {matched.f1:.2f}: {matched.summary}")


def _read_spans(response: Response, sample: Sample, of: Of) -> tuple[Sequence[TimeSpan], Sequence[TimeSpan]]:
    """Return the spans of a part of the response, and the target's, at least one."""
    targets = target_value(sample, AnswerType.SPANS)
    if not targets:
        raise Unscorable("the target has no spans")
    return part_value(response, AnswerType.SPANS, of), targets


def _covered_seconds(spans: Sequence[TimeSpan]) -> float:
    """Return the number of seconds that at least one of the spans covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _temporal_iou(a: TimeSpan, b: TimeSpan) -> float:
    """Return the intersection over union of two spans, in [0, 1]."""
    shared = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    # In this order it cannot round to more than 1.
    return shared / ((a[1] - a[0]) + (b[1] - b[0]) - shared)


def _format_span(span: TimeSpan) -> str:
    """Return a span as text, for the reason of a reward."""
    return f"[{span[0]:g}, {span[1]:g}] s"
