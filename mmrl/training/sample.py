"""Asking, answering and judging, written down: rollouts with their reward terms as a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

from mmrl.data.stage_tables import read, row_of
from mmrl.distributed.ranks import Ranks, share
from mmrl.ports import Asker, Judge, Program
from mmrl.types import Finish, Group, Interrupted, Rollout, Sample, Score
from mmrl.utils.files import json_line, refusing

_UNJUDGED: Final[Mapping[str, Any]] = MappingProxyType({"terms": {}, "total": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked, `prompts` samples a step and `group_size` times each; the table to write."""

    samples: Sequence[Sample]
    prompts: int
    group_size: int
    path: Path

    @property
    def steps(self) -> int:
        """Steps until every sample was asked."""
        return -(-len(self.samples) // self.prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The machinery, each behind its port: program and judge are shared by the ranks, of which the first writes.
    `stop_wanted` is asked after every step.
    """

    asker: Asker
    program: Program
    judge: Judge
    ranks: Ranks
    stop_wanted: Callable[[], bool]


def sample(plan: Plan, parts: Parts) -> Iterator[int]:
    """Write the rollouts of one step after another, from wherever the table ends; yields the steps done.

    The table is all there is to go on from: what a step writes depends on the step alone, and half of one is dropped.

    Raises:
        Interrupted: the user wanted to stop; everything is saved.
        UserError: the table cannot be written.
    """
    for step in range(parts.ranks.once(lambda: steps_done(plan)), plan.steps):
        asked = plan.samples[step * plan.prompts : (step + 1) * plan.prompts]
        mine = [parts.asker.ask(each) for each in asked[share(len(asked), parts.ranks)]]
        groups = parts.judge.judge(parts.program.answer(mine, step=step).groups, step=step)
        parts.ranks.once(partial(_append, plan.path, groups))
        yield step + 1
        if parts.stop_wanted():
            raise Interrupted


def steps_done(plan: Plan) -> int:
    """How many steps the table holds; what comes behind them is cut off."""
    lines = plan.path.read_bytes().splitlines(keepends=True) if plan.path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) == len(plan.samples) * plan.group_size:
        return plan.steps
    steps, rows = len(whole) // (plan.prompts * plan.group_size), plan.prompts * plan.group_size
    if lines:
        os.truncate(plan.path, sum(map(len, whole[: steps * rows])))
    return steps


def describe(path: Path) -> dict[str, float]:
    """Metrics of a whole table: mean reward, by term; rollouts, and those that were cut, went on from a draft, or could
    not be judged.
    """
    rows = read(path)
    judged = [row for row in rows if row["total"] is not None]
    named: dict[str, list[float]] = {"reward/total": [row["total"] for row in judged]}
    for row in judged:
        for name, value in row["terms"].items():
            named.setdefault(f"reward/term/{name}", []).append(value)
    return {
        **{name: fmean(values) for name, values in named.items() if values},
        "reward/skipped": float(len(rows) - len(judged)),
        "rollout/count": float(len(rows)),
        "rollout/second_look_frac": fmean(row["second_look"] for row in rows),
        "rollout/truncated_frac": fmean(row["finish"] == Finish.LENGTH for row in rows),
    }


def _append(path: Path, groups: Sequence[Group]) -> None:
    lines = [json_line(row) for group in groups for row in _rows(group, path.parent)]
    with refusing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with refusing(path), file:
        file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def _rows(group: Group, folder: Path) -> list[dict[str, Any]]:
    """Every rollout of a prompt, judged or not, as it was drawn."""
    judged = [(rollout, _said(score)) for rollout, score in zip(group.rollouts, group.scores, strict=True)]
    skipped = [(skip.rollout, _UNJUDGED) for skip in group.skipped]
    columns = row_of(group.prompt.sample, folder)
    return [
        {**columns, **_drawn(rollout), **said}
        for rollout, said in sorted((*judged, *skipped), key=lambda pair: pair[0].index)
    ]


def _drawn(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": f"{rollout.prompt.sample.id}#{rollout.index}",
        "rollout": rollout.index,
        "response": rollout.text,
        "finish": rollout.finish,
        "second_look": rollout.parent is not None,
        "tokens": rollout.num_tokens,
    }


def _said(score: Score) -> dict[str, Any]:
    return {"terms": {name: term.value for name, term in score.terms.items()}, "total": score.total}
