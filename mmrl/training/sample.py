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

from mmrl.data.stage_tables import build_sample_row, read_table
from mmrl.distributed.ranks import Ranks, rank_slice
from mmrl.ports import PromptBuilder, RewardScorer, RolloutPipeline
from mmrl.types import FinishReason, Group, Rollout, RunInterrupted, Sample, Score
from mmrl.utils.files import json_line, report_write_errors

_UNSCORED: Final[Mapping[str, Any]] = MappingProxyType({"terms": {}, "total": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """What is asked, `prompts` samples a step and `group_size` times each; the table to write."""

    samples: Sequence[Sample]
    prompts_per_step: int
    group_size: int
    table_path: Path

    @property
    def num_steps(self) -> int:
        """Steps until every sample was asked."""
        return -(-len(self.samples) // self.prompts_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleComponents:
    """The machinery, each behind its port: program and judge are shared by the ranks, of which the first writes.
    `stop_wanted` is asked after every step.
    """

    prompt_builder: PromptBuilder
    rollout_pipeline: RolloutPipeline
    scorer: RewardScorer
    ranks: Ranks
    stop_requested: Callable[[], bool]


def sample_rollouts(settings: SampleSettings, components: SampleComponents) -> Iterator[int]:
    """Write the rollouts of one step after another, from wherever the table ends; yields the steps done.

    The table is all there is to go on from: what a step writes depends on the step alone, and half of one is dropped.

    Raises:
        Interrupted: the user wanted to stop; everything is saved.
        UserError: the table cannot be written.
    """
    for step in range(components.ranks.on_rank0(lambda: count_finished_steps(settings)), settings.num_steps):
        asked = settings.samples[step * settings.prompts_per_step : (step + 1) * settings.prompts_per_step]
        mine = [components.prompt_builder.build(each) for each in asked[rank_slice(len(asked), components.ranks)]]
        groups = components.scorer.score_groups(components.rollout_pipeline.run(mine, step=step).groups, step=step)
        components.ranks.on_rank0(partial(_append_rows, settings.table_path, groups))
        yield step + 1
        if components.stop_requested():
            raise RunInterrupted


def count_finished_steps(settings: SampleSettings) -> int:
    """How many steps the table holds; what comes behind them is cut off."""
    lines = settings.table_path.read_bytes().splitlines(keepends=True) if settings.table_path.exists() else []
    whole = [line for line in lines if line.endswith(b"\n")]
    if len(whole) == len(settings.samples) * settings.group_size:
        return settings.num_steps
    steps, rows = (
        len(whole) // (settings.prompts_per_step * settings.group_size),
        settings.prompts_per_step * settings.group_size,
    )
    if lines:
        os.truncate(settings.table_path, sum(map(len, whole[: steps * rows])))
    return steps


def compute_table_metrics(path: Path) -> dict[str, float]:
    """Metrics of a whole table: mean reward, by term; rollouts, and those that were cut, went on from a draft, or could
    not be judged.
    """
    rows = read_table(path)
    judged = [row for row in rows if row["total"] is not None]
    named: dict[str, list[float]] = {"reward/mean": [row["total"] for row in judged]}
    for row in judged:
        for name, value in row["terms"].items():
            named.setdefault(f"reward/term/{name}", []).append(value)
    return {
        **{name: fmean(values) for name, values in named.items() if values},
        "reward/dropped": float(len(rows) - len(judged)),
        "rollout/count": float(len(rows)),
        "rethink/frac": fmean(row["second_look"] for row in rows),
        "rollout/truncated_frac": fmean(row["finish"] == FinishReason.LENGTH for row in rows),
    }


def _append_rows(path: Path, groups: Sequence[Group]) -> None:
    lines = [json_line(row) for group in groups for row in _rollout_rows(group, path.parent)]
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with report_write_errors(path), file:
        file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def _rollout_rows(group: Group, folder: Path) -> list[dict[str, Any]]:
    """Every rollout of a prompt, judged or not, as it was drawn."""
    judged = [(rollout, _score_columns(score)) for rollout, score in zip(group.rollouts, group.scores, strict=True)]
    skipped = [(skip.rollout, _UNSCORED) for skip in group.dropped]
    columns = build_sample_row(group.prompt.sample, folder)
    return [
        {**columns, **_rollout_columns(rollout), **said}
        for rollout, said in sorted((*judged, *skipped), key=lambda pair: pair[0].index)
    ]


def _rollout_columns(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": f"{rollout.prompt.sample.id}#{rollout.index}",
        "rollout": rollout.index,
        "response": rollout.text,
        "finish": rollout.finish_reason,
        "second_look": rollout.parent_index is not None,
        "tokens": rollout.num_tokens,
    }


def _score_columns(score: Score) -> dict[str, Any]:
    return {"terms": {name: term.value for name, term in score.terms.items()}, "total": score.total}
