"""Sizes of prompts and responses for a plan: measured on the data if they can be read, else assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from mmrl.config import Config
from mmrl.config.schema import RlStage, matches_conditions
from mmrl.data.context import make_dataset_context
from mmrl.data.rows import read_filtered_source
from mmrl.media.cache import MediaCache
from mmrl.plan.shapes import ModelShapes
from mmrl.policy.build import build_encoder, build_processor
from mmrl.policy.families import Grid
from mmrl.types import ImageRef, Sample, Size, UserError

_MOST_ROWS = 256  # rows of each source that are measured
_ASSUMED_TEXT_TOKENS = 256
_CHARACTERS_PER_TOKEN = 3.0  # of English; the notes of a plan say that this is assumed
_CHAT_TOKENS = 64  # chat template and instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSizes:
    """Sizes of a micro-batch in which all groups are alike."""

    num_groups: int  # groups, each of one prompt
    prompt_tokens: int  # tokens of a prompt, placeholders included
    grids: tuple[Grid, ...]  # grids of a prompt's images, in patches
    responses: tuple[int, ...]  # tokens of each response of a group

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row."""
        return self.num_groups * (self.prompt_tokens + sum(self.responses))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and responses of a training step."""

    prompt_tokens: int  # tokens of the longest prompt
    grids: tuple[Grid, ...]  # images of that prompt, in patches
    mean_prompt_frac: float  # mean length of a prompt, as a share of the longest
    longest_response: int  # tokens that memory is planned for
    mean_response: int  # tokens that time is planned for
    notes: tuple[str, ...]  # what was measured and what was assumed

    def micro_batch(self, stage: RlStage) -> MicroBatchSizes:
        """Return the fullest micro-batch of a stage. A group that does not fit is split, and its prompt repeated."""
        room = stage.micro_batch_tokens - self.prompt_tokens
        size = min(stage.group_size, max(1, room // self.longest_response))
        groups = stage.micro_batch_tokens // (self.prompt_tokens + stage.group_size * self.longest_response)
        return MicroBatchSizes(
            num_groups=max(1, min(groups, stage.micro_batch_groups, stage.prompts_per_step)),
            prompt_tokens=self.prompt_tokens,
            grids=self.grids,
            responses=(self.longest_response,) * size,
        )


def find_workload(
    config: Config, stage: RlStage, base_dir: Path, model: ModelShapes, mean_response: int | None
) -> Workload:
    """Return the sizes of a stage's prompts and responses; without `mean_response`, all are as long as the longest."""
    notes = [model.note] if model.note else []
    prompts: list[tuple[int, tuple[Grid, ...]]] = []
    try:
        with TemporaryDirectory() as folder:
            prompts = list(_measure_prompts(config, stage, base_dir, Path(folder), model))
        has_tokenizer = _finds_tokenizer(config)
        how = "" if has_tokenizer else "; assumed: a token is 3 characters, and videos are left out (no tokenizer here)"
        notes.append(f"longest and mean prompt of the first {len(prompts)} samples of data.train{how}")
    except (UserError, OSError) as error:
        notes.append(f"data.train cannot be read ({str(error).splitlines()[0]})")
    longest = stage.sampling.max_new_tokens
    if not prompts:
        grid = _image_grid(config, model, None)
        prompts = [(_ASSUMED_TEXT_TOKENS + model.image_tokens((grid,)), (grid,))]
        notes.append(
            f"assumed: a prompt of {_ASSUMED_TEXT_TOKENS} tokens of text and one image of model.max_pixels, "
            f"{model.image_tokens((grid,))} tokens"
        )
    if mean_response is None:
        notes.append(f"assumed: every response has max_new_tokens, {longest}; --response-tokens says otherwise")
    prompt_tokens, grids = max(prompts)
    return Workload(
        prompt_tokens=prompt_tokens,
        grids=grids,
        mean_prompt_frac=sum(tokens for tokens, _ in prompts) / len(prompts) / prompt_tokens,
        longest_response=longest,
        mean_response=min(mean_response or longest, longest),
        notes=tuple(notes),
    )


def _finds_tokenizer(config: Config) -> bool:
    return config.model.path is None or (Path(config.model.path) / "tokenizer_config.json").is_file()


def _measure_prompts(
    config: Config, stage: RlStage, base_dir: Path, work_dir: Path, model: ModelShapes
) -> Iterator[tuple[int, tuple[Grid, ...]]]:
    """Yield tokens and grids of the first prompts of each source."""
    context = make_dataset_context(config, base_dir, work_dir)
    samples: list[Sample] = []
    for source in config.data.train:
        rows = islice(read_filtered_source(source, base_dir, context, "train"), _MOST_ROWS)
        samples += [row for row in rows if isinstance(row, Sample) and matches_conditions(stage.when, row)]
    cache = MediaCache(context.media_policy, config.data.media_limits, max_bytes=0)
    if _finds_tokenizer(config):
        encoder = build_encoder(config, build_processor(config, samples, base_dir), cache)
        for layout in map(encoder.measure, samples):
            yield len(layout.ids), tuple(media.grid for media in layout.media_layouts)
        return
    for sample in samples:
        characters = sum(len(part) for part in sample.parts if isinstance(part, str))
        images = [part for part in sample.parts if isinstance(part, ImageRef)]
        grids = tuple(_image_grid(config, model, cache.image_size(image)) for image in images)
        yield _CHAT_TOKENS + round(characters / _CHARACTERS_PER_TOKEN) + model.image_tokens(grids), grids


def _image_grid(config: Config, model: ModelShapes, size: Size | None) -> Grid:
    """Return the grid of an image of `size` pixels; without a size, of a square one of `model.max_pixels`."""
    patch, side = model.vision.patch_size, int(config.model.max_pixels**0.5)
    width, height = model.family.resized_image_size(
        size or Size(side, side),
        factor=patch * model.vision.spatial_merge_size,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
    )
    return (1, height // patch, width // patch)
