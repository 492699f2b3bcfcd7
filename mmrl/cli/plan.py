"""`mmrl plan`: what a run will need of GPUs, computed without one."""

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

    loaded = load_config(arguments.config, arguments.overrides)
    with pause_gc_for_imports():
        from mmrl.plan.estimate import Plan, make_plan
        from mmrl.plan.hardware import find_gpu
        from mmrl.plan.remedies import find_remedy, fits
        from mmrl.plan.report import as_json, table_lines
        from mmrl.plan.shapes import read_shapes
        from mmrl.plan.workload import find_workload

    if not 0.0 < arguments.efficiency <= 1.0:
        raise UserError(f"--efficiency {arguments.efficiency} must be above 0 and at most 1")
    gpu, config = find_gpu(arguments.gpu), loaded.config
    stages = {stage.name: stage for stage in config.stages if isinstance(stage, RlStage)}
    name = arguments.stage or next(iter(stages), None)
    if name not in stages:
        raise UserError(f"--stage: there is no rl stage {name!r}; the config has {', '.join(stages) or 'none'}")
    family, shapes = read_shapes(config)
    base_dir = loaded.files[0].parent
    workload = find_workload(config, stages[name], base_dir, family, shapes, arguments.response_tokens)

    def plan_with(overrides: list[str]) -> Plan:
        changed = load_config(arguments.config, overrides).config
        stage = next(stage for stage in changed.stages if stage.name == name)
        assert isinstance(stage, RlStage)
        return make_plan(changed, stage, workload, gpu, arguments.gpus, arguments.efficiency)

    plan = plan_with(arguments.overrides)
    is_fitting, remedy = fits(plan, gpu.memory_gb), None
    if not is_fitting:
        remedy = find_remedy(
            config,
            arguments.overrides,
            name,
            plan.num_learners,
            lambda overrides: fits(plan_with(overrides), gpu.memory_gb),
        )
    if arguments.json:
        echo(json.dumps(as_json(plan, workload, remedy, is_fitting=is_fitting), indent=2))
        return int(not is_fitting)
    for line in table_lines(plan, stages[name], workload, arguments.gpu, gpu, arguments.efficiency):
        echo(line)
    if not is_fitting:
        echo(f"\nIt does not fit into {gpu.memory_gb:.0f} GB.")
        echo("\n".join(["These settings do:", *remedy] if remedy else ["No change of the ladder makes it fit."]))
    return int(not is_fitting)
