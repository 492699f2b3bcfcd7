"""The model families: one file per built-in family, and a function that loads a user's family.

`model.family: {fn: ./mine.py:make}` names a function that returns another `ModelFamily`, like each `make_family` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

from mmrl.policy.families import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe
from mmrl.policy.families.base import FromScratchSupport as FromScratchSupport
from mmrl.policy.families.base import Grid as Grid
from mmrl.policy.families.base import ImageFormat as ImageFormat
from mmrl.policy.families.base import ModelFamily as ModelFamily
from mmrl.policy.families.base import PlaceholderRun as PlaceholderRun
from mmrl.policy.families.base import VideoTimeEncoding as VideoTimeEncoding
from mmrl.policy.families.base import load_family as load_family
from mmrl.utils.torch_cpu_compat import import_torchvision

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_BUILTIN: Mapping[str, Callable[[], ModelFamily]] = {
    "qwen2_vl": qwen2_vl.make_family,
    "qwen2_5_vl": qwen2_5_vl.make_family,
    "qwen3_vl": qwen3_vl.make_family,
    "qwen3_vl_moe": qwen3_vl_moe.make_family,
    "qwen3_5": qwen3_5.make_family,
    "qwen3_5_moe": qwen3_5_moe.make_family,
}


class _BuiltinFamilies(Mapping[str, ModelFamily]):
    """The built-in families by `model_type`. A lookup makes the family, because its class takes seconds to import."""

    def __getitem__(self, model_type: str) -> ModelFamily:
        make_family = _BUILTIN[model_type]
        import_torchvision()
        # Without scikit-learn, which takes seconds to import and only assisted generation uses.
        with patch("transformers.utils.is_sklearn_available", lambda: False):
            from transformers.generation import candidate_generator  # noqa: F401
        return make_family()

    def __iter__(self) -> Iterator[str]:
        return iter(_BUILTIN)

    def __len__(self) -> int:
        return len(_BUILTIN)


FAMILIES: Mapping[str, ModelFamily] = _BuiltinFamilies()


def get_family(config: PretrainedConfig) -> ModelFamily:
    """Return the built-in family of a model, with the positions a second that this model's own config states.

    Raises:
        KeyError: the model is of none of `FAMILIES`.
    """
    family = FAMILIES[config.model_type]
    if family.video_time is not VideoTimeEncoding.SECONDS:
        return family
    return replace(family, tokens_per_second=config.vision_config.tokens_per_second)
