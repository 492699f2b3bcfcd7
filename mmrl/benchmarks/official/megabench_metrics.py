"""MEGA-Bench's metrics that need neither judge nor program, each on one field of an answer.

Source: megabench/metrics/scoring of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: formulas and
numbers are compared by math-verify and read by our own rules, where MEGA-Bench runs them as Python; letters lose their
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

from mmrl.benchmarks.official import megabench_places as places
from mmrl.benchmarks.official.megabench_values import (
    MAX_FIELD_CHARS,
    parse_entries,
    parse_fields,
    parse_numbers,
    to_text,
)
from mmrl.benchmarks.official.planning import score_plan
from mmrl.benchmarks.reward_scores import formulas_equal

_MIN_SIMILARITY: Final = 0.9
_RELATIVE_TOLERANCE: Final = 0.01
_LEADING_LETTER: Final = re.compile(r"\(?([A-Za-z])\)?")
_ARTICLE: Final = re.compile(r"\b(?:a|an|the)\s+", re.IGNORECASE)
_IGNORED_CHARS: Final = str.maketrans("", "", " -\n\t.")
_FENCE_LANGUAGE_CHARS: Final = string.ascii_letters + string.digits + "_"
_DOLLAR_FORMULA: Final = re.compile(r"(\$[^$]*\$)")

FieldMetric = Callable[[Any, Any], float]


def _exact_match(prediction: object, reference: object) -> float:
    """The same text; where a letter is due, the first letter said."""
    ours, theirs = to_text(prediction).strip(), to_text(reference).strip()
    if len(theirs) == 1 and theirs.isalpha() and len(ours) > 1 and (letter := _LEADING_LETTER.match(ours)):
        ours = letter[1]
    return float(ours == theirs)


def _simple_match(prediction: object, reference: object) -> float:
    """The same text, white space, hyphens, full stops and case aside."""
    return _exact_match(*(to_text(value).translate(_IGNORED_CHARS).lower() for value in (prediction, reference)))


def _near_match(prediction: object, reference: object) -> float:
    """Similarity, articles, accents and case aside, from 0.9 on."""
    ours, theirs = (_strip_accents(to_text(value)) for value in (prediction, reference))
    return float(DamerauLevenshtein.normalized_similarity(ours, theirs, score_cutoff=_MIN_SIMILARITY))


def _strip_accents(text: str) -> str:
    apart = unicodedata.normalize("NFKD", _ARTICLE.sub("", text[:MAX_FIELD_CHARS]))
    return "".join(letter for letter in apart if not unicodedata.combining(letter)).lower()


def _same_number(prediction: object, reference: object) -> float:
    """One number within 1 %; the same text where either has none."""
    ours, theirs = parse_numbers(prediction), parse_numbers(reference)
    if not (ours and theirs):
        return _simple_match(prediction, reference)
    return float(abs(ours[-1] - theirs[-1]) <= _RELATIVE_TOLERANCE * abs(theirs[-1]))


def _relative_difference(prediction: object, reference: object) -> float:
    """1 - |a - b| / |b|, at least 0."""
    ours, theirs = parse_numbers(prediction), parse_numbers(reference)
    if not (ours and theirs):
        return 0.0
    return max(0.0, 1.0 - abs(ours[0] - theirs[0]) / abs(theirs[0])) if theirs[0] else float(ours[0] == 0.0)


def _same_positive_integer(prediction: object, reference: object) -> float:
    """The same positive whole number."""
    ours, theirs = parse_numbers(prediction), parse_numbers(reference)
    return float(len(ours) >= 1 and ours[:1] == theirs[:1] and ours[0] > 0 and ours[0].is_integer())


def _overlap_ratio(prediction: Sequence[Any], reference: Sequence[Any], *, over_union: bool) -> float:
    """What both have, of what either has or of what was said; 1 of nothing, as MEGA-Bench has it."""
    ours, theirs = set(prediction), set(reference)
    whole = ours | theirs if over_union else ours
    return len(ours & theirs) / len(whole) if whole else 1.0


def _jaccard_index(prediction: object, reference: object) -> float:
    return _overlap_ratio(parse_entries(prediction), parse_entries(reference), over_union=True)


def _set_equality(prediction: object, reference: object) -> float:
    return float({*parse_entries(prediction)} == {*parse_entries(reference)})


def _set_equality_ignoring_case(prediction: object, reference: object) -> float:
    return float({*parse_entries(prediction, lowercase=True)} == {*parse_entries(reference, lowercase=True)})


def _common_prefix_ratio(prediction: Sequence[Any], reference: Sequence[Any]) -> float:
    """How much of the right list its beginning is."""
    pairs = [ours == theirs for ours, theirs in zip(prediction, reference, strict=False)]
    same = pairs.index(False) if False in pairs else len(pairs)
    return same / max(len(reference), 1)


def _sequence_accuracy(prediction: Sequence[Any], reference: Sequence[Any]) -> float:
    """The share of entries that are right where they stand, of lists as long as each other."""
    if len(prediction) != len(reference):
        return 0.0
    return float(
        sum(ours == theirs for ours, theirs in zip(prediction, reference, strict=True)) / max(len(reference), 1)
    )


def _line_set(value: object) -> set[str]:
    return {*to_text(value).replace("\\n", "\n").lower().split("\n")}


def _make_mapping_metric(field_metric: FieldMetric, *, over_union: bool) -> FieldMetric:
    """The mean of a metric over the fields of the right mapping, or over those of both."""

    def metric(said: object, due: object) -> float:
        ours, theirs = (value if isinstance(value, Mapping) else parse_fields(to_text(value)) for value in (said, due))
        scores = [field_metric(ours[key], value) for key, value in theirs.items() if key in ours]
        return sum(scores) / max(1, len({*ours, *theirs} if over_union else theirs))

    return metric


def _mapping_precision(prediction: object, reference: object) -> float:
    """The share of the fields given that are right."""
    ours, theirs = (
        value if isinstance(value, Mapping) else parse_fields(to_text(value)) for value in (prediction, reference)
    )
    return sum(_exact_match(value, theirs[key]) for key, value in ours.items() if key in theirs) / max(1, len(ours))


def _mapping_equality(prediction: object, reference: object) -> float:
    ours, theirs = (
        value if isinstance(value, Mapping) else parse_fields(to_text(value)) for value in (prediction, reference)
    )
    return float(bool(ours) and ours == theirs)


def _chess_moves_jaccard(prediction: object, reference: object) -> float:
    """Chess moves that both have, of those that either has; marks of mate and praise aside."""
    ours, theirs = (
        [to_text(move).removesuffix("!").removesuffix("#") for move in parse_entries(each)]
        for each in (prediction, reference)
    )
    return _overlap_ratio(ours, theirs, over_union=True)


def _match_any_phrase(prediction: object, reference: object) -> float:
    """The same text as one of those in a list, as `_simple` compares."""
    return max(
        (_simple_match(prediction, phrase) for phrase in parse_entries(to_text(reference).replace("\uff0c", ","))),
        default=0.0,
    )


def _code_output_match(prediction: object, reference: object) -> float:
    """The same text, without the fence around it."""
    return _exact_match(*(_strip_code_fence(to_text(value)[:MAX_FIELD_CHARS]) for value in (prediction, reference)))


def _strip_code_fence(written: str) -> str:
    _, fence, rest = written.partition("```")
    inner, closed, _ = rest.partition("```")
    return inner.lstrip(_FENCE_LANGUAGE_CHARS).strip("\n") if fence and closed else written


def _text_with_formulas_match(prediction: object, reference: object) -> float:
    """The same words, as `_simple` compares, around the same formulas between dollar signs; commas aside."""
    (ours, our_formulas), (theirs, their_formulas) = _split_formulas(prediction), _split_formulas(reference)
    same = _simple_match(our_formulas, their_formulas) or formulas_equal(our_formulas, their_formulas)
    return float(bool(_simple_match(ours, theirs) and same))


def _split_formulas(value: object) -> tuple[str, str]:
    """What stands outside of dollar signs, and what within, each in one piece."""
    pieces = _DOLLAR_FORMULA.split(to_text(value)[:MAX_FIELD_CHARS].replace(",", ""))
    return "".join(piece.strip() for piece in pieces[::2]), " ".join(piece[1:-1].strip() for piece in pieces[1::2])


def _bleu_score(prediction: object, reference: object) -> float:
    """BLEU of the corpus, of texts or of lists of them, with the right one as the hypothesis, as MEGA-Bench has it."""
    from sacrebleu.metrics.bleu import BLEU

    ours, theirs = ([value] if isinstance(value, str) else value for value in (prediction, reference))
    if not (isinstance(ours, list) and isinstance(theirs, list)) or len(ours) != len(theirs):
        return 0.0
    if isinstance(prediction, str) != isinstance(reference, str) or not all(
        isinstance(one, str) for one in (*ours, *theirs)
    ):
        return 0.0
    score = float(BLEU().corpus_score(theirs, [[one[:MAX_FIELD_CHARS] for one in ours]]).score)
    return min(1.0, score / 100.0)


CONTEXT_METRICS: Final = frozenset({"xml_norm_point_in_bbox", "symbolic_planning_test"})
"""Metrics that look at `eval_context` instead of the answer."""

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
"""Metrics whose full credit a careful reader would give too, where the text is another: in another order, for one."""

FIELD_METRICS: Final[Mapping[str, FieldMetric]] = MappingProxyType(
    {
        "exact_str_match": _exact_match,
        "exact_str_match_case_insensitive": lambda said, due: _exact_match(to_text(said).lower(), to_text(due).lower()),
        "simple_str_match": _simple_match,
        "near_str_match": _near_match,
        "normalized_similarity_damerau_levenshtein": lambda said, due: DamerauLevenshtein.normalized_similarity(
            to_text(said)[:MAX_FIELD_CHARS], to_text(due)
        ),
        "number_rel_diff_ratio": _relative_difference,
        "general_single_numerical_match": _same_number,
        "boxed_single_numerical_match": _same_number,
        "positive_int_match": _same_positive_integer,
        "set_equality": _set_equality,
        "set_equality_case_insensitive": _set_equality_ignoring_case,
        "str_set_equality_comma": _set_equality_ignoring_case,
        "str_set_equality_line_break": lambda said, due: float(_line_set(said) == _line_set(due)),
        "set_precision": lambda said, due: _overlap_ratio(parse_entries(said), parse_entries(due), over_union=False),
        "jaccard_index": _jaccard_index,
        "jaccard_index_case_insensitive": lambda said, due: _overlap_ratio(
            parse_entries(said, lowercase=True), parse_entries(due, lowercase=True), over_union=True
        ),
        "sequence_equality": lambda said, due: float(parse_entries(said) == parse_entries(due)),
        "sequence_equality_case_insensitive": lambda said, due: float(
            parse_entries(said, lowercase=True) == parse_entries(due, lowercase=True)
        ),
        "sequence_accuracy_case_insensitive": lambda said, due: _sequence_accuracy(
            parse_entries(said, lowercase=True), parse_entries(due, lowercase=True)
        ),
        "chess_move_list_jaccard_index": _chess_moves_jaccard,
        "multi_ref_phrase": _match_any_phrase,
        "code_result_exact_str_match": _code_output_match,
        "bleu": _bleu_score,
        "longest_common_list_prefix_ratio": lambda said, due: _common_prefix_ratio(
            parse_entries(said), parse_entries(due)
        ),
        "dict_equality": _mapping_equality,
        "dict_precision": _mapping_precision,
        "dict_exact_str_match_agg_recall": _make_mapping_metric(_exact_match, over_union=False),
        "dict_set_equality_agg_jaccard": _make_mapping_metric(_set_equality, over_union=True),
        "dict_jaccard_agg_jaccard": _make_mapping_metric(_jaccard_index, over_union=True),
        "dict_nbbox_iou_tuple_agg_jaccard": _make_mapping_metric(places.mean_best_iou, over_union=True),
        "latex_expr_equality": lambda said, due: float(formulas_equal(to_text(said), to_text(due))),
        "text_with_latex_expr_equality": _text_with_formulas_match,
        "nbbox_iou_single": places.first_box_iou,
        "nbbox_iou_tuple": places.mean_best_iou,
        "nbbox_iou_sequence": places.mean_pairwise_iou,
        "xml_nbbox_iou_single": places.mean_best_iou,
        "xml_norm_point_in_bbox": places.is_point_in_any_box,
        "xml_norm_point_distance": places.point_closeness,
        "sequence_coords_similarity": places.keypoint_similarity,
        "normalized_rmse": places.number_closeness,
        "angle_seq_float_rmse": places.angle_closeness,
        "symbolic_planning_test": score_plan,
    }
)
"""What scores one field, by the name that MEGA-Bench gives it."""
