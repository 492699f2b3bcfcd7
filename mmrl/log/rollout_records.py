"""Records of rollouts: JSON lines for people and `mmrl view`, and the numbers of their tokens in a file beside them.

docs/records.md lists the keys. Media and marks are also read back here. The bytes of both files follow from the config
and its seed, so a run that was killed and resumed ends with the same files.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import numpy as np
from pydantic import TypeAdapter

from mmrl.answer.values import AnswerValue, list_coordinates
from mmrl.types import (
    Action,
    AnswerType,
    Author,
    CoordinateSystem,
    Experience,
    Group,
    GroupSelection,
    ImageRef,
    MediaRef,
    Prompt,
    ResizeMap,
    Rollout,
    Score,
    SelectedExperiences,
    TokenValues,
    VideoRef,
)
from mmrl.utils.files import check_not_deleted, json_line, report_write_errors, write_atomically

RECORDS_VERSION: Final = 2
"""Version of the records in a run directory, as in its manifest.json."""
AUTHORS: Final = (
    Author.POLICY,
    Author.DEMONSTRATION,
    Author.FORCED,
    Author.ENVIRONMENT,
    Author.DEMONSTRATION_PREFIX,
)
"""The authors in the order of their numbers in a file of tokens."""
BAD_VALUE: Final = (TypeError, ValueError, IndexError, KeyError, AttributeError, OverflowError, ZeroDivisionError)
"""Exceptions that arithmetic on the values of a damaged or hostile record may raise."""
_IMAGE, _VIDEO, _RESIZE_MAP = TypeAdapter(ImageRef), TypeAdapter(VideoRef), TypeAdapter(ResizeMap)

# The columns of a file of tokens; the last five are the fields of `TokenValues`.
TOKEN_COLUMNS: Final = {
    "token_id": np.int32,
    "end": np.int32,
    "author": np.uint8,
    "recorded_logprob": np.float32,
    **dict.fromkeys(("logprob", "ratio", "entropy", "advantage"), np.float32),
    "clipped": np.int8,
}
_NOT_COMPUTED: Final = (nan, nan, nan, nan, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """A rollout to be recorded, with its score and selection."""

    group: int  # number of its group in the file
    rollout: Rollout
    outcome: Mapping[str, Any]  # keys of the line that say how it was scored and selected
    experience: int | None = None  # its index among the step's experiences; None if it is not trained on


class TextSource(Protocol):
    """The processor that built the prompts; it also turns tokens into text."""

    def render_prompt(self, prompt: Prompt) -> str:
        """Return the prompt as text, its placeholders folded."""

    def find_token_ends(self, rollout: Rollout) -> Sequence[int] | None:
        """Return where the text of each token ends in the response; None if the tokens do not spell it."""


def list_step_records(
    selected: SelectedExperiences, *, max_groups: int, version: int, has_gradient: Callable[[Experience], bool]
) -> list[RolloutRecord]:
    """Return the records of a step's first `max_groups` groups, then of replayed rollouts, of as many prompts.

    `version` is the policy version that the step trained from; `has_gradient` is the learner's.
    """
    index_by_id: dict[int, int] = {}
    gradient_ids: set[int] = set()
    for position, experience in enumerate(selected.experiences):
        index_by_id.setdefault(id(experience.rollout), position)
        if has_gradient(experience):
            gradient_ids.add(id(experience.rollout))
    records: list[RolloutRecord] = []
    selections = selected.selections or (GroupSelection("trained"),) * len(selected.groups)
    rows = zip(selected.groups, selected.experiences_by_group, selections, strict=True)
    for number, (group, experiences, selection) in enumerate(islice(rows, max_groups)):
        outcomes: list[dict[str, Any]] = []
        for score, experience in zip(group.scores, experiences, strict=True):
            outcomes.append(_score_fields(score) | _advantage_fields(experience))
        for _, failures in group.dropped:
            # There are no failures if the rollout was dropped because a sibling failed.
            reasons = {name: f"{failure.kind}: {failure.reason}" for name, failure in failures.items()}
            outcomes.append({"dropped": reasons})
        probes = _probe_means(group)
        for rollout, outcome in zip(group.all_rollouts, outcomes, strict=True):
            # A demonstration, of supervised training, has no policy version.
            authors = {segment.author for segment in rollout.segments}
            staleness = version - rollout.oldest_version if Author.POLICY in authors else 0
            fate = {**selection._asdict(), "staleness": staleness}
            outcome |= {"selection": fate, "in_forward": id(rollout) in gradient_ids, "probes": probes}
            index = index_by_id.get(id(rollout))
            records.append(RolloutRecord(group=number, rollout=rollout, outcome=outcome, experience=index))
    first_group = min(max_groups, len(selected.groups))
    records += _replayed_records(
        selected.replayed, index_by_id, gradient_ids, first_group=first_group, max_groups=max_groups
    )
    return records


def list_scored_records(groups: Iterable[Group]) -> list[RolloutRecord]:
    """Return the records of held-out samples, each a group."""
    records = []
    for number, group in enumerate(groups):
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            records.append(RolloutRecord(group=number, rollout=rollout, outcome=_score_fields(score)))
    return records


def _advantage_fields(experience: Experience) -> dict[str, Any]:
    fields = {"advantage": experience.advantage, "turn_advantages": experience.turn_advantages}
    return {name: value for name, value in fields.items() if value is not None}


def _score_fields(score: Score) -> dict[str, Any]:
    terms: dict[str, Any] = {}
    for name, reward in score.terms.items():
        failure = score.failures.get(name)
        fields = {"value": reward.value, "reason": reward.reason, "failure": failure and failure.kind}
        if name in score.decided_by:
            fields["decided_by"] = score.decided_by[name]
        if name in score.contributions:
            transformed, weight, is_counted, share = score.contributions[name]
            fields |= {"transformed": transformed, "weight": weight, "counts": is_counted, "contribution": share}
        terms[name] = fields
    fields = {"terms": terms, "total": score.total}
    return {**fields, "turn_rewards": score.by_turn} if score.by_turn else fields


def write_records(
    path: Path,
    records: Sequence[RolloutRecord],
    step_keys: Mapping[str, Any],
    texts: TextSource,
    token_values: Mapping[int, TokenValues] | None = None,
) -> None:
    """Write one JSON line for each record to `path`, with `step_keys` first, and a file of their tokens.

    `token_values` has what the learner computed, by index of the experience; None leaves out the file of tokens.

    Raises:
        UserError: a file cannot be written.
    """
    run_dir = path.parent.parent
    check_not_deleted(run_dir)
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    prompts: dict[str, str] = {}
    lines, token_ends = [], []
    for record in records:
        rollout, prompt = record.rollout, record.rollout.prompt
        if prompt.digest not in prompts:
            prompts[prompt.digest] = texts.render_prompt(prompt)
        ends = texts.find_token_ends(rollout)
        shared = {**step_keys, "group": record.group, "prompt": prompts[prompt.digest]}
        lines.append(json_line({**shared, **_rollout_fields(rollout, run_dir, ends), **record.outcome}))
        token_ends.append([-1] * rollout.num_tokens if ends is None else ends)
    write_atomically(path, "".join(lines))
    if token_values is not None:
        write_atomically(path.with_suffix(".npz"), _pack_tokens(records, token_ends, token_values))


def _pack_tokens(
    records: Sequence[RolloutRecord], token_ends: Iterable[Sequence[int]], values: Mapping[int, TokenValues]
) -> bytes:
    """Return the tokens of the records as a file of `numpy.load`: docs/records.md lists the arrays."""
    rows: list[tuple[float, ...]] = []
    for record, ends in zip(records, token_ends, strict=True):
        learned = None if record.experience is None else values.get(record.experience)
        # The learner's values of the tokens that the policy sampled; it may not have computed this rollout.
        computed = iter(()) if learned is None else zip(*learned, strict=True)
        remaining_ends = iter(ends)
        for segment in record.rollout.segments:
            author = AUTHORS.index(segment.author)
            is_policy = segment.author is Author.POLICY
            for token_id, logprob in zip(segment.token_ids, segment.logprobs, strict=True):
                sampled = (logprob, *next(computed, _NOT_COMPUTED)) if is_policy else (nan, *_NOT_COMPUTED)
                rows.append((token_id, next(remaining_ends), author, *sampled))
    table = np.array(rows, np.float64).reshape(-1, len(TOKEN_COLUMNS))
    arrays = {"offset": np.array([0, *accumulate(record.rollout.num_tokens for record in records)])}
    for column, (name, dtype) in zip(table.T, TOKEN_COLUMNS.items(), strict=True):
        arrays[name] = column.astype(dtype)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    return content.getvalue()


def _probe_means(group: Group) -> dict[str, dict[str, float]]:
    """Return the mean of each term, and of the total, over the rollouts of each blind probe."""
    means: dict[str, dict[str, float]] = {}
    for probe, scores in group.probes.items():
        values: dict[str, list[float]] = {}
        for score in scores:
            for name, reward in score.terms.items():
                values.setdefault(name, []).append(reward.value)
            values.setdefault("total", []).append(score.total)
        means[probe] = {name: fmean(found) for name, found in values.items()}
    return means


def _replayed_records(
    replayed: Sequence[Experience],
    index_by_id: Mapping[int, int],
    gradient_ids: Container[int],
    *,
    first_group: int,
    max_groups: int,
) -> Iterator[RolloutRecord]:
    """Yield a record of each replayed rollout; rollouts of one prompt share a group."""
    times = Counter(id(experience.rollout) for experience in replayed)
    groups: dict[tuple[str, str], int] = {}
    seen: set[int] = set()
    for experience in replayed:
        rollout = experience.rollout
        group = groups.setdefault(rollout.prompt.group_key, first_group + len(groups))
        if id(rollout) in seen or group >= first_group + max_groups:
            continue
        seen.add(id(rollout))
        selection = {"status": "replayed", "staleness": experience.staleness, "times": times[id(rollout)]}
        fate = {"selection": selection, "in_forward": id(rollout) in gradient_ids}
        outcome = {**_advantage_fields(experience), **fate}
        yield RolloutRecord(group=group, rollout=rollout, outcome=outcome, experience=index_by_id[id(rollout)])


def _rollout_fields(rollout: Rollout, run_dir: Path, token_ends: Sequence[int] | None) -> dict[str, Any]:
    sample, prompt = rollout.prompt.sample, rollout.prompt
    media = zip(sample.media, prompt.resize_maps, strict=True)
    names = {ImageRef: "<image>", VideoRef: "<video>"}
    question = [part if isinstance(part, str) else names[type(part)] for part in sample.parts]
    turns = []
    for turn in rollout.turns:
        action = turn.action
        if isinstance(action, Action):
            action = json.dumps({"name": action.name, "arguments": dict(action.arguments)}, ensure_ascii=False)
        turns.append({**asdict(turn), "action": action})
    return {
        "sample": sample.id,
        "task": sample.task,
        "rollout": rollout.index,
        "question": "".join(question),
        "response": rollout.text,
        "thinking": rollout.answer.thinking,
        "answer": rollout.answer.value,
        "answer_text": rollout.answer.text,
        "answer_type": sample.target.answer_type,
        "target": sample.target.value,
        "target_frame": sample.target.coordinate_system,
        "frame": prompt.coordinate_system,
        "media_index": sample.target.media_index,
        "media": [_medium(ref, resize_map, run_dir) for ref, resize_map in media],
        "finish": rollout.finish_reason,
        "tokens": rollout.num_tokens,
        "segments": list(_segments(rollout, run_dir, token_ends)),
        "parent": rollout.parent_index,
        "is_correct": rollout.is_correct,
        "first_correct": rollout.first_is_correct,
        "turns": turns,
    }


def _segments(rollout: Rollout, run_dir: Path, token_ends: Sequence[int] | None) -> Iterator[dict[str, Any]]:
    num_tokens, start = 0, 0
    for segment in rollout.segments:
        num_tokens += len(segment.token_ids)
        chars = None
        if token_ends is not None:
            # The text of a thought that the prompt opened belongs to the first segment.
            chars = (start, token_ends[num_tokens - 1] if segment.token_ids else start)
            start = chars[1]
        shown = segment.observation and _medium(segment.observation.ref, segment.observation.resize_map, run_dir)
        fields = {"author": segment.author, "n": len(segment.token_ids), "version": segment.version}
        yield {**fields, "chars": chars, "shows": shown}


def _medium(ref: MediaRef, resize_map: ResizeMap, run_dir: Path) -> dict[str, Any]:
    """Return the entry of an image or video in a line. Paths in the run directory are relative, so that it can move."""
    path, kind = Path(ref.path), "image" if isinstance(ref, ImageRef) else "video"
    own_path = str(path.relative_to(run_dir) if path.is_relative_to(run_dir) else path)
    return {"kind": kind, **asdict(ref), "path": own_path, **asdict(resize_map)}


def parse_medium(record: Mapping[str, Any], run_dir: Path) -> MediaRef:
    """Return the reference of a recorded image or video; a damaged record raises one of `BAD_VALUE`."""
    fields = {**record, "path": str(run_dir.absolute() / record["path"])}
    return _VIDEO.validate_python(fields) if record["kind"] == "video" else _IMAGE.validate_python(fields)


def parse_resize_map(medium: Mapping[str, Any]) -> ResizeMap | None:
    """Return the resize map of a recorded medium, None if it has none that can be used."""
    try:
        resize_map = _RESIZE_MAP.validate_python(medium)
    except ValueError:
        return None
    return resize_map if min(*resize_map.original, *resize_map.resized) > 0 else None


def record_marks(record: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the marks of the `target` or the `answer` of a recorded rollout, on the medium of the target."""
    coordinate_system = record.get("target_frame" if key == "target" else "frame")
    media = record.get("media")
    medium = record.get("media_index") or 0
    # A sample of only text has answers, too, but no medium.
    resize_map = parse_resize_map(media[medium]) if isinstance(media, list) and 0 <= medium < len(media) else None
    return make_marks(record.get("answer_type") or "", record.get(key), coordinate_system, medium, resize_map)


def make_marks(
    answer_type: str, value: object, coordinate_system: str | None, medium: int, resize_map: ResizeMap | None
) -> list[dict[str, Any]]:
    """Return the marks of an answer: coordinates as fractions of the medium, times in seconds of a video.

    Without the coordinate system of `value` or a resize map, boxes and points are left out. A value that does not fit
    its type has no marks at all, since some of them would mislead.
    """
    marks = []
    try:
        for numbers, label, second in _list_regions(answer_type, value):
            at: tuple[float, ...]
            if answer_type in (AnswerType.SPAN, AnswerType.SPANS):
                start, end = numbers
                shape, at = "span", (float(start), float(end))
            elif coordinate_system is None or resize_map is None:
                continue
            else:
                at = resize_map.convert(numbers, CoordinateSystem(coordinate_system), CoordinateSystem.NORM_1)
                shape = {2: "point", 4: "box"}[len(at)]
            if all(map(isfinite, at)):
                marks.append({"shape": shape, "medium": medium, "at": list(at), "label": label, "second": second})
    except BAD_VALUE:
        return []
    return marks


def _list_regions(answer_type: str, value: AnswerValue) -> Iterator[tuple[Sequence[float], str, float | None]]:
    """Yield the numbers and the label of each box, point or span, and the second of a box in a track."""
    if value is None:
        return
    match answer_type:
        case AnswerType.BOX | AnswerType.POINT | AnswerType.SPAN:
            yield value, "", None
        case AnswerType.SPANS:
            for span in value:
                yield span, "", None
        case AnswerType.BOXES | AnswerType.POINTS:
            for coordinates, label, *_ in value:
                yield coordinates, str(label or ""), None
        case AnswerType.ACTION:
            name, arguments = value
            for coordinates in list_coordinates(AnswerType.ACTION, Action(name, arguments)):
                yield coordinates, str(name), None
        case AnswerType.JSON:
            for item in value if isinstance(value, list) else [value]:
                # The reward `tube` reads boxes over time as a list of objects with `time` and `bbox_2d`.
                time = item.get("time") if isinstance(item, dict) else None
                second = float(time) if isinstance(time, int | float) else None
                for coordinates in list_coordinates(AnswerType.JSON, item):
                    yield coordinates, "", second
