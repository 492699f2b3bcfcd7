"""Responses made elsewhere, scored: files in, verdicts and report out. The same files give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.benchmarks.items import Item, ItemResponse, missing_ids, read_items, read_responses
from mmrl.benchmarks.registry import Benchmark, extract_answer, make_verdict, missing_verdict
from mmrl.benchmarks.report.markdown import report_markdown
from mmrl.benchmarks.report.report import ScoredRun, build_report, report_json
from mmrl.benchmarks.verdict import Verdict, verdict_lines
from mmrl.types import UserError
from mmrl.utils.files import compute_sha256, report_write_errors, write_atomically


def score_files(benchmark: Benchmark, items: Path, responses: Path) -> ScoredRun:
    """Verdicts on the responses of a file, in the order of the items; items without a response count as wrong.

    Raises:
        UserError: a file cannot be read, or its rows cannot be used.
    """
    known = read_items(items, benchmark.parse_item)
    given = read_responses(responses, known)
    return score_responses(
        benchmark, known, given, {"items_sha256": file_digest(items), "responses_sha256": file_digest(responses)}
    )


def score_responses(
    benchmark: Benchmark, items: Mapping[str, Item], responses: Sequence[ItemResponse], provenance: Mapping[str, Any]
) -> ScoredRun:
    """A verdict on each response, and on each item without one, in the order of the items and their samples."""
    place = {id: number for number, id in enumerate(items)}
    ordered = sorted(responses, key=lambda response: (place[response.id], response.response_index))
    judged = [(items[response.id], response, extract_answer(items[response.id], response)) for response in ordered]
    absent = missing_ids(items, responses)
    verdicts = [make_verdict(benchmark, *each) for each in judged] + [missing_verdict(items[id]) for id in absent]
    silent = [(items[id], ItemResponse(id=id, text="")) for id in absent]
    judged += [(item, response, extract_answer(item, response)) for item, response in silent]
    verdicts.sort(key=lambda verdict: (place[verdict.id], verdict.response_index))
    return ScoredRun(
        benchmark=benchmark.name,
        items=items,
        responses=ordered,
        verdicts=verdicts,
        missing_ids=absent,
        overall_scores={benchmark.overall_metric[0]: benchmark.overall_metric[1](judged)}
        if benchmark.overall_metric
        else {},
        provenance=provenance,
    )


def write_report(run: ScoredRun, out_dir: Path, *, rescore: bool) -> dict[str, Any]:
    """Write verdicts.jsonl, report.json and report.md; returns the report.

    Raises:
        UserError: the folder holds a report on other files and `rescore` is not asked for, or cannot be written.
    """
    report = build_report(run)
    if not rescore:
        _check_same_files(out_dir / "report.json", report)
    texts = {(response.id, response.response_index): response.text for response in run.responses}
    with report_write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(out_dir / "verdicts.jsonl", verdict_lines(run.verdicts, texts))
    write_atomically(out_dir / "report.json", report_json(report))
    write_atomically(out_dir / "report.md", report_markdown(report))
    return report


def changed_verdicts(before: Sequence[Verdict], after: Sequence[Verdict]) -> list[tuple[Verdict, Verdict]]:
    """The verdicts that differ in strict or compat, old and new, in the order of the new ones."""
    old = {(verdict.id, verdict.response_index): verdict for verdict in before}
    pairs = [
        (old[verdict.id, verdict.response_index], verdict)
        for verdict in after
        if (verdict.id, verdict.response_index) in old
    ]
    return [(one, other) for one, other in pairs if (one.strict, one.official) != (other.strict, other.official)]


def file_digest(path: Path) -> str:
    """The sha256 of a file's bytes.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return compute_sha256(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _check_same_files(path: Path, report: Mapping[str, Any]) -> None:
    """Raises UserError where a report on other files would be overwritten."""
    if not path.exists():
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        same = all(before[key] == report[key] for key in ("bench", "items_sha256", "responses_sha256"))
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise UserError(f"{path}: reports on other files; choose another --out, or --rescore to replace it")
