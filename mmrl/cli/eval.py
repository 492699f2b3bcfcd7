"""`mmrl eval`: benchmarks. `mmrl eval MODEL ...` is short for `mmrl eval run MODEL ...`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mmrl.cli.common import Subparsers, add_command, echo, pause_gc_for_imports, positive_int
from mmrl.utils.messages import first_names

if TYPE_CHECKING:
    from mmrl.benchmarks.compare import RunComparison
    from mmrl.benchmarks.report import ScoredRun
    from mmrl.benchmarks.verdict import Verdict

DETAILS = """\
examples:
  mmrl eval runs/mine --benchmark mathvista --data MathVista   # generate and score: `mmrl eval run --help`
  mmrl eval score --benchmark mathvista --items items.jsonl.gz --responses responses.jsonl --out scored
  mmrl eval compare scored other                               # which answers flipped, and is the difference real?

`mmrl eval COMMAND --help` says more about each.
"""

_RUN_DETAILS = """\
examples:
  mmrl eval runs/mine --benchmark mathvista --data MathVista
  mmrl eval runs/mine/checkpoints/01-000500 --benchmark refcoco --data RefCOCO --split testA
  mmrl eval models/Qwen2.5-VL-3B --benchmark mmmu --data MMMU/Art --data MMMU/Biology model.max_pixels=1003520
  mmrl eval runs/mine --benchmark mathvista --data MathVista.tsv evaluation.temperature=1 responses_per_question=8
  mmrl eval runs/mine --benchmark run:test          # the run's own test data, by its own rewards

Benchmarks: canonical, coco, counting, docvqa, emma, geometry3k, mathverse, mathvision, mathvista, megabench, mmmu,
mmmu_pro, mvbench, ocrbench, refcoco, screenspot, seed_bench_r1, textvqa, video_mme; run:test, run:validation.
docs/evaluation.md lists the file formats of each.

MODEL is a folder of transformers, a run directory, or one of its checkpoints. A run brings its own image sizes,
response format and media limits; key=value sets others (docs/evaluation.md lists them). Nothing is downloaded.

DIR gets predictions.jsonl, verdicts.jsonl, report.json and report.md. The same command again resumes an interrupted
one.
"""

_SCORE_DETAILS = """\
Items are JSONL in the columns of MathVista's testmini for --benchmark mathvista, else canonical JSONL
(docs/evaluation.md). Responses are rows {"pid": .., "response": ..}; `sample` numbers several to one question, `finish`
is "length" for one that was cut, `tokens` is its length; other columns are ignored. Either file may end in .gz.

--judge-url asks a language model only about responses in which no rule finds an answer. Its verdicts are the column
`judge_correct`, and the report gives the accuracy with and without them. Its replies are kept in DIR/judge.

Writes verdicts.jsonl, report.json and report.md into DIR. Items without a response are named, and count as incorrect;
malformed items too, with --allow-missing.
"""
_COMPARE_DETAILS = """\
A and B are folders that `mmrl eval` wrote, or their verdicts.jsonl, on the same questions. McNemar's test asks whether
as many answers flipped one way as the other; the interval is for the difference, with images resampled. The
difference within each subset, by strict verdicts, follows; one subset in twenty differs by chance.
"""

_EVAL_COMMANDS: Final = ("run", "score", "compare", "-h", "--help")
_JUDGE_REQUESTS_IN_FLIGHT = 8


def insert_default_command(argv: Sequence[str]) -> list[str]:
    """Insert `run` if the word after `mmrl eval` is not a command."""
    if len(argv) > 1 and argv[0] == "eval" and argv[1] not in _EVAL_COMMANDS:
        return [argv[0], "run", *argv[1:]]
    return [*argv]


def add_parser(commands: Subparsers) -> None:
    """Declare the group and its commands."""
    parser = add_command(commands, "eval", "run benchmarks, score responses, compare results", DETAILS)
    group = parser.add_subparsers(dest="eval_command", metavar="COMMAND", title="commands", required=True)
    _add_run_parser(group)
    _add_score_parser(group)
    _add_compare_parser(group)


def _add_run_parser(group: Subparsers) -> None:
    parser = add_command(group, "run", "run a benchmark; `run` may be left out", _RUN_DETAILS)
    parser.add_argument("model", metavar="MODEL", help="a folder of transformers, a run, or a checkpoint of one")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="set one value by dotted path")
    parser.add_argument(
        "--benchmark", required=True, metavar="NAME", help="such as mathvista, run:test, ./mine.py:make_benchmark"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="PATH",
        help="a file or folder of questions, may be given again; for run:test, the folder that paths start from",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results (evals/MODEL-NAME)")
    parser.add_argument("--engine", choices=("hf", "vllm"), help="engine that generates responses")
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint of a run, or `best`; the newest by default")
    parser.add_argument("--split", metavar="NAME", help="split of a folder of questions")
    parser.add_argument("--media-root", metavar="DIR", help="folder that paths of images and videos start from")
    parser.add_argument(
        "--coordinates",
        choices=("px_original", "norm_1", "norm_1000"),
        help="coordinate system of boxes in a table that does not state it (VLMEvalKit's RefCOCO)",
    )
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="count malformed rows and questions without their image as incorrect",
    )
    parser.add_argument("--rescore", action="store_true", help="score the predictions again, and print what changes")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from mmrl.evaluation.eval_settings import EvalRequest, check_request, default_out_dir
    from mmrl.log.console import Console
    from mmrl.types import CoordinateSystem

    engine = [f"rollout.engine={arguments.engine}"] if arguments.engine else []
    # A wrong request should be refused before torch is imported, which takes seconds.
    request = EvalRequest(
        model=arguments.model,
        benchmark=arguments.benchmark,
        data_files=tuple(arguments.data),
        out_dir=arguments.out or default_out_dir(arguments.model, arguments.benchmark),
        overrides=[*engine, *arguments.overrides],
        checkpoint=arguments.checkpoint,
        split=arguments.split,
        media_root=arguments.media_root,
        coordinate_system=CoordinateSystem(arguments.coordinates) if arguments.coordinates else None,
        allow_missing=arguments.allow_missing,
        rescore=arguments.rescore,
    )
    check_request(request)
    with pause_gc_for_imports():
        from mmrl.distributed.torch_ranks import require_single_process
        from mmrl.evaluation.evaluate import evaluate

    require_single_process("mmrl eval")
    result = evaluate(request, Console())
    _print_report(result.report, result.changed_verdicts)
    echo(f"Written: {request.out_dir}/predictions.jsonl, verdicts.jsonl, report.json, report.md")
    return 0


def _print_report(report: Mapping[str, Any], changed_verdicts: Sequence[tuple[Verdict, Verdict]]) -> None:
    """Print the summary of a report, and the verdicts that scoring again has changed."""
    from mmrl.benchmarks.report import report_markdown

    echo(report_markdown(report).partition("\n## ")[0].rstrip())
    for old, new in changed_verdicts:
        echo(f"{new.id}: strict {old.strict} -> {new.strict}, score {old.score:g} -> {new.score:g} ({new.rule})")


def _add_score_parser(group: Subparsers) -> None:
    parser = add_command(group, "score", "score responses, by rule and by the benchmark's own metric", _SCORE_DETAILS)
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
    parser.add_argument("--allow-missing", action="store_true", help="count malformed rows of items as incorrect")
    parser.add_argument("--rescore", action="store_true", help="replace the results in DIR, and print what changes")
    parser.set_defaults(run=_score)


def _score(arguments: argparse.Namespace) -> int:
    from mmrl.benchmarks.compare import changed_verdicts
    from mmrl.benchmarks.grading import score_files
    from mmrl.benchmarks.registry import get_benchmark
    from mmrl.benchmarks.report import write_report
    from mmrl.benchmarks.verdict import read_verdicts

    benchmark = get_benchmark(arguments.benchmark)
    has_results = arguments.rescore and (arguments.out / "verdicts.jsonl").exists()
    before = read_verdicts(arguments.out) if has_results else []
    scored = score_files(benchmark, arguments.items, arguments.responses, allow_missing=arguments.allow_missing)
    for problem in scored.problems.values():
        echo(f"mmrl: counts as incorrect: {problem}", file=sys.stderr)
    if arguments.judge_url or arguments.judge_model:
        scored = _apply_llm_judge(scored, arguments)
    report = write_report(scored, arguments.out, rescore=arguments.rescore)
    unanswered = [id for id in scored.missing_ids if id not in scored.problems]
    if unanswered:
        listed = first_names(unanswered)
        echo(f"mmrl: {len(unanswered)} items have no response and count as incorrect: {listed}", file=sys.stderr)
    _print_report(report, changed_verdicts(before, scored.verdicts))
    echo(f"Written: {arguments.out / 'verdicts.jsonl'}, report.json, report.md")
    return 0


def _apply_llm_judge(scored: ScoredRun, arguments: argparse.Namespace) -> ScoredRun:
    """Add the verdicts of a language model where no rule finds an answer."""
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

    def warn(text: str) -> None:
        echo(f"mmrl: {text}", file=sys.stderr)

    return add_judge_verdicts(scored, service, max_concurrent=_JUDGE_REQUESTS_IN_FLIGHT, warn=warn)


def _add_compare_parser(group: Subparsers) -> None:
    parser = add_command(
        group, "compare", "compare two results: flips, McNemar's test, paired bootstrap", _COMPARE_DETAILS
    )
    parser.add_argument("a", type=Path, metavar="A", help="one result, such as the earlier one")
    parser.add_argument("b", type=Path, metavar="B", help="the other result")
    parser.add_argument("--flips", type=positive_int, default=10, metavar="N", help="flips to list each way (10)")
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    from mmrl.benchmarks.compare import VerdictColumn, compare_runs, compare_subsets
    from mmrl.benchmarks.verdict import read_verdicts

    a, b = read_verdicts(arguments.a), read_verdicts(arguments.b)
    columns: tuple[VerdictColumn, ...] = ("strict", "official")
    judged_a, judged_b = _was_judged(arguments.a, a), _was_judged(arguments.b, b)
    if judged_a and judged_b:
        columns = (*columns, "correct_with_judge")
    elif judged_a or judged_b:
        side = "A" if judged_a else "B"
        echo(f"with_judge: left out, because only {side} asked a judge; score the other with the same judge")
    for column in columns:
        _print_comparison(column.removeprefix("correct_"), compare_runs(a, b, column), arguments.flips)
    for name, rows in compare_subsets(a, b).items():
        _print_subset_table(name, rows)
    return 0


def _was_judged(path: Path, verdicts: Sequence[Verdict]) -> bool:
    """Return True when a judge gave verdicts, or when the report beside them says that it had none to give."""
    if any(verdict.judge_correct is not None for verdict in verdicts):
        return True
    folder = path if path.is_dir() else path.parent
    try:
        return "judge" in json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _print_comparison(column: str, comparison: RunComparison, max_flips: int) -> None:
    """Print accuracies, their difference, and the questions that only one result answers correctly."""
    difference, mcnemar = comparison.difference, comparison.mcnemar
    echo(
        f"{column}: A {100 * comparison.accuracy_a:.1f}, B {100 * comparison.accuracy_b:.1f}, "
        f"of {comparison.num_questions} questions"
    )
    is_significant = difference.low > 0 or difference.high < 0
    echo(
        f"  A - B: {100 * difference.value:+.1f} points, "
        f"95 % from {100 * difference.low:+.1f} to {100 * difference.high:+.1f} "
        f"({'differ' if is_significant else 'no significant difference'})"
    )
    if mcnemar is not None:
        echo(
            f"  correct only in A: {mcnemar.a_only}, only in B: {mcnemar.b_only}; "
            f"McNemar's exact p = {mcnemar.p_value:.3g}"
        )
    for name, ids in (("A", comparison.a_only_ids), ("B", comparison.b_only_ids)):
        if ids:
            echo(f"  correct only in {name}: {first_names(ids, max_flips)}")


def _print_subset_table(column: str, comparisons: Mapping[str, RunComparison]) -> None:
    """Print the differences within the subsets that a column divides the questions into."""
    from mmrl.log.console import Console

    rows = []
    for value, comparison in comparisons.items():
        difference = comparison.difference
        interval = ""
        if comparison.num_questions > 1:
            interval = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
        shares = f"{100 * comparison.accuracy_a:.1f}", f"{100 * comparison.accuracy_b:.1f}"
        flips = str(len(comparison.a_only_ids)), str(len(comparison.b_only_ids))
        p_value = f"{comparison.mcnemar.p_value:.3g}" if comparison.mcnemar else ""
        number = str(comparison.num_questions)
        rows.append((value, number, *shares, f"{100 * difference.value:+.1f}", interval, *flips, p_value))
    headings = (column, "n", "A", "B", "A - B", "95 %", "A alone", "B alone", "McNemar p")
    Console().print_table(f"strict by {column}", headings, rows)
