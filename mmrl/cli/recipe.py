"""`mmrl recipe list` and `mmrl recipe show`: list the published systems that come as configs, or describe one."""

from __future__ import annotations

import argparse
import json

from mmrl.cli.common import Subparsers, add_command, echo

DETAILS = """\
examples:
  mmrl recipe list                            # all, by task
  mmrl recipe list video 7B                   # those with all of these words: paper, task, model, reward, ...
  mmrl recipe show vlm_r1_rec --data /data    # what it is, what it needs, and which files are missing
  mmrl train vlm_r1_rec --model /models/Qwen2.5-VL-3B-Instruct --data /data
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "recipe", "list published systems that can be trained by name, or show one", DETAILS)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = add_command(actions, "list", "list recipes by task", DETAILS)
    listing.add_argument("words", nargs="*", metavar="WORD", help="show only recipes that contain all of these words")
    listing.set_defaults(run=_list)
    show = add_command(actions, "show", "show what a recipe is and needs", DETAILS)
    show.add_argument("name", metavar="NAME", help="name of the recipe, or a YAML file")
    show.add_argument("--data", metavar="DIR", help="look in this folder for the recipe's files")
    show.set_defaults(run=_show)


def _list(arguments: argparse.Namespace) -> int:
    from mmrl.config.recipes import group_by_task

    groups = group_by_task(arguments.words)
    for task, recipes in groups.items():
        echo(f"{task}:")
        for file, header in recipes:
            echo(f"  {file.stem:25}  {header.summary or header.title}")
    if not groups:
        echo(f"no recipe contains all of the words {' '.join(arguments.words)}")
    return int(not groups)


def _show(arguments: argparse.Namespace) -> int:
    from mmrl.config import load_config
    from mmrl.config.recipes import find_missing_data, read_header

    loaded = load_config(arguments.name, [f"data.dir={json.dumps(arguments.data)}"] if arguments.data else [])
    config = loaded.config
    # What a recipe does not say itself is in the header of the one that it extends.
    for file in loaded.files:
        echo(f"{read_header(file).text}\n")
    echo(f"Model: {config.model.path or 'made from scratch'}")
    echo(f"Rewards: {', '.join(term.fn for term in config.rewards.terms)}")
    echo(f"Stages: {', '.join(f'{stage.name} ({stage.kind})' for stage in config.stages)}")
    for source in config.data.sources_by_split()["validation"]:
        share = f"{100 * source.validation_share:g} % of " if source.validation_share else ""
        echo(f"Validation: {share}{source.args.get('path', source.fn)}")
    missing = find_missing_data(loaded)
    for name in loaded.data_files:
        state = "needs" if not arguments.data else "missing" if name in missing else "has"
        echo(f"{arguments.data or 'The data folder'}: {state}  {name}{missing.get(name, '')}")
    echo(f"\nTo train: mmrl train {arguments.name} --model DIR" + (" --data DIR" if loaded.data_files else ""))
    return 0
