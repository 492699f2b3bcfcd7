"""Errors that cross packages."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right: a path, a key, a value, a full disk. Ends the command with exit code 2."""


class PromptTooLongError(UserError):
    """A prompt of more tokens than `model.max_prompt_tokens`."""


class RunInterrupted(Exception):
    """The user asked the run to stop, and everything is saved."""


class Unscorable(Exception):
    """A reward cannot judge this sample (unusable gold, a service that failed). It is never a score of 0."""
