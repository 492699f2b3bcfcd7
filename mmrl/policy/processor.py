"""Samples to prompts: chat template, expanded placeholders, patches, and the digest that ties them together."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import ProcessorMixin
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from mmrl.answer import Grammar
from mmrl.media.store import MediaStore
from mmrl.policy.families import Family
from mmrl.policy.positions import mrope_positions
from mmrl.types import (
    Author,
    Finish,
    ImageRef,
    Prompt,
    ResizeMap,
    Rollout,
    Sample,
    SamplingLaw,
    Segment,
    Size,
    Target,
    TooLongError,
    UserError,
)

_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What a medium becomes: a grid (t, h, w) of patches; for a video, when (s) each pair of frames was taken."""

    resize: ResizeMap
    grid: tuple[int, int, int]
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A prompt without pixels: its ids with every placeholder expanded, and a layout per medium in reading order."""

    ids: tuple[int, ...]
    layouts: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Feed:
    """What the model's forward needs of one prompt. Shapes: N patches, D values a patch, P tokens."""

    prompt: Prompt
    pixels_ND: torch.Tensor
    positions_3P: torch.Tensor


class QwenProcessor:
    """The asker: every picture is opened, resized and cut into patches once, here.

    Patches of recent prompts stay in a cache of bounded size; a prompt that has left it is processed again and must
    come out with the same digest.
    """

    def __init__(
        self,
        hf: ProcessorMixin,
        family: Family,
        grammar: Grammar,
        store: MediaStore,
        *,
        instruct: bool,
        max_prompt_tokens: int,
    ) -> None:
        self.hf = hf
        self.tokenizer = hf.tokenizer
        self.grammar = grammar
        self._family = family
        self._store = store
        self._instruct = instruct
        self._max_prompt_tokens = max_prompt_tokens
        self._image_id: int = hf.image_token_id
        self._special = [str(token) for token in hf.tokenizer.added_tokens_decoder.values() if token.special]
        self._cache: OrderedDict[str, _Feed] = OrderedDict()
        self._cached_bytes = 0

    def ask(self, sample: Sample) -> Prompt:
        """The sample as the model reads it.

        Raises:
            UserError: a picture cannot be used, the text contains a special token (a placeholder, say), or the prompt
                is longer than `model.max_prompt_tokens`.
        """
        return self._feed(sample).prompt

    def pixels(self, prompt: Prompt) -> torch.Tensor:
        """Patches of the prompt's pictures, float32 [N, D]; N is 0 for text alone."""
        return self._checked(prompt).pixels_ND

    def positions(self, prompt: Prompt) -> torch.Tensor:
        """M-RoPE position ids of the prompt, int64 [3, P]."""
        return self._checked(prompt).positions_3P

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def demonstrate(self, prompt: Prompt, answer: Target) -> Rollout:
        """The response a teacher would give: `answer` in the model's own frame and format, ended by EOS."""
        if answer.frame is not None:
            value = prompt.resizes[0].convert(answer.value, answer.frame, prompt.frame)
            answer = Target(kind=answer.kind, value=value, frame=prompt.frame)
        text = self.grammar.render(answer, prompt.sample.thought)
        words = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        ids = (*words, self.tokenizer.eos_token_id)
        segment = Segment(ids=ids, logps=(0.0,) * len(ids), author=Author.TEACHER)
        return Rollout(
            prompt=prompt,
            index=0,
            segments=(segment,),
            text=text,
            answer=self.grammar.parse(text, answer.kind),
            finish=Finish.EOS,
            law=SamplingLaw(max_new_tokens=len(ids)),
        )

    def _checked(self, prompt: Prompt) -> _Feed:
        feed = self._feed(prompt.sample)
        if feed.prompt.digest != prompt.digest:
            raise UserError(
                f"sample {prompt.sample.id}: its pictures changed while the run was using them "
                f"(digest {prompt.digest[:12]} became {feed.prompt.digest[:12]}); restore the files"
            )
        return feed

    def _feed(self, sample: Sample) -> _Feed:
        feed = self._cache.pop(sample.id, None)
        if feed is None or feed.prompt.sample is not sample:  # two sets of data may use one id for two samples
            self._cached_bytes -= feed.pixels_ND.nbytes if feed else 0
            feed = self._process(sample)
            self._cached_bytes += feed.pixels_ND.nbytes
        self._cache[sample.id] = feed
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1].pixels_ND.nbytes
        return feed

    def measure(self, sample: Sample) -> Outline:
        """All of a prompt but its pixels; needs no more of its media than their sizes.

        Raises:
            TooLongError: the prompt is longer than `model.max_prompt_tokens`.
            UserError: a medium cannot be used, or the text contains a special token (a placeholder, say).
        """
        words = " ".join(part for part in sample.parts if isinstance(part, str))
        if forged := [token for token in self._special if token in words]:
            raise UserError(f"its text contains the special token {forged[0]!r}; take it out")
        layouts = tuple(self._layout(ref) for ref in sample.images)
        counts = [h * w // self.hf.image_processor.merge_size**2 for _, h, w in (layout.grid for layout in layouts)]
        ids: list[int] = []
        for token in self.tokenizer(self.question(sample)).input_ids:
            ids += [token] * (counts.pop(0) if token == self._image_id else 1)
        if len(ids) > self._max_prompt_tokens:
            raise TooLongError(
                f"{len(ids)} tokens exceed model.max_prompt_tokens={self._max_prompt_tokens}; lower model.max_pixels?"
            )
        return Outline(ids=tuple(ids), layouts=layouts)

    def _layout(self, ref: ImageRef) -> Layout:
        size, images = self._store.size(ref), self.hf.image_processor
        height, width = smart_resize(
            size.height,
            size.width,
            factor=images.patch_size * images.merge_size,
            min_pixels=images.size["shortest_edge"],
            max_pixels=images.size["longest_edge"],
        )
        grid = (1, height // images.patch_size, width // images.patch_size)
        return Layout(resize=ResizeMap(size, Size(width, height)), grid=grid)

    def _process(self, sample: Sample) -> _Feed:
        try:
            self.measure(sample)
        except UserError as error:
            raise UserError(f"sample {sample.id}: {error}") from error
        pictures = [self._store.open(ref) for ref in sample.images]
        encoded = self.hf(text=[self.question(sample)], images=pictures or None, return_tensors="pt")
        ids = tuple(encoded["input_ids"][0].tolist())
        images = self.hf.image_processor
        grids = tuple(tuple(grid) for grid in encoded["image_grid_thw"].tolist()) if pictures else ()
        dim = 3 * images.temporal_patch_size * images.patch_size**2
        pixels = encoded["pixel_values"] if pictures else torch.zeros(0, dim)
        try:
            positions = mrope_positions(ids, grids, image_id=self._image_id, merge=images.merge_size)
        except UserError as error:
            raise UserError(f"sample {sample.id}: {error}") from error
        resizes = tuple(
            ResizeMap(original=Size(*picture.size), resized=Size(w * images.patch_size, h * images.patch_size))
            for picture, (_, h, w) in zip(pictures, grids, strict=True)
        )
        prompt = Prompt(
            sample=sample,
            ids=ids,
            grids=grids,
            resizes=resizes,
            frame=self._family.frame,
            digest=_digest(ids, grids, pixels),
        )
        return _Feed(prompt=prompt, pixels_ND=pixels, positions_3P=positions)

    def question(self, sample: Sample) -> str:
        """The chat-formatted text of a sample, one placeholder per picture."""
        content: list[dict[str, str]] = [
            {"type": "image"} if isinstance(part, ImageRef) else {"type": "text", "text": part} for part in sample.parts
        ]
        if self._instruct:
            content.append(
                {"type": "text", "text": " " + self.grammar.instruction(sample.target.kind, self._family.frame)}
            )
        messages = [{"role": "user", "content": content}]
        return str(self.hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _digest(ids: Sequence[int], grids: Sequence[Sequence[int]], pixels: torch.Tensor) -> str:
    digest = hashlib.sha256(repr((ids, grids)).encode())
    digest.update(pixels.numpy().tobytes())
    return digest.hexdigest()
