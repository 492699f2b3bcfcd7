"""`mmrl.evaluate`: evaluate a model on a benchmark from Python, as `mmrl eval` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_type_hints

from mmrl.api.functions import name_function
from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.predictions import Prediction, parse_prediction
from mmrl.benchmarks.verdict import Verdict, read_rows, read_verdicts
from mmrl.config import check_is_list, check_overrides
from mmrl.evaluation.eval_dir import EvalDir
from mmrl.evaluation.eval_settings import EvalRequest, check_request, default_out_dir
from mmrl.log.console import Console
from mmrl.types import CoordinateSystem, UserError
from mmrl.utils.messages import did_you_mean


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A finished evaluation. Verdicts and predictions are read from its folder on each access."""

    out_dir: Path  # folder of all results
    report: Mapping[str, Any]  # contents of report.json: accuracy with intervals, by subset too

    @property
    def verdicts(self) -> list[Verdict]:
        """One verdict for each response, and for each question without one."""
        return read_verdicts(self.out_dir)

    @property
    def predictions(self) -> list[Prediction]:
        """The responses of the model, in the order of the questions."""
        return [parse_prediction(row) for _, row in read_rows(EvalDir(self.out_dir).predictions_file)]


class EvalOptions(TypedDict, total=False):
    """Less common options of `evaluate`; `mmrl eval run` has the same ones."""

    checkpoint: str  # checkpoint of a run, or "best"; the newest by default
    split: str  # split of a folder of questions
    media_root: str  # folder that paths of images and videos start from
    coordinate_system: CoordinateSystem  # coordinate system of boxes in a table that does not state it
    allow_missing: bool  # count malformed rows and questions without their image as incorrect
    rescore: bool  # grade the predictions again and replace the verdicts


def evaluate(
    model: str | Path,
    benchmark: str | Benchmark | Callable[[], Benchmark],
    data: str | Path | Sequence[str | Path] = (),
    *,
    out_dir: str | Path | None = None,
    overrides: Sequence[str] = (),
    **options: Unpack[EvalOptions],
) -> Evaluation:
    """Answer the questions of a benchmark, grade the responses, and write a report.

    The same call resumes an interrupted evaluation.

    Args:
        model: A folder of transformers, a run directory, or one of its checkpoints.
        benchmark: A name such as "mathvista"; "run:test" for the run's own test data, graded by its rewards; or a
            benchmark of your own.
        data: Files or folders of questions. Nothing is downloaded.
        out_dir: Folder for the results; `evals/MODEL-BENCHMARK` by default.
        overrides: Settings as `dotted.path=value`, such as "evaluation.temperature=1".
        options: See `EvalOptions`.

    Raises:
        UserError: the model, files or settings cannot be used. Predictions so far are kept.
    """
    check_overrides(overrides)
    files = [data] if isinstance(data, str | Path) else data
    check_is_list("data", files)
    for name, path in (("model", model), ("out_dir", out_dir or ""), *(("data", file) for file in files)):
        if not isinstance(path, str | Path):
            raise UserError(f"{name}: {path!r:.80} is not a path")
    if isinstance(options.get("media_root"), Path):
        options["media_root"] = str(options["media_root"])
    _check_options(options)
    benchmark_name = _name_benchmark(benchmark)
    request = EvalRequest(
        model=str(model),
        benchmark=benchmark_name,
        data_files=tuple(map(str, files)),
        out_dir=Path(out_dir) if out_dir else default_out_dir(str(model), benchmark_name),
        overrides=overrides,
        **options,
    )
    # Before torch is imported, which takes seconds.
    check_request(request)
    from mmrl.evaluation.evaluate import evaluate as run_evaluation

    return Evaluation(request.out_dir, run_evaluation(request, Console()).report)


def _check_options(options: Mapping[str, object]) -> None:
    """Raise a UserError for an option that `EvalOptions` does not have, or a value of another type."""
    types = get_type_hints(EvalOptions)
    for name, value in options.items():
        if name not in types:
            known = [*types, "data", "out_dir", "overrides"]
            hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
            raise UserError(f"{name!r} is not an option; {hint}")
        is_valid = value in list(CoordinateSystem) if name == "coordinate_system" else isinstance(value, types[name])
        if value is not None and not is_valid:
            raise UserError(f"{name}={value!r:.80}: must be {getattr(types[name], '__name__', types[name])}")


def _name_benchmark(benchmark: str | Benchmark | Callable[[], Benchmark]) -> str:
    if isinstance(benchmark, str):
        return benchmark
    if callable(benchmark):
        return name_function(benchmark)
    if not isinstance(benchmark, Benchmark):
        raise UserError(
            f"benchmark must be a name, an mmrl.Benchmark or a function that returns one, not {benchmark!r:.80}"
        )
    # Results record the benchmark's name, so the function that returns the benchmark needs no name.
    return name_function(lambda: benchmark, stands_for=Benchmark)
