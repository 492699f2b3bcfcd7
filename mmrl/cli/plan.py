"""`mmrl plan`: compute the GPU memory and time that a run will need, without a GPU."""

from __future__ import annotations

import argparse
import json

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, echo, pause_gc_for_imports, positive_int
from mmrl.types import UserError

DETAILS = """\
examples:
  mmrl plan configs/recipes/qwen2_5_vl_7b_8x80gb.yaml --gpus 8 --gpu h100-80gb
  mmrl plan my.yaml --gpus 4 --gpu a100-40gb --response-tokens 600 --json

Needs no GPU and no weights: the learner's own code runs on a pretended device. If the run does not fit, changes to the
config with which it does are printed. Exit code 1: it does not fit.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "plan", "print the memory, time and GPU-hours that a run will need", DETAILS)
    add_config_arguments(parser)
    parser.add_argument("--gpus", type=positive_int, default=1, help="GPUs of all machines, those of servers included")
    parser.add_argument("--gpu", default="h100-80gb", help="kind of GPU (default: h100-80gb)")
    parser.add_argument("--stage", help="the rl stage that is planned for (default: the first)")
    parser.add_argument(
        "--response-tokens", type=positive_int, metavar="N", help="mean length of a response, for times"
    )
    parser.add_argument(
        "--efficiency", type=float, default=0.3, metavar="F", help="share of a GPU's peak that learning reaches"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if the run does not fit."""
    from mmrl.config import load_config
    from mmrl.config.schema import RlStage

    if not 0.0 < arguments.efficiency <= 1.0:
        raise UserError(f"--efficiency {arguments.efficiency} must be above 0 and at most 1")
    loaded = load_config(arguments.config, arguments.overrides)
    stages = {stage.name: stage for stage in loaded.config.stages if isinstance(stage, RlStage)}
    if not stages:
        raise UserError(f"{arguments.config} has no rl stage, and nothing else is planned")
    name = arguments.stage or next(iter(stages))
    if name not in stages:
        raise UserError(f"--stage: there is no rl stage {name!r}; the config has {', '.join(stages)}")
    with pause_gc_for_imports():
        from mmrl.plan.estimate import Plan, find_gpu, make_plan
        from mmrl.plan.report import Settings, as_json, find_remedy, table_lines, yaml_lines
        from mmrl.plan.shapes import read_shapes
        from mmrl.plan.workload import find_workload

    gpu, model = find_gpu(arguments.gpu), read_shapes(loaded.config.model)
    workload = find_workload(loaded.config, stages[name], loaded.files[0].parent, model, arguments.response_tokens)

    def plan_with(settings: Settings) -> Plan:
        overrides = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
        config = load_config(arguments.config, [*arguments.overrides, *overrides]).config
        stage = next(stage for stage in config.stages if stage.name == name)
        assert isinstance(stage, RlStage)
        return make_plan(config, stage, workload, gpu, arguments.gpus, arguments.efficiency)

    plan = plan_with({})
    remedy = None if plan.fits else find_remedy(plan, plan_with)
    if arguments.json:
        echo(json.dumps(as_json(plan, remedy), indent=2))
        return int(not plan.fits)
    recompute = [] if plan.config.model.gradient_checkpointing else ["vision", "language"]
    echo("\n".join(table_lines(plan, plan_with({"model.gradient_checkpointing": recompute}))))
    if not plan.fits:
        echo(f"\nIt does not fit into {gpu.memory_gb:.0f} GB.")
        echo("\n".join(["These settings do:", *yaml_lines(remedy)] if remedy else ["No change of the ladder helps."]))
    return int(not plan.fits)
