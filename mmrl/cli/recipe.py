"""`mmrl recipe list` and `mmrl recipe show`: list the published systems that come as configs, or describe one."""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.common import Subparsers, add_command, echo

if TYPE_CHECKING:
    from mmrl.config.schema import DataConfig

DETAILS = """\
examples:
  mmrl recipe list                            # all, by task
  mmrl recipe list video 7B                   # those with all of these words: paper, task, model, reward, ...
  mmrl recipe show vlm_r1_rec --data /data    # what it is, what it needs, and which files are missing
  mmrl train vlm_r1_rec --model /models/Qwen2.5-VL-3B-Instruct --data /data
"""
_INDENT = 14


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "recipe", "list published systems that can be trained by name, or show one", DETAILS)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_command(actions, "list", "list recipes by task", DETAILS)
    listing.add_argument("words", nargs="*", metavar="WORD", help="show those whose file has all of these words")
    listing.set_defaults(run=_list)
    show = add_command(actions, "show", "show what a recipe is and needs", DETAILS)
    show.add_argument("name", metavar="NAME", help="name of the recipe, or a YAML file")
    show.add_argument("--data", metavar="DIR", type=Path, help="look in this folder for the recipe's files")
    show.set_defaults(run=_show)


def _list(arguments: argparse.Namespace) -> int:
    from mmrl.config.recipes import group_by_task

    lines: list[tuple[str, str]] = []  # name and summary; a task has no summary
    for task, recipes in group_by_task().items():
        found = []
        for file, header in recipes:
            text = f"{file.stem}\n{file.read_text(encoding='utf-8')}".lower()
            if all(word.lower() in text for word in arguments.words):
                found.append((f"  {file.stem}", header.summary or header.title))
        lines += [(f"{task}:", ""), *found] if found else []
    if not lines:
        echo(f"no recipe has all of the words {' '.join(arguments.words)}")
        return 1
    width = max(len(name) for name, summary in lines if summary) + 2
    for name, summary in lines:
        echo(f"{name:{width}}{summary}".rstrip())
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from mmrl.config import load_config
    from mmrl.config.recipes import find_config, find_missing_data, read_header

    file = find_config(arguments.name)
    header = read_header(file)
    folder = [f"data.dir={arguments.data.resolve()}"] if arguments.data else []
    loaded = load_config(file, folder)
    config = loaded.config
    echo(f"{header.title}: {header.summary}\n")
    rows = dict(header.sections)
    rows["Model"] = config.model.path or "made from scratch"
    rows["Rewards"] = ", ".join(term.fn for term in config.rewards.terms)
    rows["Stages"] = ", ".join(f"{stage.name} ({stage.kind})" for stage in config.stages)
    rows["Validation"] = _describe_validation(config.data)
    for label, text in rows.items():
        lines = textwrap.wrap(text, 120 - _INDENT, break_long_words=False, break_on_hyphens=False)
        echo(f"{label:{_INDENT}}" + f"\n{'':{_INDENT}}".join(lines))
    missing = find_missing_data(loaded)
    if loaded.data_files:
        echo(f"\nFiles in {arguments.data or 'the data folder (--data DIR)'}:")
    for name in loaded.data_files:
        state = "" if not arguments.data else "missing  " if name in missing else "ok       "
        echo(f"  {state}{name}")
    # A recipe without commands of its own has the data of the one that it extends.
    downloads = next(filter(None, (read_header(file).downloads for file in loaded.files)), ())
    if downloads and (missing or not arguments.data):
        echo("\nTo fetch them, in that folder:")
        for command in downloads:
            echo(f"  {command}")
    echo(f"\nTo train: mmrl train {arguments.name} --model DIR" + (" --data DIR" if loaded.data_files else ""))
    return 0


def _describe_validation(data: DataConfig) -> str:
    """Return the files that are validated, and the shares of training files."""
    from mmrl.config.recipes import DATA
    from mmrl.data.rows import sources_by_split

    texts = []
    for source in sources_by_split(data)["validation"]:
        name = str(source.args.get("path", source.fn)).removeprefix(f"{data.dir or DATA}/")
        texts.append(f"{100 * source.validation_share:g} % of {name}" if source.validation_share else name)
    return ", ".join(dict.fromkeys(texts)) or "none"
