"""Conversations: LLaVA's and ShareGPT's `from`/`value` turns, and OpenAI's `role`/`content` messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from mmrl.answer.tool_calls import last_call
from mmrl.types import ImageRef, Part, Place, Reject, Sample
from mmrl_datasets.formats.row import BadRowError, Cells, shown
from mmrl_datasets.readers.answers import Corners, text
from mmrl_datasets.readers.columns import Column, columns_of, needed, optional
from mmrl_datasets.readers.media_resolver import MediaFiles, clip, media_files
from mmrl_datasets.readers.row_to_sample import (
    Fields,
    Forms,
    Mark,
    Source,
    forms,
    identity,
    interleaved,
    marked,
    others,
)

ROLES: Final = ("turns", "id", "images", "videos", "start", "end", "answer", "label", "thought", "medium")
SPEAKERS: Final[Mapping[object, str]] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
Exchange = Literal["only", "first", "calls"]
Turn = tuple[str, object]  # who speaks, and what


def rows(
    place: Place,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str | tuple[str, ...]],
    kind: str,
    frame: str | None = None,
    corners: Corners = "xyxy",
    exchange: Exchange = "only",
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | Reject]:
    """Samples of conversations: what the user asks, and what the assistant answers. The rest as in `table.rows`.

    Options:
        columns: turns is the conversation. Media stand in it (`image_url`, `image`, `video_url` and `video` parts), or
            in the columns images and videos, which a row may lack; then each `<image>` or `<video>`, and each part of
            that type without a value, takes the next. The answer is the assistant's first turn, unless a column is
            named for it. Also id, start, end, label, thought and medium.
        exchange: what is read of a conversation: `only` rejects those with a second question, `first` cuts them there.
            With `calls` they go on behind calls of tools, and all that the assistant says becomes the sample's
            response, for an sft stage whose `program` has these tools. What answered the calls is left out, with its
            pictures, the last of their column: the tools answer anew. The answer needs a column.

    A system turn tells how to answer, which is the config's business: it goes into `meta`.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    roles = columns_of(columns, ROLES, ("turns", "answer") if exchange == "calls" else ("turns",))
    files = media_files(place, media_root, path)
    answers = forms(kind, frame, corners)
    source = Source(path=path, split=split, task=task, limit=limit)
    return source.samples(
        source.rows(place),
        needed(roles.values()) | answers.needs,
        lambda cells: _fields(cells, roles, answers, files, exchange),
    )


def _fields(cells: Cells, roles: Mapping[str, Column], answers: Forms, files: MediaFiles, exchange: Exchange) -> Fields:
    talk = _talk(_turns(roles["turns"].of(cells)), exchange)
    if "answer" in roles:
        answer = roles["answer"].of(cells)
    elif talk.reply is None:
        raise BadRowError("nobody answers the question; name a column for the answer, or complete the conversation")
    else:
        answer = _said(talk.reply)
    given = {role: optional(cells, roles.get(role)) for role in ROLES}
    pieces = _pieces(talk.question, files)
    images = _before_tools(files.images(given["images"]), pieces, talk.heard)
    videos = files.videos(given["videos"], clip(given["start"], given["end"]))
    return Fields(
        parts=interleaved(pieces, images, videos),
        form=answers.of(cells),
        answer=answer,
        name=identity(roles["id"].of(cells)) if "id" in roles else None,
        label=given["label"],
        thought=given["thought"],
        response=talk.response,
        medium=given["medium"],
        meta=others(cells, roles.values()) | ({} if talk.system is None else {"system": _said(talk.system)}),
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


class _Talk(NamedTuple):
    """What is read of a conversation: what the system says, the question and the reply, of which the first and the
    last may be missing; or the whole response, and what was `heard` in answer to its calls.
    """

    system: object | None
    question: object
    reply: object | None = None
    response: str | None = None
    heard: Sequence[object] = ()


def _talk(turns: list[Turn], exchange: Exchange) -> _Talk:
    system = turns[0][1] if turns and turns[0][0] == "system" else None
    talk = turns if system is None else turns[1:]
    if not talk:
        raise BadRowError("the conversation holds no question")
    for place, (speaker, _) in enumerate(talk):
        expected = "assistant" if place % 2 else "user"
        if speaker != expected and not (speaker == "tool" and exchange == "calls" and place and not place % 2):
            raise BadRowError(f"the {speaker} speaks where the {expected} should")
    if exchange == "calls":
        return _Talk(system, talk[0][1], None, _response(talk[1:]), [content for _, content in talk[2::2]])
    if len(talk) > 2 and exchange == "only":
        raise BadRowError(f"the conversation goes on after the answer: {len(talk)} turns; `exchange: first` cuts it")
    return _Talk(system, talk[0][1], talk[1][1] if len(talk) > 1 else None)


def _response(turns: Sequence[Turn]) -> str:
    """All that the assistant says."""
    if not len(turns) % 2:
        raise BadRowError("the assistant does not have the last word; complete the conversation")
    said = [
        text(_said(content), f"turn {2 * number} of the conversation")
        for number, (_, content) in enumerate(turns[::2], 1)
    ]
    for number, turn in enumerate(said[:-1], 1):
        if last_call(turn) is None:
            raise BadRowError(
                f"turn {2 * number} of the conversation ends in no <tool_call>..</tool_call>, and it goes on"
            )
    return "".join(said)


def _before_tools(
    images: Sequence[ImageRef], pieces: Sequence[Part | Mark], heard: Sequence[object]
) -> Sequence[ImageRef]:
    """The pictures of a column without those that tools showed."""
    own, shown = sum(map(_is_place, pieces)), sum(map(_places, heard))
    if not shown or (own and len(images) == own):
        return images
    if len(images) <= shown:
        raise BadRowError(f"tools show {shown} pictures in this conversation, and there are {len(images)} in all")
    return images[:-shown]


def _places(content: object) -> int:
    """Places for pictures of a column in what a tool said."""
    match content:
        case str():
            return sum(map(_is_place, marked(content)))
        case [*entries]:
            return sum(map(_places, entries))
        case {"type": "text", "text": str(said)}:
            return _places(said)
        case {"type": "image", **rest}:
            return rest.get("image") is None
    return 0


def _is_place(piece: Part | Mark) -> bool:
    return isinstance(piece, Mark) and piece.kind == "image"


def _said(content: object) -> object:
    """A turn that is text, given as such or as one part; whatever else it is, the answer's check will tell."""
    match content:
        case [{"type": "text", "text": said}]:
            return said
    return content


def _pieces(content: object, files: MediaFiles) -> list[Part | Mark]:
    """What a turn says, with a mark where a medium of a column belongs."""
    if not isinstance(content, list):
        return [*marked(text(content, "question"))]
    pieces = [piece for entry in content for piece in _piece(entry, files)]
    if not any(isinstance(piece, str) and piece.strip() for piece in pieces):
        raise BadRowError("the question must say something besides pictures and videos")
    return pieces


def _piece(entry: object, files: MediaFiles) -> Sequence[Part | Mark]:
    match entry:
        case {"type": "text", "text": said}:
            return marked(text(said, "question"))
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": str(url)}:
            return [files.image(url)]
        case {"type": "video_url", "video_url": {"url": url}} | {"type": "video_url", "video_url": str(url)}:
            return [files.video(url)]
        case {"type": "image", "image": picture} if picture is not None:
            return [files.image(picture)]
        case {"type": "video", "video": video} if video is not None:
            return [files.video(entry)]
        case {"type": "image" | "video" as kind}:
            return [Mark(kind)]
    raise BadRowError(f"a part must be of type text, image_url, image, video_url or video; is {shown(entry)}")
