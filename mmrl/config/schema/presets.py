"""The names of presets.yaml, and the settings that they stand for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from ruamel.yaml import YAML

AlgorithmName = Literal[
    "grpo",
    "grpo_published",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "stable_reinforce",
    "gdpo",
]
RethinkPreset = Literal["unbiased", "paper"]
ReplayPreset = Literal["default", "paper", "code"]

Presets: TypeAlias = Mapping[str, Mapping[str, Any]]
_TABLES: Final[Mapping[str, Presets]] = YAML(typ="safe", pure=True).load(Path(__file__).with_suffix(".yaml"))
ALGORITHM_PRESETS: Final = _TABLES["algorithm"]
RETHINK_PRESETS: Final = _TABLES["rethink"]
REPLAY_PRESETS: Final = _TABLES["replay"]


def check_preset_applied(preset: str, settings: Mapping[str, Any], given: Collection[str], section: str = "") -> None:
    """Raise ValueError unless every setting of a preset is among the keys that are given.

    `preset` ("algorithm 'dapo'") and `section` ("loss.") name the preset and the place of its keys in the message.
    """
    # Loading a config file fills presets in; a model built in Python from the name alone would keep the defaults.
    missing = settings.keys() - given
    if missing:
        raise ValueError(
            f"{preset} stands for {section}{min(missing)} too, which only loading a config file fills in; set it"
        )
