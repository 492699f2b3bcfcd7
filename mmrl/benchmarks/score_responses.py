"""Scoring of a whole run of responses, and the files that come of it. The same input gives the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.benchmarks.benchmark import Benchmark, GradedResponse
from mmrl.benchmarks.grading import extract_answer, make_verdict, missing_verdict
from mmrl.benchmarks.items import Item, ItemResponse, missing_ids, read_items, read_responses
from mmrl.benchmarks.report.markdown import report_markdown
from mmrl.benchmarks.report.report import ScoredRun, build_report, report_json
from mmrl.benchmarks.verdict import Verdict, verdict_lines
from mmrl.types import UserError
from mmrl.utils.files import compute_sha256, report_write_errors, write_atomically


def score_files(benchmark: Benchmark, items_file: Path, responses_file: Path) -> ScoredRun:
    """Score the responses of a file. Items without a response count as incorrect.

    Raises:
        UserError: a file cannot be read, or holds unusable rows.
    """
    items = read_items(items_file, benchmark.parse_item)
    responses = read_responses(responses_file, items)
    provenance = {"items_sha256": file_digest(items_file), "responses_sha256": file_digest(responses_file)}
    return score_responses(benchmark, items, responses, provenance)


def score_responses(
    benchmark: Benchmark, items: Mapping[str, Item], responses: Sequence[ItemResponse], provenance: Mapping[str, Any]
) -> ScoredRun:
    """Score responses. Verdicts are in the order of the items, and of the responses to each.

    Args:
        benchmark: its rules score.
        items: by id, in the order of the report.
        responses: any number to each item; items without one get a verdict of their own.
        provenance: goes into the report as it is.
    """
    positions = {id: index for index, id in enumerate(items)}

    def position(entry: ItemResponse | Verdict) -> tuple[int, int]:
        return positions[entry.id], entry.response_index

    ordered = sorted(responses, key=position)
    absent = missing_ids(items, responses)
    graded: list[GradedResponse] = []
    verdicts = []
    for response in ordered:
        item = items[response.id]
        extraction = extract_answer(item, response)
        graded.append((item, response, extraction))
        verdicts.append(make_verdict(benchmark, item, response, extraction))
    for id in absent:
        # An overall metric must see missing items, too: COCO's recall counts their boxes.
        silence = ItemResponse(id=id, text="")
        graded.append((items[id], silence, extract_answer(items[id], silence)))
        verdicts.append(missing_verdict(items[id]))
    verdicts.sort(key=position)
    overall_scores = {}
    if benchmark.overall_metric is not None:
        overall_scores[benchmark.overall_metric.name] = benchmark.overall_metric.compute(graded)
    return ScoredRun(
        benchmark=benchmark.name,
        items=items,
        responses=ordered,
        verdicts=verdicts,
        missing_ids=absent,
        overall_scores=overall_scores,
        provenance=provenance,
    )


def write_report(run: ScoredRun, out_dir: Path, *, rescore: bool) -> dict[str, Any]:
    """Write verdicts.jsonl, report.json and report.md, and return the report.

    Args:
        run: scored responses.
        out_dir: folder of the files.
        rescore: replace a report on other files.

    Raises:
        UserError: the folder holds a report on other files, or cannot be written.
    """
    report = build_report(run)
    if not rescore:
        _check_same_files(out_dir / "report.json", report)
    texts = {}
    for response in run.responses:
        texts[(response.id, response.response_index)] = response.text
    with report_write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(out_dir / "verdicts.jsonl", verdict_lines(run.verdicts, texts))
    write_atomically(out_dir / "report.json", report_json(report))
    write_atomically(out_dir / "report.md", report_markdown(report))
    return report


def changed_verdicts(before: Sequence[Verdict], after: Sequence[Verdict]) -> list[tuple[Verdict, Verdict]]:
    """Return the old and new verdicts that differ, strictly or officially, in the order of the new ones."""
    old_verdicts = {}
    for verdict in before:
        old_verdicts[(verdict.id, verdict.response_index)] = verdict
    changed = []
    for new in after:
        old = old_verdicts.get((new.id, new.response_index))
        if old is not None and (old.strict, old.official) != (new.strict, new.official):
            changed.append((old, new))
    return changed


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        return compute_sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _check_same_files(path: Path, report: Mapping[str, Any]) -> None:
    """Raise UserError where a report on other files would be overwritten."""
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before[key] == report[key] for key in ("benchmark", "items_sha256", "responses_sha256"))
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise UserError(f"{path}: reports on other files; choose another --out, or --rescore to replace it")
