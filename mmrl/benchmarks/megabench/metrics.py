"""MEGA-Bench's metrics that need neither a judge nor a program; each scores one field of an answer.

A metric takes the predicted and the reference value, as text or as any value that a table holds, and returns a score in
[0, 1].

Source: megabench/metrics/scoring of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: formulas are
compared by math-verify and numbers read by our own rules, where MEGA-Bench runs them as Python; letters lose their
accents by Unicode's decomposition alone.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from rapidfuzz.distance import DamerauLevenshtein

from mmrl.benchmarks.extraction.fields import MAX_FIELD_CHARS, parse_fields
from mmrl.benchmarks.megabench import geometry
from mmrl.benchmarks.megabench.field_values import parse_entries, parse_numbers, to_text
from mmrl.benchmarks.megabench.planning import score_plan
from mmrl.benchmarks.reward_scores import formulas_equal

FieldMetric = Callable[[Any, Any], float]
"""Function of a predicted and a reference value."""

_MIN_SIMILARITY: Final = 0.9
_RELATIVE_TOLERANCE: Final = 0.01
_LEADING_LETTER: Final = re.compile(r"\(?([A-Za-z])\)?")
_ARTICLE: Final = re.compile(r"\b(?:a|an|the)\s+", re.IGNORECASE)
_IGNORED_CHARS: Final = str.maketrans("", "", " -\n\t.")
_FENCE_LANGUAGE_CHARS: Final = string.ascii_letters + string.digits + "_"
_DOLLAR_FORMULA: Final = re.compile(r"(\$[^$]*\$)")


def _exact_match(prediction: object, reference: object) -> float:
    """Compare texts exactly; where the reference is a letter, the first letter of the prediction."""
    predicted, expected = to_text(prediction).strip(), to_text(reference).strip()
    if len(expected) == 1 and expected.isalpha() and len(predicted) > 1:
        letter = _LEADING_LETTER.match(predicted)
        if letter:
            predicted = letter[1]
    return float(predicted == expected)


def _exact_match_ignoring_case(prediction: object, reference: object) -> float:
    return _exact_match(to_text(prediction).lower(), to_text(reference).lower())


def _simple_match(prediction: object, reference: object) -> float:
    """Compare texts ignoring white space, hyphens, full stops and case."""
    predicted = to_text(prediction).translate(_IGNORED_CHARS).lower()
    expected = to_text(reference).translate(_IGNORED_CHARS).lower()
    return _exact_match(predicted, expected)


def _near_match(prediction: object, reference: object) -> float:
    """Return the similarity of texts without articles, accents and case; 0 below a similarity of 0.9."""
    predicted, expected = _strip_accents(to_text(prediction)), _strip_accents(to_text(reference))
    return float(DamerauLevenshtein.normalized_similarity(predicted, expected, score_cutoff=_MIN_SIMILARITY))


def _edit_similarity(prediction: object, reference: object) -> float:
    """Return one minus the edit distance over the longer text's length."""
    return DamerauLevenshtein.normalized_similarity(to_text(prediction)[:MAX_FIELD_CHARS], to_text(reference))


def _strip_accents(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", _ARTICLE.sub("", text[:MAX_FIELD_CHARS]))
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter)).lower()


def _same_number(prediction: object, reference: object) -> float:
    """Compare the last number of each within 1 %; where either has none, compare the texts."""
    predicted, expected = parse_numbers(prediction), parse_numbers(reference)
    if not (predicted and expected):
        return _simple_match(prediction, reference)
    return float(abs(predicted[-1] - expected[-1]) <= _RELATIVE_TOLERANCE * abs(expected[-1]))


def _relative_difference(prediction: object, reference: object) -> float:
    """Return 1 - |a - b| / |b|, at least 0."""
    predicted, expected = parse_numbers(prediction), parse_numbers(reference)
    if not (predicted and expected):
        return 0.0
    if not expected[0]:
        return float(predicted[0] == 0.0)
    return max(0.0, 1.0 - abs(predicted[0] - expected[0]) / abs(expected[0]))


def _same_positive_integer(prediction: object, reference: object) -> float:
    predicted, expected = parse_numbers(prediction), parse_numbers(reference)
    return float(
        len(predicted) >= 1 and predicted[:1] == expected[:1] and predicted[0] > 0 and predicted[0].is_integer()
    )


def _overlap_ratio(prediction: Sequence[Any], reference: Sequence[Any], *, over_union: bool) -> float:
    """Return the share of common entries in the union, or in the prediction; 1 of nothing, as in MEGA-Bench."""
    predicted, expected = set(prediction), set(reference)
    whole = predicted | expected if over_union else predicted
    return len(predicted & expected) / len(whole) if whole else 1.0


def _jaccard_index(prediction: object, reference: object) -> float:
    return _overlap_ratio(parse_entries(prediction), parse_entries(reference), over_union=True)


def _jaccard_index_ignoring_case(prediction: object, reference: object) -> float:
    return _overlap_ratio(
        parse_entries(prediction, lowercase=True), parse_entries(reference, lowercase=True), over_union=True
    )


def _set_precision(prediction: object, reference: object) -> float:
    return _overlap_ratio(parse_entries(prediction), parse_entries(reference), over_union=False)


def _set_equality(prediction: object, reference: object) -> float:
    return float({*parse_entries(prediction)} == {*parse_entries(reference)})


def _set_equality_ignoring_case(prediction: object, reference: object) -> float:
    return float({*parse_entries(prediction, lowercase=True)} == {*parse_entries(reference, lowercase=True)})


def _sequence_equality(prediction: object, reference: object) -> float:
    return float(parse_entries(prediction) == parse_entries(reference))


def _sequence_equality_ignoring_case(prediction: object, reference: object) -> float:
    return float(parse_entries(prediction, lowercase=True) == parse_entries(reference, lowercase=True))


def _common_prefix_ratio(prediction: object, reference: object) -> float:
    """Return the share of the reference list that the prediction gets right before its first error."""
    predicted, expected = parse_entries(prediction), parse_entries(reference)
    same = 0
    for ours, theirs in zip(predicted, expected, strict=False):
        if ours != theirs:
            break
        same += 1
    return same / max(len(expected), 1)


def _sequence_accuracy(prediction: object, reference: object) -> float:
    """Return the share of entries that are correct in their place; 0 for lists of different lengths."""
    predicted, expected = parse_entries(prediction, lowercase=True), parse_entries(reference, lowercase=True)
    if len(predicted) != len(expected):
        return 0.0
    same = sum(ours == theirs for ours, theirs in zip(predicted, expected, strict=True))
    return float(same / max(len(expected), 1))


def _line_set_equality(prediction: object, reference: object) -> float:
    return float(_line_set(prediction) == _line_set(reference))


def _line_set(value: object) -> set[str]:
    return {*to_text(value).replace("\\n", "\n").lower().split("\n")}


def _make_mapping_metric(field_metric: FieldMetric, *, over_union: bool) -> FieldMetric:
    """Return the mean of a metric over the fields of the reference mapping, or over those of both mappings."""

    def mapping_metric(prediction: object, reference: object) -> float:
        predicted, expected = _to_mapping(prediction), _to_mapping(reference)
        scores = []
        for key, value in expected.items():
            if key in predicted:
                scores.append(field_metric(predicted[key], value))
        return sum(scores) / max(1, len({*predicted, *expected} if over_union else expected))

    return mapping_metric


def _to_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else parse_fields(to_text(value))


def _mapping_precision(prediction: object, reference: object) -> float:
    """Return the share of predicted fields that are correct."""
    predicted, expected = _to_mapping(prediction), _to_mapping(reference)
    correct = sum(_exact_match(value, expected[key]) for key, value in predicted.items() if key in expected)
    return correct / max(1, len(predicted))


def _mapping_equality(prediction: object, reference: object) -> float:
    predicted, expected = _to_mapping(prediction), _to_mapping(reference)
    return float(bool(predicted) and predicted == expected)


def _chess_moves_jaccard(prediction: object, reference: object) -> float:
    """Return the Jaccard index of chess moves, ignoring the marks of mate (#) and praise (!)."""
    return _overlap_ratio(_chess_moves(prediction), _chess_moves(reference), over_union=True)


def _chess_moves(value: object) -> list[str]:
    return [to_text(move).removesuffix("!").removesuffix("#") for move in parse_entries(value)]


def _match_any_phrase(prediction: object, reference: object) -> float:
    """Return 1 when the prediction is one of the phrases in the reference list, compared as `_simple_match` does."""
    phrases = parse_entries(to_text(reference).replace("\uff0c", ","))
    return max((_simple_match(prediction, phrase) for phrase in phrases), default=0.0)


def _code_output_match(prediction: object, reference: object) -> float:
    """Compare texts exactly, without the code fence around either."""
    predicted = _strip_code_fence(to_text(prediction)[:MAX_FIELD_CHARS])
    expected = _strip_code_fence(to_text(reference)[:MAX_FIELD_CHARS])
    return _exact_match(predicted, expected)


def _strip_code_fence(text: str) -> str:
    _, fence, rest = text.partition("```")
    inner, closing_fence, _ = rest.partition("```")
    return inner.lstrip(_FENCE_LANGUAGE_CHARS).strip("\n") if fence and closing_fence else text


def _latex_equality(prediction: object, reference: object) -> float:
    return float(formulas_equal(to_text(prediction), to_text(reference)))


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
    pieces = _DOLLAR_FORMULA.split(to_text(value)[:MAX_FIELD_CHARS].replace(",", ""))
    outside = "".join(piece.strip() for piece in pieces[::2])
    inside = " ".join(piece[1:-1].strip() for piece in pieces[1::2])
    return outside, inside


def _bleu_score(prediction: object, reference: object) -> float:
    """Return the corpus BLEU, in [0, 1], of two texts or two lists of texts of one length; 0 for anything else."""
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
"""Metrics whose full marks a careful reader would give, too, although the text differs: in its order, for example."""

FIELD_METRICS: Final[Mapping[str, FieldMetric]] = MappingProxyType(
    {
        "exact_str_match": _exact_match,
        "exact_str_match_case_insensitive": _exact_match_ignoring_case,
        "simple_str_match": _simple_match,
        "near_str_match": _near_match,
        "normalized_similarity_damerau_levenshtein": _edit_similarity,
        "number_rel_diff_ratio": _relative_difference,
        "general_single_numerical_match": _same_number,
        "boxed_single_numerical_match": _same_number,
        "positive_int_match": _same_positive_integer,
        "set_equality": _set_equality,
        "set_equality_case_insensitive": _set_equality_ignoring_case,
        "str_set_equality_comma": _set_equality_ignoring_case,
        "str_set_equality_line_break": _line_set_equality,
        "set_precision": _set_precision,
        "jaccard_index": _jaccard_index,
        "jaccard_index_case_insensitive": _jaccard_index_ignoring_case,
        "sequence_equality": _sequence_equality,
        "sequence_equality_case_insensitive": _sequence_equality_ignoring_case,
        "sequence_accuracy_case_insensitive": _sequence_accuracy,
        "chess_move_list_jaccard_index": _chess_moves_jaccard,
        "multi_ref_phrase": _match_any_phrase,
        "code_result_exact_str_match": _code_output_match,
        "bleu": _bleu_score,
        "longest_common_list_prefix_ratio": _common_prefix_ratio,
        "dict_equality": _mapping_equality,
        "dict_precision": _mapping_precision,
        "dict_exact_str_match_agg_recall": _make_mapping_metric(_exact_match, over_union=False),
        "dict_set_equality_agg_jaccard": _make_mapping_metric(_set_equality, over_union=True),
        "dict_jaccard_agg_jaccard": _make_mapping_metric(_jaccard_index, over_union=True),
        "dict_nbbox_iou_tuple_agg_jaccard": _make_mapping_metric(geometry.mean_best_iou, over_union=True),
        "latex_expr_equality": _latex_equality,
        "text_with_latex_expr_equality": _text_with_formulas_match,
        "nbbox_iou_single": geometry.first_box_iou,
        "nbbox_iou_tuple": geometry.mean_best_iou,
        "nbbox_iou_sequence": geometry.mean_pairwise_iou,
        "xml_nbbox_iou_single": geometry.mean_best_iou,
        "xml_norm_point_in_bbox": geometry.is_point_in_any_box,
        "xml_norm_point_distance": geometry.point_closeness,
        "sequence_coords_similarity": geometry.keypoint_similarity,
        "normalized_rmse": geometry.number_closeness,
        "angle_seq_float_rmse": geometry.angle_closeness,
        "symbolic_planning_test": score_plan,
    }
)
"""Metric by MEGA-Bench's name for it."""
