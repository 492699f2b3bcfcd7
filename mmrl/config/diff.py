"""Differences between two configs, and the settings that may change when a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from mmrl.config.load import flatten_settings
from mmrl.config.schema import Config
from mmrl.config.yaml_tree import PlainValue

_NO_EFFECT = "no result depends on it"
_ROUNDING_EFFECT = "results may differ in the last digits"
# Patterns of dotted paths, with the effect of another value on a resumed run. Any other change makes another run.
CHANGEABLE_ON_RESUME: Final = (
    ("run.dir", _NO_EFFECT),
    ("logging.save_rollouts_every", _NO_EFFECT),
    ("checkpoints.*", _NO_EFFECT),
    ("evaluation.benchmarks*", _NO_EFFECT),
    ("data.media_workers", _NO_EFFECT),
    ("data.media_timeout_s", _NO_EFFECT),
    ("rewards.workers", _NO_EFFECT),
    ("rewards.own_rewards", _NO_EFFECT),
    ("rewards.startup_timeout_s", _NO_EFFECT),
    ("*.worker_limits.*", _NO_EFFECT),
    ("stages.*.max_nonfinite_steps", _NO_EFFECT),
    ("stages.*.max_steps_without_signal", _NO_EFFECT),
    ("stages.*.health.*", _NO_EFFECT),
    ("run.cpu_threads", _ROUNDING_EFFECT),
    ("evaluation.batch_size", _ROUNDING_EFFECT),
    ("model.gradient_checkpointing", _ROUNDING_EFFECT),
    ("model.logits_chunk_tokens", _ROUNDING_EFFECT),
    ("stages.*.micro_batch_sequences", _ROUNDING_EFFECT),
    ("stages.*.micro_batch_groups", _ROUNDING_EFFECT),
    ("stages.*.micro_batch_tokens", _ROUNDING_EFFECT),
)
_MISSING: Final = object()


class SettingChange(NamedTuple):
    """A setting that differs between two configs."""

    key: str  # dotted path
    old: str  # old value as JSON, or "absent"
    new: str  # new value as JSON, or "absent"
    effect: str | None  # effect on a resumed run; None if the run cannot be resumed with the new value

    def __str__(self) -> str:
        """Return "key: old -> new"."""
        return f"{self.key}: {self.old} -> {self.new}"


def diff_configs(old_settings: Mapping[str, PlainValue], new_config: Config) -> Sequence[SettingChange]:
    """Return every setting in which a config differs from older settings, in the order of the file."""
    new_settings = flatten_settings(new_config.model_dump(mode="json"))
    changes = []
    for key in {**old_settings, **new_settings}:
        if old_settings.get(key, _MISSING) != new_settings.get(key, _MISSING):
            old, new = _format_setting(old_settings, key), _format_setting(new_settings, key)
            effect = next((effect for pattern, effect in CHANGEABLE_ON_RESUME if fnmatchcase(key, pattern)), None)
            changes.append(SettingChange(key, old, new, effect))
    return changes


def _format_setting(settings: Mapping[str, PlainValue], key: str) -> str:
    return json.dumps(settings[key], ensure_ascii=False) if key in settings else "absent"
