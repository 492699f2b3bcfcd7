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

from mmrl.answer import ResponseFormat
from mmrl.config.schema import VideoConfig
from mmrl.media.cache import MediaCache
from mmrl.media.resize import resize_image, resized_size
from mmrl.media.video import FrameSampling
from mmrl.policy.batch import Placeholders, PromptTensors, check_observation, check_prompt_media
from mmrl.policy.chat_template import ChatTemplate
from mmrl.policy.families import ModelFamily, VideoTimeEncoding
from mmrl.policy.mrope import Grid, PlaceholderRun, mrope_positions
from mmrl.types import (
    Author,
    ContentPart,
    ImageRef,
    MediaObservation,
    MediaRef,
    Prompt,
    PromptTooLongError,
    ResizeMap,
    Sample,
    Segment,
    UserError,
    VideoRef,
)

_VISION_START, _VISION_END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt, and of it the tensors that the model's forward needs."""

    prompt: Prompt
    tensors: PromptTensors


@dataclass(frozen=True, slots=True)
class EncodedToolMedia:
    """A medium within a response, and its tensors; positions count from its first token."""

    segment: Segment
    tensors: PromptTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLayout:
    """What a medium becomes: a grid of patches; for a video, when (s) each pair of frames was taken, how far apart."""

    resize_map: ResizeMap
    grid: Grid
    frame_times: tuple[float, ...] = ()
    second_per_grid: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """A prompt without pixels: its ids with every placeholder expanded, and a layout per medium in reading order."""

    ids: tuple[int, ...]
    media_layouts: tuple[MediaLayout, ...]


class PromptEncoder:
    """Turns a sample into what the model reads; the same sample always becomes the same bytes."""

    def __init__(
        self,
        hf_processor: ProcessorMixin,
        family: ModelFamily,
        grammar: ResponseFormat,
        store: MediaCache,
        *,
        video: VideoConfig,
        add_instruction: bool,
        max_prompt_tokens: int,
        limit_key: str = "model.max_prompt_tokens",
    ) -> None:
        self.hf_processor, self.family, self.grammar = hf_processor, family, grammar
        self._store = store
        self._add_instruction = add_instruction
        self._max_prompt_tokens, self._limit_key = max_prompt_tokens, limit_key
        self.frame_sampling = FrameSampling(video=video, patch_size=hf_processor.image_processor.patch_size)
        self._chat_template = ChatTemplate(hf_processor)
        image, video = re.escape(hf_processor.image_token), re.escape(hf_processor.video_token)
        self._media_pattern = re.compile(rf"{re.escape(_VISION_START)}(?:{image}|{video}){re.escape(_VISION_END)}")
        self._special_tokens = [
            str(token) for token in hf_processor.tokenizer.added_tokens_decoder.values() if token.special
        ]
        self.placeholders = Placeholders(
            image_id=hf_processor.image_token_id,
            video_id=hf_processor.video_token_id,
            merge_size=hf_processor.image_processor.merge_size,
        )

    def measure(self, sample: Sample) -> PromptLayout:
        """All of a prompt but its pixels; needs no more of its media than their sizes.

        Raises:
            TooLongError: the prompt is longer than `model.max_prompt_tokens`.
            UserError: a medium cannot be used, or the text contains a special token (a placeholder, say).
        """
        words = " ".join(part for part in sample.parts if isinstance(part, str))
        if forged := [token for token in self._special_tokens if token in words]:
            raise UserError(f"its text contains the special token {forged[0]!r}; take it out")
        layouts = tuple(self._media_layout(ref) for ref in sample.media)
        ids = self._tokenize_with_media(sample, layouts)
        if len(ids) > self._max_prompt_tokens:
            raise PromptTooLongError(
                f"{len(ids)} tokens exceed {self._limit_key}={self._max_prompt_tokens}; raise it, or lower "
                "model.max_pixels or model.video"
            )
        return PromptLayout(ids=ids, media_layouts=layouts)

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Open the sample's media, resize them, cut them into patches.

        Raises:
            UserError: as `measure`; or media, placeholders and patches disagree. It names the sample.
        """
        try:
            return self._encode(sample)
        except UserError as error:
            raise type(error)(f"sample {sample.id}: {error}") from error

    def encode_tool_media(self, ref: MediaRef) -> EncodedToolMedia:
        """A medium as it stands in a prompt, alone: marks, placeholders and, where the family has them, times.

        Raises:
            UserError: it cannot be used, or its placeholders and patches disagree.
        """
        is_picture = isinstance(ref, ImageRef)
        patches_ND = self._image_patches([ref]) if isinstance(ref, ImageRef) else self._video_patches([ref])
        layout = self._media_layout(ref)
        ids = self._expand_placeholders(self._media_text(ref, layout), [(ref, layout)])
        tensors = PromptTensors(
            image_patches_MD=patches_ND if is_picture else self._no_patches(),
            video_patches_MD=self._no_patches() if is_picture else patches_ND,
            position_ids_3P=self._position_ids(ids, [(ref, layout)]),
            second_per_grid_V=_second_per_grid([layout]),
        )
        view = MediaObservation(
            ref=ref, grid=layout.grid, resize_map=layout.resize_map, digest=_compute_digest(ids, [layout.grid], tensors)
        )
        segment = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT, observation=view)
        check_observation(segment, view, tensors, self.placeholders, owner=ref.path)
        return EncodedToolMedia(segment, tensors)

    def render_chat(self, sample: Sample) -> str:
        """The chat-formatted text of a sample, one placeholder per medium."""
        parts = tuple(map(_chat_part, sample.parts))
        if self._add_instruction:
            instruction = self.grammar.instruction(sample.target.answer_type, self.family.coordinate_system)
            parts = (*parts, ("text", f" {instruction}"))
        return self._chat_template.render(parts)

    def _encode(self, sample: Sample) -> EncodedPrompt:
        # Decoding a video plans it too; measuring first would open it twice.
        videos_ND = self._video_patches([ref for ref in sample.media if isinstance(ref, VideoRef)])
        outline = self.measure(sample)
        grids = tuple(layout.grid for layout in outline.media_layouts)
        tensors = PromptTensors(
            image_patches_MD=self._image_patches([ref for ref in sample.media if isinstance(ref, ImageRef)]),
            video_patches_MD=videos_ND,
            position_ids_3P=self._position_ids(
                outline.ids, list(zip(sample.media, outline.media_layouts, strict=True))
            ),
            second_per_grid_V=_second_per_grid(outline.media_layouts),
        )
        prompt = Prompt(
            sample=sample,
            token_ids=outline.ids,
            grids=grids,
            resize_maps=tuple(layout.resize_map for layout in outline.media_layouts),
            coordinate_system=self.family.coordinate_system,
            digest=_compute_digest(outline.ids, grids, tensors),
        )
        check_prompt_media(prompt, tensors, self.placeholders)
        return EncodedPrompt(prompt, tensors)

    def _position_ids(self, ids: Sequence[int], media: Sequence[_MediaWithLayout]) -> torch.Tensor:
        runs: dict[int, list[PlaceholderRun]] = {self.placeholders.image_id: [], self.placeholders.video_id: []}
        for ref, layout in media:
            mark = self.placeholders.image_id if isinstance(ref, ImageRef) else self.placeholders.video_id
            runs[mark] += self._placeholder_runs(ref, layout)
        return mrope_positions(ids, runs, merge_size=self.placeholders.merge_size)

    def _media_layout(self, ref: MediaRef) -> MediaLayout:
        patch = self.frame_sampling.patch_size
        if isinstance(ref, ImageRef):
            size = self._store.image_size(ref)
            fitted = resized_size(size, **self._resize_limits())
            corner = (0, 0) if ref.crop is None else ref.crop[:2]
            grid = (1, fitted.height // patch, fitted.width // patch)
            return MediaLayout(resize_map=ResizeMap(size, fitted, corner), grid=grid)
        plan = self._store.get_frame_plan(ref, self.frame_sampling)
        pair = self.hf_processor.video_processor.temporal_patch_size
        taken = [index / plan.fps for index in plan.indices]
        return MediaLayout(
            resize_map=ResizeMap(plan.original_size, plan.resized_size),
            grid=(len(taken) // pair, plan.resized_size.height // patch, plan.resized_size.width // patch),
            frame_times=tuple((taken[i] + taken[i + pair - 1]) / 2 for i in range(0, len(taken), pair)),
            second_per_grid=pair / plan.sampled_fps,
        )

    def _resize_limits(self) -> dict[str, int]:
        images = self.hf_processor.image_processor
        return {
            "factor": images.patch_size * images.merge_size,
            "min_pixels": images.size["shortest_edge"],
            "max_pixels": images.size["longest_edge"],
        }

    def _tokenize_with_media(self, sample: Sample, layouts: Sequence[MediaLayout]) -> tuple[int, ...]:
        """The question as tokens, each placeholder as often as its run has tokens.

        We expand, because transformers 5 leaves a second pair of vision tokens around the frames of a Qwen3-VL video.

        Raises:
            UserError: the model's chat template leaves out a medium, or shows one twice.
        """
        texts = self._media_pattern.split(self.render_chat(sample))
        if len(texts) - 1 != len(layouts):
            raise UserError(
                f"the model's chat template shows {len(texts) - 1} of {len(layouts)} media; restore that of the release"
            )
        media = list(zip(sample.media, layouts, strict=True))
        shown = [self._media_text(ref, layout) for ref, layout in media]
        return self._expand_placeholders("".join(map("".join, zip(texts, [*shown, ""], strict=True))), media)

    def _expand_placeholders(self, text: str, media: Sequence[_MediaWithLayout]) -> tuple[int, ...]:
        """Text with one placeholder for each run of these media, as tokens."""
        words = self._chat_template.tokenize(text)
        runs = iter([run for ref, layout in media for run in self._placeholder_runs(ref, layout)])
        counts = (prod(run.grid) // self.placeholders.merge_size**2 for run in runs)
        marks = self.placeholders.image_id, self.placeholders.video_id
        return tuple(token for word in words for token in repeat(word, next(counts) if word in marks else 1))

    def _media_text(self, ref: MediaRef, layout: MediaLayout) -> str:
        """What a medium is in the text, with one placeholder for each run."""
        frame = f"{_VISION_START}{self.hf_processor.image_token if isinstance(ref, ImageRef) else self.hf_processor.video_token}{_VISION_END}"
        if isinstance(ref, VideoRef) and self.family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS:
            return "".join(f"<{second:.1f} seconds>{frame}" for second in layout.frame_times)
        return frame

    def _placeholder_runs(self, ref: MediaRef, layout: MediaLayout) -> tuple[PlaceholderRun, ...]:
        """How the placeholders of a medium follow each other."""
        if isinstance(ref, ImageRef):
            return (PlaceholderRun(layout.grid),)
        return self.family.video_placeholder_runs(layout.grid, layout.second_per_grid)

    def _image_patches(self, refs: Sequence[ImageRef]) -> torch.Tensor:
        if not refs:
            return self._no_patches()
        pictures = [resize_image(self._store.get_image(ref), **self._resize_limits()) for ref in refs]
        cut: torch.Tensor = self.hf_processor.image_processor(pictures, do_resize=False, return_tensors="pt")[
            "pixel_values"
        ]
        return cut

    def _video_patches(self, refs: Sequence[VideoRef]) -> torch.Tensor:
        if not refs:
            return self._no_patches()
        clips = [self._store.read_video(ref, self.frame_sampling).frames_TCHW for ref in refs]
        # Frames are chosen and resized already; the cap is about resizing, and transformers warns unless it is set.
        done = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}
        cut: torch.Tensor = self.hf_processor.video_processor(clips, return_tensors="pt", **done)["pixel_values_videos"]
        return cut

    def _no_patches(self) -> torch.Tensor:
        images = self.hf_processor.image_processor
        return torch.zeros(0, 3 * images.temporal_patch_size * images.patch_size**2)


_MediaWithLayout = tuple[MediaRef, MediaLayout]


def _second_per_grid(layouts: Sequence[MediaLayout]) -> torch.Tensor:
    """How long each video's pairs of frames last, float32 [V]."""
    return torch.tensor([layout.second_per_grid for layout in layouts if layout.frame_times], dtype=torch.float32)


def _chat_part(part: ContentPart) -> tuple[str, str]:
    match part:
        case ImageRef():
            return "image", ""
        case VideoRef():
            return "video", ""
    return "text", part


def _compute_digest(ids: Sequence[int], grids: Sequence[Grid], tensors: PromptTensors) -> str:
    digest = xxhash.xxh3_128(repr((ids, grids)).encode())  # a cryptographic hash would take a tenth of all the time
    for tensor in (tensors.image_patches_MD, tensors.video_patches_MD, tensors.position_ids_3P):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
