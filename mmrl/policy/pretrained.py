"""Models from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoProcessor, PreTrainedModel, ProcessorMixin

from mmrl.config.schema import Model
from mmrl.policy.families import FAMILIES, Family, family_of
from mmrl.policy.progress_bars import without_bars
from mmrl.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What turns text and media into tokens and patches: a processor and the family it belongs to."""

    family: Family
    processor: ProcessorMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Reader):
    """A model with its reader."""

    model: PreTrainedModel


def load_reader(options: Model) -> Reader:
    """The reader of the model that `options.path` names, with the limits that `options` states.

    Raises:
        UserError: nothing loadable is there, or it is not a Qwen-VL model.
    """
    path = str(options.path)
    with _named(path):
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES:
            raise UserError(f"model.path: {path!r} is a {config.model_type!r} model; mmrl trains {', '.join(FAMILIES)}")
        processor = AutoProcessor.from_pretrained(path)
    processor.image_processor.size = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    return Reader(family=family_of(config), processor=processor)


def load_pretrained(options: Model) -> Loaded:
    """Load the model that `options.path` names, in the type and with the limits that `options` states.

    Raises:
        UserError: as `load_reader`, or weights are missing.
    """
    reader = load_reader(options)
    path = str(options.path)
    with _named(path), without_bars():
        model, found = reader.family.model_class.from_pretrained(
            path,
            dtype=getattr(torch, options.dtype),
            attn_implementation=options.attention,
            output_loading_info=True,
        )
    if absent := sorted(found["missing_keys"]):
        raise UserError(f"model.path: {path!r} lacks {len(absent)} weights, {absent[0]} for one; restore its files")
    return Loaded(family=reader.family, processor=reader.processor, model=model)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Say whose files are at fault."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.path: cannot load {path!r} (neither a model folder nor a hub id): {reason}") from error
