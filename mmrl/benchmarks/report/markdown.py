"""A report as a page for people, report.md: scores, what became of responses, how they were made, every subset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def as_markdown(report: Mapping[str, Any]) -> str:
    """report.md; what stands before the first `##` is worth a look on the console."""
    out = [f"# {report['bench']}", "", *_scores(report), "", _told(report), "", *_outcomes(report)]
    if report["samples"]:
        out += ["", *_table(("k", "pass@k", "maj@k"), _shown_samples(report["samples"]))]
    if rewards := report.get("rewards"):
        out += ["", *_table(("task", "mean reward"), [(task, f"{value:.4f}") for task, value in rewards.items()])]
    for name, rows in report["subsets"].items():
        cells = [
            (value, str(row["n"]), _percent(row["strict"]), _percent(row["compat"]), _span(row))
            for value, row in rows.items()
        ]
        out += ["", f"## {name}", "", *_table((name, "n", "strict", "compat", "95 % of strict"), cells)]
    rules = [(rule, str(row["n"]), _percent(row["strict"])) for rule, row in report["rules"].items()]
    out += ["", "## Rules", "", *_table(("found by", "responses", "strict"), rules)]
    if made_with := report.get("made_with"):
        told = [(name, _plain(value)) for name, value in made_with.items()]
        out += ["", "## Made with", "", *_table(("", "value"), told)]
    return "\n".join(out) + "\n"


def _scores(report: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, *_shown(report[name])) for name in ("strict", "compat")]
    if judge := report.get("judge"):
        rows.append(("strict, with judge", *_shown(judge["accuracy"])))
    rows += [(name, _percent(value), "") for name, value in report["overall"].items()]
    yield from _table(("", "accuracy", "95 % interval"), rows)


def _told(report: Mapping[str, Any]) -> str:
    told = f"{report['items']} items, {report['responses']} responses, {report['missing']} missing; "
    told += f"scorer {report['scorer']}. Intervals resample pictures; those of subsets are Wilson's."
    if judge := report.get("judge"):
        told += f" {judge['model']} was asked about {judge['asked']} responses that no rule could read: "
        told += f"{judge['right']} right, {judge['failed']} without a verdict."
    return told


def _outcomes(report: Mapping[str, Any]) -> Iterator[str]:
    """What became of responses; how many were cut off, however they were judged; how long they are."""
    outcomes = report["outcomes"]
    total = max(1, sum(outcomes.values()))
    rows = [(name, str(count), _percent(count / total)) for name, count in outcomes.items()]
    yield from _table(("outcome", "responses", "%"), rows)
    tokens = "" if report["mean_tokens"] is None else f" They are {report['mean_tokens']:.1f} tokens long on average."
    yield ""
    yield f"{_percent(report['truncated_rate'])} % of responses reached the limit of tokens.{tokens}"


def _shown(interval: Mapping[str, float]) -> tuple[str, str]:
    return _percent(interval["value"]), _span(interval)


def _shown_samples(samples: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str, str]]:
    return [(k, _percent(row["pass"]), _percent(row["maj"])) for k, row in samples.items()]


def _span(row: Mapping[str, float]) -> str:
    return f"{_percent(row['low'])} - {_percent(row['high'])}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _plain(value: object) -> str:
    """A setting without the signs of JSON; what is off or empty is left out of a section."""
    if isinstance(value, Mapping):
        return ", ".join(
            f"{name} {_plain(inner)}" for name, inner in value.items() if inner not in (None, False, [], ())
        )
    if isinstance(value, list | tuple):
        return "; ".join(map(_plain, value)) or "none"
    return "none" if value is None else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in line)} |" for line in lines]
