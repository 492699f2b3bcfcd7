"""Rollouts for people to read: one JSON line each, media by path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.types import Failure, Group, ImageRef, Part, Rollout, Score, VideoRef, View
from mmrl.utils.files import json_line, refusing, write_atomically


def write_rollouts(
    folder: Path, stage: str, step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]
) -> Path:
    """Write a step's rollouts to `<stage>-<step>.jsonl`, group by group; returns the file.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / f"{stage}-{step:06d}.jsonl"
    with refusing(path):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json_line(record) for record in _records(folder.parent, groups, advantages)))
    return path


def _records(run: Path, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Iterator[dict[str, Any]]:
    for group, row in zip(groups, advantages, strict=True):
        for rollout, score, advantage in zip(group.rollouts, group.scores, row, strict=True):
            yield {**_record(rollout), **_judged(score, advantage), "media": _paths(run, rollout)}
        for rollout, failures in group.skipped:
            yield {**_record(rollout), "skipped": _why(failures), "media": _paths(run, rollout)}


def _paths(run: Path, rollout: Rollout) -> list[str]:
    """Where pictures and videos are; those of the run itself from its folder, so that a run may be moved."""
    paths = [Path(ref.path) for ref in rollout.prompt.sample.media]
    return [str(path.relative_to(run) if path.is_relative_to(run) else path) for path in paths]


def _said(part: Part) -> str:
    match part:
        case ImageRef():
            return "<image>"
        case VideoRef():
            return "<video>"
    return part


def _record(rollout: Rollout) -> dict[str, Any]:
    sample = rollout.prompt.sample
    return {
        "sample": sample.id,
        "task": sample.task,
        "rollout": rollout.index,
        "question": "".join(_said(part) for part in sample.parts),
        "response": rollout.text,
        "answer": rollout.answer.value,
        "target": sample.target.value,
        "frame": sample.target.frame,
        "finish": rollout.finish,
        "segments": [
            {"author": segment.author, "n": len(segment.ids), **(_shows(segment.view) if segment.view else {})}
            for segment in rollout.segments
        ],
    }


def _shows(view: View) -> dict[str, Any]:
    """Which part of which file a tool showed."""
    match view.ref:
        case ImageRef(path=path, at=at, crop=crop):
            return {"shows": path, "at": at, "crop": crop}
        case VideoRef(path=path, start=start, end=end):
            return {"shows": path, "start": start, "end": end}


def _judged(score: Score, advantage: float) -> dict[str, Any]:
    return {
        "terms": {name: {"value": term.value, "reason": term.reason} for name, term in score.terms.items()},
        "total": score.total,
        "advantage": advantage,
    }


def _why(failures: Mapping[str, Failure]) -> dict[str, str]:
    """Why a rollout was left out, by term; nothing where a sibling's failure took it along."""
    return {name: f"{failure.fault}: {failure.reason}" for name, failure in failures.items()}
