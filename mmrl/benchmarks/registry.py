"""The benchmarks that ship with mmrl, and loading of benchmarks that a user's function returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from mmrl.benchmarks.benchmark import Benchmark, OverallMetric
from mmrl.benchmarks.megabench.layout import MegaBenchLayout
from mmrl.benchmarks.megabench.scoring import find_megabench_problem, is_correct_megabench, macro_mean, score_megabench
from mmrl.benchmarks.official_metrics import formulas, grounding, mathvista, multiple_choice, reading
from mmrl.benchmarks.readers.layouts import RowLayout
from mmrl.types import UserError
from mmrl.utils.plugin_args import check_call, check_methods
from mmrl.utils.plugins import load_plugin

_BENCHMARKS: Final = (
    Benchmark(name="canonical"),
    Benchmark(
        name="coco",
        answer_types=("boxes",),
        overall_metric=OverallMetric("AP", grounding.average_precision),
        reads_coco_annotations=True,
    ),
    Benchmark(name="counting", official_score=reading.score_counting, answer_types=("count", "integer", "float")),
    Benchmark(name="docvqa", official_score=reading.score_docvqa),
    Benchmark(name="emma", official_score=formulas.score_emma),
    Benchmark(name="geometry3k", official_score=multiple_choice.score_geometry3k),
    Benchmark(name="mathverse", official_score=multiple_choice.score_mathverse, default_split="testmini"),
    Benchmark(name="mathvision", official_score=formulas.score_mathvision, default_split="testmini"),
    Benchmark(
        name="mathvista",
        official_score=mathvista.score_mathvista,
        parse_item=mathvista.parse_mathvista_item,
        default_split="testmini",
    ),
    Benchmark(
        name="megabench",
        official_score=score_megabench,
        is_correct=is_correct_megabench,
        find_problem=find_megabench_problem,
        overall_metric=OverallMetric("macro mean over tasks", macro_mean),
        layouts=(MegaBenchLayout(),),
    ),
    Benchmark(
        name="mmmu",
        official_score=multiple_choice.score_mmmu,
        draw_letters=multiple_choice.draw_mmmu_letters,
        default_split="validation",
    ),
    Benchmark(name="mmmu_pro", official_score=multiple_choice.score_mmmu_pro),
    Benchmark(name="mvbench", official_score=multiple_choice.score_mvbench, answer_types=("choice",)),
    Benchmark(name="ocrbench", official_score=reading.score_ocrbench),
    Benchmark(name="refcoco", official_score=grounding.score_refcoco, answer_types=("box",)),
    Benchmark(name="screenspot", official_score=grounding.score_screenspot, answer_types=("point",)),
    Benchmark(name="seed_bench_r1", official_score=multiple_choice.score_seed_bench_r1),
    Benchmark(name="textvqa", official_score=reading.score_textvqa),
    Benchmark(name="video_mme", official_score=multiple_choice.score_video_mme),
)
BENCHMARKS: Final[Mapping[str, Benchmark]] = MappingProxyType({benchmark.name: benchmark for benchmark in _BENCHMARKS})
"""Benchmarks whose rules are in this package, by name."""

# Positional arguments of the functions of a `Benchmark`.
_PARAMETERS: Final[Mapping[str, Sequence[str]]] = {
    "official_score": ("item", "response", "extraction"),
    "is_correct": ("item", "response", "extraction"),
    "draw_letters": ("graded",),
    "parse_item": ("row",),
    "find_problem": ("item",),
}


def get_benchmark(name: str, base_dir: Path | None = None) -> Benchmark:
    """Return the benchmark of a name, or the one that a function returns.

    `name` is in `BENCHMARKS`, or it is `package.module:function` or `./file.py:function`. A relative file starts from
    `base_dir`, by default the working directory.

    Raises:
        UserError: no benchmark or function has this name.
    """
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    if ":" in name:
        return load_benchmark(name, base_dir)
    raise UserError(
        f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}, and your own as ./file.py:function"
    )


def load_benchmark(fn: str, base_dir: Path | None = None, args: Mapping[str, Any] | None = None) -> Benchmark:
    """Call the function `fn` with the keyword arguments `args`, and return the benchmark that it makes.

    Raises:
        UserError: there is no such function, an argument does not fit its signature, or it returns no benchmark.
    """
    make_benchmark = load_plugin(fn, base_dir or Path.cwd(), args or {}, role="benchmark", parameters=())
    benchmark = make_benchmark()
    if not isinstance(benchmark, Benchmark):
        raise UserError(f"{fn!r} returned {type(benchmark).__name__}, not a mmrl.Benchmark")
    name = benchmark.name
    if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
        raise UserError(f"{fn!r} returned a benchmark named {name!r}; its name must be a valid file name")
    owner, metric = f"benchmark {fn!r} returned {benchmark.name!r}", benchmark.overall_metric
    for name, parameters in _PARAMETERS.items():
        function = getattr(benchmark, name)
        if function is not None:
            check_call(function, parameters, name=name, owner=owner)
    if metric is not None:
        check_call(metric.compute, ("graded",), name="overall_metric.compute", owner=owner)
    for layout in benchmark.layouts:
        check_methods(layout, RowLayout, ("parse_row",), owner=owner)
    return benchmark
