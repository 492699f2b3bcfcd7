"""Stages of kind `sample`: generate and score rollouts without learning, and write them to a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from mmrl.config.schema import SampleStage
from mmrl.data.load import check_stage_has_samples
from mmrl.data.stage_tables import build_sample_row, read_table
from mmrl.distributed.exchanges import gather_items
from mmrl.distributed.ranks import own_slice
from mmrl.log.logger import MetricsLogger
from mmrl.types import FinishReason, Group, RolloutBatch, RunInterrupted, Score, TrainingState, UserError
from mmrl.utils.files import check_not_deleted, json_line, read_complete_batches, report_write_errors

if TYPE_CHECKING:
    from mmrl.training.build import RunComponents


def run_sample_stage(
    stage: SampleStage,
    run: RunComponents,
    logger: MetricsLogger,
    state: TrainingState,
    agree_to_stop: Callable[[], bool],
) -> None:
    """Write the rollouts of the current policy for the stage's samples to a table, with one row for each.

    The table is the only state of the stage. The rows of a step depend on the step alone, and an incomplete step at the
    end of the table is removed, so an interrupted stage continues exactly.

    Raises:
        RunInterrupted: the user asked to stop; the table is complete up to here.
        UserError: there are no samples, the table cannot be written, or a user's rollout step added rollouts or left
            some out.
    """
    ranks, size = run.ranks, stage.prompts_per_step
    table_path = run.run_dir.outputs / f"{stage.name}.jsonl"
    samples = run.stage_data.stage_samples(stage)
    # Checked here again: how many samples an earlier stage selected is known only now.
    check_stage_has_samples(stage, len(samples))
    if stage.steps is not None:
        samples = samples[: stage.steps * size]
    sampler = run.engine.make_sampler(run.config.run.seed, stage.name, version=state.version)
    run.engine.sync_weights(state.version)
    pipeline = run.build_rollout_pipeline(stage, sampler)
    num_steps = -(-len(samples) // size)  # the last step may have fewer samples
    first_step = ranks.on_rank0(partial(count_finished_steps, table_path, stage, len(samples)))
    with logger.log_stage(stage.name, num_steps, first_step):
        for step in range(first_step, num_steps):
            step_samples = samples[step * size : (step + 1) * size]
            own_samples = step_samples[own_slice(len(step_samples), ranks)]
            with run.engine.gather_for_sampling(), run.console.activity.during("rollout"):
                batch = pipeline.run(list(map(run.processor.build, own_samples)), step=step)
            check_group_sizes(stage, batch)
            groups = gather_items(run.scorer.score_groups(batch.groups, step=step), ranks)
            ranks.on_rank0(partial(_append_rows, table_path, groups))
            logger.log_progress(step + 1)
            if agree_to_stop():
                raise RunInterrupted
        logger.log_metrics(state, ranks.on_rank0(partial(compute_table_metrics, table_path)))


def count_finished_steps(table_path: Path, stage: SampleStage, num_samples: int) -> int:
    """Return the number of complete steps in the table, and cut off the rows after them."""
    size = stage.prompts_per_step
    rows = [min(size, num_samples - start) * stage.group_size for start in range(0, num_samples, size)]
    return len(read_complete_batches(table_path, rows))


def compute_table_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of a table: mean rewards by term, and the numbers and fractions of its rollouts."""
    rows = read_table(path)
    totals: list[float] = []
    rewards: dict[str, list[float]] = {"reward/mean": totals}
    for row in rows:
        if row["total"] is None:
            continue
        totals.append(row["total"])
        for term, value in row["terms"].items():
            rewards.setdefault(f"reward/term/{term}", []).append(value)
    return {
        **{name: fmean(values) for name, values in rewards.items() if values},
        "reward/dropped": float(len(rows) - len(totals)),
        "rollout/count": float(len(rows)),
        "rethink/frac": fmean(map(itemgetter("rethink"), rows)),
        "rollout/truncated_frac": fmean(row["finish"] == FinishReason.LENGTH for row in rows),
    }


def check_group_sizes(stage: SampleStage, batch: RolloutBatch) -> None:
    """Raise UserError if a user's rollout step added rollouts or left some out: rows tell which steps are finished."""
    for group in batch.groups:
        if len(group) != stage.group_size:
            raise UserError(
                f"stage {stage.name!r}, sample {group[0].prompt.sample.id}: rollout_steps made {len(group)} rollouts; "
                f"a sample stage writes group_size={stage.group_size} of them, so no step may add or leave out any"
            )


def _append_rows(path: Path, groups: Sequence[Group]) -> None:
    lines: list[str] = []
    for group in groups:
        lines += map(json_line, _group_rows(group, path.parent))
    check_not_deleted(path.parent.parent)
    with report_write_errors(path):
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
            file.flush()
            # On the disk before the next step begins: a resumed stage trusts the table.
            os.fsync(file.fileno())


def _group_rows(group: Group, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each rollout of a group, scored or not, in the order of generation."""
    sample_columns = build_sample_row(group.prompt.sample, folder)
    # A rollout that could not be scored has a row too, because it counts as generated.
    scores: list[Score | None] = [*group.scores, *[None] * len(group.dropped)]
    rows = []
    for rollout, score in zip(group.all_rollouts, scores, strict=True):
        terms = {} if score is None else score.values_by_term
        rows.append(
            {
                **sample_columns,
                "id": f"{rollout.prompt.sample.id}#{rollout.index}",
                "rollout": rollout.index,
                "response": rollout.text,
                "finish": rollout.finish_reason,
                "rethink": rollout.parent_index is not None,
                "tokens": rollout.num_tokens,
                "terms": terms,
                "total": None if score is None else score.total,
            }
        )
    rows.sort(key=itemgetter("rollout"))
    return rows
