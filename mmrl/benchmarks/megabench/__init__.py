"""MEGA-Bench as a benchmark plug-in: its own layout, rules and overall metric, loaded like a user's `fn:`."""

from __future__ import annotations

from mmrl.benchmarks.benchmark import Benchmark, OverallMetric
from mmrl.benchmarks.megabench.layout import MegaBenchLayout
from mmrl.benchmarks.megabench.scoring import is_correct_megabench, macro_mean, score_megabench


def make_benchmark() -> Benchmark:
    """Return MEGA-Bench's core tasks, those whose metrics need neither a judge nor a program."""
    return Benchmark(
        name="megabench",
        official_score=score_megabench,
        is_correct=is_correct_megabench,
        overall_metric=OverallMetric("macro mean over tasks", macro_mean),
        layouts=(MegaBenchLayout(),),
    )
