"""Questions in the model's chat format, and texts as tokens. The latest are remembered: many samples ask the same."""

from __future__ import annotations

from functools import lru_cache, partial

from transformers import ProcessorMixin

_KEPT = 1024


class Wording:
    """The text side of a processor."""

    def __init__(self, hf: ProcessorMixin) -> None:
        self._hf = hf
        self._chat = lru_cache(_KEPT)(partial(_chat, hf))
        self._tokens = lru_cache(_KEPT)(partial(_tokens, hf))

    def __reduce__(self) -> tuple[type[Wording], tuple[ProcessorMixin]]:
        """What is remembered stays in its process."""
        return Wording, (self._hf,)

    def chat(self, parts: tuple[tuple[str, str], ...]) -> str:
        """One turn of a user, and the beginning of an answer; each part is ("text", its words), or a medium: its kind
        and nothing. Every medium becomes one placeholder.
        """
        return self._chat(parts)

    def tokens(self, text: str) -> tuple[int, ...]:
        """The ids of a text, marks of the chat format among them."""
        return self._tokens(text)


def _chat(hf: ProcessorMixin, parts: tuple[tuple[str, str], ...]) -> str:
    content = [{"type": kind, "text": words} if kind == "text" else {"type": kind} for kind, words in parts]
    messages = [{"role": "user", "content": content}]
    return str(hf.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _tokens(hf: ProcessorMixin, text: str) -> tuple[int, ...]:
    return tuple(hf.tokenizer(text).input_ids)
