"""`mmrl export`: write a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, pause_gc_for_imports

DETAILS = """\
examples:
  mmrl export runs/quickstart --out quickstart-model
  mmrl export runs/mine --checkpoint 01-000500 --out mine-500
  mmrl export runs/lora --out adapter                             # for peft, or vLLM's --lora-modules
  mmrl export runs/lora --checkpoint best --merge-lora --out merged

The folder holds weights (safetensors), processor, chat template, generation config and a model card. It is made from
the checkpoint and the base model; no training data is read. A finished run has its last weights in RUN/model.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "export", "write a checkpoint as a folder for transformers and vLLM", DETAILS)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run directory, such as runs/quickstart")
    parser.add_argument(
        "--checkpoint", metavar="NAME", help="a name in RUN/checkpoints, or `best` (see checkpoints.best); the newest"
    )
    parser.add_argument("--merge-lora", action="store_true", help="the merged model, not only the adapter")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export the checkpoint."""
    with pause_gc_for_imports():
        from mmrl.checkpoint.hf_export import export_checkpoint
        from mmrl.log.console import Console
        from mmrl.log.run_dir import RunDir

    console = Console()
    checkpoint = export_checkpoint(
        RunDir(arguments.run_dir),
        arguments.out,
        name=arguments.checkpoint,
        merge=arguments.merge_lora,
        warn=console.warn,
    )
    console.info(f"{checkpoint} -> {arguments.out}")
    return 0
