"""Errors that cross packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class FunctionCall(NamedTuple):
    """A function that the config names, and one of its options."""

    fn: str  # the function, as the config has it
    args: Mapping[str, Any]  # its options, as the config has them
    option: str = ""  # the option that an error is about; empty for the function itself


class UserError(Exception):
    """An error that the user can correct: a path, a key, a value, a full disk.

    The command prints the message without a traceback and exits with code 2.
    """

    call: FunctionCall | None = None
    """The function that cannot be loaded or read, or refuses an option; `locate_errors` finds its line."""

    def __init__(self, *message: object, key: str = "") -> None:
        """Create an error; `key` is the dotted path of the setting that it is about, where no line is named yet."""
        super().__init__(*message)
        self.key = key


class PromptTooLongError(UserError):
    """A prompt has more tokens than `model.max_prompt_tokens`."""


class MediaError(UserError):
    """An image or video cannot or may not be used; the message names the file, the reason and the remedy."""


class MediaRangeError(MediaError):
    """A file is fine, but has no such crop, second or frames."""


class RunInterrupted(Exception):
    """The user asked the run to stop. It is raised once everything is saved."""


class Unscorable(Exception):
    """A reward function cannot score this sample: its target is unusable, or a service failed.

    The reward then has no value, which is not the same as a value of 0. `on_missing_score` decides what happens.
    """
