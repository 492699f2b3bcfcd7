"""Stages of kind `select`: choose training samples from the table of an earlier stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, groupby, starmap
from math import inf
from operator import attrgetter, itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrl.algo.correctness import terms_reach
from mmrl.algo.reward_history import measure_samples
from mmrl.config.schema import SelectStage
from mmrl.data.stage_tables import read_table, save_table
from mmrl.log.logger import MetricsLogger
from mmrl.types import SampleStats, TrainingState, UserError

if TYPE_CHECKING:
    from mmrl.training.build import RunComponents

TableRow = Mapping[str, Any]
_ROLLOUT_COLUMNS = ("rollout", "finish", "rethink", "tokens", "terms", "total", "skipped", "visits")


class SelectionCounts(NamedTuple):
    """Sizes of a selection; each field is the metric `select/<field>`."""

    kept: int  # samples that were selected
    total: int  # samples that had a value of the stage's metric
    rows: int  # rows written: one for each sample, or one for each correct response
    median: float  # median of the stage's metric over all `total` samples


class _SampleMetric(NamedTuple):
    """A sample with its value of the stage's metric."""

    row: TableRow  # the row to write for the sample
    value: float  # its value of the metric
    correct_rollouts: Sequence[TableRow] = ()  # rows of the rollouts that were correct, in the order of generation


def run_select_stage(stage: SelectStage, run: RunComponents, logger: MetricsLogger, state: TrainingState) -> None:
    """Write the table of selected samples that later stages train on. Raises as `select_samples`."""
    counts = run.ranks.on_rank0(partial(select_samples, stage, run.run_dir.outputs))
    run.console.info(
        f"Stage {stage.name} kept {counts.kept} of {counts.total} samples of {stage.results_of}, in {counts.rows} "
        f"rows; their median {stage.metric} is {counts.median:g}."
    )
    with logger.log_stage(stage.name, 1):
        logger.log_metrics(state, {f"select/{name}": float(value) for name, value in counts._asdict().items()})


def select_samples(stage: SelectStage, folder: Path) -> SelectionCounts:
    """Read the table of `stage.results_of` in `folder` and write the selected rows beside it.

    Raises:
        UserError: the table cannot be read, no rollout has one of the terms in `correct`, or nothing is selected.
    """
    rows = read_table(folder / f"{stage.results_of}.jsonl")
    measure = _measure_from_rollouts if stage.reads_rollouts else _measure_from_history
    samples = list(measure(stage, rows))
    if not samples:
        reason = "no sample has recorded rewards"
        if stage.correct:
            reason = f"no rollout has a term of `correct` ({', '.join(stage.correct)})"
        raise UserError(f"stage {stage.name!r}: {reason} in {folder / stage.results_of}.jsonl")
    kept = _keep_best(stage, samples)
    selected_rows: list[TableRow] = []
    for sample in kept:
        selected_rows += _rows_to_write(stage, sample)
    values = list(map(attrgetter("value"), samples))
    if not selected_rows:
        raise UserError(
            f"stage {stage.name!r} keeps none of {len(samples)} samples: their {stage.metric} ranges from "
            f"{min(values):g} to {max(values):g} with median {median(values):g}; widen `range`, or sample more"
        )
    save_table(folder / f"{stage.name}.jsonl", selected_rows)
    return SelectionCounts(kept=len(kept), total=len(samples), rows=len(selected_rows), median=median(values))


def _rows_to_write(stage: SelectStage, sample: _SampleMetric) -> Iterator[TableRow]:
    """Yield the row of a selected sample; with `output: responses`, one for each of its correct responses instead."""
    if stage.output != "responses":
        yield sample.row
        return
    rollouts = sample.correct_rollouts
    if stage.max_responses is not None:
        rollouts = sorted(rollouts, key=itemgetter("tokens"))[: stage.max_responses]
    for rollout in rollouts:
        yield {**sample.row, "id": rollout["id"], "response": rollout["response"]}


def _measure_from_rollouts(stage: SelectStage, rows: Sequence[TableRow]) -> Iterator[_SampleMetric]:
    """Yield each sample's pass rate, or number of its first correct rollout; skip samples without any verdict."""
    for sample_id, sample_rows in groupby(rows, itemgetter("sample")):
        judged = []
        verdicts = []
        for row in sample_rows:
            verdict = terms_reach(row["terms"], stage.correct, stage.threshold)
            if verdict is not None:
                judged.append(row)
                verdicts.append(verdict)
        if not judged:
            continue
        metrics = {"pass_rate": fmean(verdicts), "first_correct": [*verdicts, True].index(True) + 1}
        row = {**_sample_columns(judged[0]), **metrics, "id": sample_id, "response": None}
        yield _SampleMetric(row, metrics[stage.metric], list(compress(judged, verdicts)))


def _measure_from_history(stage: SelectStage, rows: Sequence[TableRow]) -> Iterator[_SampleMetric]:
    """Yield each sample's value of the metric, computed from its rewards during an RL stage."""
    history = {row["sample"]: list(starmap(SampleStats, row["visits"])) for row in rows}
    values = measure_samples(history, stage.metric)
    for row in rows:
        value = values[row["sample"]]
        yield _SampleMetric({**_sample_columns(row), stage.metric: value}, value)


def _keep_best(stage: SelectStage, samples: Sequence[_SampleMetric]) -> list[_SampleMetric]:
    """Return the `top_k` highest of the samples whose value lies within `range`, in the order of the table."""
    low, high = stage.range
    upper = inf if high is None else high
    in_range = [index for index, sample in enumerate(samples) if low <= sample.value <= upper]
    ranked = sorted(in_range, key=lambda index: -samples[index].value)
    return [samples[index] for index in sorted(ranked[: stage.top_k])]


def _sample_columns(row: TableRow) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _ROLLOUT_COLUMNS}
