"""Report on a scored run: accuracies with intervals, outcomes, subsets, pass@k; as JSON and as Markdown.

Equal verdicts give equal bytes.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from mmrl.benchmarks.extraction.numbers import parse_single_number
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.verdict import (
    MISSING_RULE,
    SCORER_VERSION,
    ResponseOutcome,
    Verdict,
    cluster_by_item,
    group_by_subset,
    mean_by_item,
)
from mmrl.types import UserError
from mmrl.utils.files import json_line, replace_nonfinite, report_write_errors, write_atomically
from mmrl.utils.stats import cluster_bootstrap, maj_at_k, pass_at_k, wilson_interval

_BOOTSTRAP_SEED: Final = 0  # fixed, so that equal verdicts give equal bytes
_DECIMALS: Final = 4  # of every share in a report


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSummary:
    """Work of a language model that judged responses."""

    model: str  # name of the model
    num_asked: int  # responses it was asked about
    num_failed: int  # asked responses without a verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRun:
    """Everything that a report is made of."""

    benchmark: str  # name of the benchmark
    items: Mapping[str, Item]  # items by id
    responses: Sequence[ItemResponse]  # all responses
    verdicts: Sequence[Verdict]  # one for each response, and for each item without any
    missing_ids: Sequence[str] = ()  # ids of items without a response
    problems: Mapping[str, str] = field(default_factory=dict)  # by id, reasons why items are malformed, so missing too
    # Values of the benchmark's overall metric, by its name.
    overall_scores: Mapping[str, float] = field(default_factory=dict)
    # Facts about the input, such as digests of files; the report repeats them.
    provenance: Mapping[str, Any] = field(default_factory=dict)
    # Model, prompt and sampling parameters that made the responses; empty when they were made elsewhere.
    generation_settings: Mapping[str, Any] = field(default_factory=dict)
    judge_summary: JudgeSummary | None = None  # None when no judge was asked


def build_report(run: ScoredRun) -> dict[str, Any]:
    """Return the report as a JSON object; see docs/evaluation.md for its keys."""
    verdicts = run.verdicts
    token_counts = [response.num_tokens for response in run.responses if response.num_tokens is not None]
    num_truncated = sum(not response.finished for response in run.responses)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    num_without_answer = outcomes[ResponseOutcome.NO_ANSWER] + outcomes[ResponseOutcome.REFUSAL]
    report: dict[str, Any] = {"benchmark": run.benchmark, "scorer": SCORER_VERSION, **run.provenance}
    if run.generation_settings:
        report["generation"] = dict(run.generation_settings)
    report["items"] = len(run.items)
    report["responses"] = len(run.responses)
    report["missing"] = len(run.missing_ids)
    report["strict"] = _clustered_mean(verdicts, "strict")
    report["official"] = _clustered_mean(verdicts, "official")
    if run.judge_summary:
        report["judge"] = _judge_section(run.judge_summary, verdicts)
    report["score"] = _round(fmean(mean_by_item(verdicts, "score").values()))
    report["overall"] = {name: _round(value) for name, value in run.overall_scores.items()}
    report["outcomes"] = {str(outcome): outcomes[outcome] for outcome in ResponseOutcome}
    report["truncated_rate"] = _round(num_truncated / max(1, len(run.responses)))
    report["no_answer_rate"] = _round(num_without_answer / len(verdicts))
    report["mean_tokens"] = _round(fmean(token_counts)) if token_counts else None
    report["samples"] = _pass_and_majority(verdicts)
    report["subsets"] = {}
    for column, subsets in group_by_subset(verdicts).items():
        report["subsets"][column] = {value: _subset_row(members) for value, members in subsets.items()}
    report["rules"] = _rule_section(verdicts)
    return report


def write_report(run: ScoredRun, out_dir: Path, *, rescore: bool) -> dict[str, Any]:
    """Write verdicts.jsonl, report.json and report.md into a folder, and return the report.

    Raises:
        UserError: the folder holds a report on other files and `rescore` is off, or it cannot be written.
    """
    report = build_report(run)
    if not rescore:
        _check_same_files(out_dir / "report.json", report)
    texts = {(response.id, response.response_index): response.text for response in run.responses}
    lines = []
    for verdict in run.verdicts:
        # Items without a response have a verdict, but no text.
        lines.append(json_line(verdict.to_row(texts.get((verdict.id, verdict.response_index), ""))))
    json_text = json.dumps(replace_nonfinite(report), indent=1, ensure_ascii=False, allow_nan=False)
    with report_write_errors(out_dir):
        out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(out_dir / "verdicts.jsonl", "".join(lines))
    write_atomically(out_dir / "report.json", json_text + "\n")
    write_atomically(out_dir / "report.md", report_markdown(report))
    return report


def report_markdown(report: Mapping[str, Any]) -> str:
    """Return the report as Markdown. The console prints the part before its first `##`."""
    lines = [f"# {report['benchmark']}", "", *_score_table(report), "", _summary_line(report), ""]
    lines += _outcome_lines(report)
    if report["samples"]:
        rows = [(k, _percent(row["pass"]), _percent(row["maj"])) for k, row in report["samples"].items()]
        lines += ["", *_markdown_table(("k", "pass@k", "maj@k"), rows)]
    if report.get("rewards"):
        rewards = [(task, f"{value:.4f}") for task, value in report["rewards"].items()]
        lines += ["", *_markdown_table(("task", "mean reward"), rewards)]
    for column, subsets in report["subsets"].items():
        subset_rows = []
        for value, row in subsets.items():
            accuracies = _percent(row["strict"]), _percent(row["official"])
            subset_rows.append((value, str(row["n"]), *accuracies, _interval(row)))
        head = (column, "n", "strict", "official", "95 % of strict")
        lines += ["", f"## {column}", "", *_markdown_table(head, subset_rows)]
    rules = [(rule, str(row["n"]), _percent(row["strict"])) for rule, row in report["rules"].items()]
    lines += ["", "## Rules", "", *_markdown_table(("found by", "responses", "strict"), rules)]
    if report.get("generation"):
        settings = [(name, _format_setting(value)) for name, value in report["generation"].items()]
        lines += ["", "## Generation", "", *_markdown_table(("", "value"), settings)]
    return "\n".join(lines) + "\n"


def _judge_section(summary: JudgeSummary, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "model": summary.model,
        "asked": summary.num_asked,
        "correct": sum(verdict.judge_correct is True for verdict in verdicts),
        "failed": summary.num_failed,
        "accuracy": _clustered_mean(verdicts, "correct_with_judge"),
    }


def _clustered_mean(verdicts: Sequence[Verdict], field_name: str) -> dict[str, float]:
    """Return the mean over items with an interval that resamples clusters."""
    means = mean_by_item(verdicts, field_name)
    clusters = [*cluster_by_item(verdicts).values()]
    interval = cluster_bootstrap([*means.values()], clusters, seed=_BOOTSTRAP_SEED)
    if interval.low == interval.high:
        # If all clusters have the same mean, resampling gives an interval of width 0, so Wilson's takes its place.
        num_clusters = len({*clusters})
        interval = wilson_interval(num_clusters * interval.value, num_clusters)
    return {"value": _round(interval.value), "low": _round(interval.low), "high": _round(interval.high)}


def _subset_row(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    # Wilson's interval counts items: several responses to one question are not several questions.
    strict_by_item = mean_by_item(verdicts, "strict")
    num_items = len(strict_by_item)
    strict = wilson_interval(num_items * fmean(strict_by_item.values()), num_items)
    return {
        "n": num_items,
        "strict": _round(strict.value),
        "low": _round(strict.low),
        "high": _round(strict.high),
        "official": _round(fmean(mean_by_item(verdicts, "official").values())),
        "score": _round(fmean(mean_by_item(verdicts, "score").values())),
    }


def _pass_and_majority(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Return pass@k and maj@k for k = 1, 2, 4, ... up to the responses that every answered item has."""
    by_item: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in sorted(verdicts, key=lambda verdict: verdict.response_index):
        by_item[verdict.id].append(verdict)
    answered = [item_verdicts for item_verdicts in by_item.values() if item_verdicts[0].rule != MISSING_RULE]
    max_k = min(map(len, answered), default=1)
    # With one response to some item there is nothing to draw from.
    if max_k == 1:
        return {}
    powers = [2**exponent for exponent in range(max_k.bit_length())]
    rows = {}
    for k in sorted({*powers, max_k}):
        passed, majority = [], []
        for item_verdicts in answered:
            correct = [verdict.strict for verdict in item_verdicts]
            votes = [_normalize_vote(verdict.value) for verdict in item_verdicts]
            passed.append(pass_at_k(sum(correct), len(correct), k))
            majority.append(maj_at_k(votes, correct, k))
        # Items without a response count as incorrect: the divisor has them, too.
        rows[str(k)] = {"pass": _round(sum(passed) / len(by_item)), "maj": _round(sum(majority) / len(by_item))}
    return rows


def _normalize_vote(value: str | None) -> str | float | None:
    """Return an answer as votes for it are counted: 5, 5.0 and "5 cm" are one vote, and so are texts of equal words."""
    if value is None:
        return None
    number = parse_single_number(value)
    return " ".join(value.casefold().split()) if number is None else number


def _rule_section(verdicts: Sequence[Verdict]) -> dict[str, dict[str, Any]]:
    """Return for each extraction rule the responses it decided, and the share of them that are correct."""
    counts = Counter(verdict.rule for verdict in verdicts)
    correct = Counter(verdict.rule for verdict in verdicts if verdict.strict)
    return {rule: {"n": counts[rule], "strict": _round(correct[rule] / counts[rule])} for rule in sorted(counts)}


def _round(value: float) -> float:
    return round(float(value), _DECIMALS)


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


def _score_table(report: Mapping[str, Any]) -> list[str]:
    rows = [(name, _percent(report[name]["value"]), _interval(report[name])) for name in ("strict", "official")]
    # With a run's rewards the score is the total reward, which has a table by task, and is not a share.
    if report["score"] != report["official"]["value"] and "rewards" not in report:
        rows.append(("official, with partial credit", _percent(report["score"]), ""))
    if report.get("judge"):
        accuracy = report["judge"]["accuracy"]
        rows.append(("strict, with judge", _percent(accuracy["value"]), _interval(accuracy)))
    rows += [(name, _percent(value), "") for name, value in report["overall"].items()]
    return _markdown_table(("", "accuracy", "95 % interval"), rows)


def _summary_line(report: Mapping[str, Any]) -> str:
    line = (
        f"{report['items']} items, {report['responses']} responses, {report['missing']} missing; "
        f"scorer {report['scorer']}. Intervals resample images; intervals of subsets are Wilson's."
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
    rows = [(name, str(count), _percent(count / total)) for name, count in outcomes.items()]
    line = f"{_percent(report['truncated_rate'])} % of responses reached the limit of tokens."
    if report["mean_tokens"] is not None:
        line += f" They are {report['mean_tokens']:.1f} tokens long on average."
    return [*_markdown_table(("outcome", "responses", "%"), rows), "", line]


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
