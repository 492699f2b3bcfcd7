"""A model family: everything in which one line of vision-language models differs from another.

Suffixes of tensor names as in `mmrl.policy.batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from inspect import isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mmrl.config.schema import Component, FromScratchConfig
from mmrl.config.schema.model import LoraTarget
from mmrl.media.image import resized_size
from mmrl.policy.shared_prefix_attention import install_shared_prefix_attention
from mmrl.policy.vision_attention import install_vision_attention
from mmrl.types import CoordinateSystem, Size, UserError
from mmrl.utils.plugin_args import check_methods
from mmrl.utils.plugins import load_plugin
from mmrl.utils.torch_cpu_compat import import_torchvision

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedModel, ProcessorMixin

    from mmrl.policy.batch import BatchMedia

# Full names of linear layers; together they fit all families of Qwen without experts.
QWEN_LORA_LAYERS: Mapping[LoraTarget, str] = {
    "language.attention": r"model\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj",
    "language.mlp": r"model\.language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
    "vision.attention": r"model\.visual\.blocks\.\d+\.attn\.(qkv|proj)",
    "vision.mlp": r"model\.visual\.blocks\.\d+\.mlp\.((gate|up|down)_proj|(linear_)?fc[12])",
    "projector.mlp": r"model\.visual\.(merger|deepstack_merger_list\.\d+)\.(mlp\.[02]|linear_fc[12])",
}
QWEN_STRUCTURAL_TOKENS = (
    "<|im_start|>",
    "<|endoftext|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


# Time, height and width of an image or video, in patches. Time counts pairs of frames; an image has 1.
Grid = tuple[int, int, int]


class ImageFormat(NamedTuple):
    """Sizes by which images become patches, and patches tokens."""

    patch_size: int  # a patch is a square of this side, in pixels
    merge_size: int  # a square of patches with this side, in patches, becomes one token of the language model
    frames_per_patch: int  # frames that a patch spans. An image is repeated to fill them.
    min_pixels: int  # least area of a resized image
    max_pixels: int  # largest area of a resized image


class PlaceholderRun(NamedTuple):
    """Adjacent placeholder tokens of one image, or of a video or a part of it."""

    grid: Grid
    time_step: float = 1.0  # positions from one pair of frames to the next


class VideoTimeEncoding(StrEnum):
    """The way in which a model learns when the frames of a video were taken."""

    NO_VIDEO = "none"  # it takes no videos
    FRAME_INDEX = "steps"  # not at all: each pair of frames is one position after the pair before
    SECONDS = "seconds"  # by position ids, in proportion to seconds
    TEXT_TIMESTAMPS = "stamps"  # in words before each pair of frames, each of which is a separate run of placeholders


@dataclass(frozen=True, kw_only=True)
class FromScratchSupport:
    """Builds tiny new models of a family, for `model.from_scratch`."""

    processor_class: str  # name of the processor's class in transformers
    video_processor_class: str
    # True if transformers reads every tokenizer of this model type by one class, which splits text in its own way.
    has_fixed_tokenizer: bool = False
    # Return settings of the language model, and of the vision tower, beyond the settings that all families share.
    text_config: Callable[[FromScratchConfig], dict[str, object]]
    vision_config: Callable[[FromScratchConfig], dict[str, object]]


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One line of vision-language models: names of its parts and tokens, its resize rule and its position ids.

    The fields describe a model that is built like Qwen-VL. A family with another rule subclasses this class and
    overrides its method.
    """

    model_type: str  # `model_type` of its config.json
    model_class: type[PreTrainedModel]  # class of transformers that loads its weights
    coordinate_system: CoordinateSystem  # the coordinates that its boxes and points were trained in
    video_time: VideoTimeEncoding  # the way in which it learns when frames were taken
    # Positions a second, for `VideoTimeEncoding.SECONDS`; `get_family` takes it from the model's own config.
    tokens_per_second: float = 1.0
    vision_module: str = "model.visual"  # path of the vision tower in the model. The projector is inside it.
    language_module: str = "model.language_model"  # path of the language model in the model
    projector_name: str = "merger"  # part of the name that distinguishes the projector's parameters from the tower's
    # Regular expression for the full names of the linear layers of each LoRA target.
    lora_layers: Mapping[LoraTarget, str] = field(default_factory=lambda: QWEN_LORA_LAYERS)
    # For each LoRA target, suffixes of parameters that are not separate layers, such as fused experts.
    lora_parameters: Mapping[LoraTarget, tuple[str, ...]] = field(default_factory=dict)
    # Targets of an adapter that names none: layers of the language model that every token passes.
    default_lora_targets: tuple[LoraTarget, ...] = ("language.attention", "language.mlp")
    has_recurrent_layers: bool = False  # true if some layers keep a recurrent state rather than keys and values
    # Images of any size become patches with grids, as in Qwen-VL. If not: no vLLM, one process, no cached features.
    takes_patches: bool = True
    vision_start_token: str = "<|vision_start|>"  # token before the placeholders, as the chat template writes it
    vision_end_token: str = "<|vision_end|>"  # token after the placeholders
    # Tokens that a response must never contain; end-of-sequence stays allowed, even if it is listed.
    structural_tokens: tuple[str, ...] = QWEN_STRUCTURAL_TOKENS
    from_scratch: FromScratchSupport | None = None  # builds tiny new models; None if it cannot
    # Arguments of the `load_family` that made this family; None for a built-in one.
    source: tuple[str, Path, Mapping[str, Any]] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  (object's own signature)
        """Pickle a user's family by its function."""
        if self.source is None:
            return super().__reduce_ex__(protocol)
        # A worker process has not imported the user's file, so it could not find the class.
        return load_family, self.source

    def component_of(self, parameter_name: str) -> Component:
        """Return the component that a parameter belongs to, by its name; the projector is named as in the tower."""
        vision_name = self.vision_module.rpartition(".")[2]
        if f".{vision_name}." not in f".{parameter_name}":
            return "language"
        return "projector" if self.projector_name in parameter_name else "vision"

    def prepare(self, model: PreTrainedModel) -> None:
        """Let the layers follow the `packed_groups` of a packed row, and the vision tower take grids on the CPU.

        Without them the layers compute as before.
        """
        if model.get_decoder().config._attn_implementation == "sdpa":
            install_shared_prefix_attention(model)
        if self.takes_patches:
            install_vision_attention(model.get_submodule(self.vision_module))

    def describe_slow_path(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return a notice for a user whose model could run faster here, or None, the default."""
        return None

    def is_router(self, parameter_name: str) -> bool:
        """Return True for a weight that decides which experts a token goes to; by default there is none."""
        return False

    def iter_engine_weights(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield a weight under the names, as in transformers, that an engine loads it by; by default as it is.

        `tensor` has the shape [...] of the parameter.
        """
        yield name, tensor

    def finish_export(self, folder: Path) -> None:
        """Change what `save_pretrained` wrote where released folders have another layout: by default, nothing."""

    def image_format(self, processor: ProcessorMixin) -> ImageFormat:
        """Return the sizes by which the processor of a model cuts images, by default Qwen-VL's."""
        options = processor.image_processor
        return ImageFormat(
            patch_size=options.patch_size,
            merge_size=options.merge_size,
            frames_per_patch=options.temporal_patch_size,
            # The keys name sides, but Qwen's image processors read areas in pixels from them.
            min_pixels=options.size["shortest_edge"],
            max_pixels=options.size["longest_edge"],
        )

    def cut_patches(self, processor: ProcessorMixin, images: Sequence[Image]) -> torch.Tensor:
        """Return the normalised patches of resized images in reading order, float32 [M, D], by default Qwen-VL's.

        A patch holds channels, frames, rows and columns. Patches of a token, `merge_size` x `merge_size`, follow each
        other.
        """
        patches: torch.Tensor = processor.image_processor(images, do_resize=False, return_tensors="pt")["pixel_values"]
        return patches

    def model_arguments(
        self, position_ids_3BL: torch.Tensor, token_types_BL: torch.Tensor, media: BatchMedia
    ) -> dict[str, torch.Tensor]:
        """Return the arguments of the model's forward in addition to token ids and mask, by default Qwen-VL's.

        Absent kinds of media have no argument.

        Args:
            position_ids_3BL: time, height and width position of each token, int64.
            token_types_BL: 0 for text, 1 for an image, 2 for a video, int64.
            media: patches [M, D] and, in CPU memory, grids [I, 3] of images and videos.
        """
        arguments = {"position_ids": position_ids_3BL, "mm_token_type_ids": token_types_BL}
        if len(media.image_grids_I3):
            arguments |= {"pixel_values": media.image_patches_MD, "image_grid_thw": media.image_grids_I3}
        if len(media.video_grids_V3):
            arguments |= {"pixel_values_videos": media.video_patches_MD, "video_grid_thw": media.video_grids_V3}
        return arguments

    def resized_image_size(self, size: Size, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
        """Return the size that an image is resized to, in pixels: by default qwen-vl-utils' `smart_resize`.

        Args:
            size: width and height of the image.
            factor: pixels per side of one language-model token; both sides are multiples of it.
            min_pixels: least area.
            max_pixels: largest area.
        """
        return resized_size(size, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels)

    def position_ids(
        self, ids: Sequence[int], runs: Mapping[int, Sequence[PlaceholderRun]], *, merge_size: int
    ) -> torch.Tensor:
        """Return the time, height and width position of each token of a prompt, int64 [3, P], by default M-RoPE's.

        Text advances all three together. A placeholder token takes its time, row and column, and the text after it
        continues from the largest position so far plus one. So does a response, equally on all three axes.

        Source: Qwen2-VL, arXiv:2409.12191v2, section 2.1 "Multimodal Rotary Position Embedding"; times in seconds as in
        Qwen2.5-VL, arXiv:2502.13923v1, section 2.1.2, rounded down. Departure from transformers 5: there, text after a
        video continues from the larger side of its frames and overlaps the later frames' times.

        Args:
            ids: token ids of the prompt, each placeholder repeated as often as its image or video has tokens.
            runs: runs of placeholder tokens in reading order, by placeholder id.
            merge_size: patches per side of one placeholder token.

        Raises:
            UserError: the placeholder tokens in `ids` do not fit the grids of `runs`.
        """
        parts: list[torch.Tensor] = []
        position, column = 0, 0
        remaining = {placeholder: list(expected) for placeholder, expected in runs.items()}
        while column < len(ids):
            placeholder = ids[column]
            if placeholder not in remaining:
                parts.append(torch.full((3, 1), position))
                position, column = position + 1, column + 1
                continue
            if not remaining[placeholder]:
                raise UserError(f"token {column} is placeholder {placeholder}, but all its grids are used up")
            run = remaining[placeholder].pop(0)
            time, height, width = run.grid
            # float64: times are rounded down, so a product just below a whole number would move a position.
            times = (torch.arange(time, dtype=torch.float64) * run.time_step).long()
            rows, columns = torch.arange(height // merge_size), torch.arange(width // merge_size)
            block = torch.stack(torch.meshgrid(times, rows, columns, indexing="ij")).reshape(3, -1) + position
            end = column + block.shape[1]
            if list(ids[column:end]) != [placeholder] * block.shape[1]:
                raise UserError(f"{block.shape[1]} tokens {placeholder} must start at token {column}, but do not")
            parts.append(block)
            # The largest of the three axes: a block of 2 x 4 tokens moves the text on by 4, not by 8.
            position, column = int(block.max()) + 1, end
        left = sum(map(len, remaining.values()))
        if left:
            raise UserError(f"{left} of {sum(map(len, runs.values()))} media have no placeholder tokens in the prompt")
        return torch.cat(parts, dim=1)

    def video_placeholder_runs(self, grid: Grid, second_per_grid: float) -> tuple[PlaceholderRun, ...]:
        """Return the runs that the placeholder tokens of a video form.

        Args:
            grid: pairs of frames, and rows and columns of patches.
            second_per_grid: seconds from one pair of frames to the next.
        """
        match self.video_time:
            case VideoTimeEncoding.NO_VIDEO:
                return ()
            case VideoTimeEncoding.FRAME_INDEX:
                return (PlaceholderRun(grid),)
            case VideoTimeEncoding.SECONDS:
                # vLLM reads the seconds from a float32 tensor; positions are rounded down, so the last bit counts.
                seconds = torch.tensor(second_per_grid, dtype=torch.float32).item()
                return (PlaceholderRun(grid, time_step=self.tokens_per_second * seconds),)
            case VideoTimeEncoding.TEXT_TIMESTAMPS:
                time, height, width = grid
                return (PlaceholderRun((1, height, width)),) * time


def mrope_parameters(rotated_channels: int) -> dict[str, object]:
    """Return M-RoPE settings of a tiny model whose heads rotate this many channels."""
    # Pairs of channels are rotated: a third of them each by height and width, the rest by time.
    pairs = rotated_channels // 2
    third = pairs // 3
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [pairs - 2 * third, third, third]}


def load_family(function: str, base_dir: Path, args: Mapping[str, Any]) -> ModelFamily:
    """Return the family that a user's function makes.

    Raises:
        UserError: the function cannot be loaded, does not take `args`, or returns no `ModelFamily`.
    """
    import_torchvision()  # before the user's file imports transformers
    make_family = load_plugin(function, base_dir, args, role="model family", parameters=())
    family = make_family()
    if not isinstance(family, ModelFamily):
        raise UserError(
            f"model.family {function!r} returned {type(family).__name__} {family!r:.60}; it must return a "
            "mmrl.policy.families.ModelFamily"
        )
    methods = [name for name, member in vars(ModelFamily).items() if isfunction(member) and not name.startswith("_")]
    check_methods(family, ModelFamily, methods, owner=f"model.family {function!r}")
    # Absolute, because the process that unpickles it may have another working directory.
    return replace(family, source=(function, base_dir.absolute(), args))
