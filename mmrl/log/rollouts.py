"""Rollout files for people to read: one JSON line for each rollout, media by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.types import ContentPart, Group, ImageRef, MediaObservation, RewardFailure, Rollout, Score, VideoRef
from mmrl.utils.files import json_line, report_write_errors, write_atomically


def write_rollouts(
    folder: Path, stage: str, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Path:
    """Write a step's rollouts to `<stage>-<step>.jsonl` in `folder`, group by group; return the file.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"{stage}-{step:06d}.jsonl"
    with report_write_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
    lines = list(map(json_line, _rollout_records(folder.parent, groups, advantages)))
    write_atomically(path, "".join(lines))
    return path


def _rollout_records(
    run_dir: Path, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Iterator[dict[str, Any]]:
    """Yield the scored rollouts of each group and then its dropped ones."""
    for group, group_advantages in zip(groups, advantages, strict=True):
        for rollout, score, advantage in zip(group.rollouts, group.scores, group_advantages, strict=True):
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
    """Return the paths of the sample's media. Those inside the run directory are relative, so that it can be moved."""
    paths = []
    for ref in rollout.prompt.sample.media:
        path = Path(ref.path)
        paths.append(str(path.relative_to(run_dir) if path.is_relative_to(run_dir) else path))
    return paths


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    sample = rollout.prompt.sample
    segments = []
    for segment in rollout.segments:
        record: dict[str, Any] = {"author": segment.author, "n": len(segment.token_ids)}
        if segment.observation:
            record |= _observation_record(segment.observation)
        segments.append(record)
    return {
        "sample": sample.id,
        "task": sample.task,
        "rollout": rollout.index,
        "question": "".join(map(_part_text, sample.parts)),
        "response": rollout.text,
        "answer": rollout.answer.value,
        "target": sample.target.value,
        "frame": sample.target.coordinate_system,
        "finish": rollout.finish_reason,
        "segments": segments,
    }


def _part_text(part: ContentPart) -> str:
    match part:
        case ImageRef():
            return "<image>"
        case VideoRef():
            return "<video>"
    return part


def _observation_record(observation: MediaObservation) -> dict[str, Any]:
    """Return the file that a tool showed, and the part of it: an image's crop, or a video's time span in seconds."""
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
    """Return by reward term why a rollout was dropped; empty if it was dropped because a sibling failed."""
    return {name: f"{failure.error_kind}: {failure.reason}" for name, failure in failures.items()}
