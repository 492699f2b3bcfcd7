"""`mmrl plan`: compute the GPU memory and time that a run will need, without a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping

from mmrl.cli.common import Subparsers, add_command, add_config_arguments, echo, pause_gc_for_imports, positive_int
from mmrl.types import UserError

DETAILS = """\
examples:
  mmrl plan configs/recipes/qwen2_5_vl_7b_8x80gb.yaml --gpus 8 --gpu h100-80gb
  mmrl plan my.yaml --gpus 4 --gpu a100-40gb --response-tokens 600 --json

Needs no GPU and no weights: the learner's own code runs on a pretended device. If the run does not fit, changes to
the config that make it fit are printed. Exit code 1: it does not fit.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "plan", "print the memory, time and GPU-hours that a run will need", DETAILS)
    add_config_arguments(parser)
    parser.add_argument("--gpus", type=positive_int, default=1, help="GPUs of all machines, including servers' GPUs")
    parser.add_argument("--gpu", default="h100-80gb", help="kind of GPU (default: h100-80gb)")
    parser.add_argument("--stage", help="the only stage to plan (default: all that train)")
    parser.add_argument(
        "--response-tokens", type=positive_int, metavar="N", help="mean length of responses that are not in the data"
    )
    efficiency_help = "share of a GPU's peak that learning reaches"
    parser.add_argument("--efficiency", type=float, default=0.3, metavar="F", help=efficiency_help)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    """Print the plan; return 1 if the run does not fit."""
    from mmrl.config import load_config

    if not 0.0 < arguments.efficiency <= 1.0:
        raise UserError(f"--efficiency {arguments.efficiency} must be above 0 and at most 1")
    loaded = load_config(arguments.config, arguments.overrides)
    stages = {stage.name: stage for stage in loaded.config.training_stages}
    if arguments.stage not in (None, *stages):
        raise UserError(f"--stage: no stage {arguments.stage!r} trains; the stages that train: {', '.join(stages)}")
    with pause_gc_for_imports():
        from mmrl.plan.memory import fits, peak_phase
        from mmrl.plan.report import as_json, find_remedy, stage_lines, table_lines, yaml_lines
        from mmrl.plan.shapes import read_shapes
        from mmrl.plan.stage_plan import Plan, find_gpu, make_plan
        from mmrl.plan.workload import estimate_workload

    gpu, model = find_gpu(arguments.gpu), read_shapes(loaded.config.model)
    base_dir, mean_response = loaded.files[0].parent, arguments.response_tokens
    names = [arguments.stage] if arguments.stage else [*stages]
    workloads = {name: estimate_workload(loaded.config, stages[name], base_dir, model, mean_response) for name in names}

    def plan_with(settings: Mapping[str, object]) -> Iterator[Plan]:
        overrides = [f"{path}={json.dumps(value)}" for path, value in settings.items()]
        config = load_config(arguments.config, [*arguments.overrides, *overrides]).config
        planned = {stage.name: stage for stage in config.training_stages}
        for name, workload in workloads.items():
            yield make_plan(config, planned[name], workload, gpu, arguments.gpus, arguments.efficiency)

    plans = list(plan_with({}))
    # The stage that needs most comes first from here on: if it does not fit, the others need not be measured.
    ordered = sorted(plans, key=peak_phase, reverse=True)
    workloads = {plan.stage.name: plan.workload for plan in ordered}
    plan, all_fit = ordered[0], all(map(fits, plans))
    remedy = None if all_fit else find_remedy(ordered, plan_with)
    if arguments.json:
        echo(json.dumps(as_json(plan, plans, remedy), indent=2))
        return int(not all_fit)
    if len(plans) > 1:
        echo("\n".join([*stage_lines(plans), f"\nStage {plan.stage.name}, which needs the most memory\n"]))
    recompute = [] if plan.config.model.gradient_checkpointing else ["vision", "language"]
    echo("\n".join(table_lines(plan, next(plan_with({"model.gradient_checkpointing": recompute})))))
    if not all_fit:
        echo(f"\nIt does not fit into {gpu.memory_gb:.0f} GB.")
        echo("\n".join(["These settings do:", *yaml_lines(remedy)] if remedy else ["No change that mmrl tries helps."]))
    return int(not all_fit)
