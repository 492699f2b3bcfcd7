"""A model family that is not Qwen's: InternVL3 by its class in transformers, each image resized to one square.

In a config: `model: {path: OpenGVLab/InternVL3-1B-hf, family: {fn: ./internvl.py:internvl}}`. examples/internvl.yaml
trains a tiny new model, which `python examples/internvl.py FOLDER` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmrl.config.schema import Component
from mmrl.policy.batch import BatchMedia
from mmrl.policy.families import ImageFormat, ModelFamily, PlaceholderRun, VideoTimeEncoding
from mmrl.policy.tiny_models import train_tokenizer
from mmrl.types import CoordinateSystem, Size
from mmrl.utils.torch_cpu_compat import import_torchvision

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
    """InternVL: a tower for squares of one size, a projector beside it, positions that simply count."""

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
        """Return patches [M, D] of normalised images: those of a token follow each other."""
        side = self.image_format(processor).patch_size
        options = {"do_resize": False, "crop_to_patches": False, "return_tensors": "pt"}
        pixels_ICHW = processor.image_processor(images, **options)["pixel_values"]
        split = pixels_ICHW.unflatten(3, (-1, MERGE_SIZE, side)).unflatten(2, (-1, MERGE_SIZE, side))
        # Image and channel; row of the token, the patch, the pixel; column of the token, the patch, the pixel.
        return split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 3 * side * side)

    def model_arguments(
        self, position_ids_3BL: torch.Tensor, token_types_BL: torch.Tensor, media: BatchMedia
    ) -> dict[str, torch.Tensor]:
        """Return positions, and images put together from their patches: the inverse of `cut_patches`."""
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


def write_tiny_model(folder: Path) -> None:
    """Write a new model of some 100,000 parameters, for images of 32 x 32 pixels, into a folder."""
    import_torchvision()  # which transformers cannot do beside a torch for CPUs if it was built for CUDA
    import transformers

    base = train_tokenizer(["How many red shapes are there? <answer>3</answer>"], vocab_size=320)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=base.backend_tokenizer,
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        extra_special_tokens={**IMAGE_TOKENS, "video_token": "<video>"},
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size={"height": 32, "width": 32}),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(),
        image_seq_length=4,
        chat_template=(
            "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}"
            "{% if part.type == 'image' %}<IMG_CONTEXT>\n{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
            "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    language = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.InternVLConfig(
        vision_config={**tower, "image_size": [32, 32], "patch_size": [8, 8]},
        text_config={
            **language,
            "model_type": "qwen2",
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "vocab_size": len(tokenizer),
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        image_token_id=tokenizer.context_image_token_id,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]))
