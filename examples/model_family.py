"""A model family of your own: a Qwen2.5-VL that was trained on square images, with boxes from 0 to 1000.

In a config: `model: {path: MODEL_FOLDER, family: {fn: ./model_family.py:square_qwen, args: {cells: 16}}}`
"""

from dataclasses import dataclass

from transformers import Qwen2_5_VLForConditionalGeneration

from mmrl import CoordinateSystem, ModelFamily, Size, VideoTimeEncoding


@dataclass(frozen=True, kw_only=True)
class SquareImageFamily(ModelFamily):
    """Resizes every image to `cells` x `cells` tokens, whatever its shape."""

    cells: int

    def resized_image_size(self, size: Size, *, factor: int, min_pixels: int, max_pixels: int) -> Size:
        """Return the same square for every image; `factor` is the side of a token in pixels."""
        return Size(self.cells * factor, self.cells * factor)


def square_qwen(*, cells: int) -> ModelFamily:
    """Describe the family; mmrl calls this in each process that needs it."""
    return SquareImageFamily(
        model_type="qwen2_5_vl",
        model_class=Qwen2_5_VLForConditionalGeneration,
        coordinate_system=CoordinateSystem.NORM_1000,
        video_time=VideoTimeEncoding.SECONDS,
        tokens_per_second=2.0,
        cells=cells,
    )
