"""Rewards for the actions of an agent on a screen: the action's name, its coordinates and its other arguments.

An action is written as in `AnswerType`, or as the call of a tool that acts: {"name": .., "arguments": {"action": ..}}.
Arguments count only if the action's name is correct, so a click earns nothing towards a target that types text.
Arguments that the target lacks are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import hypot
from typing import Final, Literal

from mmrl.answer import COORDINATE_KEYS
from mmrl.types import Action, AnswerType, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import answer_value, reward, target_value

_CLICK_RADIUS: Final = 0.14  # fraction of width and height, from Android in the Wild
# The attack clicks the middle of the screen, so its action name is correct if the target is a click.
_ACTION_NAME_TOLERANCE: Final = {"whole picture": 1.0}
_NAME_SEPARATORS: Final = re.compile(r"[\s_-]+")


@reward(name="action", answer_types=(AnswerType.ACTION,), attack_tolerance=_ACTION_NAME_TOLERANCE)
def action(response: Response, sample: Sample) -> RewardValue:
    """Return 1 if the action's name is the target's, else 0.

    Names are compared without case, and open_app, open-app and "open app" are equal.

    Source: the action type reward of UI-R1 (arXiv:2503.21620). Departures: none.
    Unscorable: the target is not an action or has no coordinate system.
    """
    target = target_value(sample, AnswerType.ACTION)
    answer = answer_value(response)
    return RewardValue(float(_same_action(answer, target)), f"{answer.name!r:.40}, expected {target.name!r:.40}")


@reward(name="click", answer_types=(AnswerType.ACTION,))
def click(
    response: Response, sample: Sample, *, column: str | None = None, radius: geometry.Share = _CLICK_RADIUS
) -> RewardValue:
    """Return 1 if the action's name is correct and every coordinate of the target is hit, else 0.

    If `column` is given, `coordinate` must lie in the box in `sample.meta[column]`, edges included, in the target's
    coordinate system. Without a column, where it holds a point, and for every other coordinate, dx^2 + dy^2 <= radius^2
    must hold, where dx and dy are fractions of the image's width and height.

    Source: the coordinate reward of UI-R1 (arXiv:2503.21620) for boxes; for points the 14 % of Android in the Wild
    (arXiv:2307.10088).
    Departures: an action without coordinates earns 1 only if its name is correct.
    Unscorable: the target is not an action or has no coordinate system, its image or video does not exist, or the
    column holds neither a box nor a point.
    """
    target = target_value(sample, AnswerType.ACTION)
    target_box = _read_target_box(response, sample, column)
    answer = answer_value(response)
    keys = [key for key in COORDINATE_KEYS if key in target.arguments]
    misses = [_miss_reason(response, sample, key, target.arguments[key], target_box, radius) for key in keys]
    return _score_action(answer, target, misses)


# The lint attack that clicks has no text, so it matches a target without the argument.
@reward(name="argument", answer_types=(AnswerType.ACTION,), attack_tolerance=_ACTION_NAME_TOLERANCE)
def argument(
    response: Response, sample: Sample, *, name: str = "text", measure: Literal["exact", "f1"] = "exact"
) -> RewardValue:
    """Return 1 if the action's name and its argument `name` are correct, else 0.

    The argument is the text to type, for example, or the `direction` to scroll. Texts are equal after case folding and
    collapsing white space. With `measure` f1, the value for a text is 2PR / (P + R) over its words. If the target lacks
    the argument, only the name counts.

    Source: GUI-R1 (arXiv:2504.10458) for the direction and the text.
    Departures: the F1 itself is returned, without the paper's threshold of 0.5.
    Unscorable: the target is not an action or has no coordinate system.
    """
    target = target_value(sample, AnswerType.ACTION)
    answer = answer_value(response)
    expected, given = target.arguments.get(name), answer.arguments.get(name)
    if measure == "f1" and isinstance(expected, str) and _same_action(answer, target):
        f1 = _word_f1(given, expected) if isinstance(given, str) else 0.0
        return RewardValue(f1, f"F1 {f1:.2f} of {name!r:.40}: {given!r:.40}, expected {expected!r:.40}")
    mismatches = [] if expected is None else [_argument_mismatch(name, given, expected)]
    return _score_action(answer, target, mismatches)


@reward(name="step", answer_types=(AnswerType.ACTION,))
def step(
    response: Response,
    sample: Sample,
    *,
    column: str | None = None,
    radius: geometry.Share = _CLICK_RADIUS,
    text_f1: geometry.Share | None = None,
) -> RewardValue:
    """Return 1 if the action's name and all arguments of the target are correct, else 0.

    Coordinates are compared as `click` does, other arguments as `argument` does. With `text_f1`, a text is also correct
    if the F1 of its words reaches that value. Arguments that the target lacks are ignored.

    Source: the step accuracy of AndroidControl (arXiv:2406.03679); the F1, at 0.5, is from GUI-R1 (arXiv:2504.10458).
    Departures: no action replaces another. AndroidControl accepts opening an app in place of a click on its icon.
    Unscorable: the target is not an action or has no coordinate system, its image or video does not exist, or the
    column holds neither a box nor a point.
    """
    target = target_value(sample, AnswerType.ACTION)
    target_box = _read_target_box(response, sample, column)
    answer = answer_value(response)
    mismatches = []
    for key, expected in target.arguments.items():
        if key in COORDINATE_KEYS:
            mismatches.append(_miss_reason(response, sample, key, expected, target_box, radius))
        else:
            mismatches.append(_argument_mismatch(key, answer.arguments.get(key), expected, text_f1))
    return _score_action(answer, target, mismatches)


def _read_target_box(response: Response, sample: Sample, column: str | None) -> tuple[float, ...] | None:
    """Return the box to click in px_original; None without a column or `coordinate`, or if the column holds a point.

    Raises:
        Unscorable: the target's image or video does not exist, or the column holds neither a box nor a point.
    """
    # Looked up for every sample, since converting any coordinate needs it.
    geometry.resize_map(response, sample)
    if column is None or "coordinate" not in target_value(sample, AnswerType.ACTION).arguments:
        return None
    written = sample.meta.get(column)
    if isinstance(written, list | tuple) and len(written) == 2:
        return None
    try:
        return geometry.target_to_pixels(response, sample, geometry.parse_box(written))
    except ValueError as error:
        raise Unscorable(f"the column {column!r}: {error}") from error


def _miss_reason(
    response: Response, sample: Sample, key: str, target: Sequence[float], box: Sequence[float] | None, radius: float
) -> str:
    """Return why the answer's coordinate `key` misses `target`, or for `coordinate` the `box`; "" if it hits."""
    answer: Action = response.answer.value
    if key not in answer.arguments:
        return f"no {key!r}"
    given = geometry.answer_to_pixels(response, sample, answer.arguments[key])
    given_text = geometry.format_coordinates(given)
    if key == "coordinate" and box is not None:
        if geometry.point_in_box(given, box):
            return ""
        return f"{given_text} not in {geometry.format_coordinates(box)} px_original"
    expected = geometry.target_to_pixels(response, sample, target)
    width, height = geometry.resize_map(response, sample).original
    # A point has one corner and a box two. Each must lie within the radius.
    corners = zip(given[::2], given[1::2], expected[::2], expected[1::2], strict=True)
    farthest = max(hypot((x - u) / width, (y - v) / height) for x, y, u, v in corners)
    if farthest <= radius:
        return ""
    return f"{given_text} is {farthest:.2f} off {geometry.format_coordinates(expected)} px_original"


def _score_action(answer: Action, target: Action, mismatches: Sequence[str]) -> RewardValue:
    """Return 1 if the action's name is correct and every mismatch is "", else 0 with the first mismatch as reason."""
    if not _same_action(answer, target):
        return RewardValue(0.0, f"action {answer.name!r:.40}, expected {target.name!r:.40}")
    mismatch = next(filter(None, mismatches), "")
    return RewardValue(float(not mismatch), mismatch or f"{target.name!r:.40} as expected")


def _same_action(a: Action, b: Action) -> bool:
    """Return True if the names are equal apart from case and the separators space, _ and -."""
    return _NAME_SEPARATORS.sub(" ", a.name.strip().casefold()) == _NAME_SEPARATORS.sub(" ", b.name.strip().casefold())


def _argument_mismatch(name: str, answer: object, target: object, text_f1: float | None = None) -> str:
    """Return how an argument differs from the target's, or "" if it is correct."""
    # True == 1 in Python, but they are different arguments.
    same = _fold(answer) == _fold(target) and isinstance(answer, bool) == isinstance(target, bool)
    if text_f1 is not None and isinstance(answer, str) and isinstance(target, str):
        same = same or _word_f1(answer, target) >= text_f1
    return "" if same else f"{name!r:.40} is {answer!r:.40}, expected {target!r:.40}"


def _fold(value: object) -> object:
    """Return a text, or the texts of a list such as keys, in folded case and with white space collapsed."""
    if isinstance(value, list | tuple):
        return [*map(_fold, value)]
    return " ".join(value.casefold().split()) if isinstance(value, str) else value


def _word_f1(answer: str, target: str) -> float:
    """Return the F1 of two texts as multisets of words, in [0, 1]. Two empty texts get 1."""
    answer_words, target_words = Counter(answer.casefold().split()), Counter(target.casefold().split())
    if not (answer_words or target_words):
        return 1.0
    return 2 * (answer_words & target_words).total() / (answer_words.total() + target_words.total())
