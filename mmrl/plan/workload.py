"""Sizes of prompts and responses that a plan counts with: from the data where there are any, else assumed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from mmrl.config import Config
from mmrl.config.schema import RlStage, matches_conditions
from mmrl.data.context import make_dataset_context
from mmrl.data.rows import read_filtered_source
from mmrl.media.cache import MediaCache
from mmrl.plan.measure import MicroBatchShape
from mmrl.policy.build import build_encoder, build_processor
from mmrl.policy.families import Grid, ModelFamily
from mmrl.types import ImageRef, Sample, Size, UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MOST_ROWS = 256  # rows of each source that are measured
_ASSUMED_TEXT_TOKENS = 256
_CHARACTERS_PER_TOKEN = 3.0  # of English; it is said that this was assumed
_CHAT_TOKENS = 64  # chat template and instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and responses of a training step."""

    text_tokens: int  # text of the longest prompt
    grids: tuple[Grid, ...]  # images of that prompt, in patches
    mean_prompt_frac: float  # mean length of a prompt, as a share of the longest
    longest_response: int  # tokens that memory is planned for
    mean_response: int  # tokens that time is planned for
    notes: tuple[str, ...]  # what was measured and what was assumed

    def micro_batch(self, stage: RlStage, merge_size: int) -> MicroBatchShape:
        """Return the fullest micro-batch of a stage."""
        prompt, response = self.prompt_tokens(merge_size), self.longest_response
        room = stage.micro_batch_tokens - prompt
        if prompt + stage.group_size * response > stage.micro_batch_tokens:
            # A group that does not fit is split, and its prompt repeated.
            fitting = max(1, room // response)
            return MicroBatchShape(
                num_groups=1, text_tokens=self.text_tokens, grids=self.grids, responses=(response,) * fitting
            )
        fitting = stage.micro_batch_tokens // (prompt + stage.group_size * response)
        return MicroBatchShape(
            num_groups=min(fitting, stage.micro_batch_groups, stage.prompts_per_step),
            text_tokens=self.text_tokens,
            grids=self.grids,
            responses=(response,) * stage.group_size,
        )

    def prompt_tokens(self, merge_size: int) -> int:
        """Return the tokens of the longest prompt."""
        return self.text_tokens + sum(map(prod, self.grids)) // merge_size**2


def find_workload(
    config: Config,
    stage: RlStage,
    base_dir: Path,
    family: ModelFamily,
    shapes: PretrainedConfig,
    mean_response: int | None,
) -> Workload:
    """Return the sizes of a stage's prompts and responses; `mean_response` None plans for the longest."""
    notes, prompts = [], []
    try:
        with TemporaryDirectory() as folder:
            prompts = _measure_prompts(config, stage, base_dir, Path(folder), family, shapes, notes)
    except (UserError, OSError) as error:
        notes.append(f"data.train cannot be read ({str(error).splitlines()[0]})")
    longest = stage.sampling.max_new_tokens
    vision = shapes.vision_config
    if not prompts:
        grid = _image_grid(config, family, vision, None)
        prompts = [(_ASSUMED_TEXT_TOKENS, (grid,))]
        notes.append(
            f"assumed: a prompt of {_ASSUMED_TEXT_TOKENS} tokens of text and one image of model.max_pixels, "
            f"{prod(grid) // vision.spatial_merge_size**2} tokens"
        )
    if mean_response is None:
        notes.append(f"assumed: every response has max_new_tokens, {longest}; --response-tokens says otherwise")
    totals = [text + sum(map(prod, grids)) // vision.spatial_merge_size**2 for text, grids in prompts]
    text, grids = prompts[totals.index(max(totals))]
    return Workload(
        text_tokens=text,
        grids=grids,
        mean_prompt_frac=sum(totals) / len(totals) / max(totals),
        longest_response=longest,
        mean_response=min(mean_response or longest, longest),
        notes=tuple(notes),
    )


def _measure_prompts(
    config: Config,
    stage: RlStage,
    base_dir: Path,
    work_dir: Path,
    family: ModelFamily,
    shapes: PretrainedConfig,
    notes: list[str],
) -> list[tuple[int, tuple[Grid, ...]]]:
    """Return tokens of text and grids of the first prompts of each source; add to `notes` how they were found."""
    context = make_dataset_context(config, base_dir, work_dir)
    samples: list[Sample] = []
    for source in config.data.train:
        rows = islice(read_filtered_source(source, base_dir, context), _MOST_ROWS)
        samples += [row for row in rows if isinstance(row, Sample) and matches_conditions(stage.when, row)]
    cache = MediaCache(context.media_policy, config.data.media_limits, max_bytes=0)
    merge, is_local = shapes.vision_config.spatial_merge_size, config.model.path is None
    if is_local or (Path(str(config.model.path)) / "tokenizer_config.json").is_file():
        encoder = build_encoder(config, build_processor(config, samples, base_dir), cache)
        layouts = [encoder.measure(sample) for sample in samples]
        notes.append(f"longest and mean prompt of the first {len(layouts)} samples of data.train")
        grids_of = [tuple(media.grid for media in layout.media_layouts) for layout in layouts]
        return [
            (len(layout.ids) - sum(map(prod, grids)) // merge**2, grids)
            for layout, grids in zip(layouts, grids_of, strict=True)
        ]
    prompts = []
    for sample in samples:
        characters = sum(len(part) for part in sample.parts if isinstance(part, str))
        images = [part for part in sample.parts if isinstance(part, ImageRef)]
        grids = [_image_grid(config, family, shapes.vision_config, cache.image_size(image)) for image in images]
        prompts.append((_CHAT_TOKENS + round(characters / _CHARACTERS_PER_TOKEN), tuple(grids)))
    if prompts:
        notes.append(
            f"longest and mean prompt of the first {len(prompts)} samples of data.train; without the model's tokenizer "
            f"a token of text is assumed to be {_CHARACTERS_PER_TOKEN:.0f} characters, and videos are left out"
        )
    return prompts


def _image_grid(config: Config, family: ModelFamily, vision: object, size: Size | None) -> Grid:
    """Return the grid of an image of this size, in pixels; of a square one of `model.max_pixels` without a size."""
    patch, merge = vision.patch_size, vision.spatial_merge_size  # type: ignore[attr-defined]
    side = int(config.model.max_pixels**0.5)
    width, height = family.resized_image_size(
        size or Size(side, side),
        factor=patch * merge,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
    )
    return (1, height // patch, width // patch)
