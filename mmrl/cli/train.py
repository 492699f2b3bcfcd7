"""`mmrl train`: run every stage of a config, or resume where it stopped."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, echo, pause_gc_for_imports, positive_int
from mmrl.distributed.launch import is_launched, launch

DETAILS = """\
examples:
  mmrl train configs/quickstart.yaml
  mmrl train configs/quickstart.yaml --steps 2 --run-dir /tmp/try     # does it run at all?
  mmrl train configs/quickstart.yaml --verify-resume                  # does a killed run end like an undisturbed one?
  mmrl train my.yaml --nproc 8 deepspeed.zero_stage=3               # one process for each of 8 GPUs
  mmrl train my.yaml model.path=Qwen/Qwen2.5-VL-3B-Instruct run.seed=1

Everything is written to the run directory. The same command again resumes from the last checkpoint;
Ctrl-C saves one first and exits with code 130.
"""
_VERIFIED_STEPS = 8


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "train", "train a model as a config says, or resume where it stopped", DETAILS)
    add_config_arguments(parser)
    parser.add_argument("--steps", type=positive_int, metavar="N", help="at most N training steps in every stage")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="write the run here instead of `run.dir`")
    parser.add_argument(
        "--verify-resume",
        action="store_true",
        help="keep nothing: run --steps (8) steps a stage in a temporary folder, undisturbed and with a kill in every "
        "stage, compare everything byte for byte, and exit with 0 if it is the same, 1 if not",
    )
    parser.add_argument(
        "--nproc",
        type=positive_int,
        metavar="N",
        help="share the work among N processes, one for each GPU of this machine",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; return 130 or 143 if interrupted and saved, 1 if `--verify-resume` finds a difference, else 0."""
    from mmrl.config import check_data_files, load_config, locate_errors

    loaded = load_config(arguments.config, arguments.overrides)
    check_data_files(loaded)
    if arguments.verify_resume:
        from mmrl.checkpoint.verify_resume import verify_resume

        is_same = verify_resume(
            arguments.config,
            arguments.overrides,
            steps=arguments.steps or _VERIFIED_STEPS,
            processes=arguments.nproc,
            say=echo,
        )
        return 0 if is_same else 1
    with pause_gc_for_imports():
        from mmrl.training.preflight import effective_config, load_unless_finished

    functions = None
    # Checked before torch is imported and ranks are started, which takes seconds. Ranks of another launcher check
    # together, in `train`: a rank that returned here alone would leave the others waiting.
    if not is_launched():
        config = effective_config(loaded, steps=arguments.steps, run_dir=arguments.run_dir)
        with locate_errors(loaded), pause_gc_for_imports():
            functions = load_unless_finished(config, loaded.files[0].parent)
        if functions is None:
            return 0
    if arguments.nproc:
        command = ["train", arguments.config, *arguments.overrides]
        if arguments.steps is not None:
            command += ["--steps", str(arguments.steps)]
        if arguments.run_dir is not None:
            command += ["--run-dir", str(arguments.run_dir)]
        return launch(command, arguments.nproc)
    with pause_gc_for_imports():
        from mmrl.training.build import import_model_classes
        from mmrl.training.run import train

        import_model_classes(loaded.config)

    words = ["mmrl", *sys.argv[1:]]
    # `launch` takes this option from the command of its ranks, or each would start ranks again.
    if "MMRL_LAUNCHER" in os.environ:
        words += ["--nproc", os.environ["WORLD_SIZE"]]
    with locate_errors(loaded):
        return train(
            loaded,
            steps=arguments.steps,
            run_dir=arguments.run_dir,
            functions=functions,
            resume_command=shlex.join(words),
        )
