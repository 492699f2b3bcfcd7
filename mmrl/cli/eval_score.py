"""`mmrl eval score`: verdicts on responses made elsewhere."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command

if TYPE_CHECKING:
    from mmrl.benchmarks.report.report import ScoredRun

DETAILS = """\
Items are JSONL in the columns of MathVista's testmini for --benchmark mathvista, else canonical JSONL
(docs/evaluation.md).
Responses are rows {"pid": .., "response": ..}; `sample` numbers several to one question, `finish` is "length" for one
that was cut, `tokens` says how many there are; other columns are left alone. Either file may end in .gz.

--judge asks a language model about responses in which no rule finds an answer, and about no other: its verdicts are the
column `judge_correct`, and the report has the accuracy with and without. Its replies are kept in DIR/judge.

Writes verdicts.jsonl, report.json and report.md into DIR. Items without a response are named, and count as wrong.
"""
_MAX_NAMED = 5


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "score", "score responses, by rule and by the benchmark's own metric", DETAILS)
    parser.add_argument(
        "--benchmark",
        required=True,
        metavar="NAME",
        help="such as mathvista, or ./mine.py:make_benchmark; `canonical` has no own metric",
    )
    parser.add_argument("--items", required=True, type=Path, metavar="FILE", help="questions with their answers")
    parser.add_argument("--responses", required=True, type=Path, metavar="FILE", help="what the model wrote")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where verdicts and report go")
    parser.add_argument("--judge", metavar="URL", help="ask a model, at this /chat/completions, where no rule can read")
    parser.add_argument("--judge-model", metavar="NAME", help="its name there")
    parser.add_argument("--rescore", action="store_true", help="replace what DIR has, and say which verdicts change")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Score, write and tell."""
    from mmrl.benchmarks.registry import get_benchmark
    from mmrl.benchmarks.report.markdown import report_markdown
    from mmrl.benchmarks.score_responses import changed_verdicts, score_files, write_report
    from mmrl.benchmarks.verdict import read_verdicts

    benchmark = get_benchmark(arguments.benchmark)
    known = arguments.rescore and (arguments.out / "verdicts.jsonl").exists()
    before = read_verdicts(arguments.out) if known else []
    scored = score_files(benchmark, arguments.items, arguments.responses)
    if arguments.judge or arguments.judge_model:
        scored = _apply_llm_judge(scored, arguments)
    report = write_report(scored, arguments.out, rescore=arguments.rescore)
    if scored.missing_ids:
        named = ", ".join(scored.missing_ids[:_MAX_NAMED]) + (", .." if len(scored.missing_ids) > _MAX_NAMED else "")
        print(f"mmrl: {len(scored.missing_ids)} items have no response and count as wrong: {named}", file=sys.stderr)
    print(report_markdown(report).partition("\n## ")[0].rstrip())
    for old, new in changed_verdicts(before, scored.verdicts):
        print(f"{new.id}: strict {old.strict} -> {new.strict}, official {old.official} -> {new.official} ({new.rule})")
    print(f"Written: {arguments.out / 'verdicts.jsonl'}, report.json, report.md")
    return 0


def _apply_llm_judge(scored: ScoredRun, arguments: argparse.Namespace) -> ScoredRun:
    """With a judge's verdicts; raises UserError where it has no address or no name."""
    from pydantic import ValidationError

    from mmrl.benchmarks.llm_judge import add_judge_verdicts
    from mmrl.types import UserError
    from mmrl_rewards.services.judge import JudgeService

    if not (arguments.judge and arguments.judge_model):
        raise UserError("--judge URL and --judge-model NAME belong together")
    try:
        service = JudgeService(url=arguments.judge, model=arguments.judge_model, cache=str(arguments.out / "judge"))
    except ValidationError as error:
        raise UserError(f"--judge {arguments.judge}: {error.errors()[0]['msg']}") from error
    found = add_judge_verdicts(scored, service, max_concurrent=8)
    if found.judge_summary and found.judge_summary.failures:
        failures = found.judge_summary.failures
        print(f"mmrl: the judge said nothing of {len(failures)} responses: {failures[0]}", file=sys.stderr)
    return found
