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
from mmrl.data.load import divided, place_of, read, sources
from mmrl.data_check.out_of_frame import coordinates
from mmrl.log.console import Console
from mmrl.media.cache import MediaStore
from mmrl.policy.build import encoder_of, reader_of
from mmrl.policy.encoder import Encoder, Feed, Layout
from mmrl.policy.unpatchify import unpatch
from mmrl.training.build import PICTURE_BYTES
from mmrl.types import Frame, ImageRef, MediaRef, Prompt, Reject, Sample, Target, UserError, VideoRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """A picture or video as the model is given it; of a video, a frame for each of the layout's `seconds`."""

    ref: MediaRef
    layout: Layout
    tokens: int
    frames: tuple[Image.Image, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A sample with everything there is to see of it; `text` is the prompt with each medium's tokens as one word."""

    sample: Sample
    prompt: Prompt
    text: str
    media: tuple[Medium, ...]

    def marks(self, medium: int) -> Iterator[tuple[str, tuple[float, ...]]]:
        """Role (`answer` or `label`) and coordinates, in pixels of the resized picture, of what lies in a medium."""
        for role, target in (("label", self.sample.label), ("answer", self.sample.target)):
            if target is not None and target.frame is not None and target.medium == medium:
                resize = self.prompt.resizes[medium]
                for values in coordinates(target):
                    yield role, resize.convert(values, target.frame, Frame.PX_RESIZED)


class Album:
    """The samples of one part of a config's data, read but not opened."""

    def __init__(self, config: Config, base: Path, work: Path, part: str, console: Console) -> None:
        """Datasets make their files under `work`.

        Raises:
            UserError: a source cannot be read, the model has no processor, or the part is empty.
        """
        place = place_of(config, base, work)

        def rows(name: str) -> tuple[list[Sample], list[Reject]]:
            found = (row for origin in sources(config.data)[name] for row in read(origin, place))
            return divided(console.track(f"reading {name}", found))

        self._part = part
        self.samples, self._rejects = rows(part)
        if not self.samples:
            raise UserError(f"data.{part}: there is no sample to show")
        teaching = config.model.scratch is not None and part != "train"  # the tokenizer learns from training samples
        reader = reader_of(config, rows("train")[0] if teaching else self.samples)
        store = MediaStore(place.access, config.data.limits, max_bytes=PICTURE_BYTES)
        self._encoder = encoder_of(config, reader, store)

    def choose(self, *, sample_id: str | None, index: int, seed: int | None, count: int) -> list[int]:
        """Indices of `count` samples: drawn with `seed`, or from the one of an id or index on.

        Raises:
            UserError: there is no such sample.
        """
        count = min(count, len(self.samples))
        if seed is not None:
            return Random(seed).sample(range(len(self.samples)), count)
        if sample_id is not None:
            index = self._index(sample_id)
        if not -len(self.samples) <= index < len(self.samples):
            raise UserError(f"data.{self._part}: there is no sample {index}; there are {len(self.samples)}")
        return list(range(len(self.samples))[index:][:count])

    def _index(self, sample_id: str) -> int:
        for index, sample in enumerate(self.samples):
            if sample.id == sample_id:
                return index
        for reject in self._rejects:
            if reject.id == sample_id:
                raise UserError(f"data.{self._part}: {sample_id}: {reject.reason}")
        raise UserError(
            f"data.{self._part}: there is no sample {sample_id!r} among {len(self.samples)}, of which the first is "
            f"{self.samples[0].id!r}"
        )

    def view(self, index: int) -> View:
        """Open a sample.

        Raises:
            UserError: its media or its prompt cannot be used.
        """
        sample = self.samples[index]
        feed = self._encoder.encode(sample)
        media = _media(self._encoder, feed)
        text = _collapsed(self._encoder, feed.prompt.ids, media)
        return View(sample=sample, prompt=feed.prompt, media=media, text=text)


def describe(view: View) -> str:
    """Everything about a sample in words."""
    sample, prompt = view.sample, view.prompt
    visual = sum(medium.tokens for medium in view.media)
    lines = [
        f"sample   {sample.id}, task {sample.task}",
        f"prompt   {len(prompt.ids)} tokens, {visual} of them visual",
        "",
        *(f"  | {line}" for line in view.text.splitlines()),
        "",
    ]
    for number, medium in enumerate(view.media):
        resize, (time, height, width) = medium.layout.resize, medium.layout.grid
        lines += [
            f"medium {number} {medium.ref.path}",
            f"         {_size(resize.original)} -> {_size(resize.resized)}, {time} x {height} x {width} patches, "
            f"{medium.tokens} tokens",
        ]
    for role, target in (("answer", sample.target), ("label", sample.label)):
        if target is not None:
            lines.append(f"{role:<8} {_told(target, view)}")
    if sample.thought is not None:
        lines.append(f"thought  {sample.thought}")
    lines += [f"meta     {key}: {value}" for key, value in sample.meta.items()]
    return "\n".join(lines)


def _told(target: Target, view: View) -> str:
    told = f"{target.kind}: {target.value}"
    if target.frame is None:
        return told
    native, resize = view.prompt.frame, view.prompt.resizes[target.medium]
    converted = [[round(x, 1) for x in resize.convert(c, target.frame, native)] for c in coordinates(target)]
    return f"{told} ({target.frame}, medium {target.medium}); for the model {converted} ({native})"


def _media(encoder: Encoder, feed: Feed) -> tuple[Medium, ...]:
    """The prompt's media, in reading order, from the very patches that the model is given."""
    left = {ImageRef: feed.tensors.images_ND, VideoRef: feed.tensors.videos_ND}
    sample, images = feed.prompt.sample, encoder.hf.image_processor
    media: list[Medium] = []
    for ref, layout in zip(sample.media, encoder.measure(sample).layouts, strict=True):
        count = prod(layout.grid)
        patches_ND, left[type(ref)] = left[type(ref)][:count], left[type(ref)][count:]
        frames = unpatch(patches_ND, layout.grid, images).numpy()
        shown = frames[:: images.temporal_patch_size]  # of a video, the first frame of each pair
        media.append(
            Medium(
                ref=ref,
                layout=layout,
                tokens=count // images.merge_size**2,
                frames=tuple(Image.fromarray(frame) for frame in shown),
            )
        )
    return tuple(media)


def _collapsed(encoder: Encoder, ids: Sequence[int], media: Sequence[Medium]) -> str:
    """The prompt's text; a run of placeholders is `<image 640x480 -> 84x56, 6 tokens>`."""
    kinds = {encoder.placeholders.image: "image", encoder.placeholders.video: "video"}
    owners = chain.from_iterable(repeat(medium, medium.tokens) for medium in media)
    pieces: list[str] = []
    for token, run in groupby(ids, key=lambda token: token if token in kinds else None):
        together = list(run)
        if token is None:
            pieces.append(encoder.hf.tokenizer.decode(together, skip_special_tokens=False))
            continue
        medium, *_ = islice(owners, len(together))
        resize = medium.layout.resize
        pieces.append(f"<{kinds[token]} {_size(resize.original)} -> {_size(resize.resized)}, {len(together)} tokens>")
    return "".join(pieces)


def _size(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
