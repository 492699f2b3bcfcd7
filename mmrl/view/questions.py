"""Questions of benchmarks, which predictions name by id: read again from the files that the report names.

Only benchmarks of mmrl are read, by its own readers: a folder that somebody sent must not choose code to run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mmrl.benchmarks.readers.questions import Question, read_questions
from mmrl.benchmarks.registry import BENCHMARKS
from mmrl.config.schema import MediaConfig, MediaLimitsConfig
from mmrl.data.context import benchmark_folders, make_media_policy
from mmrl.types import CoordinateSystem, DatasetContext, ImageRef, UserError
from mmrl.view.marks import BAD_VALUE
from mmrl.view.media import MediaOpener
from mmrl.view.records import as_list


class QuestionLookup:
    """The questions of one benchmark by id, and what opens their media."""

    def __init__(self, name: str, report: Mapping[str, Any], options: Mapping[str, Any], roots: Sequence[Path]) -> None:
        """Read the questions that a report is about; `options` is the benchmark's section of a run's config.

        Raises:
            UserError: they cannot be read, or are not those that the model was asked.
        """
        name = str(options.get("benchmark") or name)
        generation = report.get("generation")
        if options.get("fn") or name not in BENCHMARKS:
            raise UserError("it is not a benchmark of mmrl")
        if not isinstance(generation, Mapping):
            raise UserError("its report does not name their files")
        # Tables may hold their pictures, which the reader writes to files.
        self._folder = TemporaryDirectory(prefix="mmrl-view-")
        base_dir, work_dir = Path.cwd(), Path(self._folder.name)
        try:
            files = list(map(str, as_list(generation.get("data"))))
            folders = [work_dir, *roots, *benchmark_folders(files, options.get("media_root"), base_dir)]
            policy = make_media_policy(MediaLimitsConfig(), folders, schemes=("data",), media=MediaConfig())
            coordinates = options.get("coordinates")
            questions = read_questions(
                BENCHMARKS[name],
                files,
                DatasetContext(work_dir=work_dir, base_dir=base_dir, seed=0, media_policy=policy),
                split=options.get("split"),
                media_root=options.get("media_root"),
                coordinate_system=None if coordinates is None else CoordinateSystem(coordinates),
            )
        except BAD_VALUE as error:
            raise UserError(f"its settings are damaged ({error})") from error
        if questions.digest() != generation.get("data_sha256"):
            raise UserError("their files have changed since")
        self._by_id: dict[str, Question] = {question.item.id: question for question in questions.entries}
        self._corruption = generation.get("corruption")
        self.opener = MediaOpener(work_dir, {}, folders)

    def describe(self, item_id: str) -> dict[str, Any]:
        """Return question and target of an item as text; both are empty for an unknown one."""
        question = self._by_id.get(item_id)
        if question is None or question.sample is None:
            return {"question": question.item.question if question else "", "target": None}
        text = ""
        for part in question.sample.parts:
            text += part if isinstance(part, str) else f"<{'image' if isinstance(part, ImageRef) else 'video'}>"
        return {"question": text, "target": question.item.answer_text}

    def list_media(self, item_id: str, sizes: Sequence[Any]) -> list[dict[str, Any]]:
        """Return the records of an item's media; a prediction has their `sizes`: before and after resizing."""
        question = self._by_id.get(item_id)
        if question is None or question.sample is None or self._corruption == "left_out":
            return []
        records = []
        for number, ref in enumerate(question.sample.media):
            size = as_list(sizes[number]) if number < len(sizes) else []
            kind = "image" if isinstance(ref, ImageRef) else "video"
            record = {"kind": kind, **asdict(ref), "corruption": self._corruption}
            records.append(record | {"original": size[:2] or None, "resized": size[2:] or None})
        return records
