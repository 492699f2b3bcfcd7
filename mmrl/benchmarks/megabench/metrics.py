"""MEGA-Bench's metrics that need neither a judge nor a program; each scores one field of an answer.

A metric takes the predicted and the reference value, as text or as any value that a table holds, and returns a score in
[0, 1].

Source: megabench/metrics/scoring of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: formulas are
compared by math-verify and numbers read by our own rules, where MEGA-Bench runs them as Python; letters lose their
accents by Unicode's decomposition alone.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def _exact_match(prediction: object, reference: object, *, lowercase: bool = False) -> float:
    """Compare texts exactly; where the reference is a letter, the first letter of the prediction."""
    predicted, expected = str(prediction).strip(), str(reference).strip()
    if lowercase:
        predicted, expected = predicted.lower(), expected.lower()
    if len(expected) == 1 and expected.isalpha() and len(predicted) > 1:
        letter = _LEADING_LETTER.match(predicted)
        if letter:
            predicted = letter[1]
    return float(predicted == expected)


def _simple_match(prediction: object, reference: object) -> float:
    """Compare texts ignoring white space, hyphens, full stops and case."""
    predicted = str(prediction).translate(_IGNORED_CHARS).lower()
    expected = str(reference).translate(_IGNORED_CHARS).lower()
    return _exact_match(predicted, expected)


def _near_match(prediction: object, reference: object) -> float:
    """Return the similarity of texts without articles, accents and case; 0 below a similarity of 0.9."""
    predicted, expected = _strip_accents(str(prediction)), _strip_accents(str(reference))
    return float(DamerauLevenshtein.normalized_similarity(predicted, expected, score_cutoff=_MIN_SIMILARITY))


def _edit_similarity(prediction: object, reference: object) -> float:
    """Return one minus the edit distance over the longer text's length."""
    return DamerauLevenshtein.normalized_similarity(str(prediction)[:MAX_FIELD_CHARS], str(reference))


def _strip_accents(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", _ARTICLE.sub("", text[:MAX_FIELD_CHARS]))
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter)).lower()


def _same_number(prediction: object, reference: object) -> float:
    """Compare the last number of each within 1 %; where either has none, compare the texts."""
    predicted, expected = _parse_numbers(prediction), _parse_numbers(reference)
    if not (predicted and expected):
        return _simple_match(prediction, reference)
    return float(abs(predicted[-1] - expected[-1]) <= _RELATIVE_TOLERANCE * abs(expected[-1]))


def _number_closeness(prediction: object, reference: object, *, max_error: float | None = None) -> float:
    """Return 1 - |a - b| / `max_error`, at least 0; a `max_error` of None takes |b|."""
    predicted, expected = _parse_numbers(prediction), _parse_numbers(reference)
    if not (predicted and expected):
        return 0.0
    error, scale = abs(predicted[0] - expected[0]), abs(expected[0]) if max_error is None else max_error
    return max(0.0, 1.0 - error / scale) if scale else float(error == 0.0)


def _same_positive_integer(prediction: object, reference: object) -> float:
    predicted, expected = _parse_numbers(prediction), _parse_numbers(reference)
    return float(
        len(predicted) >= 1 and predicted[:1] == expected[:1] and predicted[0] > 0 and predicted[0].is_integer()
    )


def _overlap_ratio(prediction: Sequence[Any], reference: Sequence[Any], *, over_union: bool) -> float:
    """Return the share of common entries in the union, or in the prediction."""
    predicted, expected = set(prediction), set(reference)
    whole = predicted | expected if over_union else predicted
    # Of nothing the share is 1, as in MEGA-Bench.
    return len(predicted & expected) / len(whole) if whole else 1.0


def _jaccard_index(prediction: object, reference: object, *, lowercase: bool = False) -> float:
    predicted = _parse_entries(prediction, lowercase=lowercase)
    expected = _parse_entries(reference, lowercase=lowercase)
    return _overlap_ratio(predicted, expected, over_union=True)


def _set_precision(prediction: object, reference: object) -> float:
    return _overlap_ratio(_parse_entries(prediction), _parse_entries(reference), over_union=False)


def _set_equality(prediction: object, reference: object, *, lowercase: bool = False) -> float:
    return float(_jaccard_index(prediction, reference, lowercase=lowercase) == 1.0)


def _sequence_equality(prediction: object, reference: object, *, lowercase: bool = False) -> float:
    predicted = _parse_entries(prediction, lowercase=lowercase)
    expected = _parse_entries(reference, lowercase=lowercase)
    return float(predicted == expected)


def _common_prefix_ratio(prediction: object, reference: object) -> float:
    """Return the share of the reference list that the prediction gets right before its first error."""
    predicted, expected = _parse_entries(prediction), _parse_entries(reference)
    same = 0
    for ours, theirs in zip(predicted, expected, strict=False):
        if ours != theirs:
            break
        same += 1
    return same / max(len(expected), 1)


def _sequence_accuracy(prediction: object, reference: object) -> float:
    """Return the share of entries that are correct in their place; 0 for lists of different lengths."""
    predicted, expected = _parse_entries(prediction, lowercase=True), _parse_entries(reference, lowercase=True)
    if len(predicted) != len(expected):
        return 0.0
    same = sum(ours == theirs for ours, theirs in zip(predicted, expected, strict=True))
    return float(same / max(len(expected), 1))


def _line_set_equality(prediction: object, reference: object) -> float:
    line_sets = []
    for value in (prediction, reference):
        # Tables may write a line break as a backslash and an n.
        line_sets.append({*str(value).replace("\\n", "\n").lower().split("\n")})
    return float(line_sets[0] == line_sets[1])


def _mapping_mean(
    prediction: object, reference: object, *, field_metric: FieldMetric, over_union: bool = True
) -> float:
    """Return the mean of a metric over the fields of both mappings, or over those of the reference alone."""
    predicted, expected = _to_mapping(prediction), _to_mapping(reference)
    scores = []
    for key, value in expected.items():
        if key in predicted:
            scores.append(field_metric(predicted[key], value))
    return sum(scores) / max(1, len({*predicted, *expected} if over_union else expected))


def _to_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else parse_fields(str(value))


def _mapping_precision(prediction: object, reference: object) -> float:
    predicted, expected = _to_mapping(prediction), _to_mapping(reference)
    correct = sum(_exact_match(value, expected[key]) for key, value in predicted.items() if key in expected)
    return correct / max(1, len(predicted))


def _mapping_equality(prediction: object, reference: object) -> float:
    predicted, expected = _to_mapping(prediction), _to_mapping(reference)
    return float(bool(predicted) and predicted == expected)


def _chess_moves_jaccard(prediction: object, reference: object) -> float:
    """Return the Jaccard index of chess moves, ignoring the marks of mate (#) and praise (!)."""
    moves = []
    for value in (prediction, reference):
        moves.append([str(move).removesuffix("!").removesuffix("#") for move in _parse_entries(value)])
    return _overlap_ratio(*moves, over_union=True)


def _match_any_phrase(prediction: object, reference: object) -> float:
    """Return 1 when the prediction is one of the phrases in the reference list, compared as `_simple_match` does."""
    phrases = _parse_entries(str(reference).replace("\uff0c", ","))
    return max((_simple_match(prediction, phrase) for phrase in phrases), default=0.0)


def _code_output_match(prediction: object, reference: object) -> float:
    """Compare texts exactly, without the code fence around either."""
    texts = []
    for value in (prediction, reference):
        text = str(value)[:MAX_FIELD_CHARS]
        _, fence, rest = text.partition("```")
        inner, closing_fence, _ = rest.partition("```")
        texts.append(inner.lstrip(_FENCE_LANGUAGE_CHARS).strip("\n") if fence and closing_fence else text)
    return _exact_match(*texts)


def _latex_equality(prediction: object, reference: object) -> float:
    return float(formulas_equal(str(prediction), str(reference)))


def _text_with_formulas_match(prediction: object, reference: object) -> float:
    """Compare the words by `_simple_match`, and the formulas between dollar signs as formulas; commas are ignored."""
    predicted_words, predicted_formulas = _split_formulas(prediction)
    expected_words, expected_formulas = _split_formulas(reference)
    same_formulas = _simple_match(predicted_formulas, expected_formulas) or formulas_equal(
        predicted_formulas, expected_formulas
    )
    return float(bool(_simple_match(predicted_words, expected_words) and same_formulas))


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


def _first_box_iou(prediction: object, reference: object) -> float:
    predicted, expected = _parse_boxes(prediction), _parse_boxes(reference)
    return _ordered_iou(predicted[0], expected[0]) if predicted and expected else 0.0


def _mean_best_iou(prediction: object, reference: object) -> float:
    """Return the mean over predicted boxes of the best IoU with any reference box."""
    predicted, expected = _parse_boxes(prediction), _parse_boxes(reference)
    if not (predicted and expected):
        return 0.0
    best_ious = []
    for box in predicted:
        best_ious.append(max(_ordered_iou(box, target) for target in expected))
    return fmean(best_ious)


def _mean_pairwise_iou(prediction: object, reference: object) -> float:
    """Return the mean IoU of boxes paired by their order; 0 when there are not equally many."""
    predicted, expected = _parse_boxes(prediction), _parse_boxes(reference)
    if len(predicted) != len(expected) or not predicted:
        return 0.0
    return fmean(map(_ordered_iou, predicted, expected))


def _is_point_in_any_box(prediction: object, reference: object) -> float:
    """Return 1 when the one point in tags lies in a box of the context, or of the answer."""
    point = _parse_point(prediction)
    if isinstance(reference, Mapping):
        reference = " ".join(map(str, reference["bounding_boxes"]))
    boxes = _parse_boxes(reference)
    return float(bool(point) and any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in boxes))


def _point_closeness(prediction: object, reference: object) -> float:
    """Return 1 minus the distance of two points in tags, at least 0. Both are fractions of the image's sides."""
    predicted, expected = _parse_point(prediction), _parse_point(reference)
    if not (predicted and expected) or not all(0.0 <= side <= 1.0 for side in (*predicted, *expected)):
        return 0.0
    return max(0.0, 1.0 - math.dist(predicted, expected))


def _keypoint_similarity(prediction: object, reference: object) -> float:
    """Return the mean of exp(-10 d / sqrt 2) over points paired by order, d their distance; 0 for unequal counts."""
    predicted, expected = _parse_pairs(prediction), _parse_pairs(reference)
    if len(predicted) != len(expected) or not predicted:
        return 0.0
    return fmean(
        math.exp(-_KEYPOINT_DECAY * math.dist(point, target)) for point, target in zip(predicted, expected, strict=True)
    )


def _angle_closeness(prediction: object, reference: object) -> float:
    """Return 1 - the mean of |a - b| / 10 over angles in degrees paired by order, at least 0; 0 for unequal counts."""
    predicted_entries = _parse_entries(prediction)
    predicted = list(filter(_is_bounded_number, predicted_entries))
    expected = list(filter(_is_bounded_number, _parse_entries(reference)))
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

FIELD_METRICS: Final[Mapping[str, FieldMetric]] = MappingProxyType(
    {
        "exact_str_match": _exact_match,
        "exact_str_match_case_insensitive": partial(_exact_match, lowercase=True),
        "simple_str_match": _simple_match,
        "near_str_match": _near_match,
        "normalized_similarity_damerau_levenshtein": _edit_similarity,
        "number_rel_diff_ratio": _number_closeness,
        "general_single_numerical_match": _same_number,
        "boxed_single_numerical_match": _same_number,
        "positive_int_match": _same_positive_integer,
        "set_equality": _set_equality,
        "set_equality_case_insensitive": partial(_set_equality, lowercase=True),
        "str_set_equality_comma": partial(_set_equality, lowercase=True),
        "str_set_equality_line_break": _line_set_equality,
        "set_precision": _set_precision,
        "jaccard_index": _jaccard_index,
        "jaccard_index_case_insensitive": partial(_jaccard_index, lowercase=True),
        "sequence_equality": _sequence_equality,
        "sequence_equality_case_insensitive": partial(_sequence_equality, lowercase=True),
        "sequence_accuracy_case_insensitive": _sequence_accuracy,
        "chess_move_list_jaccard_index": _chess_moves_jaccard,
        "multi_ref_phrase": _match_any_phrase,
        "code_result_exact_str_match": _code_output_match,
        "bleu": _bleu_score,
        "longest_common_list_prefix_ratio": _common_prefix_ratio,
        "dict_equality": _mapping_equality,
        "dict_precision": _mapping_precision,
        "dict_exact_str_match_agg_recall": partial(_mapping_mean, field_metric=_exact_match, over_union=False),
        "dict_set_equality_agg_jaccard": partial(_mapping_mean, field_metric=_set_equality),
        "dict_jaccard_agg_jaccard": partial(_mapping_mean, field_metric=_jaccard_index),
        "dict_nbbox_iou_tuple_agg_jaccard": partial(_mapping_mean, field_metric=_mean_best_iou),
        "latex_expr_equality": _latex_equality,
        "text_with_latex_expr_equality": _text_with_formulas_match,
        "nbbox_iou_single": _first_box_iou,
        "nbbox_iou_tuple": _mean_best_iou,
        "nbbox_iou_sequence": _mean_pairwise_iou,
        "xml_nbbox_iou_single": _mean_best_iou,
        "xml_norm_point_in_bbox": _is_point_in_any_box,
        "xml_norm_point_distance": _point_closeness,
        "sequence_coords_similarity": _keypoint_similarity,
        "normalized_rmse": partial(_number_closeness, max_error=0.1),  # an RMSE of one number
        "angle_seq_float_rmse": _angle_closeness,
        "symbolic_planning_test": score_plan,
    }
)
"""Metric by MEGA-Bench's name for it."""
