"""The shapes of a model, without its weights: from its own config.json, or from those that come with mmrl."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config import Config
from mmrl.policy.families import FAMILIES, ModelFamily
from mmrl.policy.tiny_models import make_model, train_tokenizer
from mmrl.types import UserError
from mmrl.utils.model_files import UNSUPPORTED

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_MODELS = files("mmrl.plan").joinpath("models")
_VARIANTS = ("-instruct", "-thinking", "-base")  # they differ in weights, not in shapes


def shipped_models() -> list[str]:
    """Return the names of the models whose shapes come with mmrl."""
    return sorted(entry.name.removesuffix(".json") for entry in _MODELS.iterdir() if entry.name.endswith(".json"))


def read_shapes(config: Config) -> tuple[ModelFamily, PretrainedConfig]:
    """Return the family and the transformers config of the model that a config trains.

    Raises:
        UserError: there are no shapes of this model, or its type is not one that mmrl trains.
    """
    if config.model.from_scratch is not None:
        return _shapes_from_scratch(config)
    path = str(config.model.path)
    if Path(path).is_dir():
        file = Path(path) / "config.json"
        try:
            shapes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"model.path: {file} cannot be read ({error}); restore it") from error
    else:
        shapes = _read_shipped(path)
    model_type = shapes.get("model_type")
    if model_type not in FAMILIES:
        reason = f" ({UNSUPPORTED[model_type]})" if model_type in UNSUPPORTED else ""
        raise UserError(f"model.path: {path!r} is a {model_type!r} model{reason}; a plan knows {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    return family, family.model_class.config_class(**shapes)


def build_meta_model(family: ModelFamily, shapes: PretrainedConfig, dtype: str) -> PreTrainedModel:
    """Return a model without memory: its weights are on torch's `meta` device."""
    with torch.device("meta"):
        # A copy: a policy notes its attention in the config of its model.
        model: PreTrainedModel = family.model_class(copy.deepcopy(shapes))
    return model.to(getattr(torch, dtype))


def _read_shipped(path: str) -> dict[str, Any]:
    name = path.rpartition("/")[2].lower()
    for variant in _VARIANTS:
        name = name.removesuffix(variant)
    file = _MODELS.joinpath(f"{name}.json")
    if not file.is_file():
        raise UserError(
            f"model.path: {path!r} is neither a folder nor one of the models whose shapes come with mmrl "
            f"({', '.join(shipped_models())}); put its config.json into a folder and set model.path to that"
        )
    shapes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    del shapes["source"]
    return shapes


def _shapes_from_scratch(config: Config) -> tuple[ModelFamily, PretrainedConfig]:
    spec = config.model.from_scratch
    assert spec is not None
    # The real vocabulary depends on the text of the data; its largest size is planned for.
    tokenizer = train_tokenizer(["words"], spec.language.vocab_size)
    with torch.device("meta"):
        shapes = make_model(spec, tokenizer, seed=0).config
    shapes.text_config.vocab_size = spec.language.vocab_size
    return FAMILIES[spec.family], shapes
