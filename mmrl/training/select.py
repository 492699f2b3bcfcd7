"""Choosing what to train on: by rollouts that were written down, or by how samples fared in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from mmrl.config.schema import Select
from mmrl.data.history import RANKINGS
from mmrl.data.stage_tables import read, write
from mmrl.types import UserError, Visit

Row = Mapping[str, Any]
_OF_ONE_ROLLOUT = ("rollout", "finish", "second_look", "tokens", "terms", "total", "skipped", "visits")


class Selected(NamedTuple):
    """How many samples were kept, of how many; rows written; and the median of what they were judged by."""

    kept: int
    of: int
    rows: int
    median: float


class _Judged(NamedTuple):
    """A sample, what it is judged by, and its right rollouts in the order they were drawn."""

    row: Row
    value: float
    right: Sequence[Row] = ()


def select(stage: Select, folder: Path) -> Selected:
    """Write what `stage` chooses of its source's table; both lie in `folder`.

    Raises:
        UserError: the table cannot be read, no rollout has a term of `right`, or nothing is left.
    """
    rows = read(folder / f"{stage.source}.jsonl")
    found = list(_by_rollouts(stage, rows) if stage.reads_rollouts else _by_history(stage, rows))
    if not found:
        what = f"rollout has a term of `right` ({', '.join(stage.right)})" if stage.right else "sample was drawn"
        raise UserError(f"stage {stage.name!r}: no {what} in {folder / stage.source}.jsonl")
    kept = _best(stage, found)
    written = [row for each in kept for row in (_responses(stage, each) if stage.keep == "responses" else [each.row])]
    values = [each.value for each in found]
    if not written:
        raise UserError(
            f"stage {stage.name!r} keeps none of {len(found)} samples: their {stage.by} is {min(values):g} to "
            f"{max(values):g}, {median(values):g} in the middle; widen `within`, or sample more"
        )
    write(folder / f"{stage.name}.jsonl", written)
    return Selected(kept=len(kept), of=len(found), rows=len(written), median=median(values))


def _by_rollouts(stage: Select, rows: Sequence[Row]) -> Iterator[_Judged]:
    """The samples of which a rollout could be judged."""
    for name, of_sample in groupby(rows, itemgetter("sample")):
        rollouts = [(row, verdict) for row in of_sample if (verdict := _is_right(stage, row)) is not None]
        if not rollouts:
            continue
        verdicts = [verdict for _, verdict in rollouts]
        found = {"pass_rate": fmean(verdicts), "attempts": [*verdicts, True].index(True) + 1}
        row = {**_sample_alone(rollouts[0][0]), **found, "id": name, "response": None}
        yield _Judged(row, found[stage.by], [rollout for rollout, verdict in rollouts if verdict])


def _by_history(stage: Select, rows: Sequence[Row]) -> Iterator[_Judged]:
    history = {row["sample"]: [Visit(*visit) for visit in row["visits"]] for row in rows}
    values = RANKINGS[stage.by](history)
    for row in rows:
        value = values[row["sample"]]
        yield _Judged({**_sample_alone(row), stage.by: value}, value)


def _is_right(stage: Select, row: Row) -> bool | None:
    """What the terms of `right` that apply say of a rollout; None where none does."""
    values = [row["terms"][name] for name in stage.right if name in row["terms"]]
    return all(value >= stage.right_from for value in values) if values else None


def _best(stage: Select, found: Sequence[_Judged]) -> list[_Judged]:
    """Those within bounds, and of these the `top` ones, in the order they came."""
    low, high = stage.within
    inside = [k for k, each in enumerate(found) if low <= each.value <= (inf if high is None else high)]
    ranked = sorted(inside, key=lambda k: -found[k].value)[: stage.top]
    return [found[k] for k in sorted(ranked)]


def _responses(stage: Select, judged: _Judged) -> list[Row]:
    """A row for each right response that is kept; where only some are, for the shortest."""
    shortest = judged.right if stage.most is None else sorted(judged.right, key=itemgetter("tokens"))[: stage.most]
    return [{**judged.row, "id": rollout["id"], "response": rollout["response"]} for rollout in shortest]


def _sample_alone(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in _OF_ONE_ROLLOUT}
