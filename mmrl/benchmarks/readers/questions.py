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

from mmrl.benchmarks.extraction.numbers import numbers
from mmrl.benchmarks.items import AnswerType, Item, canonical
from mmrl.benchmarks.readers.layouts import Asked, Layout, Named, recognised
from mmrl.benchmarks.readers.megabench import LeftOutError
from mmrl.benchmarks.readers.published import layouts_of
from mmrl.types import Frame, ImageRef, Kind, MediaRef, Part, Place, Reject, Sample, Target, UserError, VideoRef
from mmrl_datasets.formats.registry import open_rows
from mmrl_datasets.formats.row import BadRowError, Cells
from mmrl_datasets.readers import coco
from mmrl_datasets.readers.media_resolver import MediaFiles, media_files
from mmrl_datasets.readers.row_to_sample import Mark, interleaved, listed, marked

KINDS: Final[Mapping[AnswerType, Kind]] = MappingProxyType(
    {
        "choice": Kind.CHOICE,
        **dict.fromkeys(("integer", "float", "count"), Kind.NUMBER),
        **dict.fromkeys(("list", "text"), Kind.TEXT),
        "box": Kind.BOX,
        "boxes": Kind.BOXES,
        "point": Kind.POINT,
    }
)
"""What is asked for: the kind of answer that the grammar states, and reads."""
_NAMED: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """An item, and the sample that asks it; or why it cannot be asked: `problem`."""

    item: Item
    sample: Sample | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The questions of a benchmark in the order of its files, and how many rows no rule could score."""

    asked: tuple[Question, ...]
    left_out: int = 0

    @property
    def items(self) -> dict[str, Item]:
        """The items by id."""
        return {question.item.id: question.item for question in self.asked}

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What a model can be asked."""
        return tuple(question.sample for question in self.asked if question.sample is not None)

    @property
    def problems(self) -> dict[str, str]:
        """Why some cannot be asked, by the item's id."""
        return {question.item.id: question.problem for question in self.asked if question.sample is None}

    def digest(self) -> str:
        """A hash over questions, answers and media, wherever the media lie."""
        digest = hashlib.sha256()
        for question in self.asked:
            parts = question.sample.parts if question.sample else ()
            seen = [part if isinstance(part, str) else part.sha256 for part in parts]
            digest.update(repr((question.item, seen)).encode())
        return digest.hexdigest()


def read_questions(
    bench: str,
    paths: Sequence[str],
    place: Place,
    *,
    split: str,
    media: str | None,
    frame: Frame | None = None,
) -> Questions:
    """The questions of files; a row whose media cannot be had keeps its item. `frame` is what boxes are measured in,
    for tables that do not say.

    Raises:
        UserError: a file cannot be read, is in no layout of the benchmark, or has rows that are no items, or one twice;
            `frame` is missing, or not for this layout.
    """
    asked: dict[str, Question] = {}
    bad: list[Reject] = []
    left_out = 0
    rows = partial(_rows, bench, place=place, split=split, media=media, frame=frame, alone=len(paths) == 1)
    for row in chain.from_iterable(map(rows, paths)):
        match row:
            case None:
                left_out += 1
            case Reject():
                bad.append(row)
            case Question() if row.item.id in asked:
                bad.append(Reject(row.item.id, "the id stands twice; give each question an id of its own"))
            case Question():
                asked[row.item.id] = row
    if bad:
        lines = "\n".join(f"  {reject.id}: {reject.reason}" for reject in bad[:_NAMED])
        more = f"\n  and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise UserError(f"{len(bad)} of {len(bad) + len(asked)} rows are no questions of {bench}:\n{lines}{more}")
    if not asked:
        raise UserError(f"{', '.join(paths)}: holds no question that can be scored")
    return Questions(asked=tuple(asked.values()), left_out=left_out)


def from_samples(samples: Iterable[Sample]) -> Questions:
    """Samples as they were made for training: what they are scored by is the run's rewards, not an item's answer."""
    return Questions(asked=tuple(Question(item=_item(sample), sample=sample) for sample in samples))


def _item(sample: Sample) -> Item:
    kinds: dict[Kind, AnswerType] = {kind: name for name, kind in KINDS.items()}
    return Item(
        id=sample.id,
        kind=kinds.get(sample.target.kind, "text"),
        answer=sample.target.value,
        frame=sample.target.frame or Frame.PX_ORIGINAL,
        cluster=_cluster(sample.media) or sample.id,
        groups={"task": (sample.task,)},
    )


def _rows(
    bench: str, path: str, *, place: Place, split: str, media: str | None, frame: Frame | None, alone: bool
) -> Iterator[Question | Reject | None]:
    """The questions of a file; None for a row that no rule can score. One of several files is a group of its own."""
    if bench == "coco":
        if frame is not None:
            raise UserError(f"COCO's annotations are in pixels; leave out --frame {frame}")
        yield from map(_detection, coco.rows(place, split=split, path=path, media_root=media))
        return
    files, layouts, file = media_files(place, media, path), layouts_of(bench, frame), PurePath(path).stem
    layout = None
    for row in open_rows(place.base, path, split):
        try:
            if isinstance(row.cells, BadRowError):
                raise row.cells
            try:
                layout = layout or _layout(layouts, row.cells, frame)
            except BadRowError as error:
                raise UserError(f"{row.where}: {error}") from error
            for asked in layout.read(row.cells, files, file):
                asked.columns.setdefault("id", row.name if alone else f"{file}/{row.name}")
                question = _question(asked, files, bench)
                yield question if alone else _filed(question, file)
        except LeftOutError:
            yield None
        except (BadRowError, ValueError) as problem:
            yield Reject(row.name, f"{row.where}: {problem}")
    if layout is None:
        raise UserError(f"{path}: holds no rows")


def _layout(layouts: Sequence[Layout], cells: Cells, frame: Frame | None) -> Layout:
    """That of a row. Raises BadRowError where there is none, or where it says itself what boxes are measured in."""
    layout = recognised(layouts, cells)
    if frame is not None and not layout.asks_frame:
        raise BadRowError(f"{layout.name} says itself what boxes are measured in; leave out --frame {frame}")
    return layout


def _question(asked: Asked, files: MediaFiles, bench: str) -> Question:
    """A row as a question. Raises ValueError for one that is no item, BadRowError where its text is none."""
    item = canonical({name: value for name, value in asked.columns.items() if value is not None})
    try:
        images = asked.found or files.images(asked.images)
        videos = files.videos(asked.videos, asked.clip, asked.fps)
        written = item.question + (listed(item.options) if asked.lists else "")
        parts = _joined(_placed(written, images, videos, asked.named))
    except BadRowError as problem:
        return Question(item=item, problem=str(problem))
    if not any(isinstance(part, str) for part in parts):
        raise ValueError("has neither a question nor a prompt")
    media = tuple(part for part in parts if not isinstance(part, str))
    clustered = item if asked.columns.get("cluster") else replace(item, cluster=_cluster(media) or item.id)
    sample = Sample(id=f"{bench}/{item.id}", task=bench, parts=parts, target=_target(item), meta=dict(item.extra))
    return Question(item=clustered, sample=sample)


def _placed(written: str, images: Sequence[ImageRef], videos: Sequence[VideoRef], named: Named) -> Sequence[Part]:
    """Text and media in turn. Raises BadRowError where they do not go together.

    Where a question names `some` pictures, the others are not shown: MMMU has them for its explanations. Where it names
    `parts` of one picture, as MATH-V does with a sheet of figures, the picture comes first, and the names stay.
    """
    pieces = marked(written)
    numbers = [piece.number for piece in pieces if isinstance(piece, Mark)]
    if named == "parts" and len(images) == 1 and {*numbers} - {1, None}:
        return (*images, written)
    if named == "some" and numbers and all(number and number <= len(images) for number in numbers):
        return [images[(piece.number or 1) - 1] if isinstance(piece, Mark) else piece for piece in pieces]
    return interleaved(pieces, images, videos)


def _filed(question: Question, file: str) -> Question:
    """The question, in the group of its file."""
    item = question.item
    return replace(question, item=replace(item, groups={**item.groups, "file": (file,)}))


def _target(item: Item) -> Target:
    """What is due, of the kind that is asked for; a point is due in the middle of its box."""
    kind, answer = KINDS[item.kind], item.answer
    frame = item.frame if item.kind in ("box", "boxes", "point") else None
    match item.kind:
        case "choice":
            answer = chr(ord("A") + item.options.index(answer))
        case "integer" | "float" | "count":
            answer = next(numbers(str(answer))).value
        case "point":
            answer = ((answer[0] + answer[2]) / 2, (answer[1] + answer[3]) / 2)
        case "text" | "list":
            answer = str(answer[0] if isinstance(answer, list) and answer else answer)
    return Target(kind=kind, value=answer, frame=frame)


def _detection(row: Sample | Reject) -> Question | Reject:
    if isinstance(row, Reject):
        return row
    return Question(item=replace(_item(row), groups={"category": (str(row.meta["category"]),)}), sample=row)


def _cluster(media: Sequence[MediaRef]) -> str:
    """Questions on one picture stand or fall together."""
    return media[0].sha256[:16] if media else ""


def _joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Without texts that say nothing."""
    return tuple(part for part in parts if part != "")
