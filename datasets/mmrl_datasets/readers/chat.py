"""Read conversations: the `from`/`value` turns of LLaVA and ShareGPT, and the `role`/`content` messages of OpenAI."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from mmrl.answer import ResponseFormat, ResponseSection
from mmrl.answer.tool_calls import find_final_call
from mmrl.types import AnswerType, ContentPart, DatasetContext, ImageRef, RejectedRow, Sample, UserError
from mmrl_datasets.formats.row import BadRowError, Cells, short_repr
from mmrl_datasets.formats.tables import open_rows
from mmrl_datasets.readers.answers import BoxFormat, check_text, parse_json
from mmrl_datasets.readers.columns import Column, collect_required_columns, optional_value, parse_columns
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver, parse_time_range
from mmrl_datasets.readers.row_to_sample import (
    Limit,
    MediaPlaceholder,
    RowAnswerSpec,
    SampleFields,
    convert_rows,
    insert_media,
    make_row_answer_spec,
    parse_id,
    split_at_placeholders,
    unused_cells,
)

ROLES: Final = ("turns", "id", "images", "videos", "start", "end", "answer", "label", "thinking", "media_index")
"""The roles that the option `columns` may name."""
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
USUAL_TAGS: Final = ("think", "answer")
_CLOSED_TAG: Final = re.compile(r"</([A-Za-z_][\w-]*)>", re.ASCII)


class _Turn(NamedTuple):
    speaker: str  # system, user, assistant or tool
    content: object  # text or a list of parts, not checked yet


class _Reply(NamedTuple):
    """The parts of the assistant's turn, not checked yet."""

    answer: object
    thinking: str | None = None
    response: str | None = None  # the whole turn, where it says more than the other two


class _Conversation(NamedTuple):
    """The parts of a conversation that a sample needs."""

    system: object | None  # the system turn, if there is one
    question: object  # the first turn of the user
    reply: object | None = None  # the first turn of the assistant, or all it says if tools are called; None without one
    tool_replies: Sequence[object] = ()  # the turns that answer tool calls


def rows(
    context: DatasetContext,
    *,
    split: str = "train",
    path: str,
    columns: Mapping[str, str | tuple[str, ...]],
    answer_type: str,
    coordinates: str | None = None,
    box_format: BoxFormat = "xyxy",
    exchange: Exchange = "only",
    reply_tags: tuple[str, ...] = USUAL_TAGS,
    task: str | None = None,
    media_root: str | None = None,
    limit: Limit = None,
) -> Iterator[Sample | RejectedRow]:
    r"""Yield the samples of conversations: the user's question, the assistant's answer. The rest as in `table.rows`.

    A system turn goes into `meta`: it says how to answer, which is for the config to decide.

    Options:
        columns: turns is the conversation, a list or its JSON as text. Images and videos are in it (`image_url`,
            `image`, `video_url` and `video` parts), or in the columns images and videos, which a row may lack; then
            each `<image>` or `<video>`, and each part of that type without a value, takes the next one. Images of a
            column also replace the paths of `image` parts. The answer is the first turn of the assistant unless a
            column is named for it. A part that names no type has the type of its only value. Also id, start, end,
            label, thinking and media_index.
        exchange: the part of a conversation that is read. `only` rejects conversations with a second question, `first`
            cuts them before it. With `calls` they continue after tool calls, and everything the assistant says becomes
            the sample's response, for an sft stage whose `rollout_steps` have these tools; the answer needs a column.
            Replies to calls are left out, with their images, the last ones of that column: the tools run again.
        reply_tags: the parts of the answering turn, of which the last is the answer and the others are thinking:
            `[SUMMARY, CAPTION, REASONING, CONCLUSION]`. The default reads `<think>..</think>` before an answer in
            `<answer>`, in `\boxed{..}` or bare, and turns without any of these. Others must be in every row. `[]` takes
            the whole turn for the answer. With a column for the answer the turn is not divided.

    Raises:
        UserError: no such file; an impossible option; a column that no row has.
    """
    roles = parse_columns(columns, ROLES, ("turns", "answer") if exchange == "calls" else ("turns",))
    resolver = make_media_resolver(context, media_root, path)
    answer_spec = make_row_answer_spec(answer_type, coordinates, box_format)
    if "answer" in roles and tuple(reply_tags) != USUAL_TAGS:
        raise UserError(
            f"reply_tags={list(reply_tags)} would have no effect: the answer is in the column of columns.answer, so "
            "the turn is not divided; leave out one of the two"
        )
    if len(reply_tags) == 1:
        raise UserError(f"reply_tags={list(reply_tags)}: name the tags of the thinking and the answer, or none")
    read_fields = partial(
        _read_fields, roles=roles, answer_spec=answer_spec, resolver=resolver, exchange=exchange, tags=reply_tags
    )
    # A table of text alone may lack the columns of media.
    required = [column for role, column in roles.items() if role not in ("images", "videos")]
    expected = collect_required_columns(required) | answer_spec.required_columns
    table_rows = open_rows(context.base_dir, path, split)
    return convert_rows(table_rows, read_fields, expected, path=path, split=split, task=task, limit=limit)


def _read_fields(
    cells: Cells,
    *,
    roles: Mapping[str, Column],
    answer_spec: RowAnswerSpec,
    resolver: MediaResolver,
    exchange: Exchange,
    tags: Sequence[str],
) -> SampleFields:
    conversation = _parse_conversation(_parse_turns(roles["turns"].read(cells)), exchange)
    said = _turn_text(conversation.reply)
    if "answer" in roles:
        whole = said if isinstance(said, str) and said.strip() else None
        reply = _Reply(roles["answer"].read(cells), response=whole)
    elif said is None:
        raise BadRowError("nobody answers the question; name a column for the answer, or complete the conversation")
    else:
        # Some rows hold their answer as JSON, such as the numbers of a box.
        reply = _split_reply(said, tags) if isinstance(said, str) else _Reply(said)
    values = {role: optional_value(cells, roles.get(role)) for role in ROLES}
    pieces = _parse_content(conversation.question, resolver, values["images"] is not None)
    images = _drop_tool_images(resolver.images(values["images"]), pieces, conversation.tool_replies)
    videos = resolver.videos(values["videos"], parse_time_range(values["start"], values["end"]))
    meta = unused_cells(cells, roles.values())
    if conversation.system is not None:
        meta["system"] = _turn_text(conversation.system)
    return SampleFields(
        parts=insert_media(pieces, images, videos),
        answer_spec=answer_spec.resolve(cells),
        answer=reply.answer,
        row_id=parse_id(roles["id"].read(cells)) if "id" in roles else None,
        label=values["label"],
        thinking=values["thinking"] or reply.thinking,
        response=reply.response,
        media_index=values["media_index"],
        meta=meta,
    )


def _parse_turns(value: object) -> list[_Turn]:
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, list):
        raise BadRowError(f"a conversation must be a list of turns, is {short_repr(value)}")
    turns = []
    for entry in value:
        match entry:
            # LLaVA and ShareGPT write the first way, OpenAI the second.
            case {"from": str(speaker), "value": content} | {"role": str(speaker), "content": content}:
                if speaker not in SPEAKER_ROLES:
                    raise BadRowError(f"unknown speaker {speaker!r}; there are {', '.join(map(str, SPEAKER_ROLES))}")
                if entry.get("reasoning_content"):
                    thinking = check_text(entry["reasoning_content"], "reasoning_content")
                    content = f"<think>{thinking}</think>{check_text(_turn_text(content), 'content')}"
                parts = [*map(_name_type, content)] if isinstance(content, list) else content
                turns.append(_Turn(SPEAKER_ROLES[speaker], parts))
            case _:
                raise BadRowError(f"a turn must have from and value, or role and content; is {short_repr(entry)}")
    return turns


def _name_type(part: object) -> object:
    """Give a part that names no type the one of its only value: `{"image": "1.jpg"}` is an image."""
    if not isinstance(part, dict) or part.get("type") is not None:
        return part
    names = [name for name in ("text", "image", "video") if part.get(name) is not None]
    return {**part, "type": names[0]} if len(names) == 1 else part


def _parse_conversation(turns: list[_Turn], exchange: Exchange) -> _Conversation:
    system = turns[0].content if turns and turns[0].speaker == "system" else None
    dialogue = turns if system is None else turns[1:]
    if not dialogue:
        raise BadRowError("the conversation holds no question")
    # User and assistant take turns; the reply of a tool takes the place of the user's turn.
    for index, turn in enumerate(dialogue):
        expected = "assistant" if index % 2 else "user"
        replies_to_call = turn.speaker == "tool" and exchange == "calls" and index > 0 and expected == "user"
        if turn.speaker != expected and not replies_to_call:
            raise BadRowError(f"the {turn.speaker} speaks where the {expected} should")
    question = dialogue[0].content
    if exchange == "calls":
        tool_replies = [turn.content for turn in dialogue[2::2]]
        return _Conversation(system, question, _join_assistant_turns(dialogue[1:]), tool_replies)
    if len(dialogue) > 2 and exchange == "only":
        raise BadRowError(
            f"the conversation continues after the answer: {len(dialogue)} turns; `exchange: first` cuts it"
        )
    return _Conversation(system, question, dialogue[1].content if len(dialogue) > 1 else None)


def _split_reply(text: str, tags: Sequence[str]) -> _Reply:
    """Return the parts of a reply, as the option `reply_tags` describes them; raises BadRowError for a faulty one."""
    if not tags:
        return _Reply(text)
    if tuple(tags) == USUAL_TAGS:
        return _split_usual_reply(text)
    *sections, think_tag, answer_tag = tags
    reply_format = ResponseFormat(
        thinking="required", think_tag=think_tag, answer_tag=answer_tag, sections=tuple(map(ResponseSection, sections))
    )
    reply = _parse_reply(text, reply_format)
    # Several parts keep their tags, as a response format with `sections` writes them.
    return reply._replace(thinking=text[: reply_format.find_last_answer(text)]) if sections else reply


def _split_usual_reply(text: str) -> _Reply:
    _check_for_other_tags(text)
    thinking, closing, rest = text.rpartition("</think>")
    if r"\boxed{" in rest and "<answer>" not in text:
        # The words around the box are in neither part.
        return _parse_reply(text, ResponseFormat(thinking="optional", style="boxed"))._replace(response=text)
    if not closing and "<think>" not in text and "<answer>" not in text:
        return _Reply(text)
    tagged = f"{thinking}{closing}<answer>{rest}</answer>" if closing and "<answer>" not in rest else text
    return _parse_reply(tagged, ResponseFormat(thinking="optional"))


def _parse_reply(text: str, reply_format: ResponseFormat) -> _Reply:
    reply = reply_format.parse(text, AnswerType.TEXT)
    # An empty thought is one that was left out.
    problems = ", ".join(problem for problem in reply.problems if problem != "empty thinking")
    if problems:
        raise BadRowError(f"{problems}: {short_repr(text)}; correct the reply, or name a column for the answer")
    has_thinking = reply.thinking and reply.thinking.strip()
    return _Reply((reply.text or "").strip(), reply.thinking if has_thinking else None)


def _check_for_other_tags(text: str) -> None:
    tags = [*dict.fromkeys(_CLOSED_TAG.findall(text))]
    first = next((tag for tag in tags if text.lstrip().startswith(f"<{tag}>")), None)
    # A single pair of tags around the reply belongs to the answer, such as a table in HTML.
    if first not in (None, *USUAL_TAGS) and text.rpartition(f"</{first}>")[2].strip():
        raise BadRowError(
            f"the answer begins with <{first}>: set `reply_tags: [{', '.join(tags)}]` if these are its parts, or "
            "`reply_tags: []` to take the whole turn for the answer"
        )


def _join_assistant_turns(turns: Sequence[_Turn]) -> str:
    """Join the assistant's turns, which are every second one from the first; all but the last must call a tool."""
    if not len(turns) % 2:
        raise BadRowError("the assistant does not have the last word; complete the conversation")
    texts = []
    for number, turn in enumerate(turns[::2], start=1):
        place = f"turn {2 * number} of the conversation"
        text = check_text(_turn_text(turn.content), place)
        if 2 * number <= len(turns) and find_final_call(text) is None:
            raise BadRowError(f"{place} ends in no <tool_call>..</tool_call>, and it continues")
        texts.append(text)
    return "".join(texts)


def _drop_tool_images(
    images: Sequence[ImageRef], pieces: Sequence[ContentPart | MediaPlaceholder], tool_replies: Sequence[object]
) -> Sequence[ImageRef]:
    """Return the images of a column without the last ones, which tools showed."""
    num_in_question = sum(map(_is_image_placeholder, pieces))
    num_in_replies = sum(map(_count_image_placeholders, tool_replies))
    # The column may list the images of the question only, though the replies have placeholders, too.
    if not num_in_replies or (num_in_question and len(images) == num_in_question):
        return images
    if len(images) <= num_in_replies:
        raise BadRowError(
            f"tools show {num_in_replies} images in this conversation, and there are {len(images)} in all"
        )
    return images[:-num_in_replies]


def _count_image_placeholders(content: object) -> int:
    """Return the number of places in a tool's reply that take an image of the column."""
    match content:
        case str(text) | {"type": "text", "text": str(text)}:
            return sum(map(_is_image_placeholder, split_at_placeholders(text)))
        case [*entries]:
            return sum(map(_count_image_placeholders, entries))
        case {"type": "image", **rest}:
            return int(rest.get("image") is None)
    return 0


def _is_image_placeholder(piece: ContentPart | MediaPlaceholder) -> bool:
    return isinstance(piece, MediaPlaceholder) and piece.media_type == "image"


def _turn_text(content: object) -> object:
    """Unwrap a turn that is a single text part. Anything else is returned for the check of the answer to refuse."""
    match content:
        case [{"type": "text", "text": text}]:
            return text
    return content


def _parse_content(content: object, resolver: MediaResolver, has_images: bool) -> list[ContentPart | MediaPlaceholder]:
    """Return the pieces of the question, with a placeholder for each image or video of a column.

    `has_images`: there is a column of images, which prevails over the paths of `image` parts.
    """
    if not isinstance(content, list):
        return [*split_at_placeholders(check_text(content, "question"))]
    pieces: list[ContentPart | MediaPlaceholder] = []
    for entry in content:
        pieces += _parse_content_part(entry, resolver, has_images)
    if not any(isinstance(piece, str) and piece.strip() for piece in pieces):
        raise BadRowError("the question must say something besides images and videos")
    return pieces


def _parse_content_part(
    entry: object, resolver: MediaResolver, has_images: bool
) -> Sequence[ContentPart | MediaPlaceholder]:
    match entry:
        case {"type": "text", "text": text}:
            return split_at_placeholders(check_text(text, "question"))
        case {"type": "image_url", "image_url": {"url": url}} | {"type": "image_url", "image_url": str(url)}:
            return [resolver.image(url)]
        case {"type": "video_url", "video_url": {"url": url}} | {"type": "video_url", "video_url": str(url)}:
            return [resolver.video(url)]
        case {"type": "image", "image": image} if image is not None and not has_images:
            return [resolver.image(image)]
        case {"type": "video", "video": video} if video is not None:
            # The part itself may say which part of the video is meant.
            return [resolver.video(entry)]
        case {"type": "image" | "video" as media_type}:
            return [MediaPlaceholder(media_type)]
    raise BadRowError(f"a part must be of type text, image_url, image, video_url or video; is {short_repr(entry)}")
