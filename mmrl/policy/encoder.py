"""Samples to prompts: chat template, expanded placeholders, patches, and the digest that ties them together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod

import torch
import xxhash
from transformers import ProcessorMixin

from mmrl.answer import Grammar
from mmrl.config.schema import Video
from mmrl.media.cache import MediaStore
from mmrl.media.resize import fit, fitted_size
from mmrl.media.video import ClipRule
from mmrl.policy.batch import Placeholders, PromptTensors, check_media, check_view
from mmrl.policy.chat_template import Wording
from mmrl.policy.families import Clock, Family
from mmrl.policy.mrope import Grid, Run, mrope_positions
from mmrl.types import (
    Author,
    ImageRef,
    MediaRef,
    Part,
    Prompt,
    ResizeMap,
    Sample,
    Segment,
    TooLongError,
    UserError,
    VideoRef,
    View,
)

_START, _END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Feed:
    """A prompt, and of it the tensors that the model's forward needs."""

    prompt: Prompt
    tensors: PromptTensors


@dataclass(frozen=True, slots=True)
class Showing:
    """A medium within a response, and its tensors; positions count from its first token."""

    segment: Segment
    tensors: PromptTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a medium becomes: a grid of patches; for a video, when (s) each pair of frames was taken, how far apart."""

    resize: ResizeMap
    grid: Grid
    seconds: tuple[float, ...] = ()
    second_per_grid: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A prompt without pixels: its ids with every placeholder expanded, and a layout per medium in reading order."""

    ids: tuple[int, ...]
    layouts: tuple[Layout, ...]


class Encoder:
    """Turns a sample into what the model reads; the same sample always becomes the same bytes."""

    def __init__(
        self,
        hf: ProcessorMixin,
        family: Family,
        grammar: Grammar,
        store: MediaStore,
        *,
        video: Video,
        instruct: bool,
        max_prompt_tokens: int,
        limited_by: str = "model.max_prompt_tokens",
    ) -> None:
        self.hf, self.family, self.grammar = hf, family, grammar
        self._store = store
        self._instruct = instruct
        self._max_prompt_tokens, self._limited_by = max_prompt_tokens, limited_by
        self.clip_rule = ClipRule(video=video, patch=hf.image_processor.patch_size)
        self._wording = Wording(hf)
        image, video = re.escape(hf.image_token), re.escape(hf.video_token)
        self._medium = re.compile(rf"{re.escape(_START)}(?:{image}|{video}){re.escape(_END)}")
        self._special = [str(token) for token in hf.tokenizer.added_tokens_decoder.values() if token.special]
        self.placeholders = Placeholders(
            image=hf.image_token_id, video=hf.video_token_id, merge=hf.image_processor.merge_size
        )

    def measure(self, sample: Sample) -> Outline:
        """All of a prompt but its pixels; needs no more of its media than their sizes.

        Raises:
            TooLongError: the prompt is longer than `model.max_prompt_tokens`.
            UserError: a medium cannot be used, or the text contains a special token (a placeholder, say).
        """
        words = " ".join(part for part in sample.parts if isinstance(part, str))
        if forged := [token for token in self._special if token in words]:
            raise UserError(f"its text contains the special token {forged[0]!r}; take it out")
        layouts = tuple(self._layout(ref) for ref in sample.media)
        ids = self._ids(sample, layouts)
        if len(ids) > self._max_prompt_tokens:
            raise TooLongError(
                f"{len(ids)} tokens exceed {self._limited_by}={self._max_prompt_tokens}; raise it, or lower "
                "model.max_pixels or model.video"
            )
        return Outline(ids=ids, layouts=layouts)

    def encode(self, sample: Sample) -> Feed:
        """Open the sample's media, resize them, cut them into patches.

        Raises:
            UserError: as `measure`; or media, placeholders and patches disagree. It names the sample.
        """
        try:
            return self._encode(sample)
        except UserError as error:
            raise type(error)(f"sample {sample.id}: {error}") from error

    def show(self, ref: MediaRef) -> Showing:
        """A medium as it stands in a prompt, alone: marks, placeholders and, where the family has them, times.

        Raises:
            UserError: it cannot be used, or its placeholders and patches disagree.
        """
        is_picture = isinstance(ref, ImageRef)
        patches_ND = self._image_patches([ref]) if isinstance(ref, ImageRef) else self._video_patches([ref])
        layout = self._layout(ref)
        ids = self._expanded(self._shown(ref, layout), [(ref, layout)])
        tensors = PromptTensors(
            images_ND=patches_ND if is_picture else self._nothing(),
            videos_ND=self._nothing() if is_picture else patches_ND,
            positions_3P=self._positions(ids, [(ref, layout)]),
            seconds_V=_seconds([layout]),
        )
        view = View(ref=ref, grid=layout.grid, resize=layout.resize, digest=_digest(ids, [layout.grid], tensors))
        segment = Segment(ids=ids, logps=(0.0,) * len(ids), author=Author.ENV, view=view)
        check_view(segment, view, tensors, self.placeholders, who=ref.path)
        return Showing(segment, tensors)

    def question(self, sample: Sample) -> str:
        """The chat-formatted text of a sample, one placeholder per medium."""
        parts = tuple(map(_worded, sample.parts))
        if self._instruct:
            instruction = self.grammar.instruction(sample.target.kind, self.family.frame)
            parts = (*parts, ("text", f" {instruction}"))
        return self._wording.chat(parts)

    def _encode(self, sample: Sample) -> Feed:
        # Decoding a video plans it too; measuring first would open it twice.
        videos_ND = self._video_patches([ref for ref in sample.media if isinstance(ref, VideoRef)])
        outline = self.measure(sample)
        grids = tuple(layout.grid for layout in outline.layouts)
        tensors = PromptTensors(
            images_ND=self._image_patches([ref for ref in sample.media if isinstance(ref, ImageRef)]),
            videos_ND=videos_ND,
            positions_3P=self._positions(outline.ids, list(zip(sample.media, outline.layouts, strict=True))),
            seconds_V=_seconds(outline.layouts),
        )
        prompt = Prompt(
            sample=sample,
            ids=outline.ids,
            grids=grids,
            resizes=tuple(layout.resize for layout in outline.layouts),
            frame=self.family.frame,
            digest=_digest(outline.ids, grids, tensors),
        )
        check_media(prompt, tensors, self.placeholders)
        return Feed(prompt, tensors)

    def _positions(self, ids: Sequence[int], media: Sequence[_Medium]) -> torch.Tensor:
        runs: dict[int, list[Run]] = {self.placeholders.image: [], self.placeholders.video: []}
        for ref, layout in media:
            mark = self.placeholders.image if isinstance(ref, ImageRef) else self.placeholders.video
            runs[mark] += self._runs(ref, layout)
        return mrope_positions(ids, runs, merge=self.placeholders.merge)

    def _layout(self, ref: MediaRef) -> Layout:
        patch = self.clip_rule.patch
        if isinstance(ref, ImageRef):
            size = self._store.size(ref)
            fitted = fitted_size(size, **self._area())
            corner = (0, 0) if ref.crop is None else ref.crop[:2]
            grid = (1, fitted.height // patch, fitted.width // patch)
            return Layout(resize=ResizeMap(size, fitted, corner), grid=grid)
        plan = self._store.plan(ref, self.clip_rule)
        pair = self.hf.video_processor.temporal_patch_size
        taken = [index / plan.fps for index in plan.indices]
        return Layout(
            resize=ResizeMap(plan.original, plan.resized),
            grid=(len(taken) // pair, plan.resized.height // patch, plan.resized.width // patch),
            seconds=tuple((taken[i] + taken[i + pair - 1]) / 2 for i in range(0, len(taken), pair)),
            second_per_grid=pair / plan.sample_fps,
        )

    def _area(self) -> dict[str, int]:
        images = self.hf.image_processor
        return {
            "factor": images.patch_size * images.merge_size,
            "min_pixels": images.size["shortest_edge"],
            "max_pixels": images.size["longest_edge"],
        }

    def _ids(self, sample: Sample, layouts: Sequence[Layout]) -> tuple[int, ...]:
        """The question as tokens, each placeholder as often as its run has tokens.

        We expand, because transformers 5 leaves a second pair of vision tokens around the frames of a Qwen3-VL video.

        Raises:
            UserError: the model's chat template leaves out a medium, or shows one twice.
        """
        texts = self._medium.split(self.question(sample))
        if len(texts) - 1 != len(layouts):
            raise UserError(
                f"the model's chat template shows {len(texts) - 1} of {len(layouts)} media; restore that of the release"
            )
        media = list(zip(sample.media, layouts, strict=True))
        shown = [self._shown(ref, layout) for ref, layout in media]
        return self._expanded("".join(map("".join, zip(texts, [*shown, ""], strict=True))), media)

    def _expanded(self, text: str, media: Sequence[_Medium]) -> tuple[int, ...]:
        """Text with one placeholder for each run of these media, as tokens."""
        words = self._wording.tokens(text)
        runs = iter([run for ref, layout in media for run in self._runs(ref, layout)])
        counts = (prod(run.grid) // self.placeholders.merge**2 for run in runs)
        marks = self.placeholders.image, self.placeholders.video
        return tuple(token for word in words for token in repeat(word, next(counts) if word in marks else 1))

    def _shown(self, ref: MediaRef, layout: Layout) -> str:
        """What a medium is in the text, with one placeholder for each run."""
        frame = f"{_START}{self.hf.image_token if isinstance(ref, ImageRef) else self.hf.video_token}{_END}"
        if isinstance(ref, VideoRef) and self.family.clock is Clock.STAMPS:
            return "".join(f"<{second:.1f} seconds>{frame}" for second in layout.seconds)
        return frame

    def _runs(self, ref: MediaRef, layout: Layout) -> tuple[Run, ...]:
        """How the placeholders of a medium follow each other."""
        if isinstance(ref, ImageRef):
            return (Run(layout.grid),)
        return self.family.video_runs(layout.grid, layout.second_per_grid)

    def _image_patches(self, refs: Sequence[ImageRef]) -> torch.Tensor:
        if not refs:
            return self._nothing()
        pictures = [fit(self._store.open(ref), **self._area()) for ref in refs]
        cut: torch.Tensor = self.hf.image_processor(pictures, do_resize=False, return_tensors="pt")["pixel_values"]
        return cut

    def _video_patches(self, refs: Sequence[VideoRef]) -> torch.Tensor:
        if not refs:
            return self._nothing()
        clips = [self._store.clip(ref, self.clip_rule).frames_TCHW for ref in refs]
        # Frames are chosen and resized already; the cap is about resizing, and transformers warns unless it is set.
        done = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}
        cut: torch.Tensor = self.hf.video_processor(clips, return_tensors="pt", **done)["pixel_values_videos"]
        return cut

    def _nothing(self) -> torch.Tensor:
        images = self.hf.image_processor
        return torch.zeros(0, 3 * images.temporal_patch_size * images.patch_size**2)


_Medium = tuple[MediaRef, Layout]


def _seconds(layouts: Sequence[Layout]) -> torch.Tensor:
    """How long each video's pairs of frames last, float32 [V]."""
    return torch.tensor([layout.second_per_grid for layout in layouts if layout.seconds], dtype=torch.float32)


def _worded(part: Part) -> tuple[str, str]:
    match part:
        case ImageRef():
            return "image", ""
        case VideoRef():
            return "video", ""
    return "text", part


def _digest(ids: Sequence[int], grids: Sequence[Grid], tensors: PromptTensors) -> str:
    digest = xxhash.xxh3_128(repr((ids, grids)).encode())  # a cryptographic hash would take a tenth of all the time
    for tensor in (tensors.images_ND, tensors.videos_ND, tensors.positions_3P):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
