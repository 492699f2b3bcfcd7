"""`mmrl eval compare`: compare two results on the same questions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command, positive_int

if TYPE_CHECKING:
    from mmrl.benchmarks.compare import RunComparison

DETAILS = """\
A and B are folders that `mmrl eval` wrote, or their verdicts.jsonl, on the same questions. McNemar's test asks whether
as many answers flipped one way as the other; the interval is that of the difference, images resampled. Then the
difference within every subset, by strict verdicts: of twenty subsets one differs by chance.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "compare", "compare two results: flips, McNemar's test, paired bootstrap", DETAILS)
    parser.add_argument("a", type=Path, metavar="A", help="one result, the earlier, for example")
    parser.add_argument("b", type=Path, metavar="B", help="the other result")
    parser.add_argument("--flips", type=positive_int, default=10, metavar="N", help="flips to list each way (10)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare the results and print the differences."""
    from mmrl.benchmarks.compare import VerdictColumn, compare_runs, compare_subsets
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


def _print_comparison(column: str, comparison: RunComparison, max_flips: int) -> None:
    """Print accuracies, their difference, and the questions that one result alone answers correctly."""
    difference, mcnemar = comparison.difference, comparison.mcnemar
    print(
        f"{column}: A {100 * comparison.accuracy_a:.1f}, B {100 * comparison.accuracy_b:.1f}, "
        f"of {comparison.num_questions} questions"
    )
    is_significant = difference.low > 0 or difference.high < 0
    print(
        f"  A - B: {100 * difference.value:+.1f} points, "
        f"95 % from {100 * difference.low:+.1f} to {100 * difference.high:+.1f} "
        f"({'differ' if is_significant else 'no significant difference'})"
    )
    if mcnemar is not None:
        print(
            f"  correct in A alone {mcnemar.a_only}, in B alone {mcnemar.b_only}; "
            f"McNemar's exact p = {mcnemar.p_value:.3g}"
        )
    for name, ids in (("A", comparison.a_only_ids), ("B", comparison.b_only_ids)):
        if ids:
            more = ", .." if len(ids) > max_flips else ""
            print(f"  correct in {name} alone: {', '.join(ids[:max_flips])}{more}")


def _print_subset_table(column: str, comparisons: Mapping[str, RunComparison]) -> None:
    """Print the differences within the subsets that a column divides the questions into."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"strict by {column}", title_justify="left")
    table.add_column(column)
    for heading in ("n", "A", "B", "A - B", "95 %", "A alone", "B alone", "McNemar p"):
        table.add_column(heading, justify="right")
    for value, comparison in comparisons.items():
        difference = comparison.difference
        interval = ""
        if comparison.num_questions > 1:
            interval = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
        table.add_row(
            value,
            str(comparison.num_questions),
            f"{100 * comparison.accuracy_a:.1f}",
            f"{100 * comparison.accuracy_b:.1f}",
            f"{100 * difference.value:+.1f}",
            interval,
            str(len(comparison.a_only_ids)),
            str(len(comparison.b_only_ids)),
            f"{comparison.mcnemar.p_value:.3g}" if comparison.mcnemar else "",
        )
    Console(width=120).print(table)
