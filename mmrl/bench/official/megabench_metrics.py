"""MEGA-Bench's metrics that need neither judge nor program, each on one field of an answer.

Source: megabench/metrics/scoring of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563). Departures: formulas and
numbers are compared by math-verify and read by our own rules, where MEGA-Bench runs them as Python; letters lose their
accents by Unicode's decomposition alone.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

from rapidfuzz.distance import DamerauLevenshtein

from mmrl.bench.earned import same_formula
from mmrl.bench.numbers import numbers
from mmrl.bench.regions import boxes_in
from mmrl_rewards import geometry

LONGEST: Final = 20_000
"""Characters of a field that are looked at."""
_NEAR: Final = 0.9
_TOLERANCE: Final = 0.01
_LETTER: Final = re.compile(r"\(?([A-Za-z])\)?")
_ARTICLE: Final = re.compile(r"\b(?:a|an|the)\s+", re.IGNORECASE)
_DROPPED: Final = str.maketrans("", "", " -\n\t.")
_POINT: Final = re.compile(r"<point>([^<]{1,80})</point>")
_TAGS: Final = re.compile(r"<(/?)box>")
_BRACKETS: Final = {"(": ")", "[": "]", "{": "}"}

Metric = Callable[[Any, Any], float]


def fields_of(text: str, names: Sequence[str]) -> Mapping[str, Any]:
    """What a text says for each field: those of the JSON object in it; all of the text where there is none."""
    found = fields_in(text)
    rest = "" if found and len(names) > 1 else text
    return {name: found.get(name, rest) for name in names}


def fields_in(text: str) -> Mapping[str, Any]:
    """The fields of the JSON object in a text, or of a mapping as Python writes it; none if there is none."""
    value = _literal(text[text.find("{") : text.rfind("}") + 1])
    return value if isinstance(value, Mapping) else {}


def _literal(text: str) -> object:
    """What JSON or Python's literals say; the text itself where they say nothing."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip()[:LONGEST])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def _entries(value: object, *, lower: bool = False) -> list[Any]:
    """The entries of a list, of text that writes one, or between commas; those of a mapping are its keys."""
    if isinstance(value, str):
        written = value.strip(" ")
        literal = _literal(written) if written else []
        if literal == written and _BRACKETS.get(written[0]) == written[-1:]:
            written = written[1:-1]
        elif literal == written and written[0] in _BRACKETS:
            return []
        value = [entry.strip() for entry in written.split(",")] if isinstance(literal, str) else literal
    entries = [*value] if isinstance(value, Sequence | Mapping | set) else [] if value is None else [value]
    frozen = [_frozen(entry) for entry in entries]
    return [entry.lower() if isinstance(entry, str) else entry for entry in frozen] if lower else frozen


def _frozen(value: object) -> Any:  # noqa: ANN401 - what a set may hold
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), repr(inner)) for key, inner in value.items()))
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple | set) else value


def _text(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _exact(said: object, due: object) -> float:
    """The same text; where a letter is due, the first letter said."""
    ours, theirs = _text(said).strip(), _text(due).strip()
    if len(theirs) == 1 and theirs.isalpha() and len(ours) > 1 and (letter := _LETTER.match(ours)):
        ours = letter[1]
    return float(ours == theirs)


def _simple(said: object, due: object) -> float:
    """The same text, white space, hyphens, full stops and case aside."""
    return _exact(*(_text(value).translate(_DROPPED).lower() for value in (said, due)))


def _near(said: object, due: object) -> float:
    """Similarity, articles, accents and case aside, from 0.9 on."""
    ours, theirs = (_plain(_text(value)) for value in (said, due))
    return float(DamerauLevenshtein.normalized_similarity(ours, theirs, score_cutoff=_NEAR))


def _plain(text: str) -> str:
    apart = unicodedata.normalize("NFKD", _ARTICLE.sub("", text[:LONGEST]))
    return "".join(letter for letter in apart if not unicodedata.combining(letter)).lower()


def _figures(value: object) -> list[float]:
    return [one.value for one in numbers(_text(value))]


def _same_figure(said: object, due: object) -> float:
    """One number within 1 %; the same text where either has none."""
    ours, theirs = _figures(said), _figures(due)
    if not (ours and theirs):
        return _simple(said, due)
    return float(abs(ours[-1] - theirs[-1]) <= _TOLERANCE * abs(theirs[-1]))


def _relative(said: object, due: object) -> float:
    """1 - |a - b| / |b|, at least 0."""
    ours, theirs = _figures(said), _figures(due)
    if not (ours and theirs):
        return 0.0
    return max(0.0, 1.0 - abs(ours[0] - theirs[0]) / abs(theirs[0])) if theirs[0] else float(ours[0] == 0.0)


def _whole(said: object, due: object) -> float:
    """The same positive whole number."""
    ours, theirs = _figures(said), _figures(due)
    return float(len(ours) >= 1 and ours[:1] == theirs[:1] and ours[0] > 0 and ours[0].is_integer())


def _shared(said: Sequence[Any], due: Sequence[Any], *, of_both: bool) -> float:
    """What both have, of what either has or of what was said; 1 of nothing, as MEGA-Bench has it."""
    ours, theirs = set(said), set(due)
    whole = ours | theirs if of_both else ours
    return len(ours & theirs) / len(whole) if whole else 1.0


def _jaccard(said: object, due: object) -> float:
    return _shared(_entries(said), _entries(due), of_both=True)


def _same_set(said: object, due: object) -> float:
    return float({*_entries(said)} == {*_entries(due)})


def _same_set_any_case(said: object, due: object) -> float:
    return float({*_entries(said, lower=True)} == {*_entries(due, lower=True)})


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
    return {*_text(value).replace("\\n", "\n").lower().split("\n")}


def _by_key(of_fields: Metric, *, of_both: bool) -> Metric:
    """The mean of a metric over the fields of the right mapping, or over those of both."""

    def metric(said: object, due: object) -> float:
        ours, theirs = (value if isinstance(value, Mapping) else fields_in(_text(value)) for value in (said, due))
        scores = [of_fields(ours[key], value) for key, value in theirs.items() if key in ours]
        return sum(scores) / max(1, len({*ours, *theirs} if of_both else theirs))

    return metric


def _precision(said: object, due: object) -> float:
    """The share of the fields given that are right."""
    ours, theirs = (value if isinstance(value, Mapping) else fields_in(_text(value)) for value in (said, due))
    return sum(_exact(value, theirs[key]) for key, value in ours.items() if key in theirs) / max(1, len(ours))


def _same_fields(said: object, due: object) -> float:
    ours, theirs = (value if isinstance(value, Mapping) else fields_in(_text(value)) for value in (said, due))
    return float(bool(ours) and ours == theirs)


def _boxes(value: object) -> list[tuple[float, ...]]:
    return [box for box, _ in boxes_in(_TAGS.sub(lambda tag: ")" if tag[1] else "(", _text(value)[:LONGEST]))]


def _iou(ours: Sequence[float], theirs: Sequence[float]) -> float:
    ordered = all(box[0] < box[2] and box[1] < box[3] for box in (ours, theirs))
    return geometry.iou(tuple(ours), tuple(theirs)) if ordered else 0.0


def _overlap(said: object, due: object) -> float:
    """IoU of the first box of each."""
    ours, theirs = _boxes(said), _boxes(due)
    return _iou(ours[0], theirs[0]) if ours and theirs else 0.0


def _overlaps(said: object, due: object) -> float:
    """The mean over the boxes given of the best IoU with a right one."""
    ours, theirs = _boxes(said), _boxes(due)
    return fmean(max(_iou(box, other) for other in theirs) for box in ours) if ours and theirs else 0.0


def _tracked(said: object, due: object) -> float:
    """The mean IoU of boxes in turn, as many as are due."""
    ours, theirs = _boxes(said), _boxes(due)
    if len(ours) != len(theirs) or not ours:
        return 0.0
    return fmean(_iou(box, other) for box, other in zip(ours, theirs, strict=True))


def _pointed(said: object, due: object) -> float:
    """The one point in tags lies in a box, of the context or of the answer."""
    found = _POINT.findall(_text(said))
    point = _figures(found[0]) if len(found) == 1 else []
    boxes = _boxes(" ".join(map(_text, due["bounding_boxes"])) if isinstance(due, Mapping) else due)
    if len(point) != 2:
        return 0.0
    return float(any(x1 <= point[0] <= x2 and y1 <= point[1] <= y2 for x1, y1, x2, y2 in boxes))


CONTEXTUAL: Final = frozenset({"xml_norm_point_in_bbox"})
"""Metrics that look at `eval_context` instead of the answer."""

METRICS: Final[Mapping[str, Metric]] = MappingProxyType(
    {
        "exact_str_match": _exact,
        "exact_str_match_case_insensitive": lambda said, due: _exact(_text(said).lower(), _text(due).lower()),
        "simple_str_match": _simple,
        "near_str_match": _near,
        "normalized_similarity_damerau_levenshtein": lambda said, due: DamerauLevenshtein.normalized_similarity(
            _text(said)[:LONGEST], _text(due)
        ),
        "number_rel_diff_ratio": _relative,
        "general_single_numerical_match": _same_figure,
        "boxed_single_numerical_match": _same_figure,
        "positive_int_match": _whole,
        "set_equality": _same_set,
        "set_equality_case_insensitive": _same_set_any_case,
        "str_set_equality_comma": _same_set_any_case,
        "str_set_equality_line_break": lambda said, due: float(_lines(said) == _lines(due)),
        "set_precision": lambda said, due: _shared(_entries(said), _entries(due), of_both=False),
        "jaccard_index": _jaccard,
        "jaccard_index_case_insensitive": lambda said, due: _shared(
            _entries(said, lower=True), _entries(due, lower=True), of_both=True
        ),
        "sequence_equality": lambda said, due: float(_entries(said) == _entries(due)),
        "sequence_equality_case_insensitive": lambda said, due: float(
            _entries(said, lower=True) == _entries(due, lower=True)
        ),
        "sequence_accuracy_case_insensitive": lambda said, due: _in_place(
            _entries(said, lower=True), _entries(due, lower=True)
        ),
        "longest_common_list_prefix_ratio": lambda said, due: _prefix(_entries(said), _entries(due)),
        "dict_equality": _same_fields,
        "dict_precision": _precision,
        "dict_exact_str_match_agg_recall": _by_key(_exact, of_both=False),
        "dict_set_equality_agg_jaccard": _by_key(_same_set, of_both=True),
        "dict_jaccard_agg_jaccard": _by_key(_jaccard, of_both=True),
        "latex_expr_equality": lambda said, due: float(same_formula(_text(said), _text(due))),
        "nbbox_iou_single": _overlap,
        "nbbox_iou_tuple": _overlaps,
        "nbbox_iou_sequence": _tracked,
        "xml_nbbox_iou_single": _overlaps,
        "xml_norm_point_in_bbox": _pointed,
    }
)
"""What scores one field, by the name that MEGA-Bench gives it."""
