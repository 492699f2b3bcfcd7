"""Questions of a benchmark: each row of its files as a sample for the model and the item that scores its answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Final

from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.extraction.numbers import find_numbers
from mmrl.benchmarks.items import COORDINATE_TYPES, Item, ItemAnswerType, parse_canonical_item
from mmrl.benchmarks.readers.layouts import ImageNumbering, QuestionRow, RowLayout, UnscorableRowError
from mmrl.benchmarks.readers.published import CANONICAL_JSONL, get_layouts
from mmrl.benchmarks.readers.vlmevalkit import VlmEvalKitLayout
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
from mmrl.utils.messages import did_you_mean, first_lines, first_names
from mmrl_datasets.choices import format_choices
from mmrl_datasets.formats.row import BadRowError, Cells, has_column
from mmrl_datasets.formats.tables import open_rows
from mmrl_datasets.readers import coco
from mmrl_datasets.readers.media_resolver import MediaResolver, make_media_resolver
from mmrl_datasets.readers.row_to_sample import MediaPlaceholder, insert_media, split_at_placeholders

PROMPT_ANSWER_TYPES: Final[Mapping[ItemAnswerType, AnswerType]] = MappingProxyType(
    {
        "choice": AnswerType.CHOICE,
        "integer": AnswerType.NUMBER,
        "float": AnswerType.NUMBER,
        "count": AnswerType.NUMBER,
        "list": AnswerType.TEXT,
        "text": AnswerType.TEXT,
        "box": AnswerType.BOX,
        "boxes": AnswerType.BOXES,
        "point": AnswerType.POINT,
    }
)
"""Answer type that the response format asks for, by the item's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An item with the sample that asks it, or with the reason why it cannot be asked.

    The item of a row that is malformed has nothing but its id.
    """

    item: Item  # the answer, and what scoring needs besides
    sample: Sample | None = None  # the prompt; None when its media cannot be used
    problem: str = ""  # reason for a missing sample


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkQuestions:
    """The questions of a benchmark."""

    entries: tuple[Question, ...]  # questions in the order of the files
    num_unscorable: int = 0  # rows left out: no rule can score their answer, or a run's own data leaves them out

    @property
    def items(self) -> dict[str, Item]:
        """All items by id, including those that cannot be asked."""
        return {question.item.id: question.item for question in self.entries}

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Samples of the questions that can be asked."""
        return tuple(question.sample for question in self.entries if question.sample is not None)

    @property
    def problems(self) -> dict[str, str]:
        """Reasons why questions cannot be asked, by item id."""
        return {question.item.id: question.problem for question in self.entries if question.sample is None}

    def digest(self) -> str:
        """Return a hash of questions, answers, and what is shown of the media; it does not depend on their paths."""
        digest = hashlib.sha256()
        for question in self.entries:
            parts = question.sample.parts if question.sample else ()
            contents: list[object] = []
            for part in parts:
                if isinstance(part, str):
                    contents.append(part)
                    continue
                # Contents, not paths: the same file may have another path on another machine.
                contents.append(part.sha256)
                for option in fields(part):
                    value = getattr(part, option.name)
                    # A field that is not set is left out, so that new fields keep the digests of earlier runs.
                    if option.name not in ("path", "sha256") and value is not None:
                        contents.append((option.name, value))
            digest.update(repr((question.item, contents)).encode())
        return digest.hexdigest()


def read_questions(
    benchmark: Benchmark,
    paths: Sequence[str],
    dataset_context: DatasetContext,
    *,
    split: str | None = None,
    media_root: str | None = None,
    coordinate_system: CoordinateSystem | None = None,
) -> BenchmarkQuestions:
    """Read the questions of files. Malformed rows, and rows whose media cannot be used, count as missing.

    `paths` are files or folders, relative to the context's base folder; `split` applies to a folder, by default the
    benchmark's usual one. Relative media paths start from `media_root`, by default the file's own folder.
    `coordinate_system` applies to boxes of files that do not say it.

    Raises:
        UserError: a file cannot be read, has no known layout, holds no row that is a question, or repeats an id;
            `coordinate_system` is missing or not wanted; or `split` is given and all paths are files.
    """
    if split is not None and all((dataset_context.base_dir / path).is_file() for path in paths):
        raise UserError(f"split {split!r}: only a folder of questions has splits; leave it out")
    questions: dict[str, Question] = {}
    malformed: list[RejectedRow] = []
    repeated: list[str] = []
    num_unscorable = 0
    for path in paths:
        rows = _read_rows(
            benchmark,
            path,
            dataset_context,
            split=split or benchmark.default_split,
            media_root=media_root,
            coordinate_system=coordinate_system,
            is_only_file=len(paths) == 1,
        )
        for row in rows:
            if row is None:
                num_unscorable += 1
                continue
            if isinstance(row, Question):
                question = row
            else:
                malformed.append(row)
                # It counts as missing, so its item is never scored.
                question = Question(item=Item(id=row.id, answer_type="text", answer=""), problem=row.reason)
            if question.item.id in questions:
                repeated.append(question.item.id)
            questions[question.item.id] = question
    num_rows = len(questions) + len(repeated)
    if repeated:
        listed = first_names(repeated)
        raise UserError(f"{len(repeated)} of {num_rows} rows have an id that appears twice: {listed}; ids must differ")
    # If no row is a question, the file is not of this benchmark, and there is nothing to score.
    if malformed and len(malformed) == num_rows:
        lines = "\n".join(first_lines([f"{row.id}: {row.reason}" for row in malformed]))
        raise UserError(f"none of {num_rows} rows is a question of {benchmark.name}:\n{lines}")
    if not questions:
        raise UserError(f"{', '.join(paths)}: holds no question that can be scored")
    return BenchmarkQuestions(entries=tuple(questions.values()), num_unscorable=num_unscorable)


def questions_from_samples(samples: Iterable[Sample]) -> BenchmarkQuestions:
    """Return samples of a run's data as questions. The run's rewards score them, so their items only describe them."""
    entries = tuple(Question(item=_item_from_sample(sample), sample=sample) for sample in samples)
    return BenchmarkQuestions(entries=entries)


def _read_rows(
    benchmark: Benchmark,
    path: str,
    dataset_context: DatasetContext,
    *,
    split: str,
    media_root: str | None,
    coordinate_system: CoordinateSystem | None,
    is_only_file: bool,
) -> Iterator[Question | RejectedRow | None]:
    """Yield the questions of one file or folder, and None for each row that no rule can score."""
    if benchmark.reads_coco_annotations:
        yield from _read_coco(path, dataset_context, split, media_root, coordinate_system)
        return
    media = make_media_resolver(dataset_context, media_root, path)
    layouts = get_layouts(benchmark.name, benchmark.layouts, coordinate_system)
    layout: RowLayout | None = None
    file_name = PurePath(path).stem
    is_empty = True
    for row in open_rows(dataset_context.base_dir, path, split):
        is_empty = False
        # Several files repeat row numbers, so the file is part of the id.
        row_id = row.name if is_only_file else f"{file_name}/{row.name}"
        question_rows: Sequence[QuestionRow] = ()
        try:
            if isinstance(row.cells, BadRowError):
                raise row.cells
            if layout is None:
                layout = _select_layout(layouts, row.cells, coordinate_system, location=row.location)
            question_rows = layout.parse_row(row.cells, media, file_name)
        except UnscorableRowError:
            yield None
        except (BadRowError, ValueError) as problem:
            yield RejectedRow(row_id, f"{row.location}: {problem}")
        for question_row in question_rows:
            question_row.columns.setdefault("id", row_id)
            try:
                question = _make_question(question_row, media, benchmark)
            except (BadRowError, ValueError) as problem:
                yield RejectedRow(str(question_row.columns["id"]), f"{row.location}: {problem}")
                continue
            if not is_only_file:
                subsets = {**question.item.subsets, "file": (file_name,)}
                question = replace(question, item=replace(question.item, subsets=subsets))
            yield question
    if is_empty:
        raise UserError(f"{path}: holds no rows")


def _read_coco(
    path: str,
    dataset_context: DatasetContext,
    split: str,
    media_root: str | None,
    coordinate_system: CoordinateSystem | None,
) -> Iterator[Question | RejectedRow]:
    if coordinate_system is not None:
        raise UserError(f"COCO's annotations are in pixels; leave out the coordinate system {coordinate_system}")
    for sample in coco.rows(dataset_context, split=split, path=path, media_root=media_root):
        if isinstance(sample, RejectedRow):
            yield sample
        else:
            item = replace(_item_from_sample(sample), subsets={"category": (str(sample.meta["category"]),)})
            yield Question(item=item, sample=sample)


def _select_layout(
    layouts: Sequence[RowLayout], cells: Cells, coordinate_system: CoordinateSystem | None, *, location: str
) -> RowLayout:
    """Return the layout of a file by its first row; raise UserError when none fits, or `coordinate_system` does not."""
    missing_columns, missing_shares = [], []
    for layout in layouts:
        missing = sorted(name for name in layout.required_columns if not has_column(cells, name))
        missing_columns.append(missing)
        missing_shares.append(len(missing) / len(layout.required_columns))
    # Of several layouts that fit, the first counts, which is the more specific.
    nearest = missing_shares.index(min(missing_shares))
    layout, missing = layouts[nearest], missing_columns[nearest]
    if missing:
        raise UserError(
            f"{location}: the columns are {', '.join(cells)}; the nearest known layout is {layout.name}, which needs "
            f"{', '.join(map(repr, missing))} too"
        )
    if layout is CANONICAL_JSONL:
        roles = {"answer_type", *CANONICAL_JSONL.columns, *CANONICAL_JSONL.optional_columns}
        for name in cells.keys() - roles:
            # Other columns are ignored, but `image` for `images` would ask about no picture.
            hint = did_you_mean(name, sorted(roles - cells.keys()), cutoff=0.8)
            if hint:
                raise UserError(f"{location}: the column {name!r} is unknown; {hint}")
    takes_coordinate_system = isinstance(layout, VlmEvalKitLayout) and layout.needs_coordinate_system
    if coordinate_system is not None and not takes_coordinate_system:
        raise UserError(f"{location}: {layout.name} states its own coordinate system; leave out {coordinate_system}")
    return layout


def _make_question(row: QuestionRow, media_resolver: MediaResolver, benchmark: Benchmark) -> Question:
    """Return a row as a question; raise ValueError or BadRowError for one that makes no item, or asks nothing."""
    if row.problem:
        raise BadRowError(row.problem)
    columns = {name: value for name, value in row.columns.items() if value is not None}
    item = benchmark.check_item(parse_canonical_item(columns))
    try:
        images = row.image_refs or media_resolver.images(row.images)
        videos = media_resolver.videos(row.videos, row.clip, row.fps)
        text = item.question + (format_choices(item.options) if row.append_options else "")
        parts = _interleave_media(text, images, videos, row.image_numbering)
    except BadRowError as problem:
        # The item is kept, so that the question counts as missing instead of leaving the total.
        return Question(item=item, problem=str(problem))
    parts = tuple(filter(None, parts))
    if not any(isinstance(part, str) for part in parts):
        raise ValueError("has neither a question nor a prompt")
    if not row.columns.get("cluster"):
        media = [part for part in parts if not isinstance(part, str)]
        item = replace(item, cluster=_media_cluster(media) or item.id)
    sample = Sample(
        id=f"{benchmark.name}/{item.id}",
        task=benchmark.name,
        parts=parts,
        target=_make_target(item),
        meta=dict(item.meta),
    )
    return Question(item=item, sample=sample)


def _interleave_media(
    text: str, images: Sequence[ImageRef], videos: Sequence[VideoRef], image_numbering: ImageNumbering
) -> Sequence[ContentPart]:
    """Return text and media in reading order; raise BadRowError when placeholders and media do not match."""
    pieces = split_at_placeholders(text)
    numbers = [piece.number for piece in pieces if isinstance(piece, MediaPlaceholder)]
    if image_numbering == "parts" and len(images) == 1 and {*numbers} - {1, None}:
        # The numbers name figures on the only image, so they stay in the text after it.
        return (*images, text)
    if image_numbering == "some" and numbers and all(number and number <= len(images) for number in numbers):
        # Images that no placeholder names belong to an explanation, and are not shown.
        return [images[(piece.number or 1) - 1] if isinstance(piece, MediaPlaceholder) else piece for piece in pieces]
    return insert_media(pieces, images, videos)


def _make_target(item: Item) -> Target:
    """Return the item's answer in the type that the prompt asks for; for a point, the centre of the item's box."""
    answer = item.answer
    match item.answer_type:
        case "choice":
            answer = item.accepted_answers[0]
        case "integer" | "float" | "count":
            answer = next(find_numbers(str(answer))).value
        case "point":
            answer = ((answer[0] + answer[2]) / 2, (answer[1] + answer[3]) / 2)
        case "text" | "list":
            answer = str(answer[0] if isinstance(answer, list) and answer else answer)
    return Target(
        answer_type=PROMPT_ANSWER_TYPES[item.answer_type],
        value=answer,
        coordinate_system=item.coordinate_system if item.answer_type in COORDINATE_TYPES else None,
    )


def _item_from_sample(sample: Sample) -> Item:
    # Of several item types with one prompt type the last counts: `text` rather than `list`, `count` for numbers.
    item_types = dict(zip(PROMPT_ANSWER_TYPES.values(), PROMPT_ANSWER_TYPES, strict=True))
    return Item(
        id=sample.id,
        answer_type=item_types.get(sample.target.answer_type, "text"),
        answer=sample.target.value,
        coordinate_system=sample.target.coordinate_system or CoordinateSystem.PX_ORIGINAL,
        cluster=_media_cluster(sample.media) or sample.id,
        subsets={"task": (sample.task,)},
    )


def _media_cluster(media: Sequence[MediaRef]) -> str:
    """Return the cluster of a question, shared by all questions on the same first image or video."""
    return media[0].sha256[:16] if media else ""
