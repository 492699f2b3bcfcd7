"""Renders questions by a model's chat template, and checks how the template begins and ends a response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from mmrl.answer import ResponseFormat
from mmrl.types import UserError

if TYPE_CHECKING:
    from transformers import ProcessorMixin

_TEXT_CACHE_SIZE = 1024  # questions, and texts to tokenize
_THOUGHT = "<think>"
_PROBE = "mmrl"  # the response of a made-up conversation

# A template is code by the model's authors: rendering may raise errors of jinja2 and of Python.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_Content = tuple[tuple[str, str], ...]


class ChatTemplate:
    """The chat template and tokenizer of a processor, with caches: many samples ask the same question."""

    def __init__(self, hf_processor: ProcessorMixin, options: Mapping[str, object]) -> None:
        """Prepare to render with these options of the template, `model.chat` in a config."""
        self._hf_processor = hf_processor
        self._options = dict(options)
        self.render = lru_cache(_TEXT_CACHE_SIZE)(self._render)
        self.tokenize = lru_cache(_TEXT_CACHE_SIZE)(self._tokenize)

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[ProcessorMixin, dict[str, object]]]:
        """Pickle without the caches, which cannot be pickled; a worker process fills its own."""
        return ChatTemplate, (self._hf_processor, self._options)

    def find_response_opening(self, response_format: ResponseFormat) -> str:
        """Return the start of the response that each prompt ends with: `<think>` with its white space, or nothing.

        Templates of thinking models end the prompt with `<think>`. This depends on the template's options and differs
        between models of one family, so it is read from a rendered prompt.

        Raises:
            UserError: the template does not read an option, raises, does not end a turn as the tokenizer ends a
                response, or opens a thought that the response format does not ask for.
        """
        for option in self._options:
            if not re.search(rf"\b{re.escape(option)}\b", str(self._hf_processor.chat_template)):
                raise UserError(f"model.chat: the chat template does not read `{option}`; correct it, or take it out")
        question: _Content = (("text", "?"),)
        prompt = self.render(question)
        self._check_turn_end(question)
        start = prompt.rfind(_THOUGHT)
        opening = prompt[start:] if start >= 0 else ""
        if opening.strip() != _THOUGHT:
            return ""
        problem = _find_conflict(response_format)
        if problem:
            raise UserError(
                f"model.chat: the chat template ends each prompt with {_THOUGHT}, and {problem}; set model.chat: "
                "{enable_thinking: false}, or change the response format"
            )
        return opening

    def _check_turn_end(self, question: _Content) -> None:
        answer = {"role": "assistant", "content": [{"type": "text", "text": _PROBE}]}
        turns = self._apply([_user_turn(question), answer], add_generation_prompt=False)
        tokenizer = self._hf_processor.tokenizer
        ending = turns.rpartition(_PROBE)[2].strip()
        if ending and not ending.startswith(tokenizer.eos_token):
            raise UserError(
                f"model.path: the tokenizer's end of sequence is {tokenizer.eos_token!r}, and the chat template ends a "
                f"turn with {ending[:40]!r}: a response would never end; set eos_token in tokenizer_config.json to the "
                "token that ends a turn"
            )

    def _render(self, content: _Content) -> str:
        """Return one user turn and the opening of the assistant's, with one placeholder for each image or video.

        `content` has ("text", the text), ("image", "") or ("video", ""), in reading order.

        Raises:
            UserError: the template raises.
        """
        return self._apply([_user_turn(content)], add_generation_prompt=True)

    def _apply(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        try:
            rendered = self._hf_processor.apply_chat_template(
                messages, add_generation_prompt=add_generation_prompt, tokenize=False, **self._options
            )
        except _TEMPLATE_ERRORS as error:
            options = f" with model.chat {self._options}" if self._options else ""
            raise UserError(
                f"model.path: the chat template refuses a question{options}: {error}; correct model.chat, or "
                f"chat_template.jinja of {self._hf_processor.tokenizer.name_or_path or 'the model'}"
            ) from error
        return str(rendered)

    def _tokenize(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text; special tokens written in it count as such.

        Raises:
            UserError: it cannot be encoded in UTF-8, so the tokenizer cannot read it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise UserError(f"its text contains {half!r}, half of a surrogate pair; write the character") from error
        return tuple(self._hf_processor.tokenizer(text).input_ids)


def _user_turn(content: _Content) -> dict[str, Any]:
    parts = []
    for kind, text in content:
        parts.append({"type": kind, "text": text} if kind == "text" else {"type": kind})
    return {"role": "user", "content": parts}


def _find_conflict(response_format: ResponseFormat) -> str:
    """Return the setting by which responses cannot begin with `<think>`; empty if they can."""
    if response_format.thinking == "none":
        return "response_format.thinking is none"
    if f"<{response_format.think_tag}>" != _THOUGHT:
        return f"response_format.think_tag is {response_format.think_tag}"
    if response_format.style == "json":
        return "response_format.style is json"
    return ""
