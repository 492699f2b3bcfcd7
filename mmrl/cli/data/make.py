"""`mmrl data make`: write the samples of a dataset function as files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.cli.common import Subparsers, add_command
from mmrl.types import DatasetContext, MediaPolicy, UserError

DETAILS = """\
examples:
  mmrl data make mmrl_datasets.generators.scenes:counting split=train size=1000 --out shapes
  mmrl data make mmrl_datasets.generators.jigsaw:order split=train size=500 rows=3 columns=3 --out puzzles
  mmrl data make ./my_data.py:rows split=test --out copy

Prints the lines of YAML that read the dataset. An interrupted command leaves no folder behind.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "make", "write the samples of a generator, or of any dataset function", DETAILS)
    parser.add_argument("fn", metavar="FN", help="package.module:function, or ./file.py:function")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="an option of that function, written as YAML"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="a folder that is new or empty")
    parser.add_argument("--format", choices=["jsonl", "parquet"], default="jsonl", help="of the table (default: jsonl)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the samples, and print the YAML that reads them."""
    from rich.console import Console
    from rich.progress import track

    from mmrl.utils.plugin_args import check_positional_parameters, read_plugin_options, validate_args
    from mmrl.utils.plugins import load_function
    from mmrl_datasets.export import MEDIA_DIR, atomic_output_dir, write_table

    fn = load_function(arguments.fn, Path.cwd(), role="data source")
    check_positional_parameters(fn, ("context",), role="data source")
    options = read_plugin_options(fn, skip=1)
    args = validate_args(repr(arguments.fn), options, _parse_args(arguments.overrides))
    size = args.get("size", options["size"].default if "size" in options else 0)
    if size is None:
        raise UserError("size=null never ends; say how many samples to write")
    console = Console(stderr=True)
    with atomic_output_dir(arguments.out) as folder:
        media_policy = MediaPolicy(roots=(Path.cwd().resolve(), folder.resolve()))
        context = DatasetContext(work_dir=folder / MEDIA_DIR, base_dir=Path.cwd(), seed=0, media_policy=media_policy)
        samples = fn(context, **args)
        samples = track(samples, "making samples", size or None, console=console, disable=not console.is_terminal)
        table_args = write_table(samples, folder, arguments.format)
    print(_config_snippet(arguments.out, table_args), end="")
    return 0


def _parse_args(overrides: Sequence[str]) -> dict[str, Any]:
    from mmrl.config.load import COMMAND_LINE_ORIGIN
    from mmrl.config.yaml_tree import parse_yaml

    args = {}
    for word in overrides:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UserError(f"{word!r} is no option; write key=value, such as size=100")
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
    return f"# a config in {Path.cwd()} reads it so:\n{text.getvalue()}"
