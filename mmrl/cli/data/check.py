"""`mmrl data check`: check the data of a config."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, pause_gc_for_imports

if TYPE_CHECKING:
    from mmrl.data_check.report import DataCheckReport

DETAILS = """\
examples:
  mmrl data check my.yaml data.media_workers=8             # open media in 8 processes
  mmrl data check my.yaml --json report.json               # writes report.png too, a histogram of lengths
  mmrl data check my.yaml --json - | jq .counts

Opens every medium, tries every reward on every sample, makes every prompt without its pixels, and compares training
with validation, test and benchmark data. No model weights are loaded; nothing is written into the run directory.
docs/data.md lists the findings and describes the JSON. Exit code 1: something would stop the run, or make its
validation and test results meaningless.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "check", "find what would stop or mislead a run", DETAILS)
    add_config_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it, and nothing else")
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write lengths.png here; otherwise it goes beside the JSON file"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the data and print the findings; return 1 if one of them is an error."""
    from mmrl.config import load_config

    loaded = load_config(arguments.config, arguments.overrides)
    # A wrong config should be refused before these are imported, which takes seconds.
    with pause_gc_for_imports():
        from mmrl.data_check.check import DataCheck
        from mmrl.data_check.report import Severity, print_report
        from mmrl.log.console import Console

    console = Console(sys.stderr if arguments.json == "-" else None)
    with tempfile.TemporaryDirectory(prefix="mmrl-check-") as work_dir:
        report = DataCheck(loaded.config, loaded.files[0].parent, Path(work_dir), console).run()
    if arguments.json == "-":
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report, console)
    for file in _write_outputs(report, arguments.json, arguments.plots):
        console.info(f"Written: {file}")
    return int(report.counts()[Severity.ERROR] > 0)


def _write_outputs(report: DataCheckReport, json_file: str | None, plots_dir: Path | None) -> list[Path]:
    """Write the JSON report and the histograms that the command line asks for, and return the files."""
    from mmrl.data_check.lengths import draw_histograms
    from mmrl.utils.files import report_write_errors, write_atomically

    files: list[Path] = []
    if json_file not in (None, "-"):
        files.append(Path(str(json_file)))
        write_atomically(files[0], json.dumps(report.as_json(), indent=1) + "\n")
    if plots_dir:
        plot = plots_dir / "lengths.png"
    elif files:
        plot = files[0].with_suffix(".png")
    else:
        return files
    histograms = {}
    for name, split in report.splits.items():
        histograms[name] = {"prompt tokens": split.prompt_tokens, "visual tokens": split.visual_tokens}
    with report_write_errors(plot):
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw_histograms(histograms, {"prompt tokens": report.max_prompt_tokens}).save(plot)
    return [*files, plot]
