"""The groups of a step, each a prompt with pictures and the rollouts that answer it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrl.types import AnswerType, CoordinateSystem
from mmrl.view.marks import make_marks, parse_resize_map
from mmrl.view.records import BAD_VALUE, NumberedRow, Row, as_list, as_mapping, pick, place_of, utf16_places

_TEXTS: Final = ("sample", "task", "question", "response")
_OPTIONAL_TEXTS: Final = ("prompt", "answer_type", "thinking", "answer_text", "frame", "target_frame", "finish")
_ROLLOUT_KEYS: Final = ("rollout", "response", "finish", "total", "advantage", "dropped", "parent", "is_correct")


def group_rows(rows: Sequence[NumberedRow]) -> list[list[NumberedRow]]:
    """Return the rows of each group, in the order of the file."""
    groups: dict[object, list[NumberedRow]] = {}
    number = 0
    for line, row in rows:
        # Older versions wrote no number of the group: there, siblings follow one another from rollout 0.
        number += row.get("rollout") == 0
        groups.setdefault(str(row.get("group", number)), []).append((line, row))
    return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuilder:
    """Makes the groups of a file of rollouts."""

    describe_medium: Callable[[object], Row]  # returns the entry of a recorded medium
    report_bad_row: Callable[[int, Exception], None]  # called with the index and the problem of a damaged line

    def build_groups(self, rows: Sequence[NumberedRow]) -> list[Row]:
        """Return the groups that the page shows."""
        groups: list[Row] = []
        for members in group_rows(rows):
            group: Row = {}
            rollouts: list[Row] = []
            for line, row in members:
                try:
                    _check_texts(row)
                    group = group or self._build_group(row)
                    rollouts.append(self._build_rollout(line, row))
                except BAD_VALUE as error:
                    self.report_bad_row(line, error)
            _mark_duplicates(rollouts)
            if rollouts:
                groups.append({"group": len(groups), **group, "rollouts": rollouts})
        return groups

    def _build_group(self, row: Row) -> Row:
        """Return what the rollouts of a group share."""
        return {
            **pick(row, "sample", "task", "question", "prompt", "answer_type"),
            "selection": as_mapping(row.get("selection")),
            "probes": as_mapping(row.get("probes")),
            "media": list(map(self.describe_medium, as_list(row.get("media")))),
            "target": _format_value(row.get("target")),
            "marks": _marks(row, "target", "target_frame"),
        }

    def _build_rollout(self, line: int, row: Row) -> Row:
        response, answer = row["response"], row.get("answer_text")
        places = utf16_places(response)
        selection = as_mapping(row.get("selection"))
        terms = {}
        for name, term in as_mapping(row.get("terms")).items():
            terms[name] = {**term, "reason": _format_value(term.get("reason"))}
        return {
            **pick(row, *_ROLLOUT_KEYS, "first_correct"),
            "segments": self._build_segments(row, places),
            "thinking": _find(response, row.get("thinking"), str.find, places),
            "answer": answer or _format_value(row.get("answer")),
            # The last place: a forced second look repeats the first answer, and replaces it.
            "answer_chars": _find(response, answer, str.rfind, places),
            "marks": _marks(row, "answer", "frame"),
            "tokens_n": row.get("tokens"),
            "trained": selection.get("status") in ("trained", "replayed"),
            "selection": selection,
            "age": selection.get("staleness"),
            "terms": terms,
            "line": line,  # which its tokens have in the file of tokens
        }

    def _build_segments(self, row: Row, places: Sequence[int]) -> list[Row]:
        segments, end = [], 0
        media = as_list(row.get("media"))
        for segment in map(as_mapping, as_list(row.get("segments"))):
            # Older versions wrote no places; all text is then in the first segment.
            start, end = segment.get("chars") or (end, len(places) - 1)
            shows, crop = as_mapping(segment.get("shows")), []
            if media and shows.get("path") == as_mapping(media[0]).get("path"):
                # In pixels of the file.
                whole = parse_resize_map(media[0])
                crop = make_marks(AnswerType.BOX, shows.get("crop"), CoordinateSystem.PX_ORIGINAL, 0, whole)
            segments.append(
                {
                    **pick(segment, "author", "version", "n"),
                    "chars": [place_of(start, places), place_of(end, places)],
                    "shows": self.describe_medium(shows) if shows else None,
                    "crop": crop[0]["at"] if crop else None,
                }
            )
        return segments


def _check_texts(row: Row) -> None:
    """Raise a TypeError if a value that the page shows as text is something else."""
    for key in (*_TEXTS, *_OPTIONAL_TEXTS):
        if not isinstance(row.get(key), str) and (key in _TEXTS or row.get(key) is not None):
            raise TypeError(f"{key} is not text")


def _marks(row: Mapping[str, Any], key: str, frame_key: str) -> list[Row]:
    """Return the marks of an answer or target on the medium that it refers to."""
    media, medium = as_list(row.get("media")), row.get("media_index", 0)
    # A sample of text alone has answers, too, and no medium.
    resize_map = parse_resize_map(media[medium]) if media else None
    return make_marks(row.get("answer_type") or "", row.get(key), row.get(frame_key), medium, resize_map)


def _mark_duplicates(rollouts: Sequence[Row]) -> None:
    """Note at each rollout the first sibling with the same text, and the first with the same answer."""
    for key, source in (("same_text_as", "response"), ("same_answer_as", "answer")):
        seen: dict[str, Row] = {}
        for rollout in rollouts:
            value = rollout[source]
            first = rollout if value is None else seen.setdefault(value, rollout)
            rollout[key] = None if first is rollout else first["rollout"]


def _format_value(value: object) -> str | None:
    """Return an answer, target or reason as text for people."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _find(text: str, part: str | None, find: Callable[[str, str], int], places: Sequence[int]) -> list[int] | None:
    """Return where `part` begins and ends in `text`; None if it is not there."""
    start = find(text, part) if part else -1
    return None if start < 0 else [places[start], places[start + len(part or "")]]
