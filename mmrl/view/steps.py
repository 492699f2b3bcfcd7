"""The groups of a step, each a prompt with pictures and the rollouts that answer it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mmrl.log.marks import make_marks, record_marks
from mmrl.log.rollout_records import BAD_VALUE, parse_resize_map
from mmrl.types import AnswerType, CoordinateSystem
from mmrl.view.records import NumberedRow, Row, as_list, as_mapping, pick

_TEXTS: Final = ("sample", "task", "question", "response")
_OPTIONAL_TEXTS: Final = ("prompt", "answer_type", "thinking", "answer_text", "frame", "target_frame", "finish")
_VERDICT_KEYS: Final = ("parent", "is_correct", "first_correct")
_ROLLOUT_KEYS: Final = ("rollout", "response", "finish", "total", "advantage", "dropped", *_VERDICT_KEYS)


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
            "marks": record_marks(row, "target"),
        }

    def _build_rollout(self, line: int, row: Row) -> Row:
        response, answer, thinking = row["response"], row.get("answer_text"), row.get("thinking")
        selection = as_mapping(row.get("selection"))
        terms = {}
        for name, term in as_mapping(row.get("terms")).items():
            terms[name] = {**term, "reason": _format_value(term.get("reason"))}
        return {
            **pick(row, *_ROLLOUT_KEYS),
            "segments": list(self._build_segments(row)),
            "turns": list(_build_turns(row)),
            "thinking": _make_range(response.find(thinking), thinking) if thinking else None,
            "answer": answer or _format_value(row.get("answer")),
            # The last place: a forced second look repeats the first answer, and replaces it.
            "answer_chars": _make_range(response.rfind(answer), answer) if answer else None,
            "marks": record_marks(row, "answer"),
            "tokens_n": row.get("tokens"),
            "trained": selection.get("status") in ("trained", "replayed"),
            "selection": selection,
            "age": selection.get("staleness"),
            "terms": terms,
            "line": line,  # which its tokens have in the file of tokens
        }

    def _build_segments(self, row: Row) -> Iterator[Row]:
        media, end = as_list(row.get("media")), 0
        for segment in map(as_mapping, as_list(row.get("segments"))):
            # Older versions wrote no places; all text is then in the first segment.
            start, end = map(int, segment.get("chars") or (end, len(row["response"])))
            shows, crop = as_mapping(segment.get("shows")), []
            if media and shows.get("path") == as_mapping(media[0]).get("path"):
                # In pixels of the file.
                whole = parse_resize_map(media[0])
                crop = make_marks(AnswerType.BOX, shows.get("crop"), CoordinateSystem.PX_ORIGINAL, 0, whole)
            yield {
                **pick(segment, "author", "version", "n"),
                "chars": [start, end],
                "shows": self.describe_medium(shows) if shows else None,
                "crop": crop[0]["at"] if crop else None,
            }


def _build_turns(row: Row) -> Iterator[Row]:
    """Yield the turns of an episode, with what each earned."""
    earned, advantages = as_list(row.get("turn_rewards")), as_list(row.get("turn_advantages"))
    for index, turn in enumerate(map(as_mapping, as_list(row.get("turns")))):
        end = "terminated" if turn.get("terminated") else "truncated" if turn.get("truncated") else ""
        yield {
            "action": _format_value(turn.get("action")),
            "state": _format_value(turn.get("state")),
            "valid": turn.get("valid") is not False,
            "end": end,
            "earned": float(earned[index]) if index < len(earned) else float(turn.get("reward", 0.0)),
            "advantage": float(advantages[index]) if index < len(advantages) else None,
        }


def _check_texts(row: Row) -> None:
    """Raise a TypeError if a value that the page shows as text is something else."""
    for key in (*_TEXTS, *_OPTIONAL_TEXTS):
        if not isinstance(row.get(key), str) and (key in _TEXTS or row.get(key) is not None):
            raise TypeError(f"{key} is not text")


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


def _make_range(start: int, part: str) -> list[int] | None:
    """Return where a part of a text begins and ends; None if it was not found, as a negative `start` says."""
    return None if start < 0 else [start, start + len(part)]
