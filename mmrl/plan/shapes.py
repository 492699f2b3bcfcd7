"""The shapes of a model, without its weights: from its own config.json, or from the shapes that come with mmrl."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmrl.config.schema import ModelConfig
from mmrl.policy.families import FAMILIES, Grid, ModelFamily
from mmrl.policy.tiny_models import make_model, train_tokenizer
from mmrl.types import UserError
from mmrl.utils.model_files import check_model_type

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODELS = Path(__file__).with_name("models")
_VARIANTS = ("", "-instruct", "-thinking", "-base")  # they differ in weights, not in shapes


class ModelShapes(NamedTuple):
    """A family and the sizes of one of its models."""

    family: ModelFamily
    config: Any  # transformers' config, which gives its attributes no type
    note: str = ""  # names the model whose shapes are assumed, if any

    @property
    def num_recurrent_layers(self) -> int:
        """Language blocks that keep a state in place of keys and values."""
        return int((getattr(self.config.text_config, "layer_types", None) or []).count("linear_attention"))

    def cache_bytes(self, width: int) -> tuple[float, float]:
        """Return the bytes that a token's keys and values take, of `width` bytes a number, and a row's states."""
        text, recurrent = self.config.text_config, self.num_recurrent_layers
        channels = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        keys = 2.0 * width * (text.num_hidden_layers - recurrent) * text.num_key_value_heads * channels
        if not recurrent:
            return keys, 0.0
        state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim
        return keys, 4.0 * recurrent * state

    def image_tokens(self, grids: Sequence[Grid]) -> int:
        """Return how many tokens of a prompt stand for images of these grids."""
        return sum(map(prod, grids)) // int(self.config.vision_config.spatial_merge_size) ** 2

    def trim(self, *, language: int, vision: int) -> ModelShapes:
        """Return the same shapes with so many language blocks and vision blocks, of the same kinds."""
        config = copy.deepcopy(self.config)
        text, tower = config.text_config, config.vision_config
        text.num_hidden_layers = language
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:language]
        if vision < tower.depth:
            # One block keeps full attention, because `measure` counts it apart from window attention.
            if getattr(tower, "fullatt_block_indexes", None):
                tower.fullatt_block_indexes = [0]
            if getattr(tower, "deepstack_visual_indexes", None):
                tower.deepstack_visual_indexes = list(range(len(tower.deepstack_visual_indexes)))
        tower.depth = vision
        return ModelShapes(self.family, config)

    def build(self, dtype: str, device: str = "meta") -> PreTrainedModel:
        """Return a model of these shapes; on torch's `meta` device it takes no memory."""
        with torch.device(device):
            # A copy: a policy notes its attention in the config of its model.
            model: PreTrainedModel = self.family.model_class(copy.deepcopy(self.config))
        return model.to(getattr(torch, dtype))


def shipped_models() -> list[str]:
    """Return the names of the models whose shapes come with mmrl."""
    return sorted(file.name.removesuffix(".json") for file in _MODELS.glob("*.json"))


def read_shapes(model: ModelConfig) -> ModelShapes:
    """Return the shapes of the model that a config trains.

    Raises:
        UserError: there are no shapes of this model, or its type is not one that mmrl trains.
    """
    if model.from_scratch is not None:
        # The real vocabulary depends on the text of the data; its largest size is planned for.
        vocab_size = model.from_scratch.language.vocab_size
        with torch.device("meta"):
            config = make_model(model.from_scratch, train_tokenizer(["words"], vocab_size), seed=0).config
        config.text_config.vocab_size = vocab_size
        return ModelShapes(FAMILIES[model.from_scratch.family], config)
    path, known, note = Path(str(model.path)), shipped_models(), ""
    file = path / "config.json"
    shipped = [each for each in known if each in path.name.lower()]
    if path.is_dir():
        check_model_type(str(path), None)
    elif shipped:
        match = max(shipped, key=len)  # the longest, because some names are the beginning of others
        file = _MODELS / f"{match}.json"
        if path.name.lower().removeprefix(match) not in _VARIANTS:
            note = f"assumed: {path} has the shapes of {match}, which its name contains"
    else:
        raise UserError(
            f"model.path: {str(path)!r} has no config.json, and names none of the models whose shapes come with mmrl "
            f"({', '.join(known)}); name one of the same shapes, as --model Qwen/Qwen2.5-VL-3B-Instruct"
        )
    sizes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if sizes["model_type"] not in FAMILIES:
        families = ", ".join(FAMILIES)
        raise UserError(f"model.path: {file} describes a {sizes['model_type']!r} model; there are plans for {families}")
    family = FAMILIES[sizes["model_type"]]
    return ModelShapes(family, family.model_class.config_class(**sizes), note)
