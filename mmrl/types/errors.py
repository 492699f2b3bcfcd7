"""Errors that cross packages."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right: a path, a key, a value, a full disk.

    The command prints the message without a traceback and exits with code 2.
    """


class PromptTooLongError(UserError):
    """A prompt has more tokens than `model.max_prompt_tokens`."""


class RunInterrupted(Exception):
    """The user asked the run to stop. It is raised once everything is saved."""


class Unscorable(Exception):
    """A reward function cannot score this sample: its target is unusable, or a service failed.

    The reward gives no value then, which is not the same as a value of 0. `rewards.on_error` says what follows.
    """
