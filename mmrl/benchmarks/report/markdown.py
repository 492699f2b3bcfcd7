"""report.md: a report as a page for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def report_markdown(report: Mapping[str, Any]) -> str:
    """Return the page. The console prints the part before its first `##`."""
    lines = [f"# {report['benchmark']}", "", *_score_table(report), "", _summary_line(report), ""]
    lines += _outcome_lines(report)
    if report["samples"]:
        rows = [(k, _percent(row["pass"]), _percent(row["maj"])) for k, row in report["samples"].items()]
        lines += ["", *_markdown_table(("k", "pass@k", "maj@k"), rows)]
    if report.get("rewards"):
        rewards = [(task, f"{value:.4f}") for task, value in report["rewards"].items()]
        lines += ["", *_markdown_table(("task", "mean reward"), rewards)]
    for column, subsets in report["subsets"].items():
        lines += ["", f"## {column}", "", *_subset_table(column, subsets)]
    rules = [(rule, str(row["n"]), _percent(row["strict"])) for rule, row in report["rules"].items()]
    lines += ["", "## Rules", "", *_markdown_table(("found by", "responses", "strict"), rules)]
    if report.get("generation"):
        settings = [(name, _format_setting(value)) for name, value in report["generation"].items()]
        lines += ["", "## Generation", "", *_markdown_table(("", "value"), settings)]
    return "\n".join(lines) + "\n"


def _score_table(report: Mapping[str, Any]) -> list[str]:
    rows = [(name, _percent(report[name]["value"]), _interval(report[name])) for name in ("strict", "official")]
    if report.get("judge"):
        accuracy = report["judge"]["accuracy"]
        rows.append(("strict, with judge", _percent(accuracy["value"]), _interval(accuracy)))
    rows += [(name, _percent(value), "") for name, value in report["overall"].items()]
    return _markdown_table(("", "accuracy", "95 % interval"), rows)


def _summary_line(report: Mapping[str, Any]) -> str:
    line = (
        f"{report['items']} items, {report['responses']} responses, {report['missing']} missing; "
        f"scorer {report['scorer']}. Intervals resample images; those of subsets are Wilson's."
    )
    judge = report.get("judge")
    if judge:
        line += (
            f" {judge['model']} was asked about {judge['asked']} responses that no rule could read: "
            f"{judge['correct']} correct, {judge['failed']} without a verdict."
        )
    return line


def _outcome_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the table of outcomes, and a line on length and truncation."""
    outcomes = report["outcomes"]
    total = max(1, sum(outcomes.values()))
    rows = []
    for name, count in outcomes.items():
        rows.append((name, str(count), _percent(count / total)))
    line = f"{_percent(report['truncated_rate'])} % of responses reached the limit of tokens."
    if report["mean_tokens"] is not None:
        line += f" They are {report['mean_tokens']:.1f} tokens long on average."
    return [*_markdown_table(("outcome", "responses", "%"), rows), "", line]


def _subset_table(column: str, subsets: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = []
    for value, row in subsets.items():
        rows.append((value, str(row["n"]), _percent(row["strict"]), _percent(row["official"]), _interval(row)))
    return _markdown_table((column, "n", "strict", "official", "95 % of strict"), rows)


def _interval(row: Mapping[str, float]) -> str:
    return f"{_percent(row['low'])} - {_percent(row['high'])}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _format_setting(value: object) -> str:
    """Return a setting without JSON's punctuation. Values of a section that are off or empty are left out."""
    if isinstance(value, Mapping):
        shown = {name: inner for name, inner in value.items() if inner not in (None, False, [], ())}
        return ", ".join(f"{name} {_format_setting(inner)}" for name, inner in shown.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(_format_setting, value)) or "none"
    return "none" if value is None else str(value)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for line in (head, ["---"] * len(head), *rows):
        # A bar or a line break in a cell would end it.
        cells = [cell.replace("|", "/").replace("\n", " ") for cell in line]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
