"""Builds the model, its processor and its encoder from a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from mmrl.algo.seeds import derive_seed
from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.config import Config, EvalConfig
from mmrl.config.schema import (
    EvalGenerationConfig,
    FromScratchConfig,
    RethinkConfig,
    RlStage,
    SftStage,
    ToolsConfig,
)
from mmrl.config.schema import SampleStage as SampleStage
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES, get_family
from mmrl.policy.pretrained import ModelBundle, ProcessorBundle, load_pretrained, load_processor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import Sample, UserError

if TYPE_CHECKING:
    pass


def build_model(config: Config | EvalConfig, load_processor: Callable[[], ProcessorBundle]) -> ModelBundle:
    """The model as it is before training; `read` gives what reads for one made from scratch.

    Raises:
        UserError: `model.path` is not loadable, or `model.scratch` cannot be made.
    """
    options = config.model
    if options.from_scratch is None:
        return load_pretrained(options)
    reader = load_processor()
    model = make_model(
        options.from_scratch,
        reader.processor.tokenizer,
        derive_seed(config.run.seed, "init"),
        dtype=options.dtype,
        attention=options.attn_implementation,
    )
    return ModelBundle(family=get_family(model.config), processor=reader.processor, model=model)


def build_response_format(config: Config | EvalConfig) -> ResponseFormat:
    """How responses are written."""
    options = config.response_format
    return ResponseFormat(
        thinking=options.thinking,
        style=options.style,
        answer_tag=options.answer_tag,
        think_tag=options.think_tag,
        sections=tuple(ResponseSection(**section.model_dump()) for section in options.sections),
        stop_at_answer=options.stop_at_answer,
        stop_strings=options.stop_strings,
    )


def build_processor(config: Config, samples: Iterable[Sample]) -> ProcessorBundle:
    """What reads for the model, without the model; a tokenizer made from scratch learns from the training `samples`.

    Raises:
        UserError: `model.path` has none.
    """
    options = config.model
    if options.from_scratch is None:
        return load_processor(options)
    tokenizer = train_tokenizer(
        _tokenizer_training_texts(config, options.from_scratch, samples), options.from_scratch.language.vocab_size
    )
    processor = make_processor(options.from_scratch, tokenizer, (options.min_pixels, options.max_pixels))
    return ProcessorBundle(family=FAMILIES[options.from_scratch.family], processor=processor)


def build_encoder(
    config: Config | EvalConfig, reader: ProcessorBundle, media_store: MediaCache, limit: tuple[int, str] | None = None
) -> PromptEncoder:
    """What turns samples into prompts, of `limit` tokens at most: how many, and what says so."""
    longest, limited_by = limit or (config.model.max_prompt_tokens, "model.max_prompt_tokens")
    return PromptEncoder(
        reader.processor,
        reader.family,
        build_response_format(config),
        media_store,
        video=config.model.video,
        add_instruction=config.response_format.add_instruction,
        max_prompt_tokens=longest,
        limit_key=limited_by,
    )


def _tokenizer_training_texts(config: Config, scratch: FromScratchConfig, samples: Iterable[Sample]) -> Iterator[str]:
    """What a tokenizer made from scratch learns from: questions, demonstrations, triggers, what stands around tools."""
    grammar, frame = build_response_format(config), FAMILIES[scratch.family].coordinate_system
    for owner in _configs_with_rollout_steps(config):
        for step in owner.rollout_steps:
            match step:
                case RethinkConfig():
                    yield from (trigger.text for trigger in step.triggers)
                case ToolsConfig():
                    yield step.result_prefix + step.result_suffix
    for sample in samples:
        yield from (part for part in sample.parts if isinstance(part, str))
        if config.response_format.add_instruction:
            yield " " + grammar.instruction(sample.target.answer_type, frame)
        if sample.response is not None:
            yield sample.response
        for answer in (sample.target, sample.label):
            if answer is not None:
                yield grammar.render(answer, sample.thinking)


def _configs_with_rollout_steps(config: Config) -> tuple[SftStage | RlStage | SampleStage | EvalGenerationConfig, ...]:
    """What of a config has programs."""
    return (
        *(stage for stage in config.stages if isinstance(stage, SftStage | RlStage | SampleStage)),
        config.evaluation,
    )


def select_device(config: Config | EvalConfig) -> torch.device:
    """Where the model is; raises UserError where that is not there."""
    wanted = config.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: there is no usable CUDA device; use `auto` or `cpu`")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
