"""Builds the model, its processor and its encoder from a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from mmrl.algo.seeds import derive
from mmrl.answer import Grammar, Section
from mmrl.config import Config, Exam
from mmrl.config.schema import (
    ContinueWith,
    Evaluation,
    Rl,
    Scratch,
    Sft,
    UseTools,
)
from mmrl.config.schema import Sample as SampleStage
from mmrl.media.cache import MediaStore
from mmrl.policy.encoder import Encoder
from mmrl.policy.families import FAMILIES, family_of
from mmrl.policy.pretrained import Loaded, Reader, load_pretrained, load_reader
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import Sample, UserError

if TYPE_CHECKING:
    pass


def model_of(config: Config | Exam, read: Callable[[], Reader]) -> Loaded:
    """The model as it is before training; `read` gives what reads for one made from scratch.

    Raises:
        UserError: `model.path` is not loadable, or `model.scratch` cannot be made.
    """
    options = config.model
    if options.scratch is None:
        return load_pretrained(options)
    reader = read()
    model = make_model(
        options.scratch,
        reader.processor.tokenizer,
        derive(config.run.seed, "init"),
        dtype=options.dtype,
        attention=options.attention,
    )
    return Loaded(family=family_of(model.config), processor=reader.processor, model=model)


def grammar_of(config: Config | Exam) -> Grammar:
    """How responses are written."""
    options = config.answer
    return Grammar(
        think=options.think,
        style=options.style,
        answer_tag=options.answer_tag,
        think_tag=options.think_tag,
        sections=tuple(Section(**section.model_dump()) for section in options.sections),
        stop_at_answer=options.stop_at_answer,
        more_stops=options.more_stops,
    )


def reader_of(config: Config, samples: Iterable[Sample]) -> Reader:
    """What reads for the model, without the model; a tokenizer made from scratch learns from the training `samples`.

    Raises:
        UserError: `model.path` has none.
    """
    options = config.model
    if options.scratch is None:
        return load_reader(options)
    tokenizer = train_tokenizer(_texts(config, options.scratch, samples), options.scratch.language.vocab)
    processor = make_processor(options.scratch, tokenizer, (options.min_pixels, options.max_pixels))
    return Reader(family=FAMILIES[options.scratch.family], processor=processor)


def encoder_of(
    config: Config | Exam, reader: Reader, store: MediaStore, limit: tuple[int, str] | None = None
) -> Encoder:
    """What turns samples into prompts, of `limit` tokens at most: how many, and what says so."""
    longest, limited_by = limit or (config.model.max_prompt_tokens, "model.max_prompt_tokens")
    return Encoder(
        reader.processor,
        reader.family,
        grammar_of(config),
        store,
        video=config.model.video,
        instruct=config.answer.instruct,
        max_prompt_tokens=longest,
        limited_by=limited_by,
    )


def _texts(config: Config, scratch: Scratch, samples: Iterable[Sample]) -> Iterator[str]:
    """What a tokenizer made from scratch learns from: questions, demonstrations, triggers, what stands around tools."""
    grammar, frame = grammar_of(config), FAMILIES[scratch.family].frame
    for owner in _with_program(config):
        for step in owner.program:
            match step:
                case ContinueWith():
                    yield from (trigger.text for trigger in step.triggers)
                case UseTools():
                    yield step.before + step.after
    for sample in samples:
        yield from (part for part in sample.parts if isinstance(part, str))
        if config.answer.instruct:
            yield " " + grammar.instruction(sample.target.kind, frame)
        if sample.response is not None:
            yield sample.response
        for answer in (sample.target, sample.label):
            if answer is not None:
                yield grammar.render(answer, sample.thought)


def _with_program(config: Config) -> tuple[Sft | Rl | SampleStage | Evaluation, ...]:
    """What of a config has programs."""
    return (*(stage for stage in config.stages if isinstance(stage, Sft | Rl | SampleStage)), config.evaluation)


def device_of(config: Config | Exam) -> torch.device:
    """Where the model is; raises UserError where that is not there."""
    wanted = config.model.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: there is no usable CUDA device; use `auto` or `cpu`")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")
