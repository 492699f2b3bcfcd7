"""`mmrl eval score`: score responses that were generated elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command

if TYPE_CHECKING:
    from mmrl.benchmarks.report import ScoredRun

DETAILS = """\
Items are JSONL in the columns of MathVista's testmini for --benchmark mathvista, else canonical JSONL
(docs/evaluation.md). Responses are rows {"pid": .., "response": ..}; `sample` numbers several to one question, `finish`
is "length" for one that was cut, `tokens` is its length; other columns are ignored. Either file may end in .gz.

--judge-url asks a language model about responses in which no rule finds an answer, and about no other: its verdicts are
the column `judge_correct`, and the report has the accuracy with and without. Its replies are kept in DIR/judge.

Writes verdicts.jsonl, report.json and report.md into DIR. Items without a response are named, and count as incorrect.
"""
_MAX_LISTED_ITEMS = 5
_JUDGE_REQUESTS_IN_FLIGHT = 8


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "score", "score responses, by rule and by the benchmark's own metric", DETAILS)
    parser.add_argument(
        "--benchmark",
        required=True,
        metavar="NAME",
        help="such as mathvista, or ./mine.py:make_benchmark; `canonical` has no metric of its own",
    )
    parser.add_argument("--items", required=True, type=Path, metavar="FILE", help="questions with their answers")
    parser.add_argument("--responses", required=True, type=Path, metavar="FILE", help="responses of a model")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder for verdicts and report")
    parser.add_argument("--judge-url", metavar="URL", help="/chat/completions of a model to ask where no rule decides")
    parser.add_argument("--judge-model", metavar="NAME", help="name of that model")
    parser.add_argument("--rescore", action="store_true", help="replace the results in DIR, and print what changes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Score the responses, write the report and print it."""
    from mmrl.benchmarks.compare import changed_verdicts
    from mmrl.benchmarks.grading import score_files
    from mmrl.benchmarks.registry import get_benchmark
    from mmrl.benchmarks.report import report_markdown, write_report
    from mmrl.benchmarks.verdict import read_verdicts

    benchmark = get_benchmark(arguments.benchmark)
    has_results = arguments.rescore and (arguments.out / "verdicts.jsonl").exists()
    before = read_verdicts(arguments.out) if has_results else []
    scored = score_files(benchmark, arguments.items, arguments.responses)
    if arguments.judge_url or arguments.judge_model:
        scored = _apply_llm_judge(scored, arguments)
    report = write_report(scored, arguments.out, rescore=arguments.rescore)
    if scored.missing_ids:
        listed = ", ".join(scored.missing_ids[:_MAX_LISTED_ITEMS])
        more = ", .." if len(scored.missing_ids) > _MAX_LISTED_ITEMS else ""
        print(
            f"mmrl: {len(scored.missing_ids)} items have no response and count as incorrect: {listed}{more}",
            file=sys.stderr,
        )
    print(report_markdown(report).partition("\n## ")[0].rstrip())
    for old, new in changed_verdicts(before, scored.verdicts):
        print(f"{new.id}: strict {old.strict} -> {new.strict}, official {old.official} -> {new.official} ({new.rule})")
    print(f"Written: {arguments.out / 'verdicts.jsonl'}, report.json, report.md")
    return 0


def _apply_llm_judge(scored: ScoredRun, arguments: argparse.Namespace) -> ScoredRun:
    """Add the verdicts of a language model.

    Raises:
        UserError: its URL or its name is missing or malformed.
    """
    from pydantic import ValidationError

    from mmrl.benchmarks.llm_judge import add_judge_verdicts
    from mmrl.types import UserError
    from mmrl_rewards.services.judge import JudgeService

    url, model = arguments.judge_url, arguments.judge_model
    if not (url and model):
        raise UserError("--judge-url URL and --judge-model NAME belong together")
    try:
        service = JudgeService(url=url, model=model, cache=str(arguments.out / "judge"))
    except ValidationError as error:
        raise UserError(f"--judge-url {url}: {error.errors()[0]['msg']}") from error
    judged = add_judge_verdicts(scored, service, max_concurrent=_JUDGE_REQUESTS_IN_FLIGHT)
    if judged.judge_summary and judged.judge_summary.failures:
        failures = judged.judge_summary.failures
        print(f"mmrl: the judge has no verdict on {len(failures)} responses: {failures[0]}", file=sys.stderr)
    return judged
