"""What a benchmark asks: rows of a file as samples for a model, each with the item by which its answer is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.items import Item, ItemAnswerType, parse_canonical_item
from mmrl.benchmarks.readers.layouts import ImageNumbering, QuestionRow, RowLayout, recognize_layout
from mmrl.benchmarks.readers.megabench import UnscorableRowError
from mmrl.benchmarks.readers.published import get_layouts
from mmrl.types import (
    AnswerType,
    ContentPart,
    CoordinateSystem,
    DatasetContext,
    ImageRef,
    MediaRef,
    RejectedRow,
    Sample,
    Target,
    UserError,
    VideoRef,
)
from mmrl_datasets.choices import format_choices
from mmrl_datasets.formats.registry import open_rows
from mmrl_datasets.formats.row import BadRowError, Cells
from mmrl_datasets.readers import coco
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import MediaPlaceholder, insert_media, split_at_placeholders

PROMPT_ANSWER_TYPES: Final[Mapping[ItemAnswerType, AnswerType]] = MappingProxyType(
    {
        "choice": AnswerType.CHOICE,
        **dict.fromkeys(("integer", "float", "count"), AnswerType.NUMBER),
        **dict.fromkeys(("list", "text"), AnswerType.TEXT),
        "box": AnswerType.BOX,
        "boxes": AnswerType.BOXES,
        "point": AnswerType.POINT,
    }
)
"""What is asked for: the kind of answer that the grammar states, and reads."""
_MAX_LISTED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An item, and the sample that asks it; or why it cannot be asked: `problem`."""

    item: Item
    sample: Sample | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkQuestions:
    """The questions of a benchmark in the order of its files, and how many rows no rule could score."""

    entries: tuple[Question, ...]
    num_unscorable: int = 0

    @property
    def items(self) -> dict[str, Item]:
        """The items by id."""
        return {question.item.id: question.item for question in self.entries}

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What a model can be asked."""
        return tuple(question.sample for question in self.entries if question.sample is not None)

    @property
    def problems(self) -> dict[str, str]:
        """Why some cannot be asked, by the item's id."""
        return {question.item.id: question.problem for question in self.entries if question.sample is None}

    def digest(self) -> str:
        """A hash over questions, answers and media, wherever the media lie."""
        digest = hashlib.sha256()
        for question in self.entries:
            parts = question.sample.parts if question.sample else ()
            seen = [part if isinstance(part, str) else part.sha256 for part in parts]
            digest.update(repr((question.item, seen)).encode())
        return digest.hexdigest()


def read_questions(
    benchmark: str,
    paths: Sequence[str],
    dataset_context: DatasetContext,
    *,
    split: str,
    media_root: str | None,
    coordinate_system: CoordinateSystem | None = None,
) -> BenchmarkQuestions:
    """The questions of files; a row whose media cannot be had keeps its item. `frame` is what boxes are measured in,
    for tables that do not say.

    Raises:
        UserError: a file cannot be read, is in no layout of the benchmark, or has rows that are no items, or one twice;
            `frame` is missing, or not for this layout.
    """
    asked: dict[str, Question] = {}
    bad: list[RejectedRow] = []
    left_out = 0
    rows = partial(
        _read_file,
        benchmark,
        dataset_context=dataset_context,
        split=split,
        media_root=media_root,
        coordinate_system=coordinate_system,
        only_file=len(paths) == 1,
    )
    for row in chain.from_iterable(map(rows, paths)):
        match row:
            case None:
                left_out += 1
            case RejectedRow():
                bad.append(row)
            case Question() if row.item.id in asked:
                bad.append(RejectedRow(row.item.id, "the id stands twice; give each question an id of its own"))
            case Question():
                asked[row.item.id] = row
    if bad:
        lines = "\n".join(f"  {reject.id}: {reject.reason}" for reject in bad[:_MAX_LISTED])
        more = f"\n  and {len(bad) - _MAX_LISTED} more" if len(bad) > _MAX_LISTED else ""
        raise UserError(f"{len(bad)} of {len(bad) + len(asked)} rows are no questions of {benchmark}:\n{lines}{more}")
    if not asked:
        raise UserError(f"{', '.join(paths)}: holds no question that can be scored")
    return BenchmarkQuestions(entries=tuple(asked.values()), num_unscorable=left_out)


def questions_from_samples(samples: Iterable[Sample]) -> BenchmarkQuestions:
    """Samples as they were made for training: what they are scored by is the run's rewards, not an item's answer."""
    return BenchmarkQuestions(
        entries=tuple(Question(item=_item_from_sample(sample), sample=sample) for sample in samples)
    )


def _item_from_sample(sample: Sample) -> Item:
    kinds: dict[AnswerType, ItemAnswerType] = {kind: name for name, kind in PROMPT_ANSWER_TYPES.items()}
    return Item(
        id=sample.id,
        answer_type=kinds.get(sample.target.answer_type, "text"),
        answer=sample.target.value,
        coordinate_system=sample.target.coordinate_system or CoordinateSystem.PX_ORIGINAL,
        cluster=_media_cluster(sample.media) or sample.id,
        subsets={"task": (sample.task,)},
    )


def _read_file(
    benchmark: str,
    path: str,
    *,
    dataset_context: DatasetContext,
    split: str,
    media_root: str | None,
    coordinate_system: CoordinateSystem | None,
    only_file: bool,
) -> Iterator[Question | RejectedRow | None]:
    """The questions of a file; None for a row that no rule can score. One of several files is a group of its own."""
    if benchmark == "coco":
        if coordinate_system is not None:
            raise UserError(f"COCO's annotations are in pixels; leave out --frame {coordinate_system}")
        yield from map(
            _make_detection_question, coco.rows(dataset_context, split=split, path=path, media_root=media_root)
        )
        return
    files, layouts, file = (
        make_media_resolver(dataset_context, media_root, path),
        get_layouts(benchmark, coordinate_system),
        PurePath(path).stem,
    )
    layout = None
    for row in open_rows(dataset_context.base_dir, path, split):
        try:
            if isinstance(row.cells, BadRowError):
                raise row.cells
            try:
                layout = layout or _select_layout(layouts, row.cells, coordinate_system)
            except BadRowError as error:
                raise UserError(f"{row.location}: {error}") from error
            for asked in layout.parse_row(row.cells, files, file):
                asked.columns.setdefault("id", row.name if only_file else f"{file}/{row.name}")
                question = _make_question(asked, files, benchmark)
                yield question if only_file else _add_file_subset(question, file)
        except UnscorableRowError:
            yield None
        except (BadRowError, ValueError) as problem:
            yield RejectedRow(row.name, f"{row.location}: {problem}")
    if layout is None:
        raise UserError(f"{path}: holds no rows")


def _select_layout(layouts: Sequence[RowLayout], cells: Cells, coordinate_system: CoordinateSystem | None) -> RowLayout:
    """That of a row. Raises BadRowError where there is none, or where it says itself what boxes are measured in."""
    layout = recognize_layout(layouts, cells)
    if coordinate_system is not None and not layout.needs_coordinate_system:
        raise BadRowError(
            f"{layout.name} says itself what boxes are measured in; leave out --frame {coordinate_system}"
        )
    return layout


def _make_question(row: QuestionRow, files: MediaResolver, benchmark: str) -> Question:
    """A row as a question. Raises ValueError for one that is no item, BadRowError where its text is none."""
    item = parse_canonical_item({name: value for name, value in row.columns.items() if value is not None})
    try:
        images = row.image_refs or files.images(row.images)
        videos = files.videos(row.videos, row.clip, row.fps)
        written = item.question + (format_choices(item.options) if row.append_options else "")
        parts = _drop_empty_texts(_interleave_media(written, images, videos, row.image_numbering))
    except BadRowError as problem:
        return Question(item=item, problem=str(problem))
    if not any(isinstance(part, str) for part in parts):
        raise ValueError("has neither a question nor a prompt")
    media = tuple(part for part in parts if not isinstance(part, str))
    clustered = item if row.columns.get("cluster") else replace(item, cluster=_media_cluster(media) or item.id)
    sample = Sample(
        id=f"{benchmark}/{item.id}", task=benchmark, parts=parts, target=_make_target(item), meta=dict(item.meta)
    )
    return Question(item=clustered, sample=sample)


def _interleave_media(
    text: str, images: Sequence[ImageRef], videos: Sequence[VideoRef], image_numbering: ImageNumbering
) -> Sequence[ContentPart]:
    """Text and media in turn. Raises BadRowError where they do not go together.

    Where a question names `some` pictures, the others are not shown: MMMU has them for its explanations. Where it names
    `parts` of one picture, as MATH-V does with a sheet of figures, the picture comes first, and the names stay.
    """
    pieces = split_at_placeholders(text)
    numbers = [piece.number for piece in pieces if isinstance(piece, MediaPlaceholder)]
    if image_numbering == "parts" and len(images) == 1 and {*numbers} - {1, None}:
        return (*images, text)
    if image_numbering == "some" and numbers and all(number and number <= len(images) for number in numbers):
        return [images[(piece.number or 1) - 1] if isinstance(piece, MediaPlaceholder) else piece for piece in pieces]
    return insert_media(pieces, images, videos)


def _add_file_subset(question: Question, file: str) -> Question:
    """The question, in the group of its file."""
    item = question.item
    return replace(question, item=replace(item, subsets={**item.subsets, "file": (file,)}))


def _make_target(item: Item) -> Target:
    """What is due, of the kind that is asked for; a point is due in the middle of its box."""
    kind, answer = PROMPT_ANSWER_TYPES[item.answer_type], item.answer
    frame = item.coordinate_system if item.answer_type in ("box", "boxes", "point") else None
    match item.answer_type:
        case "choice":
            answer = chr(ord("A") + item.options.index(answer))
        case "integer" | "float" | "count":
            answer = next(find_numbers(str(answer))).value
        case "point":
            answer = ((answer[0] + answer[2]) / 2, (answer[1] + answer[3]) / 2)
        case "text" | "list":
            answer = str(answer[0] if isinstance(answer, list) and answer else answer)
    return Target(answer_type=kind, value=answer, coordinate_system=frame)


def _make_detection_question(row: Sample | RejectedRow) -> Question | RejectedRow:
    if isinstance(row, RejectedRow):
        return row
    return Question(
        item=replace(_item_from_sample(row), subsets={"category": (str(row.meta["category"]),)}), sample=row
    )


def _media_cluster(media: Sequence[MediaRef]) -> str:
    """Questions on one picture stand or fall together."""
    return media[0].sha256[:16] if media else ""


def _drop_empty_texts(parts: Iterable[ContentPart]) -> tuple[ContentPart, ...]:
    """Without texts that say nothing."""
    return tuple(part for part in parts if part != "")
