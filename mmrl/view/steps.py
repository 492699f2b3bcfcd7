"""The document of a step: the groups and rollouts that the page shows, with badges that say what is unusual of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

from mmrl.log.rollout_records import BAD_VALUE, make_marks, parse_resize_map, record_marks
from mmrl.types import AnswerType, Author, CoordinateSystem
from mmrl.view.records import NumberedRow, Row, as_list, as_mapping, pick

_TEXTS: Final = ("sample", "task", "question", "response")
_OPTIONAL_TEXTS: Final = ("prompt", "answer_type", "thinking", "answer_text", "frame", "target_frame", "finish")
_NUMBERS: Final = ("total", "advantage")
_ROLLOUT_KEYS: Final = ("rollout", "response", "finish", "is_correct", *_NUMBERS)
_WIDE: Final = re.compile("[\U00010000-\U0010ffff]")  # characters that are two units of UTF-16


_TOOL_FAILURE: Final = re.compile(
    r"The tool (did not answer|was stopped|failed|refuses|returned)|There is no tool |This is (not a|no) call"
)


class Badge(NamedTuple):
    """A few words beside a rollout."""

    text: str
    kind: str = ""  # for its colour: good, bad, warn or quiet
    why: str = ""  # shown when the mouse is over the badge


_FLIPS: Final[dict[object, tuple[str | None, Badge | None]]] = {  # by both verdicts, before and after rethinking
    (False, True): ("up", Badge("wrong \u2192 right", "good", "Rethinking corrected it.")),
    (True, False): ("down", Badge("right \u2192 wrong", "bad", "Rethinking spoiled it.")),
    (True, True): ("same", Badge("stayed right", "", "Rethinking changed no verdict.")),
    (False, False): ("same", Badge("stayed wrong", "", "Rethinking changed no verdict.")),
}
_DROPPED: Final = Badge("dropped", "quiet", "It could not be scored, and left its group.")
_NO_GRADIENT: Final = Badge("zero advantage", "quiet", "It has no gradient.")
_NOT_TRAINED: Final = Badge("not trained", "quiet", "`loss.mask_truncated` masks it, or replay drew others.")
_TRUNCATED: Final = Badge("truncated", "warn", "It was cut at max_new_tokens.")
_TOOL_FAILED: Final = Badge("tool failed", "bad", "See its reply.")


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
    in_training: bool  # False for validation and test

    def build_groups(self, rows: Sequence[NumberedRow]) -> list[Row]:
        """Return the groups that the page shows."""
        groups: list[Row] = []
        for members in group_rows(rows):
            group: Row = {}
            rollouts: list[Row] = []
            for line, row in members:
                try:
                    _check_types(row)
                    group = group or self._build_group(row)
                    rollouts.append(self._build_rollout(line, row))
                except BAD_VALUE as error:
                    self.report_bad_row(line, error)
            mark_duplicates(rollouts)
            if rollouts:
                groups.append({"group": len(groups), **group, "rollouts": rollouts})
        return groups

    def _build_group(self, row: Row) -> Row:
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
        segments = list(_cover_text(self._build_segments(row), len(response)))
        outcome = describe_outcome(row, segments, in_training=self.in_training)
        # The answer is searched from the end: forced rethinking repeats the first answer, and replaces it.
        thinking_chars = _make_range(response.find(thinking), thinking) if thinking else None
        answer_chars = _make_range(response.rfind(answer), answer) if answer else None
        count_units(response, [thinking_chars, answer_chars, *(segment["chars"] for segment in segments)])
        terms = as_mapping(row.get("terms"))
        return {
            **pick(row, *_ROLLOUT_KEYS),
            **outcome,
            "segments": segments,
            "turns": list(_build_turns(row)),
            "thinking": thinking_chars,
            "answer": answer or _format_value(row.get("answer")),
            "answer_chars": answer_chars,
            "marks": record_marks(row, "answer"),
            "tokens_n": row.get("tokens"),
            "terms": {name: {**term, "reason": _format_value(term.get("reason"))} for name, term in terms.items()},
            "line": line,  # index of its tokens in the file of tokens
        }

    def _build_segments(self, row: Row) -> Iterator[Row]:
        media, end = as_list(row.get("media")), 0
        for segment in map(as_mapping, as_list(row.get("segments"))):
            # Older versions wrote no places; all text is then in the first segment.
            start, end = map(int, segment.get("chars") or (end, len(row["response"])))
            shows, crop = as_mapping(segment.get("shows")), []
            if media and shows.get("path") == as_mapping(media[0]).get("path"):
                # The crop is in pixels of the file.
                whole = parse_resize_map(media[0])
                crop = make_marks(AnswerType.BOX, shows.get("crop"), CoordinateSystem.PX_ORIGINAL, 0, whole)
            yield {
                "author": segment.get("author"),
                "chars": [start, end],
                "shows": self.describe_medium(shows) if shows else None,
                "crop": crop[0]["at"] if crop else None,
            }


def _build_turns(row: Row) -> Iterator[Row]:
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


def describe_outcome(row: Row, segments: Sequence[Row], *, in_training: bool) -> Row:
    """Return status, flip (`up`, `down`, `same` or None), the range of advantages, if it was trained, and badges.

    `row` is its record, and `segments` are the page's. A rollout was trained if the learner ran a forward pass for it.
    Older records do not say so; there, a replayed rollout was, and one of the step's own if it has an advantage.
    """
    selection, dropped = as_mapping(row.get("selection")), row.get("dropped") is not None
    status, age = selection.get("status"), selection.get("staleness")
    flip, flip_badge = _FLIPS.get((row.get("first_correct"), row.get("is_correct")), (None, None))
    is_learned = in_training and not dropped
    # The advantage of a rollout whose turns have their own is their mean, which may be 0 where they are not.
    advantages: list[Any] = list(map(float, as_list(row.get("turn_advantages")))) or [row.get("advantage")]
    has_advantage = any(advantage != 0 for advantage in advantages)
    in_forward = row.get("in_forward", status == "replayed" or has_advantage) is True
    trained = is_learned and status in ("trained", "replayed") and in_forward
    failed = any(_is_tool_failure(row["response"], segment) for segment in segments)
    badges: list[Badge] = []
    if dropped:
        badges.append(_DROPPED)
    if is_learned and status == "replayed":
        badges.append(_replayed(selection))
    if is_learned and status == "trained" and not trained:
        badges.append(_NOT_TRAINED if has_advantage else _NO_GRADIENT)
    if flip_badge:
        badges.append(flip_badge)
    if row.get("finish") == "length":
        badges.append(_TRUNCATED)
    if failed:
        badges.append(_TOOL_FAILED)
    if isinstance(age, int) and age > 0:
        badges.append(Badge(f"{_count(age, 'step')} off-policy", "warn", "Policy versions."))
    badges += [Badge(f"{term}: {why}", "bad") for term, why in as_mapping(row.get("dropped")).items()]
    return {
        "status": "dropped" if dropped else status,
        "flip": flip,
        "advantage_range": [min(advantages), max(advantages)],
        "trained": trained,
        "badges": badges,
    }


def mark_duplicates(rollouts: Sequence[Row]) -> None:
    """Add a badge to each rollout with the text, or else the answer, of an earlier sibling."""
    responses: dict[str, int] = {}
    answers: dict[str, int] = {}
    for rollout in rollouts:
        number, answer = rollout["rollout"], rollout["answer"]
        twin = responses.setdefault(rollout["response"], number)
        alike = number if answer is None else answers.setdefault(answer, number)
        if twin != number:
            rollout["badges"].append(Badge(f"duplicate of {twin}", "quiet"))
        elif alike != number:
            rollout["badges"].append(Badge(f"same answer as {alike}", "quiet"))


def _is_tool_failure(response: str, segment: Row) -> bool:
    return segment["author"] == "environment" and bool(_TOOL_FAILURE.search(response, *segment["chars"]))


def _replayed(selection: Mapping[str, object]) -> Badge:
    times = selection.get("times")
    return Badge("replayed", "", f"Replayed {_count(times if isinstance(times, int) else 1, 'time')}.")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _check_types(row: Row) -> None:
    """Raise a TypeError if a value that the page shows as text, or uses as a number, has another type."""
    for key in (*_TEXTS, *_OPTIONAL_TEXTS):
        if not isinstance(row.get(key), str) and (key in _TEXTS or row.get(key) is not None):
            raise TypeError(f"{key} is not text")
    for key in _NUMBERS:
        if not isinstance(row.get(key), int | float | None):
            raise TypeError(f"{key} is not a number")


def _cover_text(segments: Iterable[Row], length: int) -> Iterator[Row]:
    """Yield segments that cover a text from beginning to end; text in no segment counts as the policy's."""
    begin = 0
    for segment in segments:
        start, end = (min(max(begin, place), length) for place in segment["chars"])
        if start > begin:
            yield {"author": Author.POLICY, "chars": [begin, start]}
        begin = max(start, end)
        yield {**segment, "chars": [start, begin]}
    if begin < length:
        yield {"author": Author.POLICY, "chars": [begin, length]}


def count_units(text: str, ranges: Iterable[list[int] | None]) -> None:
    """Change ranges of a text from characters to units of UTF-16, as strings of JavaScript count them."""
    if text.isascii() or not _WIDE.search(text):
        return
    places = [0, *accumulate(1 + (character > "\uffff") for character in text)]
    for found in ranges:
        if found:
            found[:] = [places[min(max(0, place), len(text))] for place in found]


def make_scale(groups: Sequence[Row]) -> dict[str, float]:
    """Return the range of the total rewards of a step and the largest size of an advantage, for colours."""
    rollouts = [rollout for group in groups for rollout in group["rollouts"]]
    # Most rewards lie between 0 and 1, and steps should look alike.
    totals = [0, 1, *(rollout["total"] for rollout in rollouts if rollout["total"] is not None)]
    advantages = [0, *(abs(bound or 0) for rollout in rollouts for bound in rollout["advantage_range"])]
    return {"low": min(totals), "high": max(totals), "advantage": max(advantages)}


def _format_value(value: object) -> str | None:
    """Return an answer, target or reason as text for people."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _make_range(start: int, part: str) -> list[int] | None:
    """Return where a part of a text begins and ends; None if it was not found, as a negative `start` says."""
    return None if start < 0 else [start, start + len(part)]
