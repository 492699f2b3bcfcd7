"""`mmrl eval diff`: two runs on the same questions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Commands, add_command, positive

if TYPE_CHECKING:
    from mmrl.benchmarks.report.compare import Difference

DETAILS = """\
A and B are folders that `mmrl eval` wrote, or their verdicts.jsonl, on the same questions. McNemar's test asks whether
as many answers flipped one way as the other; the interval is that of the difference, pictures resampled. Then the
difference within every subset, by strict verdicts: of twenty subsets one differs by chance.
"""


def add_parser(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "diff", "compare two runs: flips, McNemar's test, paired bootstrap", DETAILS)
    parser.add_argument("a", type=Path, metavar="A", help="one run, the earlier, say")
    parser.add_argument("b", type=Path, metavar="B", help="the other")
    parser.add_argument("--flips", type=positive, default=10, metavar="N", help="flips to name each way (10)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compare and tell."""
    from mmrl.benchmarks.report.compare import Column, by_subset, compare
    from mmrl.benchmarks.verdict import read_verdicts

    a, b = read_verdicts(arguments.a), read_verdicts(arguments.b)
    columns: tuple[Column, ...] = ("strict", "compat")
    if any(verdict.judged is not None for verdict in (*a, *b)):
        columns = (*columns, "judged")
    for column in columns:
        _tell(column, compare(a, b, column), arguments.flips)
    for name, rows in by_subset(a, b, "strict").items():
        _show(name, rows)
    return 0


def _show(name: str, rows: Mapping[str, Difference]) -> None:
    """The differences within the subsets that a column makes."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"strict by {name}", title_justify="left")
    table.add_column(name)
    for head in ("n", "A", "B", "A - B", "95 %", "A alone", "B alone", "McNemar p"):
        table.add_column(head, justify="right")
    for value, found in rows.items():
        percents = (f"{100 * found.a:.1f}", f"{100 * found.b:.1f}", f"{100 * found.gap.value:+.1f}")
        span = f"{100 * found.gap.low:+.1f} to {100 * found.gap.high:+.1f}" if found.n > 1 else ""
        alone = (str(len(found.a_only)), str(len(found.b_only)))
        table.add_row(value, str(found.n), *percents, span, *alone, f"{found.flips.p:.3g}" if found.flips else "")
    Console(width=120).print(table)


def _tell(column: str, found: Difference, most: int) -> None:
    gap, flips = found.gap, found.flips
    print(f"{column}: A {100 * found.a:.1f}, B {100 * found.b:.1f}, of {found.n} questions")
    real = "differ" if gap.low > 0 or gap.high < 0 else "no significant difference"
    print(f"  A - B: {100 * gap.value:+.1f} points, 95 % from {100 * gap.low:+.1f} to {100 * gap.high:+.1f} ({real})")
    if flips is not None:
        print(f"  right in A alone {flips.a_only}, in B alone {flips.b_only}; McNemar's exact p = {flips.p:.3g}")
    for name, ids in (("A", found.a_only), ("B", found.b_only)):
        if ids:
            print(f"  right in {name} alone: {', '.join(ids[:most])}{', ..' if len(ids) > most else ''}")
