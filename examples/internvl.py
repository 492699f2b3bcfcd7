"""A model family that is not Qwen's: InternVL3 by its class in transformers, each image resized to one square.

In a config: `model: {path: OpenGVLab/InternVL3-1B-hf, family: {fn: ./internvl.py:internvl}}`. examples/internvl.yaml
trains a tiny new model, which `python tools/tiny_internvl.py FOLDER` writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING

import torch

from mmrl import (
    BatchMedia,
    Component,
    CoordinateSystem,
    ImageFormat,
    ModelFamily,
    PlaceholderRun,
    Size,
    VideoTimeEncoding,
)

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

MERGE_SIZE = 2  # `downsample_ratio` 0.5: 2 x 2 patches become a token
IMAGE_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
LAYERS = {
    "language.attention": r"model\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj",
    "language.mlp": r"model\.language_model\.layers\.\d+\.mlp\.(gate|up|down)_proj",
    "projector.mlp": r"model\.multi_modal_projector\.linear_[12]",
}


@dataclass(frozen=True, kw_only=True)
class InternVLFamily(ModelFamily):
    """InternVL: a tower for squares of one size, a projector beside it, positions that count tokens."""

    def component_of(self, parameter_name: str) -> Component:
        """Return the component that a parameter belongs to."""
        if "multi_modal_projector" in parameter_name:
            return "projector"
        return "vision" if "vision_tower" in parameter_name else "language"

    def image_format(self, processor: ProcessorMixin) -> ImageFormat:
        """Return the sizes of the square that every image is resized to."""
        side = processor.image_processor.size["height"]
        tokens_per_side = isqrt(processor.image_seq_length)
        return ImageFormat(
            patch_size=side // (tokens_per_side * MERGE_SIZE),
            merge_size=MERGE_SIZE,
            frames_per_patch=1,
            min_pixels=side * side,
            max_pixels=side * side,
        )

    def resized_image_size(self, size: Size, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
        """Return the square, whatever the shape of the image."""
        return Size(isqrt(max_pixels), isqrt(max_pixels))

    def cut_patches(self, processor: ProcessorMixin, images: Sequence[Image]) -> torch.Tensor:
        """Return patches [M, D] of normalised images; the patches of a token follow each other."""
        side = self.image_format(processor).patch_size
        options = {"do_resize": False, "crop_to_patches": False, "return_tensors": "pt"}
        pixels_ICHW = processor.image_processor(images, **options)["pixel_values"]
        split = pixels_ICHW.unflatten(3, (-1, MERGE_SIZE, side)).unflatten(2, (-1, MERGE_SIZE, side))
        # Image and channel; row of the token, the patch, the pixel; column of the token, the patch, the pixel.
        return split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * side * side)

    def model_arguments(
        self, position_ids_3BL: torch.Tensor, token_types_BL: torch.Tensor, media: BatchMedia
    ) -> dict[str, torch.Tensor]:
        """Return positions, and images reassembled from their patches: the inverse of `cut_patches`."""
        arguments = {"position_ids": position_ids_3BL[0]}
        if len(media.image_grids_I3):
            _, rows, columns = (media.image_grids_I3[0] // MERGE_SIZE).tolist()
            side = isqrt(media.image_patches_MD.shape[1] // 3)
            split = media.image_patches_MD.reshape(-1, rows, columns, MERGE_SIZE, MERGE_SIZE, 3, side, side)
            arguments["pixel_values"] = split.permute(0, 5, 1, 3, 6, 2, 4, 7).flatten(5, 7).flatten(2, 4)
        return arguments

    def position_ids(
        self, ids: Sequence[int], runs: Mapping[int, Sequence[PlaceholderRun]], *, merge_size: int
    ) -> torch.Tensor:
        """Return the place of each token on all three axes [3, P]; the model takes one of them."""
        return torch.arange(len(ids)).expand(3, -1)


def internvl() -> ModelFamily:
    """Describe the family; mmrl calls this in each process that needs it."""
    from transformers import InternVLForConditionalGeneration

    return InternVLFamily(
        model_type="internvl",
        model_class=InternVLForConditionalGeneration,
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.NO_VIDEO,
        takes_patches=False,
        vision_module="model.vision_tower",
        vision_start_token="<img>",
        vision_end_token="</img>",
        structural_tokens=("<|im_start|>", "<|endoftext|>", "<video>", *IMAGE_TOKENS.values()),
        lora_layers=LAYERS,
    )
