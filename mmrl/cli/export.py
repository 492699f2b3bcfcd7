"""`mmrl export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, pause_gc_for_imports

DETAILS = """\
examples:
  mmrl export runs/quickstart --to quickstart-model
  mmrl export runs/mine --checkpoint 01-000500 --to mine-500
  mmrl export runs/lora --to adapter                              # for peft, or vLLM's --lora-modules
  mmrl export runs/lora --checkpoint best --merge-lora --to merged

The folder holds weights (safetensors), processor, chat template, generation config and a model card. It is made from
the checkpoint and the base model; no training data is read. A run that ends leaves its last weights in RUN/model.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "export", "write a checkpoint as a folder for transformers and vLLM", DETAILS)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory, such as runs/quickstart")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="a name in RUN/checkpoints, or `best` (see checkpoints.best); the newest"
    )
    parser.add_argument("--merge-lora", action="store_true", help="the model with its adapter, not the adapter alone")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="the folder to make")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export; returns 0."""
    with pause_gc_for_imports():
        from mmrl.checkpoint.hf_export import export_checkpoint
        from mmrl.log.console import Console
        from mmrl.log.run_dir import RunDir

    console = Console()
    options = {"name": arguments.checkpoint, "merge": arguments.merge_lora}
    folder = export_checkpoint(RunDir(arguments.run_dir), arguments.to, **options, warn=console.warn)
    console.info(f"{folder} -> {arguments.to}")
    return 0
