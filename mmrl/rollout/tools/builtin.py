"""Tools that come with mmrl. A model can call only the ones that a config names.

A tool is a function `(call, sample, *, options)` that returns text, or a part of an image or video. `call` holds the
arguments that the model wrote; options come from YAML. For a call that it cannot answer, a tool raises a ValueError
whose message is written for the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mmrl.answer import validate_value
from mmrl.answer.text import parse_answer_value
from mmrl.types import CoordinateSystem, ImageCrop, Sample, Unscorable, UserError, VideoClip, VideoFrames
from mmrl_rewards.services.endpoint import Endpoint

PositiveFloat = Annotated[float, Field(gt=0.0)]
PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

_MAX_NUMBER = 1e9  # exclusive; larger arguments are refused, and so are infinities


def check_answer(call: Mapping[str, Any], sample: Sample, *, reveal: bool = False) -> str:
    """Say whether the argument `answer` can be read as an answer of the type that the sample asks for.

    Args:
        call: {"answer": text}.
        sample: the question.
        reveal: say whether the answer is correct, too. This hands the target to the model; it is meant for training a
            model to check itself. Not for targets with coordinates.

    Raises:
        UserError: `reveal` is set, and the target has coordinates.
    """
    if reveal and sample.target.coordinate_system is not None:
        # The model's coordinates may have other units, and a tool does not know the size that the model saw.
        raise UserError(f"sample {sample.id!r} asks for coordinates, which `reveal` cannot compare; leave it out")
    text = _read_text(call, "answer").strip()
    answer_type = sample.target.answer_type
    try:
        value = parse_answer_value(answer_type, text)
    except ValueError as error:
        return f"This cannot be read as an answer of kind {answer_type}: {error}."
    if not reveal:
        return f"This can be read as an answer of kind {answer_type}."
    is_correct = value == validate_value(answer_type, sample.target.value)
    return "This is right." if is_correct else "This is wrong."


def search(
    call: Mapping[str, Any],
    sample: Sample,
    *,
    url: str,
    timeout_s: PositiveFloat = 5.0,
    retries: Annotated[int, Field(ge=0)] = 0,
    max_reply_bytes: PositiveInt = 100_000,
    cache: str | None = None,
) -> str:
    """Return the reply of a search service to the argument `query`.

    The query is sent as JSON, {"query": ..}. The model chooses the query and never the address, and no redirect is
    followed.

    Args:
        call: {"query": text}.
        sample: not used.
        url: address of the service.
        timeout_s: seconds for one exchange.
        retries: further exchanges after one that failed.
        max_reply_bytes: a longer reply counts as a failure.
        cache: folder that keeps replies, so that a repeated run sees the same ones.
    """
    endpoint = Endpoint(url=url, timeout_s=timeout_s, retries=retries, max_reply_bytes=max_reply_bytes, cache=cache)
    try:
        return endpoint.post({"query": _read_text(call, "query")}, _decode_reply)
    except Unscorable as error:
        raise ValueError(f"the search found no reply: {error}") from error


def zoom(call: Mapping[str, Any], sample: Sample) -> ImageCrop:
    """Show the part `box` ([x1, y1, x2, y2]) of image number `medium` (1 if left out), upscaled like any small image.

    A part of a part is cut from the file, not from the enlarged image.
    """
    _check_argument_names(call, "box", "medium")
    x1, y1, x2, y2 = _read_numbers(call, "box", 4)
    return ImageCrop(medium_number=_read_medium_number(call), box=(x1, y1, x2, y2))


def crop(call: Mapping[str, Any], sample: Sample, *, normalized: bool = False, padding: Share = 0.0) -> ImageCrop:
    """Show the part `bbox_2d` ([x1, y1, x2, y2]) of image number `target_image` (1 if left out), as `zoom` does.

    Published prompts and demonstrations have these arguments: the image_zoom_in_tool of DeepEyes (arXiv:2505.14362) and
    the crop_image_normalized of Pixel Reasoner (arXiv:2505.15966).

    Args:
        call: {"bbox_2d": list of numbers, "target_image": number, "label": anything, which is ignored}.
        sample: not used.
        normalized: the box is in fractions of the image's width and height.
        padding: with `normalized`, fraction of width and height that is shown beyond each side of the box.
    """
    _check_argument_names(call, "bbox_2d", "target_image", "label")
    x1, y1, x2, y2 = _read_numbers(call, "bbox_2d", 4)
    number, margin = _read_medium_number(call, "target_image"), padding if normalized else 0.0
    box = (x1 - margin, y1 - margin, x2 + margin, y2 + margin)
    units = CoordinateSystem.NORM_1 if normalized else None
    return ImageCrop(medium_number=number, box=box, coordinate_system=units)


def frames(call: Mapping[str, Any], sample: Sample, *, most: PositiveInt = 4) -> VideoFrames:
    """Show the frames of video number `medium` (1 if left out) at `seconds`, a list, each as an image.

    Args:
        call: {"seconds": list of numbers, "medium": number}.
        sample: not used.
        most: frames for one call.
    """
    _check_argument_names(call, "seconds", "medium")
    seconds = _read_numbers(call, "seconds")
    if not 1 <= len(seconds) <= most:
        raise ValueError(f'"seconds" are 1 to {most} numbers')
    return VideoFrames(medium_number=_read_medium_number(call), seconds=seconds)


def passage(call: Mapping[str, Any], sample: Sample) -> VideoClip:
    """Show video number `medium` (1 if left out) from `start` to `end`, in seconds, with frames closer together."""
    _check_argument_names(call, "start", "end", "medium")
    start = _read_numbers({"start": [call.get("start")]}, "start")[0]
    end = _read_numbers({"end": [call.get("end")]}, "end")[0]
    return VideoClip(medium_number=_read_medium_number(call), start=start, end=end)


def _check_argument_names(call: Mapping[str, Any], *names: str) -> None:
    for name in call:
        if name not in names:
            raise ValueError(f"there is no argument {name!r:.80}; there are {', '.join(names)}")


def _read_numbers(call: Mapping[str, Any], name: str, count: int | None = None) -> tuple[float, ...]:
    values = call.get(name)
    if not isinstance(values, list):
        raise ValueError(f'"{name}" must be given, in numbers')
    if count is not None and len(values) != count:
        raise ValueError(f'"{name}" is [x1, y1, x2, y2]')
    for value in values:
        # A bool is an int in Python. NaN compares false with everything, so the bound refuses it too.
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _MAX_NUMBER:
            raise ValueError(f'"{name}" must be given, in numbers')
    return tuple(map(float, values))


def _read_medium_number(call: Mapping[str, Any], name: str = "medium") -> int:
    number = call.get(name, 1)
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f'"{name}" is the number of a picture or video, counted from 1')
    return number


def _read_text(call: Mapping[str, Any], name: str) -> str:
    value = call.get(name)
    if not isinstance(value, str) or not value.strip() or len(call) != 1:
        raise ValueError(f'write {{"{name}": "..."}} as arguments, with text, and nothing else')
    return value


def _decode_reply(reply: bytes) -> str:
    """Return a JSON string as text, other JSON as JSON in one line, and anything else as it is."""
    text = reply.decode("utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
