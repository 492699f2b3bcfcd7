"""Questions as text in the model's chat format, and text as tokens; the latest results of both are cached."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_CACHE_SIZE = 1024


class ChatTemplate:
    """The chat template and tokenizer of a processor, with caches: many samples ask the same question."""

    def __init__(self, hf_processor: ProcessorMixin) -> None:
        self._hf_processor = hf_processor
        self._cached_render = lru_cache(_CACHE_SIZE)(partial(_render, hf_processor))
        self._cached_tokenize = lru_cache(_CACHE_SIZE)(partial(_tokenize, hf_processor))

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[ProcessorMixin]]:
        """Pickle the processor alone; a worker process fills caches of its own."""
        return ChatTemplate, (self._hf_processor,)

    def render(self, parts: tuple[tuple[str, str], ...]) -> str:
        """Return one user turn and the opening of the assistant's, with one placeholder for each image or video.

        Args:
            parts: ("text", the text), ("image", "") or ("video", ""), in reading order.
        """
        return self._cached_render(parts)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text; special tokens written in it count as such."""
        return self._cached_tokenize(text)


def _render(hf_processor: ProcessorMixin, parts: tuple[tuple[str, str], ...]) -> str:
    content = []
    for kind, text in parts:
        content.append({"type": kind, "text": text} if kind == "text" else {"type": kind})
    messages = [{"role": "user", "content": content}]
    return str(hf_processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _tokenize(hf_processor: ProcessorMixin, text: str) -> tuple[int, ...]:
    return tuple(hf_processor.tokenizer(text).input_ids)
