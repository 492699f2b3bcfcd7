"""MEGA-Bench's metrics that need neither a judge nor a program; each scores one field of an answer.

A metric takes the predicted and the reference value, as text or as any value that a table holds, and returns a score in
[0, 1].

Source: megabench/metrics/scoring of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: formulas are
compared by math-verify and numbers read by our own rules, where MEGA-Bench runs them as Python; letters lose their
accents only by Unicode's decomposition.
"""

from __future__ import annotations

import math
import operator
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

from rapidfuzz.distance import DamerauLevenshtein

from mmrl.benchmarks.extraction.fields import MAX_FIELD_CHARS, parse_fields, parse_written_value
from mmrl.benchmarks.extraction.numbers import BOX_PATTERN, find_coordinates, find_numbers
from mmrl.benchmarks.megabench.planning import score_plan
from mmrl.benchmarks.reward_scores import formulas_equal
from mmrl_rewards import geometry

FieldMetric = Callable[[Any, Any], float]
"""Function of a predicted and a reference value."""
Boxes = Sequence[Sequence[float]]
"""Coordinates of each box or point."""

_MIN_SIMILARITY: Final = 0.9
_RELATIVE_TOLERANCE: Final = 0.01
_LEADING_LETTER: Final = re.compile(r"\(?([A-Za-z])\)?")
_ARTICLE: Final = re.compile(r"\b(?:a|an|the)\s+", re.IGNORECASE)
_IGNORED_CHARS: Final = str.maketrans("", "", " -\n\t.")
_FENCE_LANGUAGE_CHARS: Final = string.ascii_letters + string.digits + "_"
_DOLLAR_FORMULA: Final = re.compile(r"(\$[^$]*\$)")
_POINT_TAG: Final = re.compile(r"<point>([^<]{1,80})</point>")
_BOX_TAG: Final = re.compile(r"<(/?)box>")
_KEYPOINT_DECAY: Final = 10.0 / math.sqrt(2.0)
_MAX_ANGLE_ERROR: Final = 10.0  # degrees
# Largest coordinate or angle that is taken seriously; it keeps infinities out of the sums.
_MAX_MAGNITUDE: Final = 1e9
_CLOSING_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}


def _compare(parse: Callable[[Any], Any], score: FieldMetric) -> FieldMetric:
    """Return the metric that scores both values as `parse` reads them."""
    return lambda prediction, reference: float(score(parse(prediction), parse(reference)))


# Texts.


def _exact_match(prediction: object, reference: object) -> float:
    """Compare texts exactly; where the reference is a letter, the first letter of the prediction."""
    predicted, expected = str(prediction).strip(), str(reference).strip()
    if len(expected) == 1 and expected.isalpha() and len(predicted) > 1:
        letter = _LEADING_LETTER.match(predicted)
        if letter:
            predicted = letter[1]
    return float(predicted == expected)


def _plain_text(value: object) -> str:
    """Return a text in lower case without white space, hyphens and full stops."""
    return str(value).translate(_IGNORED_CHARS).lower()


_simple_match: Final = _compare(_plain_text, _exact_match)


def _edit_similarity(prediction: object, reference: object) -> float:
    """Return one minus the edit distance over the longer text's length."""
    return DamerauLevenshtein.normalized_similarity(str(prediction)[:MAX_FIELD_CHARS], str(reference))


def _strip_accents(value: object) -> str:
    """Return a text without articles, accents and case."""
    decomposed = unicodedata.normalize("NFKD", _ARTICLE.sub("", str(value)[:MAX_FIELD_CHARS]))
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter)).lower()


def _same_number(prediction: object, reference: object) -> float:
    """Compare the last number of each within 1 %; where either has none, compare the texts."""
    predicted, expected = _parse_numbers(prediction), _parse_numbers(reference)
    if not (predicted and expected):
        return _simple_match(prediction, reference)
    return float(abs(predicted[-1] - expected[-1]) <= _RELATIVE_TOLERANCE * abs(expected[-1]))


def _number_closeness(predicted: Sequence[float], expected: Sequence[float], *, max_error: float | None) -> float:
    """Return 1 - |a - b| / `max_error` of the first numbers, at least 0; a `max_error` of None takes |b|."""
    if not (predicted and expected):
        return 0.0
    error, scale = abs(predicted[0] - expected[0]), abs(expected[0]) if max_error is None else max_error
    return max(0.0, 1.0 - error / scale) if scale else float(error == 0.0)


def _same_positive_integer(predicted: Sequence[float], expected: Sequence[float]) -> bool:
    return len(predicted) >= 1 and predicted[:1] == expected[:1] and predicted[0] > 0 and predicted[0].is_integer()


# Lists, as sets or in order.


def _same_set(predicted: Sequence[Any], expected: Sequence[Any]) -> bool:
    return {*predicted} == {*expected}


def _jaccard_index(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    union = {*predicted, *expected}
    # Of nothing the share is 1, as in MEGA-Bench.
    return len({*predicted} & {*expected}) / len(union) if union else 1.0


def _set_precision(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    return len({*predicted} & {*expected}) / len({*predicted}) if predicted else 1.0


def _common_prefix_ratio(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the share of the reference list that the prediction gets right before its first error."""
    same = list(takewhile(bool, map(operator.eq, predicted, expected)))
    return len(same) / max(len(expected), 1)


def _sequence_accuracy(predicted: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the share of entries that are correct in their place; 0 for lists of different lengths."""
    if len(predicted) != len(expected):
        return 0.0
    return float(sum(map(operator.eq, predicted, expected)) / max(len(expected), 1))


def _split_lines(value: object) -> list[str]:
    # Tables may write a line break as a backslash and an n.
    return str(value).replace("\\n", "\n").lower().split("\n")


def _parse_chess_moves(value: object) -> list[str]:
    """Return the moves without the marks of mate (#) and praise (!)."""
    return [str(move).removesuffix("!").removesuffix("#") for move in _parse_entries(value)]


# Mappings.


def _mapping_mean(
    predicted: Mapping[str, Any], expected: Mapping[str, Any], *, field_metric: FieldMetric, over_union: bool = True
) -> float:
    """Return the mean of a metric over the fields of both mappings, or only over the reference's."""
    scores = [field_metric(predicted[key], value) for key, value in expected.items() if key in predicted]
    return sum(scores) / max(1, len({*predicted, *expected} if over_union else expected))


def _to_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else parse_fields(str(value))


def _mapping_precision(predicted: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    correct = sum(_exact_match(value, expected[key]) for key, value in predicted.items() if key in expected)
    return correct / max(1, len(predicted))


def _mapping_equality(predicted: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return bool(predicted) and predicted == expected


# Phrases, code and formulas.


def _match_any_phrase(prediction: object, reference: object) -> float:
    """Return 1 when the prediction is one of the phrases in the reference list, compared as `_simple_match` does."""
    phrases = _parse_entries(str(reference).replace("\uff0c", ","))
    return max((_simple_match(prediction, phrase) for phrase in phrases), default=0.0)


def _strip_fence(value: object) -> str:
    """Return a text without the code fence around it."""
    text = str(value)[:MAX_FIELD_CHARS]
    _, fence, rest = text.partition("```")
    inner, closing_fence, _ = rest.partition("```")
    return inner.lstrip(_FENCE_LANGUAGE_CHARS).strip("\n") if fence and closing_fence else text


def _text_with_formulas_match(predicted: tuple[str, str], expected: tuple[str, str]) -> bool:
    """Compare the words by `_simple_match`, and the formulas between dollar signs as formulas; commas are ignored."""
    predicted_formulas, expected_formulas = predicted[1], expected[1]
    same_formulas = _simple_match(predicted_formulas, expected_formulas) or formulas_equal(
        predicted_formulas, expected_formulas
    )
    return bool(_simple_match(predicted[0], expected[0]) and same_formulas)


def _split_formulas(value: object) -> tuple[str, str]:
    """Return the text outside of dollar signs and the text within, each in one piece."""
    pieces = _DOLLAR_FORMULA.split(str(value)[:MAX_FIELD_CHARS].replace(",", ""))
    outside = "".join(map(str.strip, pieces[::2]))
    inside = " ".join(piece[1:-1].strip() for piece in pieces[1::2])
    return outside, inside


def _bleu_score(prediction: object, reference: object) -> float:
    """Return the corpus BLEU, in [0, 1], of two texts or two lists of texts of one length; 0 for anything else."""
    # Imported here, since one metric of many needs it.
    from sacrebleu.metrics.bleu import BLEU

    if isinstance(prediction, str) != isinstance(reference, str):
        return 0.0
    predicted = [prediction] if isinstance(prediction, str) else prediction
    expected = [reference] if isinstance(reference, str) else reference
    if not (isinstance(predicted, list) and isinstance(expected, list)) or len(predicted) != len(expected):
        return 0.0
    if not all(isinstance(text, str) for text in (*predicted, *expected)):
        return 0.0
    # MEGA-Bench passes the reference as the hypothesis, so that its brevity penalty punishes long predictions.
    score = float(BLEU().corpus_score(expected, [[text[:MAX_FIELD_CHARS] for text in predicted]]).score)
    return min(1.0, score / 100.0)


# Metrics of boxes, points, keypoints, numbers and angles, where a near miss scores something.


def _first_box_iou(predicted: Boxes, expected: Boxes) -> float:
    return _ordered_iou(predicted[0], expected[0]) if predicted and expected else 0.0


def _mean_best_iou(predicted: Boxes, expected: Boxes) -> float:
    """Return the mean over predicted boxes of the best IoU with any reference box."""
    if not (predicted and expected):
        return 0.0
    return fmean(max(map(partial(_ordered_iou, box), expected)) for box in predicted)


def _mean_pairwise_iou(predicted: Boxes, expected: Boxes) -> float:
    """Return the mean IoU of boxes paired by their order; 0 when there are not equally many."""
    if len(predicted) != len(expected) or not predicted:
        return 0.0
    return fmean(map(_ordered_iou, predicted, expected))


def _is_point_in_any_box(prediction: object, reference: object) -> float:
    """Return 1 when the one point in tags lies in a box of the context, or of the answer."""
    point = _parse_point(prediction)
    if isinstance(reference, Mapping):
        reference = " ".join(map(str, reference["bounding_boxes"]))
    boxes = _parse_boxes(reference)
    return float(bool(point) and any(geometry.point_in_box(point, box) for box in boxes))


def _point_closeness(predicted: Sequence[float], expected: Sequence[float]) -> float:
    """Return 1 minus the distance of two points in tags, at least 0. Both are fractions of the image's sides."""
    if not (predicted and expected) or not all(0.0 <= side <= 1.0 for side in (*predicted, *expected)):
        return 0.0
    return max(0.0, 1.0 - math.dist(predicted, expected))


def _keypoint_similarity(predicted: Boxes, expected: Boxes) -> float:
    """Return the mean of exp(-10 d / sqrt 2) over points paired by order, d their distance; 0 for unequal counts."""
    if len(predicted) != len(expected) or not predicted:
        return 0.0
    return fmean(
        math.exp(-_KEYPOINT_DECAY * math.dist(point, target)) for point, target in zip(predicted, expected, strict=True)
    )


def _angle_closeness(predicted_entries: Sequence[Any], expected_entries: Sequence[Any]) -> float:
    """Return 1 - the mean of |a - b| / 10 over angles in degrees paired by order, at least 0; 0 for unequal counts."""
    predicted = list(filter(_is_bounded_number, predicted_entries))
    expected = list(filter(_is_bounded_number, expected_entries))
    if len(predicted) != len(predicted_entries) or len(predicted) != len(expected) or not predicted:
        return 0.0
    mean_error = fmean(abs(angle - target) for angle, target in zip(predicted, expected, strict=True))
    return max(0.0, 1.0 - mean_error / _MAX_ANGLE_ERROR)


def _parse_boxes(value: object) -> list[tuple[float, ...]]:
    text = _BOX_TAG.sub(lambda tag: ")" if tag[1] else "(", str(value)[:MAX_FIELD_CHARS])
    return [box for box, _ in find_coordinates(BOX_PATTERN, text)]


def _ordered_iou(predicted_box: Sequence[float], reference_box: Sequence[float]) -> float:
    """Return the IoU of two boxes; 0 when either has its corners swapped."""
    ordered = all(box[0] < box[2] and box[1] < box[3] for box in (predicted_box, reference_box))
    return geometry.iou(tuple(predicted_box), tuple(reference_box)) if ordered else 0.0


def _parse_point(value: object) -> tuple[float, ...]:
    """Return the one point in tags; empty for none or several."""
    tags = _POINT_TAG.findall(str(value)[:MAX_FIELD_CHARS])
    point = tuple(_parse_numbers(tags[0])) if len(tags) == 1 else ()
    return point if len(point) == 2 else ()


def _parse_pairs(value: object) -> list[tuple[float, float]]:
    pairs = []
    for entry in _parse_entries(value):
        if isinstance(entry, tuple) and len(entry) == 2 and all(map(_is_bounded_number, entry)):
            pairs.append((float(entry[0]), float(entry[1])))
    return pairs


def _is_bounded_number(value: object) -> bool:
    """Return True for a number that is neither NaN nor larger than any image or angle."""
    return isinstance(value, int | float) and -_MAX_MAGNITUDE < value < _MAX_MAGNITUDE


# Values of answer fields: lists, numbers and text, from JSON or Python literals.


def _parse_entries(value: object, *, lowercase: bool = False) -> list[Any]:
    """Return the entries of a list as hashable values; for a mapping, its keys.

    Text is read as a literal, else as entries between commas, with or without brackets around all of them. An opening
    bracket that is never closed makes the list empty.
    """
    if isinstance(value, str):
        value = _parse_text_entries(value.strip(" "))
    match value:
        case None:
            entries: list[Any] = []
        case Sequence() | Mapping() | set():
            entries = list(value)
        case _:
            entries = [value]
    entries = list(map(_to_hashable, entries))
    if lowercase:
        return [entry.lower() if isinstance(entry, str) else entry for entry in entries]
    return entries


def _parse_numbers(value: object) -> list[float]:
    return [number.value for number in find_numbers(str(value))]


def _parse_text_entries(text: str) -> object:
    if not text:
        return []
    literal = parse_written_value(text)
    if literal == text and text[0] in _CLOSING_BRACKETS:
        if _CLOSING_BRACKETS[text[0]] != text[-1]:
            return []
        text = text[1:-1]
    if isinstance(literal, str):
        return list(map(str.strip, text.split(",")))
    return literal


def _to_hashable(value: object) -> Any:  # noqa: ANN401 - what a set may hold
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(inner)) for key, inner in value.items()))
    return tuple(map(_to_hashable, value)) if isinstance(value, list | tuple | set) else value


CONTEXT_METRICS: Final = frozenset({"xml_norm_point_in_bbox", "symbolic_planning_test"})
"""Metrics that read `eval_context` in place of the answer."""

MULTILINE_METRICS: Final = frozenset(
    {"symbolic_planning_test", "str_set_equality_line_break", "code_result_exact_str_match"}
)
"""Metrics of answers that may have several lines."""

FORMULA_TEXT_METRICS: Final = frozenset({"text_with_latex_expr_equality"})
"""Metrics of words with formulas between dollar signs."""

STRICT_METRICS: Final = frozenset(
    {
        *("set_equality", "set_equality_case_insensitive", "str_set_equality_comma", "str_set_equality_line_break"),
        *("sequence_equality", "sequence_equality_case_insensitive", "sequence_accuracy_case_insensitive"),
        *("jaccard_index", "jaccard_index_case_insensitive", "chess_move_list_jaccard_index"),
        *("dict_equality", "dict_set_equality_agg_jaccard", "dict_jaccard_agg_jaccard", "multi_ref_phrase"),
        *("text_with_latex_expr_equality", "latex_expr_equality", "code_result_exact_str_match"),
        *("symbolic_planning_test", "xml_norm_point_in_bbox"),
    }
)
"""Metrics whose full marks mean that a careful reader accepts the answer, even if, for example, its order differs."""

_lower_entries: Final = partial(_parse_entries, lowercase=True)
_same_entries: Final = _compare(_parse_entries, _same_set)
_same_lower_entries: Final = _compare(_lower_entries, _same_set)
_entries_jaccard: Final = _compare(_parse_entries, _jaccard_index)
_best_boxes: Final = _compare(_parse_boxes, _mean_best_iou)

FIELD_METRICS: Final[Mapping[str, FieldMetric]] = MappingProxyType(
    {
        "exact_str_match": _exact_match,
        "exact_str_match_case_insensitive": _compare(lambda value: str(value).lower(), _exact_match),
        "simple_str_match": _simple_match,
        "near_str_match": _compare(
            _strip_accents, partial(DamerauLevenshtein.normalized_similarity, score_cutoff=_MIN_SIMILARITY)
        ),
        "normalized_similarity_damerau_levenshtein": _edit_similarity,
        "number_rel_diff_ratio": _compare(_parse_numbers, partial(_number_closeness, max_error=None)),
        "general_single_numerical_match": _same_number,
        "boxed_single_numerical_match": _same_number,
        "positive_int_match": _compare(_parse_numbers, _same_positive_integer),
        "set_equality": _same_entries,
        "set_equality_case_insensitive": _same_lower_entries,
        "str_set_equality_comma": _same_lower_entries,
        "str_set_equality_line_break": _compare(_split_lines, _same_set),
        "set_precision": _compare(_parse_entries, _set_precision),
        "jaccard_index": _entries_jaccard,
        "jaccard_index_case_insensitive": _compare(_lower_entries, _jaccard_index),
        "sequence_equality": _compare(_parse_entries, operator.eq),
        "sequence_equality_case_insensitive": _compare(_lower_entries, operator.eq),
        "sequence_accuracy_case_insensitive": _compare(_lower_entries, _sequence_accuracy),
        "chess_move_list_jaccard_index": _compare(_parse_chess_moves, _jaccard_index),
        "multi_ref_phrase": _match_any_phrase,
        "code_result_exact_str_match": _compare(_strip_fence, _exact_match),
        "bleu": _bleu_score,
        "longest_common_list_prefix_ratio": _compare(_parse_entries, _common_prefix_ratio),
        "dict_equality": _compare(_to_mapping, _mapping_equality),
        "dict_precision": _compare(_to_mapping, _mapping_precision),
        "dict_exact_str_match_agg_recall": _compare(
            _to_mapping, partial(_mapping_mean, field_metric=_exact_match, over_union=False)
        ),
        "dict_set_equality_agg_jaccard": _compare(_to_mapping, partial(_mapping_mean, field_metric=_same_entries)),
        "dict_jaccard_agg_jaccard": _compare(_to_mapping, partial(_mapping_mean, field_metric=_entries_jaccard)),
        "dict_nbbox_iou_tuple_agg_jaccard": _compare(_to_mapping, partial(_mapping_mean, field_metric=_best_boxes)),
        "latex_expr_equality": _compare(str, formulas_equal),
        "text_with_latex_expr_equality": _compare(_split_formulas, _text_with_formulas_match),
        "nbbox_iou_single": _compare(_parse_boxes, _first_box_iou),
        "nbbox_iou_tuple": _best_boxes,
        "nbbox_iou_sequence": _compare(_parse_boxes, _mean_pairwise_iou),
        "xml_nbbox_iou_single": _best_boxes,
        "xml_norm_point_in_bbox": _is_point_in_any_box,
        "xml_norm_point_distance": _compare(_parse_point, _point_closeness),
        "sequence_coords_similarity": _compare(_parse_pairs, _keypoint_similarity),
        # Of one number, though MEGA-Bench calls it an RMSE.
        "normalized_rmse": _compare(_parse_numbers, partial(_number_closeness, max_error=0.1)),
        "angle_seq_float_rmse": _compare(_parse_entries, _angle_closeness),
        "symbolic_planning_test": score_plan,
    }
)
"""Metric by MEGA-Bench's name for it."""
