"""Stages of kind `sample`: generate and score rollouts without learning, and write them to a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mmrl.config.schema import SampleStage
from mmrl.data.stage_tables import build_sample_row, read_table
from mmrl.distributed.ranks import MediaPlacement, Ranks, rank_slice
from mmrl.log.logger import NullLogger, RunLogger
from mmrl.ports import PromptBuilder, RewardScorer, RolloutPipeline
from mmrl.scoring.answer_and_score import answer_and_score
from mmrl.types import FinishReason, Group, Rollout, RunInterrupted, Sample, Score, TrainingState
from mmrl.utils.files import json_line, report_write_errors

if TYPE_CHECKING:
    from mmrl.training.build import RunContext

_UNSCORED_COLUMNS: Final[Mapping[str, Any]] = MappingProxyType({"terms": {}, "total": None})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSettings:
    """Samples, sizes and output of one sample stage."""

    samples: Sequence[Sample]
    """The samples to answer, in order."""
    prompts_per_step: int
    """Samples that are answered in one step, over all ranks."""
    group_size: int
    """Rollouts of each sample."""
    table_path: Path
    """JSON Lines file with one row for each rollout."""

    @property
    def num_steps(self) -> int:
        """Steps until every sample is answered."""
        return -(-len(self.samples) // self.prompts_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleComponents:
    """The parts of one sample stage. `mmrl.ports` says what each of them does."""

    prompt_builder: PromptBuilder
    rollout_pipeline: RolloutPipeline
    scorer: RewardScorer
    """Returns the groups of all ranks."""
    ranks: Ranks
    stop_requested: Callable[[], bool]
    """Returns True on every rank once the user has asked any of them to stop."""


def run_sample_stage(
    stage: SampleStage,
    context: RunContext,
    logger: RunLogger | NullLogger,
    state: TrainingState,
    stop_requested: Callable[[], bool],
) -> None:
    """Write the rollouts of the current policy for the stage's samples. Raises as `sample_rollouts`."""
    samples = context.stage_data.stage_samples(stage)
    if stage.steps is not None:
        samples = samples[: stage.steps * stage.prompts_per_step]
    settings = SampleSettings(
        samples=samples,
        prompts_per_step=stage.prompts_per_step,
        group_size=stage.group_size,
        table_path=context.run_dir.outputs / f"{stage.name}.jsonl",
    )
    sampler = context.samplers.make_sampler(context.config.run.seed, stage.name, version=state.version)
    context.samplers.sync_weights(state.version)
    pipeline = context.build_rollout_pipeline(stage, sampler)
    components = SampleComponents(
        prompt_builder=context.processor,
        rollout_pipeline=context.share_rollout_pipeline(pipeline, stage.prompts_per_step),
        scorer=context.share_scorer(MediaPlacement()),
        ranks=context.ranks,
        stop_requested=stop_requested,
    )
    first_step = context.ranks.on_rank0(partial(count_finished_steps, settings))
    with logger.log_stage(stage.name, settings.num_steps, first_step):
        for step in sample_rollouts(settings, components):
            logger.log_progress(step)
        logger.log_metrics(state, context.ranks.on_rank0(partial(compute_table_metrics, settings.table_path)))


def sample_rollouts(settings: SampleSettings, components: SampleComponents) -> Iterator[int]:
    """Write the rollouts of one step after another, from the end of the table on; yield the number of finished steps.

    The table is the only state of the stage. The rows of a step depend on the step alone, and an incomplete step at the
    end of the table is removed, so an interrupted stage continues exactly.

    Raises:
        RunInterrupted: the user asked to stop; the table is complete up to here.
        UserError: the table cannot be written.
    """
    first_step = components.ranks.on_rank0(partial(count_finished_steps, settings))
    for step in range(first_step, settings.num_steps):
        samples = settings.samples[step * settings.prompts_per_step : (step + 1) * settings.prompts_per_step]
        own_samples = samples[rank_slice(len(samples), components.ranks)]
        answers = answer_and_score(
            own_samples, components.prompt_builder, components.rollout_pipeline, components.scorer, step=step
        )
        components.ranks.on_rank0(partial(_append_rows, settings.table_path, answers.groups))
        yield step + 1
        if components.stop_requested():
            raise RunInterrupted


def count_finished_steps(settings: SampleSettings) -> int:
    """Return the number of complete steps in the table, and cut off what stands behind them."""
    if not settings.table_path.exists():
        return 0
    lines = settings.table_path.read_bytes().splitlines(keepends=True)
    complete = []
    for line in lines:
        if line.endswith(b"\n"):
            complete.append(line)
    # The last step may have fewer rows than the others.
    if len(complete) == len(settings.samples) * settings.group_size:
        return settings.num_steps
    rows_per_step = settings.prompts_per_step * settings.group_size
    num_steps = len(complete) // rows_per_step
    if lines:
        os.truncate(settings.table_path, sum(map(len, complete[: num_steps * rows_per_step])))
    return num_steps


def compute_table_metrics(path: Path) -> dict[str, float]:
    """Return the metrics of a whole table: mean rewards by term, and the numbers and fractions of its rollouts."""
    rows = read_table(path)
    scored = [row for row in rows if row["total"] is not None]
    rewards: dict[str, list[float]] = {"reward/mean": [row["total"] for row in scored]}
    for row in scored:
        for term, value in row["terms"].items():
            rewards.setdefault(f"reward/term/{term}", []).append(value)
    return {
        **{name: fmean(values) for name, values in rewards.items() if values},
        "reward/dropped": float(len(rows) - len(scored)),
        "rollout/count": float(len(rows)),
        "rethink/frac": fmean(row["rethink"] for row in rows),
        "rollout/truncated_frac": fmean(row["finish"] == FinishReason.LENGTH for row in rows),
    }


def _append_rows(path: Path, groups: Sequence[Group]) -> None:
    lines = []
    for group in groups:
        lines += list(map(json_line, _group_rows(group, path.parent)))
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with report_write_errors(path), file:
        file.write("".join(lines).encode("utf-8", errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def _group_rows(group: Group, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each rollout of a group, scored or not, in the order of generation."""
    sample_columns = build_sample_row(group.prompt.sample, folder)
    rows = []
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        rows.append({**sample_columns, **_rollout_columns(rollout), **_score_columns(score)})
    for dropped in group.dropped:
        rows.append({**sample_columns, **_rollout_columns(dropped.rollout), **_UNSCORED_COLUMNS})
    rows.sort(key=lambda row: row["rollout"])
    return rows


def _rollout_columns(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": f"{rollout.prompt.sample.id}#{rollout.index}",
        "rollout": rollout.index,
        "response": rollout.text,
        "finish": rollout.finish_reason,
        "rethink": rollout.parent_index is not None,
        "tokens": rollout.num_tokens,
    }


def _score_columns(score: Score) -> dict[str, Any]:
    return {"terms": {name: term.value for name, term in score.terms.items()}, "total": score.total}
