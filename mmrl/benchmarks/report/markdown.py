"""A report as a page for people, report.md: scores, what became of responses, how they were made, every subset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def report_markdown(report: Mapping[str, Any]) -> str:
    """report.md; what stands before the first `##` is worth a look on the console."""
    out = [f"# {report['bench']}", "", *_score_lines(report), "", _summary_line(report), "", *_outcome_lines(report)]
    if report["samples"]:
        out += ["", *_markdown_table(("k", "pass@k", "maj@k"), _sample_rows(report["samples"]))]
    if rewards := report.get("rewards"):
        out += [
            "",
            *_markdown_table(("task", "mean reward"), [(task, f"{value:.4f}") for task, value in rewards.items()]),
        ]
    for name, rows in report["subsets"].items():
        cells = [
            (
                value,
                str(row["n"]),
                _format_percent(row["strict"]),
                _format_percent(row["compat"]),
                _format_interval(row),
            )
            for value, row in rows.items()
        ]
        out += ["", f"## {name}", "", *_markdown_table((name, "n", "strict", "compat", "95 % of strict"), cells)]
    rules = [(rule, str(row["n"]), _format_percent(row["strict"])) for rule, row in report["rules"].items()]
    out += ["", "## Rules", "", *_markdown_table(("found by", "responses", "strict"), rules)]
    if made_with := report.get("made_with"):
        told = [(name, _format_setting(value)) for name, value in made_with.items()]
        out += ["", "## Made with", "", *_markdown_table(("", "value"), told)]
    return "\n".join(out) + "\n"


def _score_lines(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, *_interval_cells(report[name])) for name in ("strict", "compat")]
    if judge := report.get("judge"):
        rows.append(("strict, with judge", *_interval_cells(judge["accuracy"])))
    rows += [(name, _format_percent(value), "") for name, value in report["overall"].items()]
    yield from _markdown_table(("", "accuracy", "95 % interval"), rows)


def _summary_line(report: Mapping[str, Any]) -> str:
    told = f"{report['items']} items, {report['responses']} responses, {report['missing']} missing; "
    told += f"scorer {report['scorer']}. Intervals resample pictures; those of subsets are Wilson's."
    if judge := report.get("judge"):
        told += f" {judge['model']} was asked about {judge['asked']} responses that no rule could read: "
        told += f"{judge['right']} right, {judge['failed']} without a verdict."
    return told


def _outcome_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What became of responses; how many were cut off, however they were judged; how long they are."""
    outcomes = report["outcomes"]
    total = max(1, sum(outcomes.values()))
    rows = [(name, str(count), _format_percent(count / total)) for name, count in outcomes.items()]
    yield from _markdown_table(("outcome", "responses", "%"), rows)
    tokens = "" if report["mean_tokens"] is None else f" They are {report['mean_tokens']:.1f} tokens long on average."
    yield ""
    yield f"{_format_percent(report['truncated_rate'])} % of responses reached the limit of tokens.{tokens}"


def _interval_cells(interval: Mapping[str, float]) -> tuple[str, str]:
    return _format_percent(interval["value"]), _format_interval(interval)


def _sample_rows(samples: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str]]:
    return [(k, _format_percent(row["pass"]), _format_percent(row["maj"])) for k, row in samples.items()]


def _format_interval(row: Mapping[str, float]) -> str:
    return f"{_format_percent(row['low'])} - {_format_percent(row['high'])}"


def _format_percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _format_setting(value: object) -> str:
    """A setting without the signs of JSON; what is off or empty is left out of a section."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {_format_setting(inner)}" for name, inner in value.items() if inner not in (None, False, [], ())
        )
    if isinstance(value, list | tuple):
        return "; ".join(map(_format_setting, value)) or "none"
    return "none" if value is None else str(value)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |" for line in lines]
