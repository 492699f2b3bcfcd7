"""Differences between two configs, and the settings that may change when a run is resumed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pydantic import BaseModel

from mmrl.config.load import flatten_settings
from mmrl.config.schema import Config
from mmrl.config.schema.base import NO_EFFECT, ChangeableOnResume, models_in
from mmrl.config.yaml_tree import PlainValue
from mmrl.utils.plugins import IN_MEMORY_PACKAGE

_LENGTHENED = "the run is lengthened"
# Sections of a stage that may decay over its steps, with the key of the curve.
_DECAYS: Final = (
    ("optimizer", "lr_schedule"),
    ("loss.kl", "schedule"),
    ("loss.entropy", "schedule"),
    ("loss.sft_loss", "schedule"),
)
_IN_MEMORY_ROWS_EFFECT = "its rows are compared with those that the run began with"
_MISSING: Final = object()


class SettingChange(NamedTuple):
    """A setting that differs between two configs."""

    key: str  # dotted path
    old: str  # old value as JSON, or "absent"
    new: str  # new value as JSON, or "absent"
    effect: str | None  # effect on a resumed run; None if the run cannot be resumed with the new value
    obstacle: str = ""  # why the number of steps cannot change; empty for other settings

    def __str__(self) -> str:
        """Return "key: old -> new", and the obstacle if there is one."""
        return f"{self.key}: {self.old} -> {self.new}" + (f" ({self.obstacle})" if self.obstacle else "")

    @property
    def lengthened_stage(self) -> int | None:
        """Index of the stage that the change gives more steps; None for any other change."""
        return int(self.key.split(".")[1]) if self.effect == _LENGTHENED else None


def diff_configs(old_settings: Mapping[str, PlainValue], new_config: Config) -> Sequence[SettingChange]:
    """Return every setting in which a config differs from older settings, in the order of the file."""
    new_settings = flatten_settings(new_config.model_dump(mode="json"))
    changes = []
    for key in {**old_settings, **new_settings}:
        if old_settings.get(key, _MISSING) != new_settings.get(key, _MISSING):
            changes.append(_make_change(key, old_settings, new_settings))
    return changes


def _make_change(key: str, old: Mapping[str, PlainValue], new: Mapping[str, PlainValue]) -> SettingChange:
    """Return the change of a setting that differs, with its effect on a resumed run."""
    values = _format_setting(old, key), _format_setting(new, key)
    if re.fullmatch(r"stages\.\d+\.steps", key):
        obstacle = _find_obstacle(key, old, new)
        return SettingChange(key, *values, None if obstacle else _LENGTHENED, obstacle)
    section, _, name = key.rpartition(".")
    if name == "decay_steps" and not _moves_decay(section, old, new):
        return SettingChange(key, *values, NO_EFFECT.effect)
    is_source = re.fullmatch(r"data\.\w+\.\d+\.fn", key) is not None
    if is_source and all(value.startswith(f'"{IN_MEMORY_PACKAGE}.') for value in values):
        return SettingChange(key, *values, _IN_MEMORY_ROWS_EFFECT)
    return SettingChange(key, *values, _find_effect(key))


def _find_effect(key: str) -> str | None:
    """Return the effect of a new value on a resumed run: that of the key, or of a section around it, in the schema."""
    models: Sequence[type[BaseModel]] = (Config,)
    for word in key.split("."):
        if word.isdecimal():  # an entry of a list, whose section is known already
            continue
        fields = [model.model_fields[word] for model in models if word in model.model_fields]
        models = []
        for field in fields:
            for note in field.metadata:
                if isinstance(note, ChangeableOnResume):
                    return note.effect
            models += models_in(field.annotation)
    return None


def _find_obstacle(key: str, old: Mapping[str, PlainValue], new: Mapping[str, PlainValue]) -> str:
    """Return why a run cannot continue with another number of steps of a stage; empty if it can."""
    before, now = old.get(key), new.get(key)
    if not isinstance(before, int) or not isinstance(now, int):
        return "only one number of steps can become another"
    if now < before:
        return "a run can be lengthened, not shortened"
    stage = key.removesuffix(".steps")
    for section, curve in _DECAYS:
        place = f"{stage}.{section}"
        if new.get(f"{place}.{curve}", "constant") != "constant" and _moves_decay(place, old, new):
            return (
                f"{section}.{curve} would decay over {now} steps; with {place}.decay_steps={before} it ends as it did"
            )
    return ""


def _moves_decay(place: str, old: Mapping[str, PlainValue], new: Mapping[str, PlainValue]) -> bool:
    """Return True if the schedule at a dotted path ends at another step than before."""
    stage = ".".join(place.split(".")[:2])
    old_end = old.get(f"{place}.decay_steps") or old.get(f"{stage}.steps")
    new_end = new.get(f"{place}.decay_steps") or new.get(f"{stage}.steps")
    return old_end != new_end


def _format_setting(settings: Mapping[str, PlainValue], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "absent"
