"""Questions in the model's chat format, and texts as tokens. The latest are remembered: many samples ask the same."""

from __future__ import annotations

from functools import lru_cache, partial

from transformers import ProcessorMixin

_CACHE_SIZE = 1024


class ChatTemplate:
    """The text side of a processor."""

    def __init__(self, hf_processor: ProcessorMixin) -> None:
        self._hf_processor = hf_processor
        self._cached_render = lru_cache(_CACHE_SIZE)(partial(_render, hf_processor))
        self._cached_tokenize = lru_cache(_CACHE_SIZE)(partial(_tokenize, hf_processor))

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[ProcessorMixin]]:
        """What is remembered stays in its process."""
        return ChatTemplate, (self._hf_processor,)

    def render(self, parts: tuple[tuple[str, str], ...]) -> str:
        """One turn of a user, and the beginning of an answer; each part is ("text", its words), or a medium: its kind
        and nothing. Every medium becomes one placeholder.
        """
        return self._cached_render(parts)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text, marks of the chat format among them."""
        return self._cached_tokenize(text)


def _render(hf_processor: ProcessorMixin, parts: tuple[tuple[str, str], ...]) -> str:
    content = [{"type": kind, "text": words} if kind == "text" else {"type": kind} for kind, words in parts]
    messages = [{"role": "user", "content": content}]
    return str(hf_processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _tokenize(hf_processor: ProcessorMixin, text: str) -> tuple[int, ...]:
    return tuple(hf_processor.tokenizer(text).input_ids)
