"""Checks what an environment returns, and hashes what it shows. Imports without torch, for worker processes."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from math import isfinite
from numbers import Real
from typing import Final

from mmrl.types import (
    Action,
    Environment,
    ImageCrop,
    ImageRef,
    MediaResult,
    Observation,
    StepResult,
    UserError,
    VideoFrames,
    VideoRef,
)
from mmrl.utils.digests import text_digest

SEED_KEY: Final = "environment_seed"
"""Key of `Sample.meta`: the seed that the episodes of a sample are reset with."""
DIGEST_KEY: Final = "observation_digest"
"""Key of `Sample.meta`: `observation_digest` of the first observation, which is the question of the sample."""

_MAX_PICTURE_BYTES = 2**26  # of a PNG or JPEG file that an environment returns
_PICTURE_HEADS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")


def check_observation(value: object) -> Observation:
    """Return an `Observation` of text, PNG or JPEG bytes, references and parts, as `encodable`; else UserError."""
    if not isinstance(value, Observation):
        raise UserError(f"an environment shows a mmrl.Observation, not {value!r:.80}")
    if not isinstance(value.text, str) or not isinstance(value.state, str | None):
        raise UserError(f"text and state of an observation are str, not {value.text!r:.40} and {value.state!r:.40}")
    if not isinstance(value.media, tuple):
        raise UserError(f"the media of an observation are a tuple, not {value.media!r:.80}")
    for medium in value.media:
        if isinstance(medium, MediaResult):
            check_media_result(medium)
            continue
        if isinstance(medium, ImageRef | VideoRef):
            continue
        if not isinstance(medium, bytes) or not medium.startswith(_PICTURE_HEADS):
            raise UserError(f"a picture of an observation is a PNG or JPEG file in bytes, not {medium!r:.80}")
        if len(medium) > _MAX_PICTURE_BYTES:
            raise UserError(f"a picture of {len(medium):,} bytes exceeds {_MAX_PICTURE_BYTES:,}; encode a smaller one")
    return replace(value, text=encodable(value.text))


def check_media_result(value: MediaResult) -> None:
    """Raise UserError unless the fields of a part are numbers, as many as it needs."""
    numbers: tuple[float, ...]
    match value:
        case ImageCrop():
            numbers = value.box
        case VideoFrames():
            numbers = value.seconds
        case _:
            numbers = (value.start, value.end)
    is_complete = isinstance(numbers, tuple | list) and (not isinstance(value, ImageCrop) or len(numbers) == 4)
    if not is_complete or not all(isinstance(number, Real) for number in (value.medium_number, *numbers)):
        raise UserError(f"the fields of a part are numbers, and a box has four; this one is {value!r:.200}")


def encodable(text: str) -> str:
    """Return a text with a question mark for each half of a surrogate pair, which no tokenizer takes.

    JSON that the model writes may hold such a half as an escape, and a tool may repeat it.
    """
    return text.encode(errors="replace").decode()


def check_step_result(value: object) -> StepResult:
    """Return a `StepResult` with fields of the right types and finite numbers; raise UserError for any other."""
    if not isinstance(value, StepResult):
        raise UserError(f"step returns a mmrl.StepResult, not {value!r:.80}")
    value = replace(value, observation=check_observation(value.observation))
    named = {f"info[{name!r}]": number for name, number in value.info.items()}
    for name, number in {"reward": value.reward, **named}.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number):
            raise UserError(f"{name} is {number!r:.40}, which is not a finite number")
    for name in ("terminated", "truncated", "valid"):
        flag = getattr(value, name)
        if not isinstance(flag, bool):
            raise UserError(f"{name} is {flag!r:.40}, which is neither True nor False")
    return value


def observation_digest(observation: Observation) -> str:
    """Return the hash of an observation, in hex: equal for equal text and pictures, wherever their files lie."""
    shown = [observation.text]
    for medium in observation.media:
        match medium:
            case bytes():
                shown.append(hashlib.sha256(medium).hexdigest())
            case ImageRef(crop=None, timestamp=None) | VideoRef(start=None, end=None):
                shown.append(medium.sha256)
            case _:
                shown.append(repr(medium))
    return text_digest("\0".join(shown))


def ask_expert(environment: Environment) -> str | Action:
    """Return the action that the environment's expert would take; raises UserError without an expert or action."""
    expert = getattr(environment, "expert", None)
    if expert is None:
        raise UserError(f"{type(environment).__name__} has no method `expert`, which makes demonstrations")
    action: str | Action = expert()
    if not isinstance(action, str | Action) or not action:
        raise UserError(f"expert returned {action!r:.80}; it returns the action that it would take")
    return action


def describe_error(error: BaseException) -> str:
    """Return a message about an error of an environment, or of a check of what it returned."""
    return str(error) if isinstance(error, UserError) else f"the environment raised {type(error).__name__}: {error}"
