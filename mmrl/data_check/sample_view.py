"""Samples as the model sees them: the exact prompt, the resized pixels, where the answer lies in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat
from math import prod
from pathlib import Path
from random import Random

from PIL import Image

from mmrl.config import Config
from mmrl.data.context import make_dataset_context
from mmrl.data.load import read_source, separate_rejected, sources_by_split
from mmrl.data_check.out_of_frame import target_coordinates
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.policy.build import build_encoder, build_processor
from mmrl.policy.encoder import EncodedPrompt, MediaLayout, PromptEncoder
from mmrl.policy.unpatchify import unpatchify
from mmrl.training.build import IMAGE_CACHE_BYTES
from mmrl.types import CoordinateSystem, ImageRef, MediaRef, Prompt, RejectedRow, Sample, Target, UserError, VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaView:
    """A picture or video as the model is given it; of a video, a frame for each of the layout's `seconds`."""

    ref: MediaRef
    layout: MediaLayout
    num_tokens: int
    frames: tuple[Image.Image, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """A sample with everything there is to see of it; `text` is the prompt with each medium's tokens as one word."""

    sample: Sample
    prompt: Prompt
    prompt_text: str
    media: tuple[MediaView, ...]

    def target_marks(self, medium: int) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Role (`answer` or `label`) and coordinates, in pixels of the resized picture, of what lies in a medium."""
        for role, target in (("label", self.sample.label), ("answer", self.sample.target)):
            if target is not None and target.coordinate_system is not None and target.media_index == medium:
                resize = self.prompt.resize_maps[medium]
                for values in target_coordinates(target):
                    yield role, resize.convert(values, target.coordinate_system, CoordinateSystem.PX_RESIZED)


class SampleBrowser:
    """The samples of one part of a config's data, read but not opened."""

    def __init__(self, config: Config, base: Path, work: Path, split: str, console: Console) -> None:
        """Datasets make their files under `work`.

        Raises:
            UserError: a source cannot be read, the model has no processor, or the part is empty.
        """
        place = make_dataset_context(config, base, work)

        def rows(name: str) -> tuple[list[Sample], list[RejectedRow]]:
            found = (row for origin in sources_by_split(config.data)[name] for row in read_source(origin, place))
            return separate_rejected(console.track(f"reading {name}", found))

        self._split = split
        self.samples, self._rejected_rows = rows(split)
        if not self.samples:
            raise UserError(f"data.{split}: there is no sample to show")
        teaching = (
            config.model.from_scratch is not None and split != "train"
        )  # the tokenizer learns from training samples
        reader = build_processor(config, rows("train")[0] if teaching else self.samples, base)
        store = MediaCache(place.media_policy, config.data.media_limits, max_bytes=IMAGE_CACHE_BYTES)
        self._encoder = build_encoder(config, reader, store)

    def select_indices(self, *, sample_id: str | None, index: int, seed: int | None, count: int) -> list[int]:
        """Indices of `count` samples: drawn with `seed`, or from the one of an id or index on.

        Raises:
            UserError: there is no such sample.
        """
        count = min(count, len(self.samples))
        if seed is not None:
            return Random(seed).sample(range(len(self.samples)), count)
        if sample_id is not None:
            index = self._find_index(sample_id)
        if not -len(self.samples) <= index < len(self.samples):
            raise UserError(f"data.{self._split}: there is no sample {index}; there are {len(self.samples)}")
        return list(range(len(self.samples))[index:][:count])

    def _find_index(self, sample_id: str) -> int:
        for index, sample in enumerate(self.samples):
            if sample.id == sample_id:
                return index
        for reject in self._rejected_rows:
            if reject.id == sample_id:
                raise UserError(f"data.{self._split}: {sample_id}: {reject.reason}")
        raise UserError(
            f"data.{self._split}: there is no sample {sample_id!r} among {len(self.samples)}, of which the first is "
            f"{self.samples[0].id!r}"
        )

    def open_sample(self, index: int) -> SampleView:
        """Open a sample.

        Raises:
            UserError: its media or its prompt cannot be used.
        """
        sample = self.samples[index]
        feed = self._encoder.encode(sample)
        media = _media_views(self._encoder, feed)
        text = _collapse_placeholders(self._encoder, feed.prompt.token_ids, media)
        return SampleView(sample=sample, prompt=feed.prompt, media=media, prompt_text=text)


def describe_sample(view: SampleView) -> str:
    """Everything about a sample in words."""
    sample, prompt = view.sample, view.prompt
    visual = sum(medium.num_tokens for medium in view.media)
    lines = [
        f"sample   {sample.id}, task {sample.task}",
        f"prompt   {len(prompt.token_ids)} tokens, {visual} of them visual",
        "",
        *(f"  | {line}" for line in view.prompt_text.splitlines()),
        "",
    ]
    for number, medium in enumerate(view.media):
        resize, (time, height, width) = medium.layout.resize_map, medium.layout.grid
        lines += [
            f"medium {number} {medium.ref.path}",
            f"         {_format_size(resize.original)} -> {_format_size(resize.resized)}, {time} x {height} x {width} patches, "
            f"{medium.num_tokens} tokens",
        ]
    for role, target in (("answer", sample.target), ("label", sample.label)):
        if target is not None:
            lines.append(f"{role:<8} {_format_target(target, view)}")
    if sample.thinking is not None:
        lines.append(f"thought  {sample.thinking}")
    lines += [f"meta     {key}: {value}" for key, value in sample.meta.items()]
    return "\n".join(lines)


def _format_target(target: Target, view: SampleView) -> str:
    told = f"{target.answer_type}: {target.value}"
    if target.coordinate_system is None:
        return told
    native, resize = view.prompt.coordinate_system, view.prompt.resize_maps[target.media_index]
    converted = [
        [round(x, 1) for x in resize.convert(c, target.coordinate_system, native)] for c in target_coordinates(target)
    ]
    return f"{told} ({target.coordinate_system}, medium {target.media_index}); for the model {converted} ({native})"


def _media_views(encoder: PromptEncoder, feed: EncodedPrompt) -> tuple[MediaView, ...]:
    """The prompt's media, in reading order, from the very patches that the model is given."""
    left = {ImageRef: feed.tensors.image_patches_MD, VideoRef: feed.tensors.video_patches_MD}
    sample, images = feed.prompt.sample, encoder.hf_processor.image_processor
    media: list[MediaView] = []
    for ref, layout in zip(sample.media, encoder.measure(sample).media_layouts, strict=True):
        count = prod(layout.grid)
        patches_ND, left[type(ref)] = left[type(ref)][:count], left[type(ref)][count:]
        frames = unpatchify(patches_ND, layout.grid, images).numpy()
        shown = frames[:: images.temporal_patch_size]  # of a video, the first frame of each pair
        media.append(
            MediaView(
                ref=ref,
                layout=layout,
                num_tokens=count // images.merge_size**2,
                frames=tuple(Image.fromarray(frame) for frame in shown),
            )
        )
    return tuple(media)


def _collapse_placeholders(encoder: PromptEncoder, ids: Sequence[int], media: Sequence[MediaView]) -> str:
    """The prompt's text; a run of placeholders is `<image 640x480 -> 84x56, 6 tokens>`."""
    kinds = {encoder.placeholders.image_id: "image", encoder.placeholders.video_id: "video"}
    owners = chain.from_iterable(repeat(medium, medium.num_tokens) for medium in media)
    pieces: list[str] = []
    for token, run in groupby(ids, key=lambda token: token if token in kinds else None):
        together = list(run)
        if token is None:
            pieces.append(encoder.hf_processor.tokenizer.decode(together, skip_special_tokens=False))
            continue
        medium, *_ = islice(owners, len(together))
        resize = medium.layout.resize_map
        pieces.append(
            f"<{kinds[token]} {_format_size(resize.original)} -> {_format_size(resize.resized)}, {len(together)} tokens>"
        )
    return "".join(pieces)


def _format_size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
