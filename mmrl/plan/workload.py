"""Sizes of prompts and responses for a plan: measured on the data if they can be read, else assumed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mmrl.config import Config, schema
from mmrl.config.recipes import DATA
from mmrl.config.schema import RlStage, SampleStage, SftStage, matches_conditions
from mmrl.data.context import make_dataset_context
from mmrl.data.demonstrations import demonstration_text
from mmrl.data.rows import read_filtered_source
from mmrl.media.cache import MediaCache
from mmrl.media.video import FrameSampling, resized_frame_size
from mmrl.plan.shapes import ModelShapes
from mmrl.policy.build import build_encoder, build_processor, build_response_format
from mmrl.policy.families import Grid
from mmrl.types import Sample, Size, UserError

_MOST_ROWS = 256  # rows of each source that are measured
_ASSUMED_TEXT_TOKENS = 256
_CHARACTERS_PER_TOKEN = 3.0  # of English; the notes of a plan say that this is assumed
_CHAT_TOKENS = 64  # chat template and instruction


class MicroBatchSizes(NamedTuple):
    """Sizes of a micro-batch in which all groups are the same."""

    num_groups: int  # groups, each of one prompt
    prompt_tokens: int  # tokens of a prompt, placeholders included
    grids: tuple[Grid, ...]  # grids of a prompt's images, in patches
    responses: tuple[int, ...]  # tokens of each response of a group

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row."""
        return self.num_groups * (self.prompt_tokens + sum(self.responses))


class Workload(NamedTuple):
    """Prompts and responses of a training step."""

    prompt_tokens: int  # tokens of the longest prompt
    grids: tuple[Grid, ...]  # images of that prompt, in patches
    mean_prompt_frac: float  # mean length of a prompt, as a share of the longest
    longest_response: int  # tokens that memory is planned for
    mean_response: int  # tokens that time is planned for
    notes: tuple[str, ...]  # what was measured and what was assumed

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt."""
        return self.prompt_tokens * self.mean_prompt_frac

    def micro_batch(self, stage: SftStage | RlStage, num_gpus: int) -> MicroBatchSizes:
        """Return the fullest micro-batch. A group that does not fit is split, and its prompt repeated."""
        # Without a shared prefix each response has its own prompt.
        sharing = 1 if stage.shared_prefix == "off" else stage.group_size
        most = min(stage.micro_batch_groups, most_groups(stage, num_gpus)) * stage.group_size // sharing
        size = min(sharing, max(1, (stage.micro_batch_tokens - self.prompt_tokens) // self.longest_response))
        num_groups = stage.micro_batch_tokens // (self.prompt_tokens + sharing * self.longest_response)
        return MicroBatchSizes(
            num_groups=max(1, min(num_groups, most)),
            prompt_tokens=self.prompt_tokens,
            grids=self.grids,
            responses=(self.longest_response,) * size,
        )


def most_groups(stage: SftStage | RlStage, num_gpus: int) -> int:
    """Return the most groups of an update that one GPU learns from: a group is not divided among GPUs."""
    return ceil(stage.prompts_per_step / stage.num_mini_batches / num_gpus)


class _SampleSizes(NamedTuple):
    prompt_tokens: int
    grids: tuple[Grid, ...]
    demonstration_tokens: int  # 0 if the data have none for the stage


def estimate_workload(
    config: Config, stage: SftStage | RlStage, base_dir: Path, model: ModelShapes, mean_response: int | None
) -> Workload:
    """Return the sizes of a stage's prompts and responses; `mean_response` is the mean of those not in the data."""
    notes = [model.note] if model.note else []
    try:
        with TemporaryDirectory() as folder:
            samples = list(_measure_samples(config, stage, base_dir, Path(folder), model))
        how = "" if _finds_tokenizer(config) else "; assumed: a token is 3 characters, videos have the most frames"
        notes.append(f"lengths are those of the first {len(samples)} samples of data.train{how}")
    except (UserError, OSError) as error:
        samples = []
        hint = "; --data DIR is the folder of its files" if DATA in str(error) else ""
        notes.append(f"data.train cannot be used ({str(error).splitlines()[0]}){hint}")
    if not samples:
        sample, note = _assume_sample(config, model)
        samples, notes = [sample], [*notes, note]
    demonstrations = [sample.demonstration_tokens for sample in samples]
    if any(demonstrations):
        longest, mean = max(demonstrations), max(1, round(sum(demonstrations) / len(demonstrations)))
    else:
        # A demonstration that is not written yet is taken to be as long as the longest that the run may generate.
        samplers = [other for other in config.stages if isinstance(other, RlStage | SampleStage)]
        limit = max(map(_longest_response, samplers), default=config.evaluation.max_new_tokens)
        longest = _longest_response(stage) or limit
        mean = min(mean_response or longest, longest)
        if isinstance(stage, SftStage):
            notes.append(f"assumed: a demonstration has at most {longest} tokens, as what is generated in the run")
        if mean_response is None:
            most = "all tokens that it may" if len(stage.rollout_steps) > 1 else "max_new_tokens"
            notes.append(f"assumed: every response has {most}, {longest}; --response-tokens says otherwise")
    fullest = max(samples)
    return Workload(
        prompt_tokens=fullest.prompt_tokens,
        grids=fullest.grids,
        mean_prompt_frac=sum(sample.prompt_tokens for sample in samples) / len(samples) / fullest.prompt_tokens,
        longest_response=longest,
        mean_response=mean,
        notes=tuple(notes),
    )


def _assume_sample(config: Config, model: ModelShapes) -> tuple[_SampleSizes, str]:
    """Return the sizes of a prompt with one full image or video, and a note that describes it."""
    # Configs for videos say how many frames the model sees.
    if "video" in config.model.model_fields_set:
        grid, medium = _video_grid(config, model), "video with all frames of model.video"
    else:
        grid, medium = _image_grid(config, model, None), "image of model.max_pixels"
    tokens = model.image_tokens((grid,))
    note = f"assumed: a prompt of {_ASSUMED_TEXT_TOKENS} tokens of text and one {medium}, {tokens} tokens"
    return _SampleSizes(_ASSUMED_TEXT_TOKENS + tokens, (grid,), 0), note


def _longest_response(stage: SftStage | RlStage | SampleStage) -> int:
    """Return the longest response of a stage with its rollout steps, without triggers or last results; 0 for none."""
    length = 0 if isinstance(stage, SftStage) else stage.sampling.max_new_tokens
    for step in stage.rollout_steps:
        if isinstance(step, schema.RethinkConfig):
            length += step.max_new_tokens
        elif isinstance(step, schema.ToolsConfig):
            length = max(length, step.max_total_tokens)
        elif isinstance(step, schema.EnvironmentConfig):
            length = max(length, step.max_tokens)
    return length


def _finds_tokenizer(config: Config) -> bool:
    return config.model.path is None or (Path(config.model.path) / "tokenizer_config.json").is_file()


def _measure_samples(
    config: Config, stage: SftStage | RlStage, base_dir: Path, work_dir: Path, model: ModelShapes
) -> Iterator[_SampleSizes]:
    """Yield the sizes of the first samples of each source."""
    context = make_dataset_context(config, base_dir, work_dir)
    samples: list[Sample] = []
    for source in config.data.train:
        rows = islice(read_filtered_source(source, base_dir, context, "train"), _MOST_ROWS)
        samples += [row for row in rows if isinstance(row, Sample) and matches_conditions(stage.when, row)]
    cache = MediaCache(context.media_policy, config.data.media_limits, max_bytes=0)
    if _finds_tokenizer(config):
        bundle = build_processor(config, samples, base_dir)
        encoder = build_encoder(config, bundle, cache)
        for sample in samples:
            layout, text = encoder.measure(sample), _demonstration(config, stage, sample)
            media_grids = tuple(media.grid for media in layout.media_layouts)
            ids = bundle.processor.tokenizer(text, add_special_tokens=False).input_ids
            yield _SampleSizes(len(layout.ids), media_grids, len(ids) + 1 if ids else 0)  # EOS ends it
        return
    for sample in samples:
        characters = sum(len(part) for part in sample.parts if isinstance(part, str))
        grids = [_image_grid(config, model, cache.image_size(image)) for image in sample.images]
        grids += [_video_grid(config, model)] * (len(sample.media) - len(grids))
        prompt_tokens = _CHAT_TOKENS + round(characters / _CHARACTERS_PER_TOKEN) + model.image_tokens(grids)
        demonstration_tokens = ceil(len(_demonstration(config, stage, sample)) / _CHARACTERS_PER_TOKEN)
        yield _SampleSizes(prompt_tokens, tuple(grids), demonstration_tokens)


def _demonstration(config: Config, stage: SftStage | RlStage, sample: Sample) -> str:
    """Return the response that a stage imitates; empty if there is none before the run."""
    # An expert plays its own, and a stage before this one selects those of `samples_of`.
    if not isinstance(stage, SftStage) or stage.samples_of is not None:
        return ""
    target = demonstration_text(sample, stage.target_field)
    return target if isinstance(target, str) else build_response_format(config).render(target, sample.thinking)


def _image_grid(config: Config, model: ModelShapes, size: Size | None) -> Grid:
    """Return the grid of an image of `size` pixels; without a size, of a square one of `model.max_pixels`."""
    patch, side = model.config.vision_config.patch_size, int(config.model.max_pixels**0.5)
    width, height = model.family.resized_image_size(
        size or Size(side, side),
        factor=patch * model.config.vision_config.spatial_merge_size,
        min_pixels=config.model.min_pixels,
        max_pixels=config.model.max_pixels,
    )
    return (1, height // patch, width // patch)


def _video_grid(config: Config, model: ModelShapes) -> Grid:
    """Return the grid of a square video of as many frames as `model.video` and `model.max_prompt_tokens` allow."""
    vision, video = model.config.vision_config, config.model.video
    side = int(video.max_pixels**0.5)
    sampling = FrameSampling(video=video, patch_size=vision.patch_size)
    width, height = resized_frame_size(Size(side, side), video.max_frames, sampling)
    rows, columns = height // vision.patch_size, width // vision.patch_size
    most = (config.model.max_prompt_tokens - _ASSUMED_TEXT_TOKENS) // model.image_tokens(((1, rows, columns),))
    return (max(1, min(video.max_frames // vision.temporal_patch_size, most)), rows, columns)
