"""Show samples as the model sees them: the exact prompt, the resized pixels, and where the answer lies in them.

It also finds answers that lie outside their image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from random import Random
from typing import Final

from PIL import Image

from mmrl.answer import list_coordinates
from mmrl.config import Config
from mmrl.data.context import make_dataset_context
from mmrl.data.rows import find_row_limit, read_filtered_source, separate_rejected
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.policy.build import build_encoder, build_processor
from mmrl.policy.encoder import EncodedPrompt, MediaLayout, PromptEncoder, unpatchify
from mmrl.policy.processor import PromptProcessor
from mmrl.types import (
    CoordinateSystem,
    ImageRef,
    MediaRef,
    Prompt,
    RejectedRow,
    ResizeMap,
    Sample,
    Target,
    UserError,
    VideoRef,
)

# Annotations that count pixels from 1, or round up, lie one pixel outside at the right and bottom edges.
TOLERANCE_PX: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaView:
    """An image or video as the model sees it."""

    ref: MediaRef
    layout: MediaLayout
    num_tokens: int  # visual tokens in the prompt
    frames: tuple[Image.Image, ...]  # the resized image, or one frame of a video for each of `layout.frame_times`


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """A sample with its prompt and its media as the model sees them."""

    sample: Sample
    prompt: Prompt
    prompt_text: str  # the decoded prompt; the tokens of each image or video are written as one word
    media: tuple[MediaView, ...]  # images and videos in reading order

    def target_marks(self, media_index: int) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Yield each box or point in an image or video: its role (`answer` or `label`) and resized pixels."""
        for role, target in reversed(targets_by_role(self.sample)):  # the answer is drawn over the label
            if target.coordinate_system is not None and target.media_index == media_index:
                resize_map = self.prompt.resize_maps[media_index]
                for values in list_coordinates(target.answer_type, target.value):
                    yield role, resize_map.convert(values, target.coordinate_system, CoordinateSystem.PX_RESIZED)


class SampleBrowser:
    """The samples of one split of a config's data; their media are opened one sample at a time."""

    def __init__(self, config: Config, base_dir: Path, work_dir: Path, split: str, console: Console) -> None:
        """Read the samples of `split`: train, validation or test.

        Relative paths of the config start from `base_dir`; datasets make their files in `work_dir`.

        Raises:
            UserError: a source cannot be read, the model has no processor, or the split is empty.
        """
        context = make_dataset_context(config, base_dir, work_dir)

        def read_split(name: str) -> tuple[list[Sample], list[RejectedRow]]:
            limit = find_row_limit(config.data, name)
            if limit is not None:
                console.info(f"data.{name} is streamed: only the first {limit:,} rows of each source are read.")
            rows: list[Sample | RejectedRow] = []
            for source in config.data.sources_by_split()[name]:
                source_rows = read_filtered_source(source, base_dir, context, name, limit=limit)
                rows += console.track(f"reading {name}", source_rows)
            return separate_rejected(rows)

        self._split = split
        self.samples, self._rejected_rows = read_split(split)
        if not self.samples:
            raise UserError(f"data.{split}: there is no sample to show")
        # A model from scratch trains its tokenizer on the training samples.
        needs_training = config.model.from_scratch is not None and split != "train"
        processor = build_processor(config, read_split("train")[0] if needs_training else self.samples, base_dir)
        cache = MediaCache(context.media_policy, config.data.media_limits)
        self._encoder = build_encoder(config, processor, cache)

    def select_indices(self, *, sample_id: str | None, index: int, seed: int | None, count: int) -> list[int]:
        """Return the indices of up to `count` samples: random ones by `seed`, or all from `sample_id` or `index` on.

        A negative index counts from the end.

        Raises:
            UserError: there is no such sample.
        """
        count = min(count, len(self.samples))
        if seed is not None:
            return Random(seed).sample(range(len(self.samples)), count)
        if sample_id is not None:
            ids = [sample.id for sample in self.samples]
            if sample_id not in ids:
                for rejected in self._rejected_rows:
                    if rejected.id == sample_id:
                        raise UserError(f"data.{self._split}: {sample_id}: {rejected.reason}")
                known = f"there are {len(ids)}, the first is {ids[0]!r}"
                raise UserError(f"data.{self._split}: there is no sample {sample_id!r}; {known}")
            index = ids.index(sample_id)
        if not -len(self.samples) <= index < len(self.samples):
            raise UserError(f"data.{self._split}: there is no sample {index}; there are {len(self.samples)}")
        return list(range(len(self.samples))[index:][:count])

    def open_sample(self, index: int) -> SampleView:
        """Open the media of a sample and build its prompt.

        Raises:
            UserError: its media or its prompt cannot be used.
        """
        sample = self.samples[index]
        encoded = self._encoder.encode(sample)
        media = _media_views(self._encoder, encoded)
        text = PromptProcessor(self._encoder).render_prompt(encoded.prompt)
        return SampleView(sample=sample, prompt=encoded.prompt, media=media, prompt_text=text)


def targets_by_role(sample: Sample) -> list[tuple[str, Target]]:
    """Return the answer of a sample, and its label if it has one, each after its role."""
    return [("answer", sample.target)] + ([("label", sample.label)] if sample.label else [])


def find_outside_image(sample: Sample, resize_maps: Sequence[ResizeMap]) -> Iterator[str]:
    """Yield a message for each box or point of a sample's answer and label that lies outside its image.

    `resize_maps` has an entry for each image and video of the sample, in reading order.
    """
    for role, target in targets_by_role(sample):
        if target.coordinate_system is None:
            continue
        if target.media_index >= len(resize_maps):
            yield (
                f"its {role} lies in image or video {target.media_index} (counted from 0), "
                f"but the sample has {len(resize_maps)}"
            )
            continue
        resize_map = resize_maps[target.media_index]
        for values in list_coordinates(target.answer_type, target.value):
            pixels = resize_map.convert(values, target.coordinate_system, CoordinateSystem.PX_ORIGINAL)
            is_within = True
            for index, value in enumerate(pixels):  # x, y, x, y, ...
                # Of a crop, they count from the corner of the larger image.
                inside = value - resize_map.offset[index % 2]
                last = resize_map.original[index % 2] + TOLERANCE_PX
                is_within = is_within and isfinite(inside) and -TOLERANCE_PX <= inside <= last
            if not is_within:
                size = format_size(resize_map.original)
                crop = f" that is cropped at {resize_map.offset}" if any(resize_map.offset) else ""
                yield f"its {role} {list(values)} ({target.coordinate_system}) leaves the image of {size} pixels{crop}"


def describe_sample(view: SampleView) -> str:
    """Return everything about a sample as text."""
    sample, prompt = view.sample, view.prompt
    num_visual = sum(media.num_tokens for media in view.media)
    lines = [
        f"sample   {sample.id}, task {sample.task}",
        f"prompt   {len(prompt.token_ids)} tokens, {num_visual} of them visual",
        "",
    ]
    lines += [f"  | {line}" for line in view.prompt_text.splitlines()]
    lines.append("")
    for number, media in enumerate(view.media):
        time, height, width = media.layout.grid
        resize_map = media.layout.resize_map
        sizes = f"{format_size(resize_map.original)} -> {format_size(resize_map.resized)}"
        lines += [
            f"media {number}  {media.ref.path}",
            f"         {sizes}, {time} x {height} x {width} patches, {media.num_tokens} tokens",
        ]
    lines += [f"{role:<8} {_format_target(target, view)}" for role, target in targets_by_role(sample)]
    if sample.thinking is not None:
        lines.append(f"thinking {sample.thinking}")
    lines += [f"meta     {key}: {value}" for key, value in sample.meta.items()]
    return "\n".join(lines)


def format_size(size: Sequence[int]) -> str:
    """Return a size as `640x480`."""
    return "x".join(map(str, size))


def _format_target(target: Target, view: SampleView) -> str:
    """Return a target as text, with its coordinates in its own system and in the model's."""
    text = f"{target.answer_type}: {target.value}"
    if target.coordinate_system is None:
        return text
    resize_map, native = view.prompt.resize_maps[target.media_index], view.prompt.coordinate_system
    converted = []
    for values in list_coordinates(target.answer_type, target.value):
        for_model = resize_map.convert(values, target.coordinate_system, native)
        converted.append([round(value, 1) for value in for_model])
    return f"{text} ({target.coordinate_system}, media {target.media_index}); for the model {converted} ({native})"


def _media_views(encoder: PromptEncoder, encoded: EncodedPrompt) -> tuple[MediaView, ...]:
    """Return the media of a prompt in reading order, put together from the patches that the model is given."""
    # Patches of all images, and of all videos, follow each other: [patches, channels * patch volume].
    remaining = {ImageRef: encoded.tensors.image_patches_MD, VideoRef: encoded.tensors.video_patches_MD}
    sample, image_format = encoded.prompt.sample, encoder.image_format
    views: list[MediaView] = []
    for ref, layout in zip(sample.media, encoder.measure(sample).media_layouts, strict=True):
        num_patches = prod(layout.grid)
        patches_ND = remaining[type(ref)][:num_patches]
        remaining[type(ref)] = remaining[type(ref)][num_patches:]
        frames = unpatchify(patches_ND, layout.grid, image_format, encoder.hf_processor.image_processor).numpy()
        # A patch spans a pair of frames, which share one time. Of an image both are the same.
        shown = frames[:: image_format.frames_per_patch]
        views.append(
            MediaView(
                ref=ref,
                layout=layout,
                num_tokens=num_patches // image_format.merge_size**2,
                frames=tuple(map(Image.fromarray, shown)),
            )
        )
    return tuple(views)
