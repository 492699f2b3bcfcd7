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
from mmrl.benchmarks.official.megabench_values import LONGEST, as_text, entries_in, fields_in, figures_in
from mmrl.benchmarks.official.planning import achieved
from mmrl.benchmarks.reward_scores import same_formula

_NEAR: Final = 0.9
_TOLERANCE: Final = 0.01
_LETTER: Final = re.compile(r"\(?([A-Za-z])\)?")
_ARTICLE: Final = re.compile(r"\b(?:a|an|the)\s+", re.IGNORECASE)
_DROPPED: Final = str.maketrans("", "", " -\n\t.")
_WORD: Final = string.ascii_letters + string.digits + "_"
_FORMULA: Final = re.compile(r"(\$[^$]*\$)")

Metric = Callable[[Any, Any], float]


def _exact(said: object, due: object) -> float:
    """The same text; where a letter is due, the first letter said."""
    ours, theirs = as_text(said).strip(), as_text(due).strip()
    if len(theirs) == 1 and theirs.isalpha() and len(ours) > 1 and (letter := _LETTER.match(ours)):
        ours = letter[1]
    return float(ours == theirs)


def _simple(said: object, due: object) -> float:
    """The same text, white space, hyphens, full stops and case aside."""
    return _exact(*(as_text(value).translate(_DROPPED).lower() for value in (said, due)))


def _near(said: object, due: object) -> float:
    """Similarity, articles, accents and case aside, from 0.9 on."""
    ours, theirs = (_plain(as_text(value)) for value in (said, due))
    return float(DamerauLevenshtein.normalized_similarity(ours, theirs, score_cutoff=_NEAR))


def _plain(text: str) -> str:
    apart = unicodedata.normalize("NFKD", _ARTICLE.sub("", text[:LONGEST]))
    return "".join(letter for letter in apart if not unicodedata.combining(letter)).lower()


def _same_figure(said: object, due: object) -> float:
    """One number within 1 %; the same text where either has none."""
    ours, theirs = figures_in(said), figures_in(due)
    if not (ours and theirs):
        return _simple(said, due)
    return float(abs(ours[-1] - theirs[-1]) <= _TOLERANCE * abs(theirs[-1]))


def _relative(said: object, due: object) -> float:
    """1 - |a - b| / |b|, at least 0."""
    ours, theirs = figures_in(said), figures_in(due)
    if not (ours and theirs):
        return 0.0
    return max(0.0, 1.0 - abs(ours[0] - theirs[0]) / abs(theirs[0])) if theirs[0] else float(ours[0] == 0.0)


def _whole(said: object, due: object) -> float:
    """The same positive whole number."""
    ours, theirs = figures_in(said), figures_in(due)
    return float(len(ours) >= 1 and ours[:1] == theirs[:1] and ours[0] > 0 and ours[0].is_integer())


def _shared(said: Sequence[Any], due: Sequence[Any], *, of_both: bool) -> float:
    """What both have, of what either has or of what was said; 1 of nothing, as MEGA-Bench has it."""
    ours, theirs = set(said), set(due)
    whole = ours | theirs if of_both else ours
    return len(ours & theirs) / len(whole) if whole else 1.0


def _jaccard(said: object, due: object) -> float:
    return _shared(entries_in(said), entries_in(due), of_both=True)


def _same_set(said: object, due: object) -> float:
    return float({*entries_in(said)} == {*entries_in(due)})


def _same_set_any_case(said: object, due: object) -> float:
    return float({*entries_in(said, lower=True)} == {*entries_in(due, lower=True)})


def _prefix(said: Sequence[Any], due: Sequence[Any]) -> float:
    """How much of the right list its beginning is."""
    pairs = [ours == theirs for ours, theirs in zip(said, due, strict=False)]
    same = pairs.index(False) if False in pairs else len(pairs)
    return same / max(len(due), 1)


def _in_place(said: Sequence[Any], due: Sequence[Any]) -> float:
    """The share of entries that are right where they stand, of lists as long as each other."""
    if len(said) != len(due):
        return 0.0
    return float(sum(ours == theirs for ours, theirs in zip(said, due, strict=True)) / max(len(due), 1))


def _lines(value: object) -> set[str]:
    return {*as_text(value).replace("\\n", "\n").lower().split("\n")}


def _by_key(of_fields: Metric, *, of_both: bool) -> Metric:
    """The mean of a metric over the fields of the right mapping, or over those of both."""

    def metric(said: object, due: object) -> float:
        ours, theirs = (value if isinstance(value, Mapping) else fields_in(as_text(value)) for value in (said, due))
        scores = [of_fields(ours[key], value) for key, value in theirs.items() if key in ours]
        return sum(scores) / max(1, len({*ours, *theirs} if of_both else theirs))

    return metric


def _precision(said: object, due: object) -> float:
    """The share of the fields given that are right."""
    ours, theirs = (value if isinstance(value, Mapping) else fields_in(as_text(value)) for value in (said, due))
    return sum(_exact(value, theirs[key]) for key, value in ours.items() if key in theirs) / max(1, len(ours))


def _same_fields(said: object, due: object) -> float:
    ours, theirs = (value if isinstance(value, Mapping) else fields_in(as_text(value)) for value in (said, due))
    return float(bool(ours) and ours == theirs)


def _moves(said: object, due: object) -> float:
    """Chess moves that both have, of those that either has; marks of mate and praise aside."""
    ours, theirs = (
        [as_text(move).removesuffix("!").removesuffix("#") for move in entries_in(each)] for each in (said, due)
    )
    return _shared(ours, theirs, of_both=True)


def _any_phrase(said: object, due: object) -> float:
    """The same text as one of those in a list, as `_simple` compares."""
    return max((_simple(said, phrase) for phrase in entries_in(as_text(due).replace("\uff0c", ","))), default=0.0)


def _code_output(said: object, due: object) -> float:
    """The same text, without the fence around it."""
    return _exact(*(_unfenced(as_text(value)[:LONGEST]) for value in (said, due)))


def _unfenced(written: str) -> str:
    _, fence, rest = written.partition("```")
    inner, closed, _ = rest.partition("```")
    return inner.lstrip(_WORD).strip("\n") if fence and closed else written


def _words_and_formulas(said: object, due: object) -> float:
    """The same words, as `_simple` compares, around the same formulas between dollar signs; commas aside."""
    (ours, our_formulas), (theirs, their_formulas) = _split(said), _split(due)
    same = _simple(our_formulas, their_formulas) or same_formula(our_formulas, their_formulas)
    return float(bool(_simple(ours, theirs) and same))


def _split(value: object) -> tuple[str, str]:
    """What stands outside of dollar signs, and what within, each in one piece."""
    pieces = _FORMULA.split(as_text(value)[:LONGEST].replace(",", ""))
    return "".join(piece.strip() for piece in pieces[::2]), " ".join(piece[1:-1].strip() for piece in pieces[1::2])


def _bleu(said: object, due: object) -> float:
    """BLEU of the corpus, of texts or of lists of them, with the right one as the hypothesis, as MEGA-Bench has it."""
    from sacrebleu.metrics.bleu import BLEU

    ours, theirs = ([value] if isinstance(value, str) else value for value in (said, due))
    if not (isinstance(ours, list) and isinstance(theirs, list)) or len(ours) != len(theirs):
        return 0.0
    if isinstance(said, str) != isinstance(due, str) or not all(isinstance(one, str) for one in (*ours, *theirs)):
        return 0.0
    score = float(BLEU().corpus_score(theirs, [[one[:LONGEST] for one in ours]]).score)
    return min(1.0, score / 100.0)


CONTEXTUAL: Final = frozenset({"xml_norm_point_in_bbox", "symbolic_planning_test"})
"""Metrics that look at `eval_context` instead of the answer."""

OF_LINES: Final = frozenset({"symbolic_planning_test", "str_set_equality_line_break", "code_result_exact_str_match"})
"""Metrics of answers that may have several lines."""
OF_FORMULAS: Final = frozenset({"text_with_latex_expr_equality"})
"""Metrics of words with formulas between dollar signs."""
FAITHFUL: Final = frozenset(
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

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "exact_str_match": _exact,
        "exact_str_match_case_insensitive": lambda said, due: _exact(as_text(said).lower(), as_text(due).lower()),
        "simple_str_match": _simple,
        "near_str_match": _near,
        "normalized_similarity_damerau_levenshtein": lambda said, due: DamerauLevenshtein.normalized_similarity(
            as_text(said)[:LONGEST], as_text(due)
        ),
        "number_rel_diff_ratio": _relative,
        "general_single_numerical_match": _same_figure,
        "boxed_single_numerical_match": _same_figure,
        "positive_int_match": _whole,
        "set_equality": _same_set,
        "set_equality_case_insensitive": _same_set_any_case,
        "str_set_equality_comma": _same_set_any_case,
        "str_set_equality_line_break": lambda said, due: float(_lines(said) == _lines(due)),
        "set_precision": lambda said, due: _shared(entries_in(said), entries_in(due), of_both=False),
        "jaccard_index": _jaccard,
        "jaccard_index_case_insensitive": lambda said, due: _shared(
            entries_in(said, lower=True), entries_in(due, lower=True), of_both=True
        ),
        "sequence_equality": lambda said, due: float(entries_in(said) == entries_in(due)),
        "sequence_equality_case_insensitive": lambda said, due: float(
            entries_in(said, lower=True) == entries_in(due, lower=True)
        ),
        "sequence_accuracy_case_insensitive": lambda said, due: _in_place(
            entries_in(said, lower=True), entries_in(due, lower=True)
        ),
        "chess_move_list_jaccard_index": _moves,
        "multi_ref_phrase": _any_phrase,
        "code_result_exact_str_match": _code_output,
        "bleu": _bleu,
        "longest_common_list_prefix_ratio": lambda said, due: _prefix(entries_in(said), entries_in(due)),
        "dict_equality": _same_fields,
        "dict_precision": _precision,
        "dict_exact_str_match_agg_recall": _by_key(_exact, of_both=False),
        "dict_set_equality_agg_jaccard": _by_key(_same_set, of_both=True),
        "dict_jaccard_agg_jaccard": _by_key(_jaccard, of_both=True),
        "dict_nbbox_iou_tuple_agg_jaccard": _by_key(places.overlaps, of_both=True),
        "latex_expr_equality": lambda said, due: float(same_formula(as_text(said), as_text(due))),
        "text_with_latex_expr_equality": _words_and_formulas,
        "nbbox_iou_single": places.overlap,
        "nbbox_iou_tuple": places.overlaps,
        "nbbox_iou_sequence": places.tracked,
        "xml_nbbox_iou_single": places.overlaps,
        "xml_norm_point_in_bbox": places.pointed,
        "xml_norm_point_distance": places.point_distance,
        "sequence_coords_similarity": places.keypoints,
        "normalized_rmse": places.near_number,
        "angle_seq_float_rmse": places.near_angles,
        "symbolic_planning_test": achieved,
    }
)
"""What scores one field, by the name that MEGA-Bench gives it."""
