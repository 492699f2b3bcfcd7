"""Tools that come with mmrl; none is at hand unless a config names it.

A tool is `(call, sample, *, options) -> str`, or a look in place of words: `call` holds what the model wrote as
arguments, options come from YAML. It raises ValueError, in words for the model, where it cannot answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mmrl.answer import validate_value
from mmrl.answer.text import parse_answer_value
from mmrl.rollout.tools.media_results import ImageCrop, VideoClip, VideoFrames
from mmrl.types import Sample, Unscorable
from mmrl_rewards.services.endpoint import Endpoint

PositiveFloat = Annotated[float, Field(gt=0.0)]
PositiveInt = Annotated[int, Field(ge=1)]


def check_answer(call: Mapping[str, Any], sample: Sample, *, reveal: bool = False) -> str:
    """Whether `answer` can be read as an answer of the kind that is asked for.

    Options:
        reveal: say whether it is right, too. This hands the target to the model: for training it to check itself.
    """
    text = _read_text(call, "answer").strip()
    try:
        value = parse_answer_value(sample.target.answer_type, text)
    except ValueError as error:
        return f"This cannot be read as an answer of kind {sample.target.answer_type}: {error}."
    if not reveal:
        return f"This can be read as an answer of kind {sample.target.answer_type}."
    return (
        "This is right."
        if value == validate_value(sample.target.answer_type, sample.target.value)
        else "This is wrong."
    )


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
    """What a search service replies to `query`, which is sent to it as JSON, {"query": ..}. The model chooses the query
    and never the address; no redirect is followed.

    Options:
        url: of the service.
        timeout_s: seconds for one exchange.
        retries: further tries.
        max_reply_bytes: a longer reply is none.
        cache: folder where replies are kept, so that a run that is repeated hears the same.
    """
    endpoint = Endpoint(url=url, timeout_s=timeout_s, retries=retries, max_reply_bytes=max_reply_bytes, cache=cache)
    try:
        return endpoint.post({"query": _read_text(call, "query")}, _decode_reply)
    except Unscorable as error:
        raise ValueError(f"the search found no reply: {error}") from error


def zoom(call: Mapping[str, Any], sample: Sample) -> ImageCrop:
    """The part `box` (x1, y1, x2, y2) of picture number `medium`, 1 if left out, enlarged as small pictures are. A part
    of a part is cut from the file, not from what was shown.
    """
    box = _read_numbers(_check_arguments(call, "box", "medium"), "box")
    if len(box) != 4:
        raise ValueError('"box" is [x1, y1, x2, y2]')
    x1, y1, x2, y2 = box
    return ImageCrop(medium_number=_read_medium_number(call), box=(x1, y1, x2, y2))


def frames(call: Mapping[str, Any], sample: Sample, *, most: PositiveInt = 4) -> VideoFrames:
    """What video number `medium` shows at `seconds`, a list; a picture each.

    Options:
        most: pictures for one call.
    """
    seconds = _read_numbers(_check_arguments(call, "seconds", "medium"), "seconds")
    if not 1 <= len(seconds) <= most:
        raise ValueError(f'"seconds" are 1 to {most} numbers')
    return VideoFrames(medium_number=_read_medium_number(call), seconds=seconds)


def passage(call: Mapping[str, Any], sample: Sample) -> VideoClip:
    """Video number `medium` from `start` to `end`, in seconds, its frames chosen anew: closer together than before."""
    given = _check_arguments(call, "start", "end", "medium")
    start, end = (_read_numbers({name: [given.get(name)]}, name)[0] for name in ("start", "end"))
    return VideoClip(medium_number=_read_medium_number(call), start=start, end=end)


def _check_arguments(call: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    if strange := [name for name in call if name not in names]:
        raise ValueError(f"there is no argument {strange[0]!r:.80}; there are {', '.join(names)}")
    return call


def _read_numbers(call: Mapping[str, Any], name: str) -> tuple[float, ...]:
    values = call.get(name)
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        raise ValueError(f'"{name}" must be given, in numbers')
    return tuple(map(float, values))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9  # nor NaN


def _read_medium_number(call: Mapping[str, Any]) -> int:
    number = call.get("medium", 1)
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError('"medium" is the number of a picture or video, counted from 1')
    return number


def _read_text(call: Mapping[str, Any], name: str) -> str:
    value = call.get(name)
    if not isinstance(value, str) or not value.strip() or len(call) != 1:
        raise ValueError(f'write {{"{name}": "..."}} as arguments, with text, and nothing else')
    return value


def _decode_reply(reply: bytes) -> str:
    text = reply.decode("utf-8")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
