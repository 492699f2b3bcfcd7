"""Badges of a rollout on the page: a few words on whether it was trained on, and on anything unusual about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from mmrl.view.records import Row, as_list, as_mapping

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
