"""Makes prompt processors for tests; what a test does not say is that of the tiny models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from videos import SMALL

from mmrl.answer import ResponseFormat
from mmrl.config.schema import MediaLimitsConfig
from mmrl.media.cache import MediaCache
from mmrl.policy.batch import LeftPaddedBatch, TokenSpan, pad_left
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.families import ModelFamily
from mmrl.policy.pretrained import ProcessorBundle
from mmrl.policy.processor import PromptProcessor
from mmrl.types import MediaPolicy, Prompt


def make_media_cache(root: Path = Path("/"), *, max_bytes: int = 0, reader: str = "pyav", **limits: Any) -> MediaCache:
    """A cache that opens files below `root`; `limits` are fields of `MediaLimitsConfig`."""
    policy = MediaPolicy(roots=(root,), video_reader=reader)
    return MediaCache(policy, MediaLimitsConfig(**limits), max_bytes=max_bytes)


def make_prompt_processor(
    family: ModelFamily,
    hf_processor: Any,
    response_format: ResponseFormat | None = None,
    *,
    media_cache: MediaCache | None = None,
    **options: Any,
) -> PromptProcessor:
    """A prompt processor with empty caches; `options` are further arguments of `PromptEncoder`."""
    encoder = PromptEncoder(
        ProcessorBundle(family=family, processor=hf_processor),
        response_format or ResponseFormat(),
        media_cache or make_media_cache(),
        **{"video": SMALL, "add_instruction": False, "max_prompt_tokens": 500, **options},
    )
    return PromptProcessor(encoder)


def pad_prompts(prompts: Sequence[Prompt], processor: PromptProcessor, *, pad_id: int) -> LeftPaddedBatch:
    """The tensors of prompts, as the engine `hf` makes them."""
    spans = [TokenSpan.from_prompt(prompt, processor) for prompt in prompts]
    return pad_left(spans, processor.placeholders, pad_id)
