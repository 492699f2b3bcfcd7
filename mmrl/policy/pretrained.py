"""Models from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmrl.config.schema import ModelConfig
from mmrl.policy.families import FAMILIES, ModelFamily, get_family
from mmrl.policy.progress_bars import hide_progress_bars
from mmrl.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorBundle:
    """What turns text and media into tokens and patches: a processor and the family it belongs to."""

    family: ModelFamily
    processor: ProcessorMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle(ProcessorBundle):
    """A model with its reader."""

    model: PreTrainedModel


def load_processor(options: ModelConfig) -> ProcessorBundle:
    """The reader of the model that `options.path` names, with the limits that `options` states.

    Raises:
        UserError: nothing loadable is there, or it is not a Qwen-VL model.
    """
    path = str(options.path)
    with _name_path_in_errors(path):
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES:
            raise UserError(f"model.path: {path!r} is a {config.model_type!r} model; mmrl trains {', '.join(FAMILIES)}")
        processor = AutoProcessor.from_pretrained(path)
    processor.image_processor.size = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    return ProcessorBundle(family=get_family(config), processor=processor)


def load_pretrained(options: ModelConfig) -> ModelBundle:
    """Load the model that `options.path` names, in the type and with the limits that `options` states.

    Raises:
        UserError: as `load_reader`, or weights are missing.
    """
    reader = load_processor(options)
    path = str(options.path)
    with _name_path_in_errors(path), hide_progress_bars():
        model, found = reader.family.model_class.from_pretrained(
            path,
            dtype=getattr(torch, options.dtype),
            attn_implementation=options.attn_implementation,
            output_loading_info=True,
        )
    if absent := sorted(found["missing_keys"]):
        raise UserError(f"model.path: {path!r} lacks {len(absent)} weights, {absent[0]} for one; restore its files")
    return ModelBundle(family=reader.family, processor=reader.processor, model=model)


@contextmanager
def _name_path_in_errors(path: str) -> Iterator[None]:
    """Say whose files are at fault."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: cannot load {path!r} (neither a model folder nor a hub id): {reason}") from error
