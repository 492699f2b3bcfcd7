"""Models and processors from a local folder or the Hugging Face hub, without transformers' progress bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from mmrl.config.schema import ModelConfig
from mmrl.policy.families import FAMILIES, ModelFamily, get_family, load_family
from mmrl.types import UserError
from mmrl.utils.model_files import check_model_type, has_contradictory_ties, read_weight_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

_OUTPUT_MATRIX = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorBundle:
    """A processor, which turns text, images and videos into tokens and patches, with its family."""

    family: ModelFamily
    processor: ProcessorMixin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBundle(ProcessorBundle):
    """A model with its processor and family."""

    model: PreTrainedModel
    # Weights in the model's files that predict several tokens at once (`mtp.*`), which transformers does not load.
    num_mtp_weights: int = 0
    is_untied_by_files: bool = False  # its config ties the output matrix to the embedding, but its files hold another

    def iter_notices(self) -> Iterator[str]:
        """Yield notices about the files that the user should read before training on them."""
        if self.num_mtp_weights:
            yield (
                f"model.path: {self.num_mtp_weights} weights for predicting several tokens at once (mtp.*) are not "
                "loaded, as transformers has no layer for them; the exported model lacks them, so no engine can "
                "speculate with them"
            )
        if self.is_untied_by_files:
            yield (
                "model.path: config.json has tie_word_embeddings: true, and lm_head.weight differs from the embedding; "
                "both are kept and trained, and the exported config says false"
            )


@dataclass(frozen=True, slots=True)
class ModelExport:
    """A model that is saved in the layout of its family's released folders."""

    model: PreTrainedModel
    family: ModelFamily

    def save_pretrained(self, save_directory: Path) -> None:
        """Write the model into a folder."""
        self.model.save_pretrained(save_directory)
        self.family.finish_export(save_directory)


def load_processor(
    options: ModelConfig, base_dir: Path = Path(), *, family: ModelFamily | None = None
) -> ProcessorBundle:
    """Load the processor of the model at `options.path`, with the pixel limits of `options` if it takes patches.

    `family` is the result of `model.family`; without it, that function is called, from a file below `base_dir`.

    Raises:
        UserError: nothing loadable is there, its family is unknown, or `model.family` returns none.
    """
    from transformers import AutoConfig, AutoProcessor

    path = str(options.path)
    if options.family and family is None:
        family = load_family(options.family.fn, base_dir, options.family.args)
    check_model_type(path, FAMILIES if family is None else None)
    with _explain_load_errors(path):
        family = family or get_family(AutoConfig.from_pretrained(path))
        processor = AutoProcessor.from_pretrained(path)
    if family.takes_patches:
        # The keys name sides, but Qwen's image processors read areas in pixels from them.
        processor.image_processor.size = {"shortest_edge": options.min_pixels, "longest_edge": options.max_pixels}
    return ProcessorBundle(family=family, processor=processor)


def read_context_tokens(options: ModelConfig) -> int:
    """Return the length of the context of the model at `options.path`, in tokens, without loading it.

    Raises:
        UserError: nothing loadable is there.
    """
    from transformers import AutoConfig

    with _explain_load_errors(str(options.path)):
        return int(AutoConfig.from_pretrained(str(options.path)).get_text_config().max_position_embeddings)


def load_pretrained(options: ModelConfig, base_dir: Path = Path()) -> ModelBundle:
    """Load the model at `options.path` with its processor. Raises as `load_processor` and `load_model`."""
    return load_model(options, load_processor(options, base_dir))


def load_model(options: ModelConfig, bundle: ProcessorBundle) -> ModelBundle:
    """Load the model at `options.path`, in the data type and attention of `options`; `bundle` has its processor.

    Raises:
        UserError: nothing loadable is there, or weights are missing or of another size.
    """
    path = str(options.path)
    with _explain_load_errors(path), hide_progress_bars():
        model, report = bundle.family.model_class.from_pretrained(
            path,
            dtype=getattr(torch, options.dtype),
            attn_implementation=options.attn_implementation,
            output_loading_info=True,
            # Reported below by name, rather than by transformers in a table.
            ignore_mismatched_sizes=True,
        )
    _check_loaded_weights(path, sorted(report["missing_keys"]), sorted(report["mismatched_keys"]))
    return ModelBundle(
        family=bundle.family,
        processor=bundle.processor,
        model=model,
        num_mtp_weights=sum(name.startswith("mtp.") for name in read_weight_names(path)),
        is_untied_by_files=_correct_tied_config(model),
    )


def _check_loaded_weights(
    path: str, missing: Sequence[str], mismatched: Sequence[tuple[str, torch.Size, torch.Size]]
) -> None:
    """Raise a UserError if the files at `path` lack weights of the model, or have them in another size.

    transformers only warns of such weights, and fills them with random numbers. `mismatched` has the name, the size in
    the files and that of the model.
    """
    if missing == [_OUTPUT_MATRIX] and has_contradictory_ties(path):
        raise UserError(
            f"model.path: {path!r} lacks {_OUTPUT_MATRIX}, and its config.json contradicts itself: "
            "text_config.tie_word_embeddings is true, tie_word_embeddings false, which is what transformers and vLLM "
            f"go by; set it to true if the embedding is the output matrix, else restore {_OUTPUT_MATRIX}"
        )
    if missing:
        raise UserError(f"model.path: {path!r} lacks {len(missing)} weights, {missing[0]} for one; restore its files")
    if mismatched:
        # Experts come as one tensor, stacked from the tensors in the files.
        name, found, expected = mismatched[0]
        raise UserError(
            f"model.path: {path!r} has {len(mismatched)} weights of another size than its config.json says, {name} for "
            f"one: {list(found)}, not {list(expected)}; restore its files (of experts, the first number counts them)"
        )


def _correct_tied_config(model: PreTrainedModel) -> bool:
    """Correct a config that ties output matrix and embedding though they are two tensors; return True if it did."""
    config = model.config
    is_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    if is_tied or not getattr(config, "tie_word_embeddings", False):
        return False
    # transformers keeps both where they differ. An export with the old config could come out tied.
    for section in (config, config.get_text_config()):
        section.tie_word_embeddings = False
    return True


@contextmanager
def hide_progress_bars() -> Iterator[None]:
    """Hide transformers' bars for reading and writing weights inside this block; the console has its own display."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    shows_weights, shows_downloads = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    # transformers switches off the bars of huggingface_hub too, which show downloads that take minutes.
    logging.disable_progress_bar()
    if shows_downloads:
        enable_progress_bars()
    try:
        yield
    finally:
        if shows_weights:
            logging.enable_progress_bar()


@contextmanager
def _explain_load_errors(path: str) -> Iterator[None]:
    """Turn an error of transformers or safetensors inside this block into a UserError that names `model.path`."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        # For a hub id, config.json has been downloaded by now: `check_model_type` reports a hub that cannot be reached.
        hint = "" if Path(path).is_dir() else f"; `hf download {path}` where there is a network fetches all its files"
        raise UserError(f"model.path: cannot load {path!r}: {reason}{hint}") from error
