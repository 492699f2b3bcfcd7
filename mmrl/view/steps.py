"""The document of a step: its groups, each a prompt with pictures and the rollouts that answer it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from mmrl.types import ResizeMap
from mmrl.view.marks import BAD_VALUE, crop_fractions, make_marks, parse_resize_map
from mmrl.view.records import Row, StepFile, as_list, as_mapping
from mmrl.view.tokens import TokenTable

_TERM_KEYS: Final = ("value", "reason", "transformed", "weight", "counts", "contribution", "failure")
_TRAINED: Final = ("trained", "replayed")
_LARGEST_BASIC_CHAR: Final = "\uffff"  # later characters are two units of a JavaScript string

NumberedRow = tuple[int, Row]  # index of the line, and its object


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What the records of a step refer to."""

    describe_medium: Callable[[object], dict[str, Any]]  # returns the entry of a recorded medium, its pictures made
    tokens: TokenTable | None  # tokens of the rollouts
    report_bad_row: Callable[[int, Exception], None]  # called with the index and the problem of a damaged line


def group_rows(rows: Sequence[NumberedRow]) -> list[list[NumberedRow]]:
    """Return the rows of each group, in the order of the file."""
    groups: dict[object, list[NumberedRow]] = {}
    number = -1
    previous: Row = {}
    for line, row in rows:
        # Older versions wrote no number: there, siblings follow one another and count up.
        begins = row.get("sample") != previous.get("sample") or not _is_later(row, previous)
        number, previous = number + begins, row
        groups.setdefault(str(row.get("group", number)), []).append((line, row))
    return list(groups.values())


def build_step(file: StepFile, rows: Sequence[NumberedRow], context: StepContext) -> dict[str, Any]:
    """Return the document of a file of rollouts."""
    groups = []
    for number, members in enumerate(group_rows(rows)):
        try:
            group = _build_group(members, context)
        except BAD_VALUE as error:
            context.report_bad_row(members[0][0], error)
            continue
        groups.append({"group": number, **group})
    terms: dict[str, None] = {}
    for group in groups:
        for rollout in group["rollouts"]:
            terms |= dict.fromkeys(rollout["terms"])
    return {"stage": file.stage, "step": file.step, "kind": file.kind, "terms": list(terms), "groups": groups}


def format_value(value: object) -> str | None:
    """Return an answer or target as text for people."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def utf16_positions(text: str) -> Sequence[int] | None:
    """Return the place of each character, and of the end, in a JavaScript string; None if it is its own index."""
    if text.isascii() or max(text) <= _LARGEST_BASIC_CHAR:
        return None
    return [0, *accumulate(1 + (char > _LARGEST_BASIC_CHAR) for char in text)]


def _is_later(row: Row, previous: Row) -> bool:
    try:
        return bool(row["rollout"] > previous["rollout"])
    except BAD_VALUE:
        return False


def _build_group(members: Sequence[NumberedRow], context: StepContext) -> dict[str, Any]:
    first = members[0][1]
    question = _text(first, "question")
    media = _list_media(first, question)
    resize_maps = [parse_resize_map(medium) for medium in media]
    rollouts = []
    for line, row in members:
        try:
            rollouts.append(_build_rollout(line, row, media, resize_maps, context))
        except BAD_VALUE as error:
            context.report_bad_row(line, error)
    _mark_duplicates(rollouts)
    return {
        "sample": _text(first, "sample"),
        "task": _text(first, "task"),
        "question": question,
        "prompt": _optional_text(first, "prompt"),
        "answer_type": _optional_text(first, "answer_type"),
        "selection": as_mapping(first.get("selection")),
        "probes": as_mapping(first.get("probes")),
        "media": list(map(context.describe_medium, media)),
        "target": format_value(first.get("target")),
        "marks": _marks(first, "target", first.get("target_frame"), resize_maps),
        "rollouts": rollouts,
    }


def _list_media(row: Row, question: str) -> list[dict[str, Any]]:
    """Return the recorded media of a group; older versions wrote their paths alone."""
    kinds = ["video" if part.startswith("video>") else "image" for part in question.split("<")[1:]]
    media = []
    for number, medium in enumerate(as_list(row.get("media"))):
        if isinstance(medium, str):
            kind = kinds[number] if number < len(kinds) else "image"
            media.append({"kind": kind, "path": medium})
        else:
            media.append(dict(as_mapping(medium)))
    return media


def _build_rollout(
    line: int,
    row: Row,
    media: Sequence[Mapping[str, Any]],
    resize_maps: Sequence[ResizeMap | None],
    context: StepContext,
) -> dict[str, Any]:
    response = _text(row, "response")
    positions = utf16_positions(response)
    selection = as_mapping(row.get("selection"))
    answer = row.get("answer_text")
    terms = {}
    for name, term in as_mapping(row.get("terms")).items():
        kept = {key: as_mapping(term).get(key) for key in _TERM_KEYS}
        terms[name] = kept | {"reason": _optional_text(kept, "reason")}
    return {
        "rollout": row.get("rollout"),
        "response": response,
        "segments": _build_segments(row, response, positions, media, resize_maps, context),
        "thinking": _find(response, row.get("thinking"), positions, last=False),
        "answer": answer if isinstance(answer, str) else format_value(row.get("answer")),
        # The last place: a forced second look repeats the first answer, and replaces it.
        "answer_chars": _find(response, answer, positions, last=True),
        "marks": _marks(row, "answer", row.get("frame"), resize_maps) if "answer_type" in row else [],
        "finish": _optional_text(row, "finish"),
        "tokens_n": row.get("tokens", _count_tokens(row)),
        "total": row.get("total"),
        "advantage": row.get("advantage"),
        "trained": selection.get("status") in _TRAINED,
        "selection": selection,
        "age": selection.get("staleness"),
        "parent": row.get("parent"),
        "is_correct": row.get("is_correct"),
        "first_correct": row.get("first_correct"),
        "terms": terms,
        # Older versions called it `skipped`.
        "dropped": row.get("dropped", row.get("skipped")),
        "same_text_as": None,
        "same_answer_as": None,
        "tokens": None if context.tokens is None else context.tokens.get(line, positions),
    }


def _build_segments(
    row: Row,
    response: str,
    positions: Sequence[int] | None,
    media: Sequence[Mapping[str, Any]],
    resize_maps: Sequence[ResizeMap | None],
    context: StepContext,
) -> list[dict[str, Any]]:
    segments, end = [], 0
    for segment in map(as_mapping, as_list(row.get("segments"))):
        # Older versions wrote no places; all text is then in the first segment.
        start, end = map(int, segment.get("chars") or (end, len(response)))
        shows = segment.get("shows")
        if isinstance(shows, str):
            kind = "image" if "at" in segment else "video"
            shows = {**segment, "kind": kind, "path": shows, "timestamp": segment.get("at")}
        crop = None
        if shows and media and shows.get("path") == media[0].get("path"):
            crop = crop_fractions(shows.get("crop"), resize_maps[0])
        segments.append(
            {
                "author": segment.get("author"),
                "chars": [_position(start, positions), _position(end, positions)],
                "version": segment.get("version"),
                "shows": context.describe_medium(shows) if shows else None,
                "crop": crop,
                "n": segment.get("n"),
            }
        )
    return segments


def _marks(row: Row, key: str, frame: object, resize_maps: Sequence[ResizeMap | None]) -> list[dict[str, Any]]:
    medium = row.get("media_index", 0)
    if not isinstance(medium, int) or not 0 <= medium < len(resize_maps):
        return []
    system = frame if isinstance(frame, str) else None
    return make_marks(str(row.get("answer_type")), row.get(key), system, medium, resize_maps[medium])


def _mark_duplicates(rollouts: Sequence[dict[str, Any]]) -> None:
    """Note at each rollout the first sibling with the same text, and the first with the same answer."""
    for key, source in (("same_text_as", "response"), ("same_answer_as", "answer")):
        seen: dict[str, Any] = {}
        for rollout in sorted(rollouts, key=_rollout_number):
            value = rollout[source]
            if value is None:
                continue
            first = seen.setdefault(value, rollout["rollout"])
            rollout[key] = None if first == rollout["rollout"] else first


def _rollout_number(rollout: Mapping[str, Any]) -> int:
    number = rollout["rollout"]
    return number if isinstance(number, int) else -1


def _count_tokens(row: Row) -> int | None:
    counts = [as_mapping(segment).get("n") for segment in as_list(row.get("segments"))]
    return sum(count for count in counts if isinstance(count, int)) if counts else None


def _find(text: str, part: object, positions: Sequence[int] | None, *, last: bool) -> list[int] | None:
    """Return first character and end of `part` in `text`, in UTF-16 units; None if it is not there."""
    if not isinstance(part, str) or not part:
        return None
    start = text.rfind(part) if last else text.find(part)
    return None if start < 0 else [_position(start, positions), _position(start + len(part), positions)]


def _position(index: int, positions: Sequence[int] | None) -> int:
    return index if positions is None else positions[max(0, min(index, len(positions) - 1))]


def _optional_text(row: Row, key: str) -> str | None:
    value = row.get(key)
    return value if isinstance(value, str) else None


def _text(row: Row, key: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise TypeError(f"{key} is not text")
    return value
