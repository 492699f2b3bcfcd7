"""Conversations: LLaVA's and ShareGPT's `from`/`value` turns, and OpenAI's `role`/`content` messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from mmrl.answer.tool_calls import find_final_call
from mmrl.types import ContentPart, DatasetContext, ImageRef, RejectedRow, Sample
from mmrl_datasets.formats.row import BadRowError, Cells, short_repr
from mmrl_datasets.readers.answers import BoxFormat, check_text
from mmrl_datasets.readers.columns import Column, collect_required_columns, optional_value, parse_columns
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver, parse_time_range
from mmrl_datasets.readers.row_to_sample import (
    MediaPlaceholder,
    RowAnswerSpec,
    RowSource,
    SampleFields,
    insert_media,
    make_row_answer_spec,
    parse_id,
    split_at_placeholders,
    unused_cells,
)

ROLES: Final = ("turns", "id", "images", "videos", "start", "end", "answer", "label", "thought", "medium")
SPEAKER_ROLES: Final[Mapping[object, str]] = {
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
    place: DatasetContext,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str | tuple[str, ...]],
    kind: str,
    frame: str | None = None,
    corners: BoxFormat = "xyxy",
    exchange: Exchange = "only",
    task: str | None = None,
    media_root: str | None = None,
    limit: int | None = None,
) -> Iterator[Sample | RejectedRow]:
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
    roles = parse_columns(columns, ROLES, ("turns", "answer") if exchange == "calls" else ("turns",))
    files = make_media_resolver(place, media_root, path)
    answers = make_row_answer_spec(kind, frame, corners)
    source = RowSource(path=path, split=split, task=task, limit=limit)
    return source.convert_rows(
        source.read_rows(place),
        collect_required_columns(roles.values()) | answers.required_columns,
        lambda cells: _read_fields(cells, roles, answers, files, exchange),
    )


def _read_fields(
    cells: Cells, roles: Mapping[str, Column], answers: RowAnswerSpec, files: MediaResolver, exchange: Exchange
) -> SampleFields:
    talk = _parse_conversation(_parse_turns(roles["turns"].read(cells)), exchange)
    if "answer" in roles:
        answer = roles["answer"].read(cells)
    elif talk.reply is None:
        raise BadRowError("nobody answers the question; name a column for the answer, or complete the conversation")
    else:
        answer = _turn_text(talk.reply)
    given = {role: optional_value(cells, roles.get(role)) for role in ROLES}
    pieces = _parse_content(talk.question, files)
    images = _drop_tool_images(files.images(given["images"]), pieces, talk.tool_replies)
    videos = files.videos(given["videos"], parse_time_range(given["start"], given["end"]))
    return SampleFields(
        parts=insert_media(pieces, images, videos),
        answer_spec=answers.resolve(cells),
        answer=answer,
        row_id=parse_id(roles["id"].read(cells)) if "id" in roles else None,
        label=given["label"],
        thought=given["thought"],
        response=talk.response,
        medium=given["medium"],
        meta=unused_cells(cells, roles.values()) | ({} if talk.system is None else {"system": _turn_text(talk.system)}),
    )


def _parse_turns(value: object) -> list[Turn]:
    if not isinstance(value, list):
        raise BadRowError(f"a conversation must be a list of turns, is {short_repr(value)}")
    return [_parse_turn(entry) for entry in value]


def _parse_turn(entry: object) -> Turn:
    match entry:
        case {"from": str(speaker), "value": content} | {"role": str(speaker), "content": content}:
            if speaker in SPEAKER_ROLES:
                return SPEAKER_ROLES[speaker], content
            raise BadRowError(f"unknown speaker {speaker!r}; there are {', '.join(map(str, SPEAKER_ROLES))}")
    raise BadRowError(f"a turn must have from and value, or role and content; is {short_repr(entry)}")


class _Conversation(NamedTuple):
    """What is read of a conversation: what the system says, the question and the reply, of which the first and the
    last may be missing; or the whole response, and what was `heard` in answer to its calls.
    """

    system: object | None
    question: object
    reply: object | None = None
    response: str | None = None
    tool_replies: Sequence[object] = ()


def _parse_conversation(turns: list[Turn], exchange: Exchange) -> _Conversation:
    system = turns[0][1] if turns and turns[0][0] == "system" else None
    talk = turns if system is None else turns[1:]
    if not talk:
        raise BadRowError("the conversation holds no question")
    for place, (speaker, _) in enumerate(talk):
        expected = "assistant" if place % 2 else "user"
        if speaker != expected and not (speaker == "tool" and exchange == "calls" and place and not place % 2):
            raise BadRowError(f"the {speaker} speaks where the {expected} should")
    if exchange == "calls":
        return _Conversation(
            system, talk[0][1], None, _join_assistant_turns(talk[1:]), [content for _, content in talk[2::2]]
        )
    if len(talk) > 2 and exchange == "only":
        raise BadRowError(f"the conversation goes on after the answer: {len(talk)} turns; `exchange: first` cuts it")
    return _Conversation(system, talk[0][1], talk[1][1] if len(talk) > 1 else None)


def _join_assistant_turns(turns: Sequence[Turn]) -> str:
    """All that the assistant says."""
    if not len(turns) % 2:
        raise BadRowError("the assistant does not have the last word; complete the conversation")
    said = [
        check_text(_turn_text(content), f"turn {2 * number} of the conversation")
        for number, (_, content) in enumerate(turns[::2], 1)
    ]
    for number, turn in enumerate(said[:-1], 1):
        if find_final_call(turn) is None:
            raise BadRowError(
                f"turn {2 * number} of the conversation ends in no <tool_call>..</tool_call>, and it goes on"
            )
    return "".join(said)


def _drop_tool_images(
    images: Sequence[ImageRef], pieces: Sequence[ContentPart | MediaPlaceholder], tool_replies: Sequence[object]
) -> Sequence[ImageRef]:
    """The pictures of a column without those that tools showed."""
    own, shown = sum(map(_is_image_placeholder, pieces)), sum(map(_count_image_placeholders, tool_replies))
    if not shown or (own and len(images) == own):
        return images
    if len(images) <= shown:
        raise BadRowError(f"tools show {shown} pictures in this conversation, and there are {len(images)} in all")
    return images[:-shown]


def _count_image_placeholders(content: object) -> int:
    """Places for pictures of a column in what a tool said."""
    match content:
        case str():
            return sum(map(_is_image_placeholder, split_at_placeholders(content)))
        case [*entries]:
            return sum(map(_count_image_placeholders, entries))
        case {"type": "text", "text": str(said)}:
            return _count_image_placeholders(said)
        case {"type": "image", **rest}:
            return rest.get("image") is None
    return 0


def _is_image_placeholder(piece: ContentPart | MediaPlaceholder) -> bool:
    return isinstance(piece, MediaPlaceholder) and piece.media_type == "image"


def _turn_text(content: object) -> object:
    """A turn that is text, given as such or as one part; whatever else it is, the answer's check will tell."""
    match content:
        case [{"type": "text", "text": said}]:
            return said
    return content


def _parse_content(content: object, files: MediaResolver) -> list[ContentPart | MediaPlaceholder]:
    """What a turn says, with a mark where a medium of a column belongs."""
    if not isinstance(content, list):
        return [*split_at_placeholders(check_text(content, "question"))]
    pieces = [piece for entry in content for piece in _parse_content_part(entry, files)]
    if not any(isinstance(piece, str) and piece.strip() for piece in pieces):
        raise BadRowError("the question must say something besides pictures and videos")
    return pieces


def _parse_content_part(entry: object, files: MediaResolver) -> Sequence[ContentPart | MediaPlaceholder]:
    match entry:
        case {"type": "text", "text": said}:
            return split_at_placeholders(check_text(said, "question"))
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": str(url)}:
            return [files.image(url)]
        case {"type": "video_url", "video_url": {"url": url}} | {"type": "video_url", "video_url": str(url)}:
            return [files.video(url)]
        case {"type": "image", "image": picture} if picture is not None:
            return [files.image(picture)]
        case {"type": "video", "video": video} if video is not None:
            return [files.video(entry)]
        case {"type": "image" | "video" as kind}:
            return [MediaPlaceholder(kind)]
    raise BadRowError(f"a part must be of type text, image_url, image, video_url or video; is {short_repr(entry)}")
