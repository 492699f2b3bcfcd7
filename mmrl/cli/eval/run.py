"""`mmrl eval run MODEL`: run a benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from mmrl.cli.common import Subparsers, add_command, pause_gc_for_imports

DETAILS = """\
examples:
  mmrl eval runs/mine --benchmark mathvista --data MathVista
  mmrl eval runs/mine/checkpoints/01-000500 --benchmark refcoco --data RefCOCO --split testA
  mmrl eval models/Qwen2.5-VL-3B --benchmark mmmu --data MMMU/Art --data MMMU/Biology model.max_pixels=1003520
  mmrl eval runs/mine --benchmark mathvista --data MathVista.tsv evaluation.temperature=1 responses_per_question=8
  mmrl eval runs/mine --benchmark run:test          # the run's own test data, by its own rewards

Benchmarks: canonical, coco, counting, docvqa, emma, geometry3k, mathverse, mathvision, mathvista, megabench, mmmu,
mmmu_pro, mvbench, ocrbench, refcoco, screenspot, seed_bench_r1, textvqa, video_mme; run:test, run:validation.
docs/evaluation.md lists the file formats of each.

MODEL is a folder of transformers, a run directory, or one of its checkpoints. A run brings its own image sizes,
response format and media limits; key=value sets others (docs/evaluation.md lists them). Nothing is downloaded.

DIR gets predictions.jsonl, verdicts.jsonl, report.json and report.md. The same command again resumes an interrupted
one.
"""


def add_parser(commands: Subparsers) -> None:
    """Declare the command."""
    parser = add_command(commands, "run", "run a benchmark; `run` may be left out", DETAILS)
    parser.add_argument("model", metavar="MODEL", help="a folder of transformers, a run, or a checkpoint of one")
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="set one value by dotted path")
    parser.add_argument(
        "--benchmark", required=True, metavar="NAME", help="such as mathvista, run:test, ./mine.py:make_benchmark"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="PATH",
        help="a file or folder of questions, may be given again; for run:test, the folder that paths start from",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for results (evals/MODEL-NAME)")
    parser.add_argument("--engine", choices=("hf", "vllm"), help="engine that generates responses")
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint of a run, or `best`; the newest by default")
    parser.add_argument("--split", metavar="NAME", help="split of a folder of questions")
    parser.add_argument("--media-root", metavar="DIR", help="folder that paths of images and videos start from")
    parser.add_argument(
        "--coordinates",
        choices=("px_original", "norm_1", "norm_1000"),
        help="coordinate system of boxes in a table that does not state it (VLMEvalKit's RefCOCO)",
    )
    parser.add_argument("--allow-missing", action="store_true", help="count questions without their image as incorrect")
    parser.add_argument("--rescore", action="store_true", help="score the predictions again, and print what changes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generate responses, score them, and print the report."""
    from mmrl.benchmarks.registry import get_benchmark
    from mmrl.benchmarks.report import report_markdown
    from mmrl.log.console import Console
    from mmrl.types import CoordinateSystem

    # A wrong name should be refused before torch is imported, which takes seconds.
    label = arguments.benchmark.replace(":", "-")
    if not arguments.benchmark.startswith("run:"):
        label = get_benchmark(arguments.benchmark).name
    with pause_gc_for_imports():
        from mmrl.distributed.torch_ranks import require_single_process
        from mmrl.evaluation.evaluate import EvalRequest, evaluate

    require_single_process("mmrl eval")
    name = f"{Path(arguments.model).resolve().name}-{label}"
    request = EvalRequest(
        model=arguments.model,
        benchmark=arguments.benchmark,
        data_files=tuple(arguments.data),
        out_dir=arguments.out or Path("evals") / name,
        overrides=arguments.overrides,
        engine=arguments.engine,
        checkpoint=arguments.checkpoint,
        split=arguments.split,
        media_root=arguments.media_root,
        coordinate_system=CoordinateSystem(arguments.coordinates) if arguments.coordinates else None,
        allow_missing=arguments.allow_missing,
        rescore=arguments.rescore,
    )
    result = evaluate(request, Console())
    print(report_markdown(result.report).partition("\n## ")[0].rstrip())
    for old, new in result.changed_verdicts:
        print(f"{new.id}: strict {old.strict} -> {new.strict}, official {old.official} -> {new.official} ({new.rule})")
    print(f"Written: {request.out_dir}/predictions.jsonl, verdicts.jsonl, report.json, report.md")
    return 0
