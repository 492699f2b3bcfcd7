"""Rewards for the actions of an agent on a screen: what to do, where, and with which arguments.

Arguments count only where the action is the right one, so that a click earns nothing for the text it does not type.
What the target does not say is not asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from math import hypot
from typing import Annotated, Final, Literal

from pydantic import Field

from mmrl.answer import COORDINATE_KEYS
from mmrl.types import Action, AnswerType, ResizeMap, Response, RewardValue, Sample, Unscorable
from mmrl_rewards import geometry
from mmrl_rewards.contract import reward, target_value

Share = Annotated[float, Field(gt=0.0, le=1.0)]
_CLICK_RADIUS: Final = 0.14
_ACTION_NAME_TOLERANCE: Final = {"whole picture": 1.0}
"""Clicking is the right action for a target that is a click."""
_NAME_SEPARATORS: Final = re.compile(r"[\s_-]+")


@reward(name="action", answer_types=(AnswerType.ACTION,), attack_tolerance=_ACTION_NAME_TOLERANCE)
def action(response: Response, sample: Sample) -> RewardValue:
    """1 if the action's name is the target's, else 0; case and the gap in open_app, open-app and "open app" aside.

    Source: the action type reward of UI-R1 (arXiv:2503.21620). Departures: none.

    Raises:
        Unscorable: the target is no action, or has no frame.
    """
    target = target_value(sample, AnswerType.ACTION)
    answer = response.answer.value
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    return RewardValue(float(_same_action(answer, target)), f"{answer.name!r:.40}, expected {target.name!r:.40}")


@reward(name="click", answer_types=(AnswerType.ACTION,))
def click(
    response: Response, sample: Sample, *, column: str | None = None, radius: Share = _CLICK_RADIUS
) -> RewardValue:
    """1 if the action is right and every coordinate of the target is hit, else 0.

    `coordinate` is hit inside the box in `sample.meta[column]`, edges included, which is in the target's frame. Without
    a column, and for any other coordinate, it is hit where dx^2 + dy^2 <= radius^2, in fractions of width and height.
    Source: the coordinate reward of UI-R1 (arXiv:2503.21620) for boxes; for points the 14 % of Android in the Wild
    (arXiv:2307.10088). Departures: an action that points nowhere earns 1 only if it is the right one.

    Raises:
        Unscorable: the target is no action, has no frame or no medium, or the column holds no box.
    """
    target = target_value(sample, AnswerType.ACTION)
    screen = _ClickTarget(response, sample, column=column, radius=radius)
    answer = response.answer.value
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    keys = [key for key in COORDINATE_KEYS if key in target.arguments]
    return _score_action(answer, target, (screen.miss_reason(key, answer, target) for key in keys))


@reward(
    name="argument", answer_types=(AnswerType.ACTION,), attack_tolerance=_ACTION_NAME_TOLERANCE
)  # lint's click has no text
def argument(
    response: Response, sample: Sample, *, name: str = "text", measure: Literal["exact", "f1"] = "exact"
) -> RewardValue:
    """1 if the action and its argument `name` are right, such as the text to type or the `direction` to scroll, else 0.

    Texts are equal after case folding and collapsing white space; `f1` gives 2PR / (P + R) over their words instead.
    An argument that the target lacks is right. Source: GUI-R1 (arXiv:2504.10458) for the direction and the text.
    Departures: the F1 itself, without its threshold of 0.5.

    Raises:
        Unscorable: the target is no action, or has no frame.
    """
    target = target_value(sample, AnswerType.ACTION)
    answer = response.answer.value
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    wanted, given = target.arguments.get(name), answer.arguments.get(name)
    if not _same_action(answer, target) or wanted is None or measure == "exact" or not isinstance(wanted, str):
        return _score_action(answer, target, [_argument_mismatch(name, given, wanted)] if wanted is not None else [])
    f1 = _word_f1(given, wanted) if isinstance(given, str) else 0.0
    return RewardValue(f1, f"F1 {f1:.2f} of {name!r:.40}: {given!r:.40}, expected {wanted!r:.40}")


@reward(name="step", answer_types=(AnswerType.ACTION,))
def step(
    response: Response,
    sample: Sample,
    *,
    column: str | None = None,
    radius: Share = _CLICK_RADIUS,
    text_f1: Share | None = None,
) -> RewardValue:
    """1 if the action and all arguments of the target are right, else 0: the success of one step.

    Coordinates are judged as in `click`, all else as in `argument`; with `text_f1`, that F1 is enough for a text of
    several words. Arguments that the target lacks are ignored. Source: the step accuracy of AndroidControl
    (arXiv:2406.03679); the F1, with 0.5, GUI-R1 (arXiv:2504.10458). Departures: no action stands for another, as
    opening an app for clicking on it does there.

    Raises:
        Unscorable: the target is no action, has no frame or no medium, or the column holds no box.
    """
    target = target_value(sample, AnswerType.ACTION)
    screen = _ClickTarget(response, sample, column=column, radius=radius)
    answer = response.answer.value
    if answer is None:
        return RewardValue(0.0, response.answer.problems[0])
    return _score_action(
        answer,
        target,
        (
            screen.miss_reason(key, answer, target)
            if key in COORDINATE_KEYS
            else _argument_mismatch(key, answer.arguments.get(key), wanted, text_f1)
            for key, wanted in target.arguments.items()
        ),
    )


class _ClickTarget:
    """Where coordinates count as hit."""

    def __init__(self, response: Response, sample: Sample, *, column: str | None, radius: float) -> None:
        """Return the coordinate system of the box.

        Raises:
            Unscorable: the sample does not name it.
        """
        self._resize: ResizeMap = geometry.resize_map(response, sample)
        self._answer_system, self._target_system = response.coordinate_system, geometry.target_coordinate_system(sample)
        self._box = None if column is None else self._read_box(sample, column)
        self._radius = radius

    def _read_box(self, sample: Sample, column: str) -> tuple[float, ...] | None:
        """Return the box to click in px_original, or None for an action without a place."""
        if "coordinate" not in target_value(sample, AnswerType.ACTION).arguments:
            return None
        try:
            return geometry.to_pixels(self._resize, geometry.parse_box(sample.meta.get(column)), self._target_system)
        except ValueError as error:
            raise Unscorable(f"the column {column!r}: {error}") from error

    def miss_reason(self, key: str, answer: Action, target: Action) -> str:
        """Why the answer's coordinate is not the target's; empty if it is."""
        if key not in answer.arguments:
            return f"no {key!r}"
        given = geometry.to_pixels(self._resize, answer.arguments[key], self._answer_system)
        wanted = geometry.to_pixels(self._resize, target.arguments[key], self._target_system)
        if key == "coordinate" and self._box is not None:
            x1, y1, x2, y2 = self._box
            hit = x1 <= given[0] <= x2 and y1 <= given[1] <= y2
            return (
                ""
                if hit
                else f"{geometry.format_coordinates(given)} not in {geometry.format_coordinates(self._box)} px_original"
            )
        width, height = self._resize.original
        corners = zip(given[::2], given[1::2], wanted[::2], wanted[1::2], strict=True)
        far = max(hypot((x - u) / width, (y - v) / height) for x, y, u, v in corners)
        off = f"{geometry.format_coordinates(given)} is {far:.2f} off {geometry.format_coordinates(wanted)} px_original"
        return "" if far <= self._radius else off


def _score_action(answer: Action, target: Action, miss_reasons: Iterator[str] | list[str]) -> RewardValue:
    """1 for the right action of which nothing misses."""
    if not _same_action(answer, target):
        return RewardValue(0.0, f"action {answer.name!r:.40}, expected {target.name!r:.40}")
    missed = next(filter(None, miss_reasons), "")
    return RewardValue(float(not missed), missed or f"{target.name!r:.40} as expected")


def _same_action(a: Action, b: Action) -> bool:
    return _NAME_SEPARATORS.sub(" ", a.name.strip().casefold()) == _NAME_SEPARATORS.sub(" ", b.name.strip().casefold())


def _argument_mismatch(name: str, answer: object, target: object, text_f1: float | None = None) -> str:
    """How an argument is not what it should be; empty if it is."""
    if isinstance(answer, str) and isinstance(target, str):
        same = _words(answer) == _words(target) or (text_f1 is not None and _word_f1(answer, target) >= text_f1)
    else:
        same = answer == target and isinstance(answer, bool) == isinstance(target, bool)
    return "" if same else f"{name!r:.40} is {answer!r:.40}, expected {target!r:.40}"


def _word_f1(answer: str, target: str) -> float:
    a, b = Counter(_words(answer)), Counter(_words(target))
    return 2 * (a & b).total() / (a.total() + b.total()) if a or b else 1.0


def _words(text: str) -> list[str]:
    return text.casefold().split()
