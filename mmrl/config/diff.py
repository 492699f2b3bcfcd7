"""What differs between two configs, and which settings a run that has begun may change."""

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
CHANGEABLE_ON_RESUME: Final = (  # patterns of dotted paths, and what becomes of a run that goes on with another value
    ("run.dir", _NO_EFFECT),
    ("logging.save_rollouts_every", _NO_EFFECT),
    ("checkpoints.*", _NO_EFFECT),
    ("evaluation.benchmarks*", _NO_EFFECT),
    ("data.media_workers", _NO_EFFECT),
    ("rewards.workers", _NO_EFFECT),
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
    """A setting with two values; `effect` says what another value does to a run, None that it makes another run."""

    key: str
    old: str
    new: str
    effect: str | None

    def __str__(self) -> str:
        """The setting, from what to what."""
        return f"{self.key}: {self.old} -> {self.new}"


def diff_configs(old_settings: Mapping[str, PlainValue], new_config: Config) -> Sequence[SettingChange]:
    """Every setting in which `new` differs from the settings `old`, in the order of the file."""
    here = flatten_settings(new_config.model_dump(mode="json"))
    keys = [key for key in {**old_settings, **here} if old_settings.get(key, _MISSING) != here.get(key, _MISSING)]
    return [
        SettingChange(key, _format_setting(old_settings, key), _format_setting(here, key), _resume_effect(key))
        for key in keys
    ]


def _resume_effect(key: str) -> str | None:
    return next((effect for pattern, effect in CHANGEABLE_ON_RESUME if fnmatchcase(key, pattern)), None)


def _format_setting(side: Mapping[str, PlainValue], key: str) -> str:
    return json.dumps(side[key], ensure_ascii=False) if key in side else "absent"
