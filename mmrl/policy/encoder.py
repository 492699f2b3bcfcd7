"""Samples to prompts: chat template, expanded placeholders, patches, position ids, and a digest over all of them.

`unpatchify` turns patches back into pixels, so that people can look at them.

Suffixes of tensor names: P tokens of a prompt, M patches, D values of a patch, V videos; TCHW frames, their channels,
height and width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
import xxhash

from mmrl.answer import ResponseFormat
from mmrl.config.schema import VideoConfig
from mmrl.media.cache import MediaCache
from mmrl.media.video import FrameSampling
from mmrl.policy.batch import MediaItem, Placeholders, PromptTensors, check_placeholders, prompt_media_items
from mmrl.policy.chat import ChatTemplate
from mmrl.policy.families import Grid, ImageFormat, ModelFamily, PlaceholderRun, VideoTimeEncoding
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.types import (
    Author,
    ImageRef,
    MediaObservation,
    MediaRef,
    Prompt,
    PromptTooLongError,
    ResizeMap,
    Sample,
    Segment,
    Size,
    UserError,
    VideoRef,
)

if TYPE_CHECKING:
    from transformers import ProcessorMixin
    from transformers.image_processing_utils import BaseImageProcessor


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt with its tensors for the model's forward."""

    prompt: Prompt
    tensors: PromptTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLayout:
    """Size and times of an image or video as the model sees it."""

    ref: MediaRef
    resize_map: ResizeMap  # original and resized size, in pixels
    grid: Grid  # time, height and width in patches
    runs: tuple[PlaceholderRun, ...]  # runs of placeholder tokens that it becomes
    frame_times: tuple[float, ...] = ()  # of a video: middle of each pair of frames, in seconds from the file's start
    second_per_grid: float = 0.0  # seconds from one pair of frames to the next; 0 for an image


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLayout:
    """A prompt without its pixels."""

    ids: tuple[int, ...]  # token ids, each placeholder repeated as often as its image or video has tokens
    media_layouts: tuple[MediaLayout, ...]  # a layout for each image and video, in reading order


class PromptEncoder:
    """Turns samples into prompts and their tensors; a sample always becomes the same bytes."""

    def __init__(
        self,
        bundle: ProcessorBundle,
        response_format: ResponseFormat,
        media_cache: MediaCache,
        *,
        video: VideoConfig,
        add_instruction: bool,
        max_prompt_tokens: int,
        limit_key: str = "model.max_prompt_tokens",
        chat: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Prepare to encode; with `add_instruction` an instruction about the response format follows each question.

        `limit_key` is the YAML key that sets `max_prompt_tokens`, for messages; `chat` has options of the chat
        template.

        Raises:
            UserError: the chat template cannot be used, or does not fit the tokenizer or the response format.
        """
        # Not the bundle itself, which may hold the model.
        hf_processor, family = bundle.processor, bundle.family
        self.hf_processor = hf_processor
        self.family = family
        self.response_format = response_format
        self.media_cache = media_cache
        self._add_instruction = add_instruction
        self._max_prompt_tokens = max_prompt_tokens
        self._limit_key = limit_key
        self.video_refusal = ""  # why videos cannot be used, and what to do; empty if they can
        self.image_format = family.image_format(hf_processor)
        self._chat_template = ChatTemplate(hf_processor, chat)
        # Text of the response that the prompt already holds: `<think>` with its white space, or nothing.
        self.response_opening = self._chat_template.find_response_opening(response_format)
        patch_size = self.image_format.patch_size
        self.frame_sampling = FrameSampling(video=video, patch_size=patch_size)
        self._no_patches = torch.zeros(0, 3 * self.image_format.frames_per_patch * patch_size**2)
        self._media_pattern = _compile_media_pattern(family, hf_processor)
        added_tokens = hf_processor.tokenizer.added_tokens_decoder.values()
        self._special_tokens = [str(token) for token in added_tokens if token.special]
        takes_videos = family.video_time is not VideoTimeEncoding.NO_VIDEO
        self.placeholders = Placeholders(
            image_id=hf_processor.image_token_id,
            video_id=hf_processor.video_token_id if takes_videos else -1,  # -1 is the id of no token
            merge_size=self.image_format.merge_size,
        )

    def with_media_cache(self, media_cache: MediaCache) -> PromptEncoder:
        """Return an encoder like this one that opens media through another cache."""
        encoder = copy(self)
        encoder.media_cache = media_cache
        return encoder

    def measure(self, sample: Sample) -> PromptLayout:
        """Return the prompt of a sample without its pixels; only the sizes of its images and videos are read.

        Raises:
            PromptTooLongError: the prompt is longer than `max_prompt_tokens`.
            UserError: an image or video cannot be used, the text contains a special token such as a placeholder, or the
                chat template of the model omits an image or video, or shows one twice.
        """
        # A chat template joins neighbouring texts, so a token may begin in one and end in the next.
        text = "".join(part if isinstance(part, str) else " " for part in sample.parts)
        for token in self._special_tokens:
            if token in text:
                raise UserError(f"its text contains the special token {token!r}; take it out")
        layouts = tuple(map(self._media_layout, sample.media))
        # Placeholders are expanded here: transformers 5 would leave a second pair of start and end tokens around the
        # frames of a Qwen3-VL video.
        texts = self._media_pattern.split(self.render_chat(sample))
        if len(texts) - 1 != len(layouts):
            raise UserError(
                f"the model's chat template shows {len(texts) - 1} of {len(layouts)} media; restore the released one"
            )
        pieces = [texts[0]]
        for layout, following_text in zip(layouts, texts[1:], strict=True):
            pieces += [self._media_text(layout), following_text]
        ids = self._expand_placeholders("".join(pieces), layouts)
        if len(ids) > self._max_prompt_tokens:
            raise PromptTooLongError(
                f"{len(ids)} tokens exceed {self._limit_key}={self._max_prompt_tokens}; raise it, or lower "
                "model.max_pixels or model.video"
            )
        return PromptLayout(ids=ids, media_layouts=layouts)

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Open the images and videos of a sample, resize them, and cut them into patches.

        Raises:
            UserError: as `measure`; or media, placeholders and patches disagree. The message names the sample.
        """
        try:
            # Decoding a video chooses its frames too; measuring first would open the file twice.
            video_patches = self._video_patches(sample.media)
            layout = self.measure(sample)
            tensors = self._make_tensors(layout.ids, layout.media_layouts, video_patches)
            grids = tuple(media_layout.grid for media_layout in layout.media_layouts)
            prompt = Prompt(
                sample=sample,
                token_ids=layout.ids,
                grids=grids,
                resize_maps=tuple(media_layout.resize_map for media_layout in layout.media_layouts),
                coordinate_system=self.family.coordinate_system,
                digest=_compute_digest(layout.ids, grids, tensors),
            )
        except UserError as error:
            raise type(error)(f"sample {sample.id}: {error}") from error
        owner = f"sample {sample.id}"
        check_placeholders(prompt.token_ids, prompt_media_items(prompt), tensors, self.placeholders, owner=owner)
        return EncodedPrompt(prompt, tensors)

    def encode_tool_media(self, ref: MediaRef) -> tuple[Segment, PromptTensors]:
        """Encode one image or video exactly as it appears in a prompt, with its start and end tokens and times.

        Returns:
            A segment of the environment, with an observation, and tensors whose positions count from its first token.

        Raises:
            UserError: it cannot be used, or its placeholders and patches disagree.
        """
        video_patches = self._video_patches([ref])
        layout = self._media_layout(ref)
        ids = self._expand_placeholders(self._media_text(layout), [layout])
        tensors = self._make_tensors(ids, [layout], video_patches)
        digest = _compute_digest(ids, [layout.grid], tensors)
        observation = MediaObservation(ref=ref, grid=layout.grid, resize_map=layout.resize_map, digest=digest)
        segment = Segment(token_ids=ids, logprobs=(0.0,) * len(ids), author=Author.ENVIRONMENT, observation=observation)
        check_placeholders(ids, [MediaItem(ref, layout.grid, digest)], tensors, self.placeholders, owner=ref.path)
        return segment, tensors

    def render_chat(self, sample: Sample) -> str:
        """Return the text of a sample in the chat format, with one placeholder for each image or video."""
        parts: list[tuple[str, str]] = []
        for part in sample.parts:
            match part:
                case ImageRef():
                    parts.append(("image", ""))
                case VideoRef():
                    parts.append(("video", ""))
                case text:
                    parts.append(("text", text))
        if self._add_instruction:
            instruction = self.response_format.instruction(sample.target.answer_type, self.family.coordinate_system)
            parts.append(("text", f" {instruction}"))
        return self._chat_template.render(tuple(parts))

    def _make_tensors(
        self, ids: Sequence[int], layouts: Sequence[MediaLayout], video_patches: torch.Tensor
    ) -> PromptTensors:
        """Return the tensors of a prompt, or of what a tool shows; the video patches are already cut."""
        image_runs: list[PlaceholderRun] = []
        video_runs: list[PlaceholderRun] = []
        images, seconds_per_grid = [], []
        for layout in layouts:
            if isinstance(layout.ref, VideoRef):
                video_runs += layout.runs
                seconds_per_grid.append(layout.second_per_grid)
                continue
            image_runs += layout.runs
            image = self.media_cache.get_image(layout.ref)
            # From the image itself: if the file has changed since it was measured, grid and patches will disagree.
            resized = self._resized_image_size(Size(*image.size))
            images.append(image if resized == image.size else image.resize(resized))
        image_patches = self._no_patches
        if images:
            image_patches = self.family.cut_patches(self.hf_processor, images)
        runs = {self.placeholders.image_id: image_runs, self.placeholders.video_id: video_runs}
        return PromptTensors(
            image_patches_MD=image_patches,
            video_patches_MD=video_patches,
            position_ids_3P=self.family.position_ids(ids, runs, merge_size=self.placeholders.merge_size),
            second_per_grid_V=torch.tensor(seconds_per_grid, dtype=torch.float32),
        )

    def _media_layout(self, ref: MediaRef) -> MediaLayout:
        if isinstance(ref, VideoRef):
            return self._video_layout(ref)
        patch_size = self.image_format.patch_size
        original = self.media_cache.image_size(ref)
        resized = self._resized_image_size(original)
        # A crop's coordinates in the original count from the corner of the whole image.
        offset = (0, 0) if ref.crop is None else ref.crop[:2]
        grid = (1, resized.height // patch_size, resized.width // patch_size)
        resize_map = ResizeMap(original, resized, offset)
        return MediaLayout(ref=ref, resize_map=resize_map, grid=grid, runs=(PlaceholderRun(grid),))

    def _video_layout(self, ref: VideoRef) -> MediaLayout:
        """Choose the frames of a video, and return its size and times.

        Raises:
            UserError: videos cannot be used, or this one cannot.
        """
        if self.video_refusal:
            raise UserError(self.video_refusal)
        if self.family.video_time is VideoTimeEncoding.NO_VIDEO:
            raise UserError(f"{ref.path}: the model ({self.family.model_type}) takes no videos; leave the sample out")
        patch_size = self.image_format.patch_size
        plan = self.media_cache.get_frame_plan(ref, self.frame_sampling)
        frames_per_grid = self.image_format.frames_per_patch
        times = [index / plan.fps for index in plan.indices]
        middles = []
        for first in range(0, len(times), frames_per_grid):
            middles.append((times[first] + times[first + frames_per_grid - 1]) / 2)
        grid = (len(middles), plan.resized_size.height // patch_size, plan.resized_size.width // patch_size)
        second_per_grid = frames_per_grid / plan.sampled_fps
        return MediaLayout(
            ref=ref,
            resize_map=ResizeMap(plan.original_size, plan.resized_size),
            grid=grid,
            runs=self.family.video_placeholder_runs(grid, second_per_grid),
            frame_times=tuple(middles),
            second_per_grid=second_per_grid,
        )

    def _resized_image_size(self, size: Size) -> Size:
        image_format = self.image_format
        return self.family.resized_image_size(
            size,
            factor=image_format.patch_size * image_format.merge_size,
            min_pixels=image_format.min_pixels,
            max_pixels=image_format.max_pixels,
        )

    def _expand_placeholders(self, text: str, layouts: Sequence[MediaLayout]) -> tuple[int, ...]:
        """Return the token ids of a text that has one placeholder for each run of these images and videos."""
        runs = chain.from_iterable(layout.runs for layout in layouts)
        run_lengths = (prod(run.grid) // self.placeholders.merge_size**2 for run in runs)
        placeholders = (self.placeholders.image_id, self.placeholders.video_id)
        ids: list[int] = []
        for token in self._chat_template.tokenize(text):
            if token in placeholders:
                ids += [token] * next(run_lengths)
            else:
                ids.append(token)
        return tuple(ids)

    def _media_text(self, layout: MediaLayout) -> str:
        """Return the text of an image or video, with one placeholder for each of its runs."""
        is_image = isinstance(layout.ref, ImageRef)
        placeholder = self.hf_processor.image_token if is_image else self.hf_processor.video_token
        run = f"{self.family.vision_start_token}{placeholder}{self.family.vision_end_token}"
        if not is_image and self.family.video_time is VideoTimeEncoding.TEXT_TIMESTAMPS:
            # The wording of transformers' Qwen3-VL processor, on which the model was trained.
            return "".join(f"<{seconds:.1f} seconds>{run}" for seconds in layout.frame_times)
        return run

    def _video_patches(self, media: Sequence[MediaRef]) -> torch.Tensor:
        """Return the patches of the videos among these media, float32 [M, D]."""
        videos = [ref for ref in media if isinstance(ref, VideoRef)]
        if not videos or self.family.video_time is VideoTimeEncoding.NO_VIDEO:
            return self._no_patches
        clips = [self.media_cache.read_video(ref, self.frame_sampling).frames_TCHW for ref in videos]
        # Frames are chosen and resized already; the cap is about resizing, and transformers warns unless it is set.
        options = {"do_resize": False, "do_sample_frames": False, "cap_pixels_per_frame": False}
        output = self.hf_processor.video_processor(clips, return_tensors="pt", **options)
        patches: torch.Tensor = output["pixel_values_videos"]
        return patches


def _compile_media_pattern(family: ModelFamily, hf_processor: ProcessorMixin) -> re.Pattern[str]:
    """Return the pattern of one image or video in a text that the chat template has rendered."""
    placeholders = [re.escape(hf_processor.image_token)]
    if family.video_time is not VideoTimeEncoding.NO_VIDEO:
        placeholders.append(re.escape(hf_processor.video_token))
    start, end = re.escape(family.vision_start_token), re.escape(family.vision_end_token)
    # Some templates leave start and end to the processor's own expansion, which is not used here.
    return re.compile(f"(?:{start})?(?:{'|'.join(placeholders)})(?:{end})?")


def unpatchify(
    patches_MD: torch.Tensor, grid: Grid, image_format: ImageFormat, processor: BaseImageProcessor
) -> torch.Tensor:
    """Return the frames that patches were cut from, uint8 [frames, height, width, 3] in pixels.

    Args:
        patches_MD: patches, float32. An image was repeated to fill a pair, so its frames are equal.
        grid: time, height and width in patches, time in pairs of frames.
        image_format: sizes of patches and tokens.
        processor: the image processor that normalised the patches.
    """
    # Inverts `ModelFamily.cut_patches`, which for Qwen-VL is transformers' Qwen2VLImageProcessor.
    merge, side, pair = image_format.merge_size, image_format.patch_size, image_format.frames_per_patch
    time, height, width = grid
    blocks = patches_MD.reshape(time, height // merge, width // merge, merge, merge, 3, pair, side, side)
    # To time, frame of the pair; then block, patch and pixel row; then block, patch and pixel column; then channel.
    frames = blocks.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(time * pair, height * side, width * side, 3)
    scaled = frames.float() * torch.tensor(processor.image_std) + torch.tensor(processor.image_mean)
    return (scaled * 255).round().clamp(0, 255).to(torch.uint8)


def _compute_digest(ids: Sequence[int], grids: Sequence[Grid], tensors: PromptTensors) -> str:
    """Return a hash over token ids, grids, patches and position ids, 32 hexadecimal digits."""
    # xxhash, because a cryptographic hash took a tenth of the encoding time.
    digest = xxhash.xxh3_128(repr((ids, grids)).encode())
    for tensor in (tensors.image_patches_MD, tensors.video_patches_MD, tensors.position_ids_3P):
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()
