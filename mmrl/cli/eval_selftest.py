"""`mmrl eval selftest`: published verdicts, replayed."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command

DETAILS = """\
DIR holds MathVista's published responses, GPT-4's extractions and the official verdicts
(mmrl/benchmarks/report/mathvista_agreement.py says which files). They are not part of mmrl:
their licence forbids training on them, and asks to share alike.

Two things are compared: the official metric on the stored extractions, which must agree to the last verdict; and our
rules on the raw responses, without any model, on rows where the official extraction is an answer at all (`clean`).
Exit code 1: a bar is missed.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "selftest", "replay published verdicts, and print how ours agree", DETAILS)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=Path("../shared/eval/mathvista"),
        help="the folder of published responses (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay and tell; returns 1 when a bar is missed."""
    from rich.console import Console
    from rich.table import Table

    from mmrl.benchmarks.report.mathvista_agreement import agreement_thresholds, measure_agreement

    runs = measure_agreement(arguments.data)
    table = Table(title="MathVista testmini: ours against published verdicts")
    for head in (
        "run",
        "metric 2023",
        "metric head",
        "cells",
        "clean",
        "free-form",
        "truth",
        "false right",
        "compat",
        "official",
    ):
        table.add_column(head, justify="left" if head == "run" else "right")
    for one in runs:
        name = f"{one.run} (left out of bars)" if one.excluded else one.run
        pairs = (
            one.metric_2023,
            one.metric_head,
            one.table_cells,
            one.clean_rows,
            one.free_form_rows,
            one.adjudicated_rows,
        )
        table.add_row(
            name,
            *(f"{equal}/{of}" for equal, of in pairs),
            str(one.false_positives),
            f"{100 * one.our_accuracy:.1f}",
            f"{100 * one.published_accuracy:.1f}",
        )
    console = Console(width=150)
    console.print(table)
    found = agreement_thresholds(runs)
    for bar in found:
        relation = "at most" if bar.is_upper_bound else "at least"
        holds = "holds " if bar.is_met else "MISSED"
        console.print(
            f"{holds}  {100 * bar.value:6.2f} %  {relation} {100 * bar.bound:5.1f} %  {bar.name}", highlight=False
        )
    return int(not all(bar.is_met for bar in found))
