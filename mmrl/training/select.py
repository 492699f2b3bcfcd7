"""Choosing what to train on: by rollouts that were written down, or by how samples fared in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from mmrl.algo.reward_history import RANKINGS
from mmrl.config.schema import SelectStage
from mmrl.data.stage_tables import read_table, save_table
from mmrl.types import SampleStats, UserError

TableRow = Mapping[str, Any]
_ROLLOUT_COLUMNS = ("rollout", "finish", "second_look", "tokens", "terms", "total", "skipped", "visits")


class SelectionCounts(NamedTuple):
    """How many samples were kept, of how many; rows written; and the median of what they were judged by."""

    kept: int
    total: int
    rows: int
    median: float


class _SampleMetric(NamedTuple):
    """A sample, what it is judged by, and its right rollouts in the order they were drawn."""

    row: TableRow
    value: float
    correct_rollouts: Sequence[TableRow] = ()


def select_samples(stage: SelectStage, folder: Path) -> SelectionCounts:
    """Write what `stage` chooses of its source's table; both lie in `folder`.

    Raises:
        UserError: the table cannot be read, no rollout has a term of `right`, or nothing is left.
    """
    rows = read_table(folder / f"{stage.from_stage}.jsonl")
    found = list(_measure_from_rollouts(stage, rows) if stage.reads_rollouts else _measure_from_history(stage, rows))
    if not found:
        what = f"rollout has a term of `right` ({', '.join(stage.correct)})" if stage.correct else "sample was drawn"
        raise UserError(f"stage {stage.name!r}: no {what} in {folder / stage.from_stage}.jsonl")
    kept = _keep_best(stage, found)
    written = [
        row for each in kept for row in (_response_rows(stage, each) if stage.output == "responses" else [each.row])
    ]
    values = [each.value for each in found]
    if not written:
        raise UserError(
            f"stage {stage.name!r} keeps none of {len(found)} samples: their {stage.metric} is {min(values):g} to "
            f"{max(values):g}, {median(values):g} in the middle; widen `within`, or sample more"
        )
    save_table(folder / f"{stage.name}.jsonl", written)
    return SelectionCounts(kept=len(kept), total=len(found), rows=len(written), median=median(values))


def _measure_from_rollouts(stage: SelectStage, rows: Sequence[TableRow]) -> Iterator[_SampleMetric]:
    """The samples of which a rollout could be judged."""
    for name, of_sample in groupby(rows, itemgetter("sample")):
        rollouts = [(row, verdict) for row in of_sample if (verdict := _is_correct(stage, row)) is not None]
        if not rollouts:
            continue
        verdicts = [verdict for _, verdict in rollouts]
        found = {"pass_rate": fmean(verdicts), "first_correct": [*verdicts, True].index(True) + 1}
        row = {**_sample_columns(rollouts[0][0]), **found, "id": name, "response": None}
        yield _SampleMetric(row, found[stage.metric], [rollout for rollout, verdict in rollouts if verdict])


def _measure_from_history(stage: SelectStage, rows: Sequence[TableRow]) -> Iterator[_SampleMetric]:
    history = {row["sample"]: [SampleStats(*visit) for visit in row["visits"]] for row in rows}
    values = RANKINGS[stage.metric](history)
    for row in rows:
        value = values[row["sample"]]
        yield _SampleMetric({**_sample_columns(row), stage.metric: value}, value)


def _is_correct(stage: SelectStage, row: TableRow) -> bool | None:
    """What the terms of `right` that apply say of a rollout; None where none does."""
    values = [row["terms"][name] for name in stage.correct if name in row["terms"]]
    return all(value >= stage.threshold for value in values) if values else None


def _keep_best(stage: SelectStage, found: Sequence[_SampleMetric]) -> list[_SampleMetric]:
    """Those within bounds, and of these the `top` ones, in the order they came."""
    low, high = stage.range
    inside = [k for k, each in enumerate(found) if low <= each.value <= (inf if high is None else high)]
    ranked = sorted(inside, key=lambda k: -found[k].value)[: stage.top_k]
    return [found[k] for k in sorted(ranked)]


def _response_rows(stage: SelectStage, judged: _SampleMetric) -> list[TableRow]:
    """A row for each right response that is kept; where only some are, for the shortest."""
    shortest = (
        judged.correct_rollouts
        if stage.max_responses is None
        else sorted(judged.correct_rollouts, key=itemgetter("tokens"))[: stage.max_responses]
    )
    return [{**judged.row, "id": rollout["id"], "response": rollout["response"]} for rollout in shortest]


def _sample_columns(row: TableRow) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _ROLLOUT_COLUMNS}
