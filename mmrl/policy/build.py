"""The model, its processor and its prompt encoder, built from a config; the sizes of the model's components."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.config import Config, EvalConfig
from mmrl.config.schema import (
    COMPONENTS,
    Component,
    EnvironmentConfig,
    EvalGenerationConfig,
    FromScratchConfig,
    RethinkConfig,
    RlStage,
    SampleStage,
    SftStage,
    ToolsConfig,
)
from mmrl.media.cache import MediaCache
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import FAMILIES, ModelFamily, VideoTimeEncoding, get_family
from mmrl.policy.pretrained import ModelBundle, ProcessorBundle, load_model, load_processor
from mmrl.policy.tiny_models import make_model, make_processor, train_tokenizer
from mmrl.types import Sample, UserError
from mmrl.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSummary:
    """Sizes and data types of one component's parameters."""

    component: Component
    num_tensors: int
    num_parameters: int  # numbers in these tensors
    num_trained: int  # numbers in the tensors that are trained
    dtypes: tuple[str, ...]  # data types of the tensors, such as `bfloat16`, in alphabetical order


def build_model(config: Config | EvalConfig, bundle: ProcessorBundle) -> ModelBundle:
    """Return the model as it is before training: loaded from `model.path`, or new as `model.from_scratch` says.

    `bundle` has its processor.

    Raises:
        UserError: `model.path` cannot be loaded, or `model.from_scratch` describes no possible model.
    """
    options = config.model
    if options.from_scratch is None:
        return load_model(options, bundle)
    model = make_model(
        options.from_scratch,
        bundle.processor.tokenizer,
        derive_seed(config.run.seed, "init"),
        dtype=options.dtype,
        attention=options.attn_implementation,
    )
    return ModelBundle(family=get_family(model.config), processor=bundle.processor, model=model)


def build_processor(config: Config, samples: Iterable[Sample], base_dir: Path = Path()) -> ProcessorBundle:
    """Return the model's processor without loading the model. Raises as `load_processor`.

    The tokenizer of a model from scratch is trained on the text of `samples`.
    """
    options, scratch = config.model, config.model.from_scratch
    if scratch is None:
        return load_processor(options, base_dir)
    texts = _tokenizer_training_texts(config, scratch, samples)
    tokenizer = train_tokenizer(texts, scratch.language.vocab_size)
    processor = make_processor(scratch, tokenizer, (options.min_pixels, options.max_pixels))
    return ProcessorBundle(family=FAMILIES[scratch.family], processor=processor)


def build_encoder(
    config: Config | EvalConfig, bundle: ProcessorBundle, media_cache: MediaCache, limit: tuple[int, str] | None = None
) -> PromptEncoder:
    """Return the encoder that turns samples into prompts.

    `limit` is the maximum of prompt tokens, and the YAML key that sets it; None for `model.max_prompt_tokens`.

    Raises:
        UserError: the chat template cannot be used with `model.chat`, the tokenizer or the response format.
    """
    max_prompt_tokens, limit_key = limit or (config.model.max_prompt_tokens, "model.max_prompt_tokens")
    encoder = PromptEncoder(
        bundle,
        build_response_format(config),
        media_cache,
        video=config.model.video,
        add_instruction=config.response_format.add_instruction,
        max_prompt_tokens=max_prompt_tokens,
        limit_key=limit_key,
        chat=config.model.chat,
    )
    # vLLM's server protocol gives the start and end of a medium, but has no mask for words inside it.
    has_words = bundle.family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS
    if config.rollout.engine == "vllm_server" and has_words:
        encoder.video_refusal = (
            f"rollout.engine: vLLM's server takes no video of {bundle.family.model_type}, which has words between its "
            "frames; set rollout.engine: vllm or hf, or leave videos out"
        )
    return encoder


def build_response_format(config: Config | EvalConfig) -> ResponseFormat:
    """Return the response format of the `response_format` section."""
    options = config.response_format
    sections = tuple(ResponseSection(**section.model_dump()) for section in options.sections)
    return ResponseFormat(**options.model_dump(exclude={"add_instruction", "sections"}), sections=sections)


def select_device(config: Config | EvalConfig) -> torch.device:
    """Return the device of the model.

    Raises:
        UserError: `model.device` is cuda, but there is no usable CUDA device.
    """
    requested = config.model.device
    if requested == "cuda" and not torch.cuda.is_available():
        raise UserError("model.device: there is no usable CUDA device; use `auto` or `cpu`")
    return torch.device("cuda" if requested != "cpu" and torch.cuda.is_available() else "cpu")


def configs_with_rollout_steps(config: Config) -> tuple[SftStage | RlStage | SampleStage | EvalGenerationConfig, ...]:
    """Return the sections of a config that have `rollout_steps`."""
    stages = tuple(stage for stage in config.stages if isinstance(stage, SftStage | RlStage | SampleStage))
    return (*stages, config.evaluation)


def find_untrained_components(config: Config) -> tuple[Component, ...]:
    """Return the components that every stage freezes."""
    untrained = set(COMPONENTS)
    for stage in config.training_stages:
        untrained &= set(config.model.with_freeze(stage.freeze).freeze)
    return tuple(sorted(untrained))


def summarize_components(model: PreTrainedModel, family: ModelFamily) -> list[ComponentSummary]:
    """Count the parameters of each component, each parameter once; a tied one counts where it comes first."""
    summaries = []
    for component in COMPONENTS:
        parameters = [tensor for name, tensor in model.named_parameters() if family.component_of(name) == component]
        dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
        summaries.append(
            ComponentSummary(
                component=component,
                num_tensors=len(parameters),
                num_parameters=sum(map(torch.numel, parameters)),
                num_trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
                dtypes=tuple(sorted(dtypes)),
            )
        )
    return summaries


def enable_gradient_checkpointing(
    model: PreTrainedModel, components: Sequence[Literal["vision", "language"]], family: ModelFamily
) -> None:
    """Keep only the inputs of the blocks of these components, and run the blocks again in the backward pass."""
    names = {"vision": family.vision_module, "language": family.language_module}
    for component in components:
        module: Any = model.get_submodule(names[component])
        # Reentrant checkpointing gives a block no gradient if its inputs need none, as in the first adapted block.
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _tokenizer_training_texts(config: Config, scratch: FromScratchConfig, samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the texts that a tokenizer from scratch is trained on."""
    # Besides questions and answers, these include the text that a run puts into responses, such as rethink triggers and
    # the text around tool results: the tokenizer would otherwise split it into bytes.
    response_format = build_response_format(config)
    coordinate_system = FAMILIES[scratch.family].coordinate_system
    for owner in configs_with_rollout_steps(config):
        for step in owner.rollout_steps:
            match step:
                case RethinkConfig():
                    yield from (trigger.text for trigger in step.triggers)
                case ToolsConfig():
                    yield step.result_prefix + step.result_suffix
                case EnvironmentConfig():
                    yield "".join(step.brackets)
    for sample in samples:
        yield from (part for part in sample.parts if isinstance(part, str))
        if config.response_format.add_instruction:
            yield " " + response_format.instruction(sample.target.answer_type, coordinate_system)
        if sample.response is not None:
            yield sample.response
        for answer in filter(None, (sample.target, sample.label)):
            if sample.thinking is None and response_format.thinking == "required":
                yield response_format.build_example(answer)  # a sample meant only for RL has no thinking
            else:
                yield response_format.render(answer, sample.thinking)
