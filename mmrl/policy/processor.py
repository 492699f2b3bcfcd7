"""Samples to prompts: chat template, expanded placeholders, patches, and the digest that ties them together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import xxhash
from transformers import ProcessorMixin

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
    UserError,
)

_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Feed:
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
        self._cache: OrderedDict[str, Feed] = OrderedDict()
        self._cached_bytes = 0
        self._held: frozenset[str] = frozenset()

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

    def _checked(self, prompt: Prompt) -> Feed:
        feed = self._feed(prompt.sample)
        if feed.prompt.digest != prompt.digest:
            raise UserError(
                f"sample {prompt.sample.id}: its pictures changed while the run was using them "
                f"(digest {prompt.digest[:12]} became {feed.prompt.digest[:12]}); restore the files"
            )
        return feed

    def cached(self, sample: Sample) -> Feed | None:
        """The feed of a sample, if it is in the cache."""
        feed = self._cache.get(sample.id)
        # Two sets of data may use one id for two samples.
        return feed if feed is not None and feed.prompt.sample is sample else None

    def hold(self, samples: Sequence[Sample], feeds: Sequence[Feed]) -> None:
        """Keep the feeds of a step's samples, whatever their size, until those of the next step are held."""
        self._held = frozenset(sample.id for sample in samples)
        for sample, feed in zip(samples, feeds, strict=True):
            self._keep(replace(feed, prompt=replace(feed.prompt, sample=sample)))

    def _feed(self, sample: Sample) -> Feed:
        feed = self.cached(sample)
        return self._keep(self.process(sample) if feed is None else feed)

    def _keep(self, feed: Feed) -> Feed:
        """Put a feed last in the cache; the first ones leave it when it is full."""
        before = self._cache.pop(feed.prompt.sample.id, None)
        self._cached_bytes += feed.pixels_ND.nbytes - (before.pixels_ND.nbytes if before else 0)
        self._cache[feed.prompt.sample.id] = feed
        for key in list(self._cache)[:-1] if self._cached_bytes > _CACHE_BYTES else ():
            if key not in self._held and self._cached_bytes > _CACHE_BYTES:
                self._cached_bytes -= self._cache.pop(key).pixels_ND.nbytes
        return feed

    def refusal(self, sample: Sample) -> str | None:
        """Why a sample cannot be asked, if it cannot; needs no more of its pictures than their sizes."""
        words = " ".join(part for part in sample.parts if isinstance(part, str))
        if forged := [token for token in self._special if token in words]:
            return f"its text contains the special token {forged[0]!r}; take it out"
        images = self.hf.image_processor
        extra = 0
        for ref in sample.images:
            width, height = self._store.size(ref)
            extra += images.get_number_of_image_patches(height, width, {}) // images.merge_size**2 - 1
        question = self.question(sample)
        if len(question.encode()) + extra <= self._max_prompt_tokens:  # no token is shorter than a byte
            return None
        tokens = len(self.tokenizer(question).input_ids) + extra
        if tokens > self._max_prompt_tokens:
            return f"{tokens} tokens exceed model.max_prompt_tokens={self._max_prompt_tokens}; lower model.max_pixels?"
        return None

    def process(self, sample: Sample) -> Feed:
        """What `ask` keeps, made anew from the sample's text and media.

        Raises:
            UserError: as `ask`.
        """
        if reason := self.refusal(sample):
            raise UserError(f"sample {sample.id}: {reason}")
        pictures = [self._store.open(ref) for ref in sample.images]
        images = self.hf.image_processor
        if pictures:
            encoded = images(images=pictures, return_tensors="pt")
            grids = tuple(tuple(grid) for grid in encoded["image_grid_thw"].tolist())
            pixels = encoded["pixel_values"]
        else:
            grids, pixels = (), torch.zeros(0, 3 * images.temporal_patch_size * images.patch_size**2)
        # The processor as a whole would do the same to the text, slower.
        lengths = (t * h * w // images.merge_size**2 for t, h, w in grids)
        words = self.tokenizer(self.question(sample)).input_ids
        ids = tuple(id_ for word in words for id_ in (word,) * (next(lengths) if word == self._image_id else 1))
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
        return Feed(prompt=prompt, pixels_ND=pixels, positions_3P=positions)

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
    digest = xxhash.xxh3_128(repr((ids, grids)).encode())  # a cryptographic hash would take a tenth of all the time
    digest.update(pixels.numpy().data)
    return digest.hexdigest()
