"""Conversations: LLaVA's and ShareGPT's `from`/`value` turns, and OpenAI's `role`/`content` messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

from mmrl.types import ImageRef, Part, Place, Reject, Sample
from mmrl_datasets.formats.row import BadRowError, Cells, cell, shown
from mmrl_datasets.mapping import (
    MARKER,
    Fields,
    Source,
    checked_roles,
    identity,
    interleaved,
    optional,
    others,
    picture_files,
)
from mmrl_datasets.picture_files import PictureFiles
from mmrl_datasets.targets import Corners, answer_form, text

ROLES: Final = ("turns", "id", "images", "answer", "label", "thought")
SPEAKERS: Final[Mapping[object, str]] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
Turn = tuple[str, object]  # who speaks, and what


def rows(
    place: Place,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str],
    kind: str,
    frame: str | None = None,
    corners: Corners = "xyxy",
    exchange: Literal["only", "first"] = "only",
    task: str | None = None,
    image_root: str = ".",
    allow_data_urls: bool = False,
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """Samples of conversations: what the user asks, and what the assistant answers. The rest as in `table.rows`.

    Options:
        columns: turns is the conversation. Pictures stand in it (`image_url` and `image` parts), or in the column
            images, which a row may lack; then each `<image>`, and each `image` part without a value, takes the next.
            The answer is the assistant's first turn, unless a column is named for it. Also id, label and thought.
        exchange: what is read of a conversation: `only` rejects those with a second question, `first` cuts them there.

    A system turn tells how to answer, which is the config's business: it goes into `meta`.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    roles = checked_roles(columns, ROLES, ("turns",))
    pictures = picture_files(place, image_root, allow_data_urls=allow_data_urls)
    source = Source(path=path, split=split, task=task, form=answer_form(kind, frame, corners), limit=limit)
    return source.samples(place, roles.values(), lambda cells: _fields(cells, roles, pictures, exchange))


def _fields(cells: Cells, roles: Mapping[str, str], pictures: PictureFiles, exchange: str) -> Fields:
    system, question, reply = _exchange(_turns(cell(cells, roles["turns"])), exchange)
    if "answer" in roles:
        answer = cell(cells, roles["answer"])
    elif reply is None:
        raise BadRowError("nobody answers the question; name a column for the answer, or complete the conversation")
    else:
        answer = _said(reply)
    return Fields(
        parts=_parts(question, pictures.refs(optional(cells, roles.get("images"))), pictures),
        answer=answer,
        name=identity(cell(cells, roles["id"])) if "id" in roles else None,
        label=optional(cells, roles.get("label")),
        thought=optional(cells, roles.get("thought")),
        meta=others(cells, roles.values()) | ({} if system is None else {"system": _said(system)}),
    )


def _turns(value: object) -> list[Turn]:
    if not isinstance(value, list):
        raise BadRowError(f"a conversation must be a list of turns, is {shown(value)}")
    return [_turn(entry) for entry in value]


def _turn(entry: object) -> Turn:
    match entry:
        case {"from": str(speaker), "value": content} | {"role": str(speaker), "content": content}:
            if speaker in SPEAKERS:
                return SPEAKERS[speaker], content
            raise BadRowError(f"unknown speaker {speaker!r}; there are {', '.join(map(str, SPEAKERS))}")
    raise BadRowError(f"a turn must have from and value, or role and content; is {shown(entry)}")


def _exchange(turns: list[Turn], exchange: str) -> tuple[object | None, object, object | None]:
    """What the system says, the question and the reply; the first and the last may be missing."""
    system = turns[0][1] if turns and turns[0][0] == "system" else None
    talk = turns if system is None else turns[1:]
    if not talk:
        raise BadRowError("the conversation holds no question")
    for (speaker, _), expected in zip(talk, ("user", "assistant") * len(talk), strict=False):
        if speaker != expected:
            raise BadRowError(f"the {speaker} speaks where the {expected} should")
    if len(talk) > 2 and exchange == "only":
        raise BadRowError(f"the conversation goes on after the answer: {len(talk)} turns; `exchange: first` cuts it")
    return system, talk[0][1], talk[1][1] if len(talk) > 1 else None


def _said(content: object) -> object:
    """A turn that is text, given as such or as one part; whatever else it is, the answer's check will tell."""
    match content:
        case [{"type": "text", "text": said}]:
            return said
    return content


def _parts(content: object, images: list[ImageRef], pictures: PictureFiles) -> tuple[Part, ...]:
    if not isinstance(content, list):
        return interleaved(text(content, "question"), images)
    waiting = iter(images)
    parts: list[Part] = []
    for entry in content:
        parts += _part(entry, waiting, pictures)
    left = len(list(waiting))
    if left == len(images):  # none is named by a part: they come first, as in a question without markers
        parts = [*images, *parts]
    elif left:
        raise BadRowError(f"the question has no place for {left} of {len(images)} pictures")
    if not any(isinstance(part, str) and part.strip() for part in parts):
        raise BadRowError("the question must say something besides pictures")
    return tuple(parts)


def _part(entry: object, waiting: Iterator[ImageRef], pictures: PictureFiles) -> list[Part]:
    match entry:
        case {"type": "text", "text": str(said)}:
            pieces = said.split(MARKER)
            placed = [_next(waiting) for _ in pieces[1:]]
            return list(interleaved(said, placed)) if placed else [text(said, "question")]
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": str(url)}:
            return [pictures.ref(url)]
        case {"type": "image", "image": picture} if picture is not None:
            return [pictures.ref(picture)]
        case {"type": "image"}:
            return [_next(waiting)]
    raise BadRowError(f"a part must be of type text, image_url or image, is {shown(entry)}")


def _next(waiting: Iterator[ImageRef]) -> ImageRef:
    image = next(waiting, None)
    if image is None:
        raise BadRowError("the question has places for more pictures than there are")
    return image
