"""Responses made elsewhere, scored: files in, verdicts and report out. The same files give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.benchmarks.items import Item, Response, missing, read_items, read_responses
from mmrl.benchmarks.registry import Bench, decide, read, unanswered
from mmrl.benchmarks.report.markdown import as_markdown
from mmrl.benchmarks.report.report import Run, as_json, summarise
from mmrl.benchmarks.verdict import Verdict, lines
from mmrl.types import UserError
from mmrl.utils.files import refusing, sha256_of, write_atomically


def score_files(bench: Bench, items: Path, responses: Path) -> Run:
    """Verdicts on the responses of a file, in the order of the items; items without a response count as wrong.

    Raises:
        UserError: a file cannot be read, or its rows cannot be used.
    """
    known = read_items(items, bench.item)
    given = read_responses(responses, known)
    return scored(bench, known, given, {"items_sha256": digest(items), "responses_sha256": digest(responses)})


def scored(
    bench: Bench, items: Mapping[str, Item], responses: Sequence[Response], provenance: Mapping[str, Any]
) -> Run:
    """A verdict on each response, and on each item without one, in the order of the items and their samples."""
    place = {id: number for number, id in enumerate(items)}
    ordered = sorted(responses, key=lambda response: (place[response.id], response.sample))
    judged = [(items[response.id], response, read(items[response.id], response)) for response in ordered]
    absent = missing(items, responses)
    verdicts = [decide(bench, *each) for each in judged] + [unanswered(items[id]) for id in absent]
    silent = [(items[id], Response(id=id, text="")) for id in absent]
    judged += [(item, response, read(item, response)) for item, response in silent]
    verdicts.sort(key=lambda verdict: (place[verdict.id], verdict.sample))
    return Run(
        bench=bench.name,
        items=items,
        responses=ordered,
        verdicts=verdicts,
        missing=absent,
        overall={bench.overall[0]: bench.overall[1](judged)} if bench.overall else {},
        provenance=provenance,
    )


def write(run: Run, folder: Path, *, rescore: bool) -> dict[str, Any]:
    """Write verdicts.jsonl, report.json and report.md; returns the report.

    Raises:
        UserError: the folder holds a report on other files and `rescore` is not asked for, or cannot be written.
    """
    report = summarise(run)
    if not rescore:
        _refuse_others(folder / "report.json", report)
    texts = {(response.id, response.sample): response.text for response in run.responses}
    with refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "verdicts.jsonl", lines(run.verdicts, texts))
    write_atomically(folder / "report.json", as_json(report))
    write_atomically(folder / "report.md", as_markdown(report))
    return report


def flipped(before: Sequence[Verdict], after: Sequence[Verdict]) -> list[tuple[Verdict, Verdict]]:
    """The verdicts that differ in strict or compat, old and new, in the order of the new ones."""
    old = {(verdict.id, verdict.sample): verdict for verdict in before}
    pairs = [(old[verdict.id, verdict.sample], verdict) for verdict in after if (verdict.id, verdict.sample) in old]
    return [(one, other) for one, other in pairs if (one.strict, one.compat) != (other.strict, other.compat)]


def digest(path: Path) -> str:
    """The sha256 of a file's bytes.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return sha256_of(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _refuse_others(path: Path, report: Mapping[str, Any]) -> None:
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
