"""What differs between two configs, and which settings a run that has begun may change."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from mmrl.config.load import settings
from mmrl.config.schema import Config
from mmrl.config.yaml_tree import Plain

_NONE = "no result depends on it"
_ROUNDING = "results may differ in the last digits"
FREE: Final = (  # patterns of dotted paths, and what becomes of a run that goes on with another value
    ("run.dir", _NONE),
    ("run.keep_rollouts_every", _NONE),
    ("checkpoints.*", _NONE),
    ("evaluation.benchmarks*", _NONE),
    ("data.workers", _NONE),
    ("rewards.workers", _NONE),
    ("stages.*.max_bad_steps", _NONE),
    ("stages.*.max_barren_steps", _NONE),
    ("stages.*.health.*", _NONE),
    ("run.threads", _ROUNDING),
    ("evaluation.batch_size", _ROUNDING),
    ("model.gradient_checkpointing", _ROUNDING),
    ("model.logits_chunk", _ROUNDING),
    ("stages.*.micro_batch", _ROUNDING),
    ("stages.*.token_budget", _ROUNDING),
)
_ABSENT: Final = object()


class Change(NamedTuple):
    """A setting with two values; `effect` says what another value does to a run, None that it makes another run."""

    key: str
    old: str
    new: str
    effect: str | None

    def __str__(self) -> str:
        """The setting, from what to what."""
        return f"{self.key}: {self.old} -> {self.new}"


def changes(old: Mapping[str, Plain], new: Config) -> Sequence[Change]:
    """Every setting in which `new` differs from the settings `old`, in the order of the file."""
    here = settings(new.model_dump(mode="json"))
    keys = [key for key in {**old, **here} if old.get(key, _ABSENT) != here.get(key, _ABSENT)]
    return [Change(key, _shown(old, key), _shown(here, key), _effect(key)) for key in keys]


def _effect(key: str) -> str | None:
    return next((effect for pattern, effect in FREE if fnmatchcase(key, pattern)), None)


def _shown(side: Mapping[str, Plain], key: str) -> str:
    return json.dumps(side[key], ensure_ascii=False) if key in side else "absent"
