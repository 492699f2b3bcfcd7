"""`mmrl eval diff`: two runs on the same questions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command, positive_int

if TYPE_CHECKING:
    from mmrl.benchmarks.report.compare import RunComparison

DETAILS = """\
A and B are folders that `mmrl eval` wrote, or their verdicts.jsonl, on the same questions. McNemar's test asks whether
as many answers flipped one way as the other; the interval is that of the difference, pictures resampled. Then the
difference within every subset, by strict verdicts: of twenty subsets one differs by chance.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "diff", "compare two runs: flips, McNemar's test, paired bootstrap", DETAILS)
    parser.add_argument("a", type=Path, metavar="A", help="one run, the earlier, say")
    parser.add_argument("b", type=Path, metavar="B", help="the other")
    parser.add_argument("--flips", type=positive_int, default=10, metavar="N", help="flips to name each way (10)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and tell."""
    from mmrl.benchmarks.report.compare import VerdictColumn, compare_runs, compare_subsets
    from mmrl.benchmarks.verdict import read_verdicts

    a, b = read_verdicts(arguments.a), read_verdicts(arguments.b)
    columns: tuple[VerdictColumn, ...] = ("strict", "official")
    if any(verdict.judge_correct is not None for verdict in (*a, *b)):
        columns = (*columns, "with_judge")
    for column in columns:
        _print_comparison(column, compare_runs(a, b, column), arguments.flips)
    for name, rows in compare_subsets(a, b, "strict").items():
        _print_subset_table(name, rows)
    return 0


def _print_subset_table(name: str, rows: Mapping[str, RunComparison]) -> None:
    """The differences within the subsets that a column makes."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"strict by {name}", title_justify="left")
    table.add_column(name)
    for head in ("n", "A", "B", "A - B", "95 %", "A alone", "B alone", "McNemar p"):
        table.add_column(head, justify="right")
    for value, found in rows.items():
        percents = (
            f"{100 * found.accuracy_a:.1f}",
            f"{100 * found.accuracy_b:.1f}",
            f"{100 * found.difference.value:+.1f}",
        )
        span = (
            f"{100 * found.difference.low:+.1f} to {100 * found.difference.high:+.1f}"
            if found.num_questions > 1
            else ""
        )
        alone = (str(len(found.a_only_ids)), str(len(found.b_only_ids)))
        table.add_row(
            value,
            str(found.num_questions),
            *percents,
            span,
            *alone,
            f"{found.mcnemar.p_value:.3g}" if found.mcnemar else "",
        )
    Console(width=120).print(table)


def _print_comparison(column: str, difference: RunComparison, max_flips: int) -> None:
    gap, flips = difference.difference, difference.mcnemar
    print(
        f"{column}: A {100 * difference.accuracy_a:.1f}, B {100 * difference.accuracy_b:.1f}, of {difference.num_questions} questions"
    )
    real = "differ" if gap.low > 0 or gap.high < 0 else "no significant difference"
    print(f"  A - B: {100 * gap.value:+.1f} points, 95 % from {100 * gap.low:+.1f} to {100 * gap.high:+.1f} ({real})")
    if flips is not None:
        print(f"  right in A alone {flips.a_only}, in B alone {flips.b_only}; McNemar's exact p = {flips.p_value:.3g}")
    for name, ids in (("A", difference.a_only_ids), ("B", difference.b_only_ids)):
        if ids:
            print(f"  right in {name} alone: {', '.join(ids[:max_flips])}{', ..' if len(ids) > max_flips else ''}")
