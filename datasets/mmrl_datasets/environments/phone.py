"""A drawn phone: a home screen, a list of settings that scrolls, and a note; the task is given in words.

An action is written as the answers of type `action`: {"action": "click", "coordinate": [x, y]}, or is a call with that
name and these arguments. Names are as in `mmrl_rewards.gui`:

    click, tap   coordinate: what lies there is opened, or switched
    scroll       direction: "down" shows what lies below, "up" what lies above
    swipe        direction of the finger: "up" shows what lies below
    type         text: replaces what the open note says
    back, home   leave an app
    finish       ends the episode; the reward is 1 if the task is done and nothing else has changed, 0 otherwise

Pictures have a size that the processors of all families keep: multiples of 28 and 32 with an even `scale`. So the
pixels of the resized picture, in which Qwen2.5-VL writes coordinates, are those of the picture itself (`px_original`).

Source: after the tasks of Mobile-R1 (arXiv:2506.20332). Departures: four apps that a program draws.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from mmrl.answer import parse_answer_value, validate_value
from mmrl.types import Action, AnswerType, Environment, Observation, Sample, StepResult
from mmrl_datasets.media_files import encode_png

APPS: Final = ("Settings", "Notes", "Clock", "Mail")
SWITCHES: Final = ("Wi-Fi", "Bluetooth", "Sound", "Location", "Dark mode", "Alarm")
WORDS: Final = ("milk", "bread", "tea", "soap", "rice", "salt")
WIDTH, HEIGHT = 112, 224  # at scale 1
_VISIBLE: Final = 4  # switches on the screen at a time
_PAPER, _INK, _BOX, _ON = (250, 250, 250), (20, 20, 20), (205, 215, 235), (40, 170, 80)
_ACTION_FORM: Final = 'Answer with an action, such as {"action": "click", "coordinate": [x, y]}.'

Box = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _State:
    """What the phone shows and has stored."""

    app: str  # empty on the home screen
    first_row: int  # number of the switch at the top of the list
    note: str
    on: frozenset[str]  # names of the switches that are on


@dataclass(kw_only=True)
class Phone(Environment):
    """An episode on a phone. The module says which actions there are.

    Options:
        scale: pixels of the picture for each of the 112 x 224 that are drawn.
        coordinates: the system in which the model writes coordinates: px_original for Qwen2.5-VL, else norm_1000.
    """

    scale: Annotated[int, Field(ge=1, le=16)] = 2
    coordinates: Literal["px_original", "norm_1000"] = "px_original"

    def reset(self, sample: Sample, seed: int) -> Observation:
        """Show the home screen, with the task of a seed."""
        rng = np.random.default_rng(seed)
        self.apps = [APPS[index] for index in rng.permutation(len(APPS))]
        self.switches = [SWITCHES[index] for index in rng.permutation(len(SWITCHES))]
        self.now = _State("", 0, "", frozenset(name for name in SWITCHES if rng.random() < 0.5))
        if rng.random() < 1 / 3:
            self.wanted = replace(self.now, note=WORDS[rng.integers(len(WORDS))])
            task = f"Open Notes and type '{self.wanted.note}'."
        else:
            name = SWITCHES[rng.integers(len(SWITCHES))]
            self.wanted = replace(self.now, on=self.now.on ^ {name})
            task = f"Turn {'off' if name in self.now.on else 'on'} {name}."
        return self._observe(f"{task} What is the next action?")

    def step(self, action: str | Action) -> StepResult:
        """Take an action, unless it is not one of the phone's."""
        try:
            read: Any = parse_answer_value if isinstance(action, str) else validate_value
            taken: Action = read(AnswerType.ACTION, action)
            name = re.sub(r"[\s_-]+", " ", taken.name.strip().casefold())
            if name == "finish":
                done = float(self._is_done())
                return StepResult(reward=done, terminated=True, info={"success": done})
            self.now = self._act(name, taken.arguments)
        except ValueError as error:
            return StepResult(observation=self._observe(f"{error}. {_ACTION_FORM}"), valid=False, info={"success": 0.0})
        return StepResult(observation=self._observe(""), info={"success": 0.0})

    def expert(self) -> str:
        """Return the next action of a shortest solution."""
        changed = sorted(self.now.on ^ self.wanted.on)
        app = "Settings" if changed else "Notes"
        name = changed[0] if changed and self.now.app else app
        if self._is_done():
            action: dict[str, Any] = {"action": "finish"}
        elif self.now.app not in ("", app):
            action = {"action": "back"}
        elif self.now.app == "Notes":
            action = {"action": "type", "text": self.wanted.note}
        elif name in self._boxes():
            x1, y1, x2, y2 = self._boxes()[name]
            x_units, y_units = self._units()
            center = [round((x1 + x2) / 2 * x_units), round((y1 + y2) / 2 * y_units)]
            action = {"action": "click", "coordinate": center}
        else:
            is_above = name in self.switches[: self.now.first_row]
            action = {"action": "scroll", "direction": "up" if is_above else "down"}
        return json.dumps(action)

    def _units(self) -> tuple[float, float]:
        """Return the units of action coordinates per pixel, for x and y."""
        if self.coordinates == "px_original":
            return 1.0, 1.0
        return 1000 / (WIDTH * self.scale), 1000 / (HEIGHT * self.scale)

    def _act(self, name: str, arguments: Mapping[str, Any]) -> _State:
        """Return the state after an action; raises ValueError if there is no such action."""
        now, direction, text = self.now, arguments.get("direction"), arguments.get("text")
        match name:
            case "click" | "tap" if "coordinate" in arguments:
                x_units, y_units = self._units()
                x, y = arguments["coordinate"][0] / x_units, arguments["coordinate"][1] / y_units
                for hit, (x1, y1, x2, y2) in self._boxes().items():
                    if x1 <= x < x2 and y1 <= y < y2:
                        return replace(now, app=hit) if hit in APPS else replace(now, on=now.on ^ {hit})
                return now
            case "scroll" | "swipe" if direction in ("up", "down", "left", "right"):
                shows_below = "down" if name == "scroll" else "up"
                rows = {"left": 0, "right": 0, shows_below: 2}.get(direction, -2)
                most = len(SWITCHES) - _VISIBLE if now.app == "Settings" else 0
                return replace(now, first_row=min(max(now.first_row + rows, 0), most))
            case "type" if isinstance(text, str):
                return replace(now, note=text.strip()) if now.app == "Notes" else now
            case "back" | "home":
                return replace(now, app="", first_row=0)
        raise ValueError(f"{name[:40]!r} with these arguments is not an action")

    def _boxes(self) -> dict[str, Box]:
        """Return the boxes that can be clicked now, by name, in pixels of the picture."""
        boxes: dict[str, Box] = {}
        if not self.now.app:
            for number, name in enumerate(self.apps):
                left, top = 4 + 54 * (number % 2), 40 + 64 * (number // 2)
                boxes[name] = self._box(left, top, left + 50, top + 48)
        elif self.now.app == "Settings":
            for number, name in enumerate(self.switches[self.now.first_row :][:_VISIBLE]):
                boxes[name] = self._box(4, 36 + 36 * number, WIDTH - 4, 64 + 36 * number)
        return boxes

    def _box(self, x1: int, y1: int, x2: int, y2: int) -> Box:
        return x1 * self.scale, y1 * self.scale, x2 * self.scale, y2 * self.scale

    def _is_done(self) -> bool:
        return self.now.note.casefold() == self.wanted.note and self.now.on == self.wanted.on

    def _observe(self, text: str) -> Observation:
        scale, now = self.scale, self.now
        picture = Image.new("RGB", (WIDTH * scale, HEIGHT * scale), _PAPER)
        draw = ImageDraw.Draw(picture)
        font = ImageFont.load_default(size=9 * scale)
        draw.text((6 * scale, 8 * scale), now.app or "Home", fill=_INK, font=font)
        for name, (x1, y1, x2, y2) in self._boxes().items():
            draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=_BOX)
            draw.text((x1 + 4 * scale, y1 + 8 * scale), name, fill=_INK, font=font)
            if name in SWITCHES:
                knob = (x2 - 20 * scale, y1 + 8 * scale, x2 - 6 * scale, y2 - 8 * scale)
                draw.rectangle(knob, fill=_ON if name in now.on else _PAPER, outline=_INK)
        if now.app == "Notes":
            draw.rectangle((4 * scale, 36 * scale, (WIDTH - 4) * scale - 1, 120 * scale), outline=_INK)
            draw.text((8 * scale, 42 * scale), now.note[:200], fill=_INK, font=font)
        state = json.dumps([now.app, now.first_row, now.note, sorted(now.on)])
        return Observation(text=text, media=(encode_png(picture),), state=state)


make = Phone
