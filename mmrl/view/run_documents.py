"""The documents of a page: the index of its runs, and metrics, steps and benchmarks of each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from mmrl.config import flatten_settings
from mmrl.config.secrets import mask_secret
from mmrl.log.logger import GlobalSteps
from mmrl.log.metric_registry import find_builtin_metric
from mmrl.log.rollout_records import BAD_VALUE
from mmrl.types import UserError
from mmrl.view.media import PictureStore, RunMedia
from mmrl.view.records import NumberedRow, Row, RunFiles, as_list, as_mapping, find_token_arrays, make_key, pick
from mmrl.view.steps import StepBuilder, count_units, group_rows, make_scale

_RUN_FILES: Final = ("config.yaml", "metrics.jsonl", "manifest.json", "status.json", "rollouts")
_EVAL_FILES: Final = ("predictions.jsonl", "verdicts.jsonl")
_VERDICT_KEYS: Final = ("strict", "official", "score", "outcome", "rule", "value", "judge_correct")
_STEP_NAME: Final = re.compile(r"(.+)-(\d+)(-validation)?")
_DEAD_AFTER_HEARTBEATS: Final = 3
_ENDED: Final = ("finished", "stopped", "failed")
# Panels of curves in the order of the page, with the columns of metrics that each takes.
_PANELS: Final = {
    "Reward": r"reward/mean",
    "Reward by term": r"reward/term/.+",
    "Validation": r"validation/.+",
    "Verdicts that rethinking flipped": r".+/(incorrect_to_correct|correct_to_incorrect)",
    "Informative groups": r"groups/nonzero_advantage_frac",
    "Response length": r"rollout/response_tokens_mean",
    "Entropy": r"policy/entropy_nats",
    "KL divergence": r"policy/(approx_kl|reference_kl_nats)",
    "Clipped tokens": r"policy/clip_frac(_low|_high)?",
    "Importance ratio": r"policy/importance_ratio_(min|max)",
    "Log-prob difference": r"rollout/(stale_)?logprob_diff_mean",
    "Gradient norm": r"learner/grad_norm",
    "Truncated": r"rollout/truncated_frac",
    "Repeated": r"rollout/duplicate(_answer)?_frac",
    "Reward by task": r"reward/task/.+",
    "Loss": r"learner/(loss|sft_loss_nats)",
    "Learning rate": r"learner/lr(/.+)?",
    "Seconds by activity": r"time/.*_s",
    "Tokens per second": r"rollout/tokens_per_s",
    "Gradient norm by component": r"learner/grad_norm/.+",
}
_MOST_LINES: Final = 12  # lines of a panel
Builders = dict[str, Callable[[], Row | bytes]]
"""By key of a document, a function that builds it."""


class RunDocuments:
    """Builds the documents of a run, or of a folder of `mmrl eval`, from its files as they are at the moment."""

    def __init__(self, run_id: str, path: Path, pictures: PictureStore, media_roots: Sequence[Path]) -> None:
        """Read the config. `run_id` begins the keys; `media_roots` are folders besides those that the config names.

        Raises:
            UserError: the folder is neither a run nor an evaluation.
        """
        is_evaluation = any((path / name).exists() for name in _EVAL_FILES)
        if not is_evaluation and not any((path / name).exists() for name in _RUN_FILES):
            problem = "neither a run nor a folder of `mmrl eval`" if path.exists() else "no such folder"
            raise UserError(f"{path}: {problem}; name a folder with config.yaml and metrics.jsonl or predictions.jsonl")
        self.id, self._kind = run_id, "eval" if is_evaluation else "run"
        self._path, self._pictures, self._files = path, pictures, RunFiles(path)
        self._held: dict[Path, tuple[object, Row]] = {}  # file of rollouts → its signature, and its counts and samples
        self._settings = self._files.read_object(path / "config.yaml")
        # Older versions did not record the folder; training is mostly started in the same one as the page.
        config_folder = Path(str(self._files.read_object(path / "manifest.json").get("config_folder", "")))
        self._opener = RunMedia(path, self._settings, config_folder, media_roots)
        self._stages = []
        for number, stage in enumerate(map(as_mapping, as_list(self._settings.get("stages")))):
            steps = stage.get("steps") if isinstance(stage.get("steps"), int) else None
            self._stages.append({"name": str(stage.get("name", number)), "kind": stage.get("kind"), "steps": steps})

    def build_entry(self) -> dict[str, Any]:
        """Return the entry of the run in the index."""
        path, files = self._path, self._files
        manifest, status, summary, report, evaluated = (
            files.read_object(path / f"{name}.json") for name in ("manifest", "status", "summary", "report", "settings")
        )
        steps: list[Row] = []
        places: dict[str, list[int]] = {}
        for index, (file, entry) in enumerate(self._list_step_files()):
            held = self._summarize(file)
            steps.append({**entry, **pick(held, "groups", "rollouts")})
            for sample in held["samples"]:
                places.setdefault(sample, []).append(index)
        tasks = as_list(summary.get("tasks"))
        benchmarks = list_benchmarks(files, self._stages)
        return {
            **{"id": self.id, "kind": self._kind, "name": path.resolve().name, "path": str(path)},
            **{"metrics": f"{self.id}/metrics", "stages": self._stages, "steps": steps},
            **{"state": _state(status), "status": status or None},
            "facts": _list_facts(manifest, self._settings, as_mapping(report.get("generation"))),
            "summary": summary if tasks and all(isinstance(task, dict) for task in tasks) else None,
            "events": _list_events(files.read_lines(path / "events.jsonl")),
            "config": list_settings(self._settings or as_mapping(evaluated.get("settings"))),
            "samples": {sample: where for sample, where in places.items() if len(where) > 1},
            "benchmarks": [{"key": f"{self.id}/{key}", **entry} for key, (_, entry) in benchmarks.items()],
            # Last, when all files were read.
            "notices": self._list_notices(is_older=bool(steps) and "records" not in manifest),
        }

    def list_documents(self) -> Builders:
        """Return the function that builds each document, by its key."""
        builders: Builders = {f"{self.id}/metrics": self._build_metrics}
        for file, entry in self._list_step_files():
            builders[entry["key"]] = partial(self._build_step, file, entry)
            if entry["tokens"]:
                builders[entry["tokens"]] = partial(self._files.read, file.with_suffix(".npz"), Path.read_bytes, b"")
        for key, (path, entry) in list_benchmarks(self._files, self._stages).items():
            builders[f"{self.id}/{key}"] = partial(build_benchmark, self._files, path, entry["name"])
        return builders

    def _build_metrics(self) -> dict[str, Any]:
        lines = [self._files.read_lines(self._path / name) for name in ("metrics.jsonl", "timings.jsonl")]
        return build_metrics(row for _, row in chain(*lines))

    def _build_step(self, file: Path, entry: Row) -> dict[str, Any]:
        groups = StepBuilder(
            describe_medium=lambda record: self._pictures.describe(record, self._opener),
            report_bad_row=lambda line, error: self._files.report(file, f"line {line + 1} is damaged: {error}"),
            in_training=entry["kind"] == "train",
        ).build_groups(self._read_rows(file))
        document = {**pick(entry, "stage", "step", "kind", "tokens"), "scale": make_scale(groups), "groups": groups}
        if entry["tokens"]:
            tokens = file.with_suffix(".npz")
            arrays: dict[str, list[int]] = self._files.read(tokens, find_token_arrays, {})
            document["arrays"] = arrays
            document["problem"] = "" if arrays else self._files.problem(tokens) or "the file is gone"
        return document

    def _read_rows(self, file: Path) -> list[NumberedRow]:
        """Read a file of rollouts, and keep its counts for the index, so that an export parses each file once."""
        signature = _signature(file)
        rows = list(self._files.read_lines(file))
        samples = list(dict.fromkeys(str(row.get("sample")) for _, row in rows))
        self._held[file] = signature, {"groups": len(group_rows(rows)), "rollouts": len(rows), "samples": samples}
        return rows

    def _summarize(self, file: Path) -> Row:
        if file not in self._held or self._held[file][0] != _signature(file):
            self._read_rows(file)
        return self._held[file][1]

    def _list_step_files(self) -> list[tuple[Path, Row]]:
        """Return the files of rollouts in the order of the run, each with the index fields that its name decides."""
        stages = [stage["name"] for stage in self._stages]
        found = []
        for path in (self._path / "rollouts").glob("*.jsonl"):
            named = _STEP_NAME.fullmatch(path.stem)
            stage, step, kind, label = None, 0, "test", path.stem.replace("-", " ")
            if path.stem in ("test-before", "test-after"):
                place = -1 if path.stem == "test-before" else len(stages) + 1
            elif named:
                stage, step, kind = named[1], int(named[2]), "validation" if named[3] else "train"
                place = stages.index(stage) if stage in stages else len(stages)
                label = f"{stage} {step}{' validation' if named[3] else ''}"
            else:
                continue
            key = f"{self.id}/{make_key(path.stem)}"
            tokens = f"{key}.tokens" if path.with_suffix(".npz").exists() else None
            entry = {"key": key, "stage": stage, "step": step, "kind": kind, "label": label, "tokens": tokens}
            # Within a step, the rollouts that were trained on come before the validation that followed.
            found.append(((place, step, kind), path, entry))
        return [(path, entry) for _, path, entry in sorted(found, key=itemgetter(0))]

    def _list_notices(self, *, is_older: bool) -> list[str]:
        names = _RUN_FILES[:3] if self._kind == "run" else ()
        notices = [f"{name} is missing" for name in names if not (self._path / name).exists()]
        if is_older:
            notices.append("recorded by an older version: prompts, pictures, boxes and tokens are missing")
        return notices + [f"{name}: {problem}" for name, problem in sorted(self._files.problems.items())]


def build_index(runs: Sequence[RunDocuments], *, live: bool) -> dict[str, Any]:
    """Return the document `index`, from which the page begins."""
    made = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema": 1, "made": made, "live": live, "runs": [run.build_entry() for run in runs]}


def build_all_documents(runs: Sequence[RunDocuments]) -> Iterator[tuple[str, Row | bytes]]:
    """Yield key and content of every document of an exported page, one at a time, the index last."""
    for run in runs:
        for key, build in run.list_documents().items():
            yield key, build()
    # Last, since it counts what the others hold, and lists what could not be read.
    yield "index", build_index(runs, live=False)


def _signature(file: Path) -> tuple[int, int] | None:
    """Return time of change and size of a file, which differ after it changed; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _state(status: Row) -> str:
    """Return the state of a run: "dead" if status.json says that it runs, but was not renewed for a while."""
    if status.get("state") != "running":
        return str(status["state"]) if status.get("state") in _ENDED else "unknown"
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(status["updated"])
        return "dead" if age.total_seconds() > _DEAD_AFTER_HEARTBEATS * status["heartbeat_s"] else "running"
    except BAD_VALUE:
        return "unknown"


def _list_events(rows: Iterator[NumberedRow]) -> list[Row]:
    """Return the health problems of the run, each with the steps at which it began and ended."""
    events: list[Row] = []
    open_events: dict[tuple[str, str], Row] = {}
    for _, row in rows:
        key = (str(row.get("stage")), str(row.get("name")))
        if row.get("state") != "end":
            texts = {"name": key[1], "message": str(row.get("message") or "")}
            open_events[key] = {**pick(row, "stage", "step"), **texts, "begin": row.get("step"), "end": None}
            events.append(open_events[key])
        elif key in open_events:
            open_events.pop(key)["end"] = row.get("step")
    return events


def _list_facts(manifest: Row, settings: Mapping[str, Any], generation: Mapping[str, Any]) -> list[list[str]]:
    """Return name and text of each known fact about a run or an evaluation."""
    git = as_mapping(manifest.get("git"))
    facts = {
        "model": as_mapping(settings.get("model")).get("path") or generation.get("model"),
        "seed": as_mapping(settings.get("run")).get("seed", generation.get("seed")),
        **pick(manifest, "created", "mmrl", "platform", "cpus", "python"),
        "commit": str(git.get("commit") or "")[:10] + (" (changed)" if git.get("dirty") else ""),
        **as_mapping(manifest.get("libraries")),
        **pick(generation, "engine", "temperature", "max_new_tokens"),
    }
    return [[str(name), str(value)] for name, value in facts.items() if value not in (None, "")]


def build_metrics(lines: Iterable[Row]) -> dict[str, Any]:
    """Return the document of metrics and timings, as columns with one entry for each step.

    Lines of one stage and step are merged; the last value of a metric counts: a resumed run repeats the timings of
    its last steps. Between stages the stage is None.
    """
    points: dict[tuple[str | None, int], Row] = {}
    for row in lines:
        stage, step = row.get("stage"), row.get("step")
        if isinstance(step, int) and isinstance(stage, str | None):
            points.setdefault((stage, step), {}).update(row)
    global_steps, running = GlobalSteps(), dict[tuple[str | None, int], int]()
    for stage, step in points:
        running[stage, step] = global_steps.count(stage, step)
    places = sorted(points, key=lambda place: running[place])
    columns: dict[str, list[float | None]] = {}
    for index, place in enumerate(places):
        for name, value in points[place].items():
            if name not in ("stage", "step") and isinstance(value, int | float | None):
                # Six digits suffice for a curve; full precision doubles the page.
                rounded = float(f"{value:.6g}") if isinstance(value, float) else value
                columns.setdefault(name, [None] * len(places))[index] = rounded
    known = {name: find_builtin_metric(name) for name in columns}
    return {
        "stage": [stage for stage, _ in places],
        "step": [step for _, step in places],
        "global": [running[place] for place in places],
        "columns": dict(sorted(columns.items())),
        "panels": list_panels(sorted(columns)),
        "meanings": {name: metric.meaning for name, metric in known.items() if metric is not None},
    }


def list_panels(columns: Sequence[str]) -> list[Row]:
    """Return the panels that show these columns of metrics; a column that fits none of them gets its own."""
    left = list(columns)
    panels = []
    for title, pattern in _PANELS.items():
        taken = [column for column in left if re.fullmatch(pattern, column)][:_MOST_LINES]
        left = [column for column in left if column not in taken]
        panels.append({"title": title, "columns": taken})
    panels += [{"title": column, "columns": [column]} for column in left]
    return [{"place": place, **panel} for place, panel in enumerate(panels) if panel["columns"]]


def list_settings(settings: Mapping[str, Any]) -> list[list[str]]:
    """Return dotted path and text of every setting, with keys, tokens, passwords and users in URLs masked in texts."""
    rows = []
    # By name, so that two runs are compared stage by stage.
    stages = {str(as_mapping(each).get("name", place)): each for place, each in enumerate(settings.get("stages") or ())}
    for path, value in flatten_settings({**settings, **({"stages": stages} if stages else {})}).items():
        text = mask_secret(path, value)
        rows.append([path, text if isinstance(text, str) else json.dumps(text)])
    return rows


def list_benchmarks(files: RunFiles, stages: Sequence[Row]) -> dict[str, tuple[Path, Row]]:
    """Return the benchmarks of a run with these stages: end of the document's key → folder and entry of the index."""
    folders = sorted((files.root / "benchmarks").glob("*/*"))
    # A folder of `mmrl eval` is one benchmark.
    if (files.root / "predictions.jsonl").exists() or (files.root / "verdicts.jsonl").exists():
        folders.append(files.root)
    found = {}
    for path in folders:
        report = files.read_object(path / "report.json")
        name = str(report.get("benchmark") or path.resolve().name) if path == files.root else path.parent.name
        # Folders of a run are named as checkpoints: number of the stage and steps, 01-000100.
        stage, _, step = path.name.partition("-")
        label = path.name
        if stage.isdecimal() and step.isdecimal() and int(stage) < len(stages):
            label = f"{stages[int(stage)]['name']} {int(step)}"
        entry = {"name": name, "label": label, **pick(report, "items")}
        entry["accuracy"] = as_mapping(report.get("strict")).get("value")
        found[f"bench-{make_key(name)}-{make_key(path.name)}"] = (path, entry)
    return found


def build_benchmark(files: RunFiles, path: Path, name: str) -> dict[str, Any]:
    """Return the document of the benchmark in a folder."""
    # By item and number of the response, as text, whatever a damaged row holds.
    verdicts = {str(pick(row, "pid", "sample")): row for _, row in files.read_lines(path / "verdicts.jsonl")}
    items: dict[str, Row] = {}
    for _, row in files.read_lines(path / "predictions.jsonl"):
        _add_response(items, row, verdicts.pop(str(pick(row, "pid", "sample")), {}))
    # Items without a response have only a verdict.
    for verdict in verdicts.values():
        _add_response(items, pick(verdict, "pid"), verdict)
    report = files.read_object(path / "report.json")
    scores = {
        "accuracy": as_mapping(report.get("strict")).get("value"),
        "official accuracy": as_mapping(report.get("official")).get("value"),
        "official score": report.get("score"),
        **as_mapping(report.get("overall")),
        **{name: report.get(f"{name.replace(' ', '_')}_rate") for name in ("truncated", "no answer")},
        "mean tokens": report.get("mean_tokens"),
    }
    metrics = [[key, value] for key, value in scores.items() if value is not None]
    return {"name": name, "metrics": metrics, "items": list(items.values())}


def _add_response(items: dict[str, Row], row: Row, verdict: Row) -> None:
    item = items.setdefault(str(row.get("pid")), {"id": str(row.get("pid")), "responses": [], "subsets": {}})
    item["subsets"] = item["subsets"] or as_mapping(verdict.get("subsets"))
    text = str(row.get("response") or "")
    start, end = verdict.get("start"), verdict.get("end")
    # The range of the text that was read as the answer. Without an answer, the verdict has the range that was searched.
    has_answer = verdict.get("value") is not None
    span = [start, end] if has_answer and isinstance(start, int) and isinstance(end, int) else None
    count_units(text, [span])
    response = {"response": text, **pick(verdict, *_VERDICT_KEYS), **pick(row, "tokens", "finish"), "span": span}
    item["responses"].append(response)
