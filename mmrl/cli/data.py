"""`mmrl data`: check, show or make data before a run uses it."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, echo, pause_gc_for_imports, positive_int
from mmrl.types import DatasetContext, MediaPolicy, UserError

if TYPE_CHECKING:
    from mmrl.data_check.report import DataCheckReport

DETAILS = """\
examples:
  mmrl data check configs/quickstart.yaml                  # what would stop the run, what would mislead it
  mmrl data show configs/quickstart.yaml --out seen.png    # one sample as the model sees it
  mmrl data make mmrl_datasets.generators.scenes:counting split=train size=100 --out shapes

`mmrl data COMMAND --help` says more about each.
"""
_CHECK_DETAILS = """\
examples:
  mmrl data check my.yaml data.media_workers=8             # open media in 8 processes
  mmrl data check my.yaml --json report.json               # writes report.png too, a histogram of lengths
  mmrl data check my.yaml --json - | jq .counts

Opens every medium, tries every reward on every sample, makes every prompt without its pixels, and compares training
with validation, test and benchmark data. No model weights are loaded; nothing is written into the run directory.
docs/data.md lists the findings and describes the JSON. Exit code 1: something would stop the run, or make its
validation and test results meaningless.
"""
_SHOW_DETAILS = """\
examples:
  mmrl data show my.yaml                                   # the first training sample, in words
  mmrl data show my.yaml --split test --id count/test/r7
  mmrl data show my.yaml --random 3 --count 6 --out six.png

Prints the exact prompt, each medium's tokens as one <image 640x480 -> 84x56, 6 tokens>. The image shows the pixels that
the model is given, reassembled from its patches, with the target (green) and the label (orange) drawn in.
"""
_MAKE_DETAILS = """\
examples:
  mmrl data make mmrl_datasets.generators.scenes:counting split=train size=1000 --out shapes
  mmrl data make mmrl_datasets.generators.jigsaw:order split=train size=500 rows=3 columns=3 --out puzzles
  mmrl data make ./my_data.py:rows split=test --out copy

Prints the lines of YAML that read the dataset. An interrupted command leaves no folder behind.
"""
_WRITE_REMEDY = "free space or choose another place"


def add_parser(commands: Subparsers) -> None:
    """Declare the group and its commands."""
    parser = add_command(
        commands, "data", "check the data of a config, show samples as the model sees them, or make a dataset", DETAILS
    )
    group = parser.add_subparsers(dest="data_command", metavar="COMMAND", title="commands", required=True)

    check = add_command(group, "check", "find what would stop or mislead a run", _CHECK_DETAILS)
    add_config_arguments(check)
    check.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it, and nothing else")
    check.add_argument(
        "--plots", type=Path, metavar="DIR", help="write lengths.png here; otherwise it goes beside the JSON file"
    )
    check.set_defaults(run=_check)

    show = add_command(group, "show", "show samples as the model sees them", _SHOW_DETAILS)
    add_config_arguments(show)
    show.add_argument("--split", choices=["train", "validation", "test"], default="train", help="default: train")
    choice = show.add_mutually_exclusive_group()
    choice.add_argument("--id", help="the sample of this id")
    choice.add_argument("--index", type=int, default=0, metavar="N", help="the Nth sample, from 0; -1 is the last")
    choice.add_argument("--random", type=int, metavar="SEED", help="samples drawn with this seed")
    show.add_argument(
        "--count", type=positive_int, default=1, metavar="N", help="this many samples, from the chosen one on"
    )
    show.add_argument("--out", type=Path, metavar="FILE.png", help="draw them into an image")
    show.set_defaults(run=_show)

    make = add_command(group, "make", "write the samples of a generator, or of any dataset function", _MAKE_DETAILS)
    make.add_argument("fn", metavar="FN", help="package.module:function, or ./file.py:function")
    make.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="an option of that function, written as YAML"
    )
    make.add_argument("--out", type=Path, metavar="DIR", required=True, help="a folder that is new or empty")
    make.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl", help="of the table (default: jsonl)")
    make.set_defaults(run=_make)


def _check(arguments: argparse.Namespace) -> int:
    """Check the data and print the findings; return 1 if one of them is an error."""
    from mmrl.config import check_data_files, load_config, locate_errors

    loaded = load_config(arguments.config, arguments.overrides)
    check_data_files(loaded)
    # A wrong config should be refused before these are imported, which takes seconds.
    with pause_gc_for_imports():
        from mmrl.data_check.check import DataCheck
        from mmrl.data_check.report import Severity, print_report
        from mmrl.log.console import Console

    console = Console(sys.stderr if arguments.json == "-" else None)
    with locate_errors(loaded), tempfile.TemporaryDirectory(prefix="mmrl-check-") as work_dir:
        report = DataCheck(loaded, Path(work_dir), console).run()
    if arguments.json == "-":
        echo(json.dumps(report.as_json(), indent=1))
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
    with report_write_errors(plot, _WRITE_REMEDY):
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw_histograms(histograms, {"prompt tokens": report.max_prompt_tokens}).save(plot)
    return [*files, plot]


def _show(arguments: argparse.Namespace) -> int:
    from mmrl.config import check_data_files, load_config, locate_errors

    loaded = load_config(arguments.config, arguments.overrides)
    check_data_files(loaded)
    with pause_gc_for_imports():
        from mmrl.data_check.contact_sheet import draw_contact_sheet
        from mmrl.data_check.sample_view import SampleBrowser, describe_sample
        from mmrl.log.console import Console
        from mmrl.utils.files import report_write_errors

    console = Console()
    with locate_errors(loaded), tempfile.TemporaryDirectory(prefix="mmrl-show-") as work_dir:
        browser = SampleBrowser(loaded.config, loaded.files[0].parent, Path(work_dir), arguments.split, console)
        indices = browser.select_indices(
            sample_id=arguments.id, index=arguments.index, seed=arguments.random, count=arguments.count
        )
        views = list(map(browser.open_sample, indices))
        for view in views:
            console.info(describe_sample(view) + "\n")
        if arguments.out is not None:
            with report_write_errors(arguments.out, _WRITE_REMEDY):
                draw_contact_sheet(views).save(arguments.out, "PNG")
            console.info(f"Written: {arguments.out}")
    return 0


def _make(arguments: argparse.Namespace) -> int:
    from mmrl.log.console import Console
    from mmrl.media.pixel_reader import PixelReader
    from mmrl.utils.plugins import load_plugin
    from mmrl_datasets.export import MEDIA_DIR, atomic_output_dir, write_table

    args = _parse_args(arguments.overrides)
    fn = load_plugin(arguments.fn, Path.cwd(), args, role="data source", parameters=("context",))
    option = inspect.signature(fn).parameters.get("size")  # a given value is its default here
    size = option.default if option else 0
    if size is None:
        raise UserError("size=null never ends; say how many samples to write")
    with atomic_output_dir(arguments.out) as folder:
        media_policy = MediaPolicy(roots=(Path.cwd().resolve(), folder.resolve()))
        opener = PixelReader(media_policy)
        context = DatasetContext(
            work_dir=folder / MEDIA_DIR, base_dir=Path.cwd(), seed=0, media_policy=media_policy, media_opener=opener
        )
        samples = Console(sys.stderr).track("making samples", fn(context), size or None)
        table_args = write_table(samples, folder, arguments.format)
    echo(_config_snippet(arguments.out, table_args), end="")
    return 0


def _parse_args(overrides: Sequence[str]) -> dict[str, Any]:
    from mmrl.config.reader import COMMAND_LINE_ORIGIN
    from mmrl.config.yaml_tree import parse_yaml

    args = {}
    for word in overrides:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UserError(f"{word!r} is not an option; write key=value, such as size=100")
        node, problems = parse_yaml(value, lambda _: COMMAND_LINE_ORIGIN, (name,))
        if problems:
            raise UserError("\n".join(map(str, problems)))
        args[name] = None if node is None else node.plain_value
    return args


def _config_snippet(out: Path, table_args: Mapping[str, Any]) -> str:
    """Return the lines of a config in the current folder that read the dataset."""
    from io import StringIO

    from ruamel.yaml import YAML

    from mmrl_datasets.export import TABLE_READER

    args = {**table_args, "path": str(out / table_args["path"])}
    split = table_args["split"] if table_args["split"] in ("validation", "test") else "train"
    yaml, text = YAML(), StringIO()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.dump({"data": {split: [{"fn": TABLE_READER, "args": args}]}}, text)
    return f"# to read it from a config in {Path.cwd()}:\n{text.getvalue()}"
