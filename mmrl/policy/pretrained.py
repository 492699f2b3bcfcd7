"""Models from a folder or the hub."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmrl.config.schema import Model
from mmrl.policy.families import FAMILIES, Family, family_of
from mmrl.policy.quiet import without_bars
from mmrl.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model with its processor."""

    family: Family
    model: PreTrainedModel
    processor: ProcessorMixin


def load_pretrained(options: Model) -> Loaded:
    """Load the model that `options.path` names, in the type and with the limits that `options` states.

    Raises:
        UserError: nothing loadable is there, weights are missing, or it is not a Qwen-VL model.
    """
    path = str(options.path)
    try:
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES:
            raise UserError(f"model.path: {path!r} is a {config.model_type!r} model; mmrl trains {', '.join(FAMILIES)}")
        family = family_of(config)
        with without_bars():
            model, found = family.model_class.from_pretrained(
                path,
                dtype=getattr(torch, options.dtype),
                attn_implementation=options.attention,
                output_loading_info=True,
            )
        processor = AutoProcessor.from_pretrained(path)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: cannot load {path!r} (neither a model folder nor a hub id): {reason}") from error
    if absent := sorted(found["missing_keys"]):
        raise UserError(f"model.path: {path!r} lacks {len(absent)} weights, {absent[0]} for one; restore its files")
    processor.image_processor.size = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    return Loaded(family=family, model=model, processor=processor)
