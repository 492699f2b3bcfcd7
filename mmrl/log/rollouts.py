"""Rollouts for people to read: one JSON line each, media by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.types import ContentPart, Group, ImageRef, MediaObservation, RewardFailure, Rollout, Score, VideoRef
from mmrl.utils.files import json_line, report_write_errors, write_atomically


def write_rollouts(
    folder: Path, stage: str, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Path:
    """Write a step's rollouts to `<stage>-<step>.jsonl`, group by group; returns the file.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"{stage}-{step:06d}.jsonl"
    with report_write_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json_line(record) for record in _rollout_records(folder.parent, groups, advantages)))
    return path


def _rollout_records(
    run_dir: Path, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    for group, row in zip(groups, advantages, strict=True):
        for rollout, score, advantage in zip(group.rollouts, group.scores, row, strict=True):
            yield {
                **_rollout_record(rollout),
                **_score_record(score, advantage),
                "media": _media_paths(run_dir, rollout),
            }
        for rollout, failures in group.dropped:
            yield {
                **_rollout_record(rollout),
                "skipped": _format_failures(failures),
                "media": _media_paths(run_dir, rollout),
            }


def _media_paths(run_dir: Path, rollout: Rollout) -> list[str]:
    """Where pictures and videos are; those of the run itself from its folder, so that a run may be moved."""
    paths = [Path(ref.path) for ref in rollout.prompt.sample.media]
    return [str(path.relative_to(run_dir) if path.is_relative_to(run_dir) else path) for path in paths]


def _part_text(part: ContentPart) -> str:
    match part:
        case ImageRef():
            return "<image>"
        case VideoRef():
            return "<video>"
    return part


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    sample = rollout.prompt.sample
    return {
        "sample": sample.id,
        "task": sample.task,
        "rollout": rollout.index,
        "question": "".join(_part_text(part) for part in sample.parts),
        "response": rollout.text,
        "answer": rollout.answer.value,
        "target": sample.target.value,
        "frame": sample.target.coordinate_system,
        "finish": rollout.finish_reason,
        "segments": [
            {
                "author": segment.author,
                "n": len(segment.token_ids),
                **(_observation_record(segment.observation) if segment.observation else {}),
            }
            for segment in rollout.segments
        ],
    }


def _observation_record(observation: MediaObservation) -> dict[str, Any]:
    """Which part of which file a tool showed."""
    match observation.ref:
        case ImageRef(path=path, timestamp=at, crop=crop):
            return {"shows": path, "at": at, "crop": crop}
        case VideoRef(path=path, start=start, end=end):
            return {"shows": path, "start": start, "end": end}


def _score_record(score: Score, advantage: float) -> dict[str, Any]:
    return {
        "terms": {name: {"value": term.value, "reason": term.reason} for name, term in score.terms.items()},
        "total": score.total,
        "advantage": advantage,
    }


def _format_failures(failures: Mapping[str, RewardFailure]) -> dict[str, str]:
    """Why a rollout was left out, by term; nothing where a sibling's failure took it along."""
    return {name: f"{failure.error_kind}: {failure.reason}" for name, failure in failures.items()}
