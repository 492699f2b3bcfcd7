"""The documents of one run: its entry in the index, metrics, steps and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from mmrl.types import UserError
from mmrl.view.benchmarks import BenchmarkFolder, build_benchmark, describe_benchmark, list_benchmarks, read_report
from mmrl.view.marks import BAD_VALUE
from mmrl.view.media import MediaOpener, PictureStore
from mmrl.view.metrics import build_metrics
from mmrl.view.questions import QuestionLookup
from mmrl.view.records import Row, RunFiles, RunFolder, StepFile, as_list, as_mapping, list_step_files
from mmrl.view.settings import list_settings
from mmrl.view.steps import NumberedRow, StepContext, build_step, group_rows
from mmrl.view.tokens import read_tokens

_DEAD_AFTER_HEARTBEATS: Final = 3
_STATES: Final = ("running", "finished", "stopped", "failed")
_MAX_NOTICES: Final = 50


class StepSummary(NamedTuple):
    """What the index says of a file of rollouts."""

    groups: int  # number of groups
    rollouts: int  # number of rollouts
    samples: tuple[str, ...]  # ids of its samples, each once


class RunDocuments:
    """Builds the documents of one run from its files as they are at the moment."""

    def __init__(self, folder: RunFolder, pictures: PictureStore, media_roots: Sequence[Path]) -> None:
        """Read the config; `media_roots` are folders with media besides those that it names."""
        self.folder = folder
        self._files = RunFiles(folder.path)
        self._pictures = pictures
        self._media_roots = media_roots
        self._questions: dict[Path, QuestionLookup | None] = {}  # by folder of a benchmark
        self._summaries: dict[Path, tuple[object, StepSummary]] = {}  # by file, its signature and summary
        self._settings = self._files.read_yaml("config.yaml")
        self._opener = MediaOpener(folder.path, self._settings, media_roots)

    def build_entry(self) -> dict[str, Any]:
        """Return the entry of the run in the index."""
        folder, files = self.folder, self._files
        self._settings = files.read_yaml("config.yaml")
        manifest = files.read_object("manifest.json")
        status = files.read_object("status.json") or None
        stages = self._list_stages()
        steps, samples = self._list_steps()
        benchmarks = [describe_benchmark(benchmark, files) for benchmark in self._list_benchmarks()]
        settings = self._settings or as_mapping(files.read_object("settings.json").get("settings"))
        return {
            "id": folder.id,
            "name": folder.path.resolve().name,
            "path": folder.shown_path,
            "kind": folder.kind,
            "state": self._state(status),
            "status": status,
            "facts": _list_facts(manifest, self._settings, files.read_object("report.json")),
            "stages": stages,
            "summary": self._read_summary(),
            "events": self._list_events(),
            "config": list_settings(settings),
            "metrics": f"{folder.id}/metrics",
            "steps": steps,
            "samples": samples,
            "benchmarks": benchmarks,
            # Last, when all files were read.
            "notices": self._list_notices(manifest, bool(steps)),
        }

    def build(self, key: str) -> dict[str, Any] | None:
        """Return a document by its key; None if the run has no such document."""
        if key == f"{self.folder.id}/metrics":
            return self._build_metrics()
        for file in self._list_step_files():
            if file.key == key:
                return self._build_step(file)
        for benchmark in self._list_benchmarks():
            if benchmark.key == key:
                return self._build_benchmark(benchmark)
        return None

    def build_all(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield key and content of every document, one at a time."""
        yield f"{self.folder.id}/metrics", self._build_metrics()
        for file in self._list_step_files():
            yield file.key, self._build_step(file)
        for benchmark in self._list_benchmarks():
            yield benchmark.key, self._build_benchmark(benchmark)

    def _build_metrics(self) -> dict[str, Any]:
        steps = {stage["name"]: stage["steps"] or 0 for stage in self._list_stages()}
        return build_metrics(self._lines("metrics.jsonl"), self._lines("timings.jsonl"), steps)

    def _build_step(self, file: StepFile) -> dict[str, Any]:
        signature = self._files.signature(file.path)
        rows = list(self._files.read_lines(file.path))
        # Kept for the index, so that an export parses each file once.
        self._summaries[file.path] = signature, _summarize(rows)
        context = StepContext(
            describe_medium=lambda record: self._pictures.describe(record, self._opener, self.folder.path),
            tokens=self._files.read(file.tokens_path, read_tokens, None),
            report_bad_row=lambda line, error: self._files.report(file.path, f"line {line + 1} is damaged: {error}"),
        )
        return build_step(file, rows, context)

    def _build_benchmark(self, benchmark: BenchmarkFolder) -> dict[str, Any]:
        questions = self._find_questions(benchmark)

        def describe_medium(record: object) -> dict[str, Any]:
            assert questions is not None
            return self._pictures.describe(record, questions.opener, self.folder.path)

        return build_benchmark(benchmark, self._files, questions, describe_medium)

    def _find_questions(self, benchmark: BenchmarkFolder) -> QuestionLookup | None:
        """Return the questions of a benchmark, read once; None, and a notice, if they cannot be shown."""
        report = read_report(benchmark, self._files)
        # The benchmark is still being taken, or the responses were made elsewhere.
        if "generation" not in report:
            return None
        if benchmark.path not in self._questions:
            options: Mapping[str, Any] = {}
            for section in map(as_mapping, as_list(as_mapping(self._settings.get("evaluation")).get("benchmarks"))):
                if section.get("name") == benchmark.name:
                    options = section
            try:
                found = QuestionLookup(benchmark.name, report, options, self._media_roots)
            except UserError as error:
                problem = str(error).split("\n", maxsplit=1)[0]
                self._files.report(benchmark.path, f"its questions are not shown: {problem}")
                found = None
            self._questions[benchmark.path] = found
        return self._questions[benchmark.path]

    def _summary(self, file: StepFile) -> StepSummary:
        signature = self._files.signature(file.path)
        if file.path not in self._summaries or self._summaries[file.path][0] != signature:
            self._summaries[file.path] = signature, _summarize(list(self._files.read_lines(file.path)))
        return self._summaries[file.path][1]

    def _list_steps(self) -> tuple[list[dict[str, Any]], dict[str, list[int]]]:
        """Return the index's entries of the files of rollouts, and the places of samples that are in several."""
        steps: list[dict[str, Any]] = []
        places: dict[str, list[int]] = {}
        for index, file in enumerate(self._list_step_files()):
            summary = self._summary(file)
            for sample in summary.samples:
                places.setdefault(sample, []).append(index)
            entry = {"key": file.key, "stage": file.stage, "step": file.step, "kind": file.kind, "label": file.label}
            counts = {"groups": summary.groups, "rollouts": summary.rollouts}
            steps.append({**entry, **counts, "tokens": file.tokens_path.exists()})
        return steps, {sample: where for sample, where in places.items() if len(where) > 1}

    def _list_stages(self) -> list[dict[str, Any]]:
        stages = []
        for number, stage in enumerate(map(as_mapping, as_list(self._settings.get("stages")))):
            steps = stage.get("steps")
            name = str(stage.get("name", number))
            stages.append({"name": name, "kind": stage.get("kind"), "steps": steps if isinstance(steps, int) else None})
        return stages

    def _list_step_files(self) -> list[StepFile]:
        return list_step_files(self.folder, [stage["name"] for stage in self._list_stages()])

    def _list_benchmarks(self) -> list[BenchmarkFolder]:
        return list_benchmarks(self.folder, self._files, [stage["name"] for stage in self._list_stages()])

    def _read_summary(self) -> Row | None:
        summary = self._files.read_object("summary.json")
        tasks = as_list(summary.get("tasks"))
        return summary if tasks and all(isinstance(task, dict) for task in tasks) else None

    def _list_events(self) -> list[dict[str, Any]]:
        """Return the health problems of the run, each with the steps at which it began and ended."""
        events: list[dict[str, Any]] = []
        open_events: dict[tuple[object, object], dict[str, Any]] = {}
        for row in self._lines("events.jsonl"):
            key = (str(row.get("stage")), str(row.get("name")))
            if row.get("state") == "end":
                if key in open_events:
                    open_events.pop(key)["end"] = row.get("step")
                continue
            event = {name: row.get(name) for name in ("stage", "step")}
            event |= {name: str(row.get(name) or "") for name in ("name", "message")}
            event |= {"begin": row.get("step"), "end": None}
            events.append(event)
            open_events[key] = event
        return events

    def _state(self, status: Mapping[str, Any] | None) -> str:
        """Return the state of the run; one that says it is running and has not for a while is dead."""
        if status is None:
            return "finished" if (self.folder.path / "model").exists() else "unknown"
        if status.get("state") not in _STATES:
            return "unknown"
        if status["state"] != "running":
            return str(status["state"])
        try:
            age = datetime.now(UTC) - datetime.fromisoformat(status["updated"])
            return "dead" if age.total_seconds() > _DEAD_AFTER_HEARTBEATS * status["heartbeat_s"] else "running"
        except BAD_VALUE:
            return "unknown"

    def _list_notices(self, manifest: Mapping[str, Any], has_steps: bool) -> list[str]:
        notices = []
        if self.folder.kind == "run":
            for name in ("config.yaml", "metrics.jsonl", "manifest.json"):
                if not (self.folder.path / name).exists():
                    notices.append(f"{name} is missing")
            if has_steps and "records" not in manifest:
                notices.append(
                    "recorded by an older version: prompts, boxes of answers, contributions of rewards and tokens are "
                    "missing, and pictures are shown as their files are now"
                )
        notices += self._files.problems
        if len(notices) > _MAX_NOTICES:
            notices = [*notices[:_MAX_NOTICES], f"... and {len(notices) - _MAX_NOTICES} more files"]
        return notices

    def _lines(self, name: str) -> list[Row]:
        return [row for _, row in self._files.read_lines(self.folder.path / name)]


def _summarize(rows: Sequence[NumberedRow]) -> StepSummary:
    samples = dict.fromkeys(str(row.get("sample")) for _, row in rows)
    return StepSummary(groups=len(group_rows(rows)), rollouts=len(rows), samples=tuple(samples))


def _list_facts(manifest: Mapping[str, Any], settings: Mapping[str, Any], report: Mapping[str, Any]) -> list[list[str]]:
    """Return name and text of the facts about a run or an evaluation, those that are known."""
    git = as_mapping(manifest.get("git"))
    commit = str(git.get("commit") or "")[:10] + (" (changed)" if git.get("dirty") else "")
    generation = as_mapping(report.get("generation"))
    facts = [
        ("model", as_mapping(settings.get("model")).get("path") or generation.get("model")),
        ("seed", as_mapping(settings.get("run")).get("seed", generation.get("seed"))),
        ("created", manifest.get("created")),
        ("mmrl", manifest.get("mmrl")),
        ("commit", commit),
        ("platform", manifest.get("platform")),
        ("cpus", manifest.get("cpus")),
        ("python", manifest.get("python")),
        *as_mapping(manifest.get("libraries")).items(),
        *((name, generation.get(name)) for name in ("engine", "temperature", "max_new_tokens")),
    ]
    return [[str(name), str(value)] for name, value in facts if value not in (None, "")]
