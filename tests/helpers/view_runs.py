"""Run folders for tests of the viewer, with the records that a run of this version writes."""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from videos import write_video

RED, BLUE = (200, 30, 30), (30, 30, 200)
CONFIG = """\
run: {name: small, seed: 7}
model: {path: null, video: {fps: 2.0, min_frames: 4, max_frames: 8, min_pixels: 1024, max_pixels: 2304}}
data: {media_roots: [.], media_limits: {max_pixels: 1000000}}
evaluation: {benchmarks: [], judge: {url: "https://me:pw@judge.example/v1", api_key: s3cret}}
stages:
  - {name: cold, kind: sft, steps: 2}
  - {name: rl, kind: rl, steps: 4}
"""
Row = dict[str, Any]


def write_picture(path: Path, size: tuple[int, int] = (200, 100), left: tuple[int, int, int] = RED) -> str:
    """Write a PNG whose left half is `left` and whose right half is blue; return its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, BLUE)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    image.save(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def image_medium(path: str, sha256: str, original: Sequence[int] = (200, 100), **other: Any) -> Row:
    """Return the record of an image, which the model saw in 112 x 56 pixels unless `other` says something else."""
    empty = dict.fromkeys(("timestamp", "crop", "fps", "corruption", "start", "end"))
    sizes = {"original": list(original), "resized": [112, 56], "offset": [0, 0]}
    return {"kind": "image", "path": path, "sha256": sha256, **empty, **sizes, **other}


def rollout_row(media: Sequence[Row] = (), response: str = "<answer>[10, 20, 60, 40]</answer>", **other: Any) -> Row:
    """Return the line of a rollout that answers with a box in pixels of what the model saw."""
    term = {"value": 0.5, "reason": "IoU 0.5", "transformed": 0.5, "weight": 2.0, "counts": True, "contribution": 1.0}
    row = {
        **{"stage": "rl", "step": 2, "group": 0, "prompt": "<|im_start|>⟨image: 8 tokens⟩Where?"},
        **{"sample": "find/train/1", "task": "find", "rollout": 0, "question": "<image>Where is it?"},
        **{"response": response, "thinking": None, "answer": [10, 20, 60, 40], "answer_text": "[10, 20, 60, 40]"},
        **{"answer_type": "box", "target": [20, 40, 100, 80], "target_frame": "px_original", "frame": "px_resized"},
        **{"media_index": 0, "media": list(media), "finish": "eos", "tokens": 4, "version": 1},
        "segments": [{"author": "policy", "n": 4, "chars": [0, len(response)], "version": 1, "shows": None}],
        **{"parent": None, "is_correct": None, "first_correct": None},
        "terms": {"iou": {**term, "failure": None}},
        **{"total": 1.0, "advantage": 0.25, "probes": {}},
        "selection": {"status": "trained", "reason": None, "carried_over": False, "staleness": 0},
    }
    return {**row, **other}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a JSON line for each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tokens(path: Path, rows: Sequence[Row], **other: Any) -> None:
    """Write the tokens of these rollouts, as many for each as its segments have, of one character each."""
    counts = [sum(segment["n"] for segment in row["segments"]) for row in rows]
    total = sum(counts)
    ends = [np.arange(1, count + 1) for count in counts]
    values = np.linspace(-1.0, 0.0, total, dtype=np.float32)
    arrays = {
        "offset": np.array([0, *np.cumsum(counts)], dtype=np.int64),
        "token_id": np.arange(total, dtype=np.int32),
        "end": np.concatenate([*ends, np.zeros(0)]).astype(np.int32),
        "author": np.zeros(total, dtype=np.uint8),
        **dict.fromkeys(("recorded_logprob", "logprob", "ratio", "entropy", "advantage"), values),
        "clipped": np.full(total, -1, dtype=np.int8),
    }
    content = io.BytesIO()
    np.savez_compressed(content, **{**arrays, **other})
    path.write_bytes(content.getvalue())


def write_benchmark(folder: Path, *, report: bool = True) -> None:
    """Write the files of a benchmark of two items, of which the second has no response."""
    prediction = {"pid": "1", "sample": 0, "response": "I think \U0001f600 it is (B).", "finish": "eos", "tokens": 7}
    verdict = {"pid": "1", "sample": 0, "strict": True, "official": True, "score": 1.0, "outcome": "correct"}
    # In characters of Python, in which the face is one.
    verdict |= {"rule": "parentheses", "value": "B", "start": 17, "end": 18, "judge_correct": None}
    missing = {**verdict, "pid": "2", "strict": False, "outcome": "no_answer", "rule": "missing", "value": None}
    write_lines(folder / "predictions.jsonl", [prediction])
    write_lines(folder / "verdicts.jsonl", [verdict | {"subsets": {"skill": ["math"]}}, missing])
    if report:
        accuracy = {"value": 0.5, "low": 0.1, "high": 0.9}
        text = {"benchmark": "mathvista", "items": 2, "strict": accuracy, "official": accuracy, "overall": {"AP": 0.3}}
        (folder / "report.json").write_text(json.dumps(text), encoding="utf-8")


def make_run(folder: Path) -> Path:
    """Write a small run: boxes, a video, a tool's crop, forced rethinking, dropped and replayed rollouts, tokens.

    Step 2 of stage `rl` has the groups 0 (an image, four rollouts), 1 (a video) and 2 (replayed).
    """
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    manifest = {"mmrl": "0.2.0", "git": {"commit": "ab12cd34ef567890", "dirty": True}, "records": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    image = image_medium("data/a.png", write_picture(folder / "data/a.png"))
    video_ref = write_video(folder / "data/b.mp4")
    video = image_medium("data/b.mp4", video_ref.sha256, (128, 96), kind="video", resized=[56, 42])
    rows = [
        rollout_row([image]),
        rollout_row([image], rollout=1, **_rethought()),
        rollout_row([image], rollout=2, **_with_tool(image)),
        _dropped(rollout_row([image], rollout=3)),
        rollout_row([video], group=1, sample="time/1", question="<video>When?", **_span()),
        rollout_row(
            [image], group=2, sample="find/train/9", selection={"status": "replayed", "staleness": 5, "times": 2}
        ),
    ]
    write_lines(folder / "rollouts/rl-000002.jsonl", rows)
    write_tokens(folder / "rollouts/rl-000002.npz", rows)
    held_out = {"advantage": None, "selection": None, "step": 2}
    write_lines(folder / "rollouts/rl-000002-validation.jsonl", [rollout_row([image], sample="find/v", **held_out)])
    write_lines(folder / "rollouts/test-before.jsonl", [rollout_row([image], sample="find/t", stage=None, step=0)])
    write_lines(folder / "rollouts/test-after.jsonl", [rollout_row([image], sample="find/t", stage=None, step=0)])
    metrics = [
        *({"stage": "cold", "step": step, "learner/loss": 3.0 - step} for step in (1, 2)),
        *({"stage": "rl", "step": step, "learner/lr": 1e-4, "reward/mean": step / 3} for step in (1, 2)),
        {"stage": "rl", "step": 2, "validation/find": 0.25},
    ]
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(
        folder / "timings.jsonl",
        [{"stage": "rl", "step": 2, "time/learn_s": 9.0}, {"stage": "rl", "step": 2, "time/learn_s": 1.5}],
    )
    begin = {"stage": "rl", "step": 1, "event": "health", "name": "min_entropy", "state": "begin", "message": "low"}
    write_lines(folder / "events.jsonl", [begin, {**begin, "step": 2, "state": "end", "message": None}])
    write_benchmark(folder / "benchmarks/mathvista/01-000002")
    return folder


def _rethought() -> Row:
    first, trigger, second = "<answer>[0, 0, 1, 1]</answer>", " Wait. ", "<answer>[10, 20, 60, 40]</answer>"
    ends = [len(first), len(first + trigger), len(first + trigger + second)]
    chars = [[0, ends[0]], [ends[0], ends[1]], [ends[1], ends[2]]]
    authors = ("policy", "forced", "policy")
    segments = []
    for author, place in zip(authors, chars, strict=True):
        segments.append({"author": author, "n": 2, "chars": place, "version": 1, "shows": None})
    verdict = {"parent": 0, "is_correct": True, "first_correct": False}
    return {"response": first + trigger + second, "segments": segments, **verdict}


def _with_tool(image: Row) -> Row:
    crop = {**image, "crop": [100, 0, 200, 50], "original": [100, 50], "offset": [100, 0], "resized": [56, 28]}
    segments = [
        {"author": "policy", "n": 2, "chars": [0, 4], "version": 1, "shows": None},
        {"author": "environment", "n": 2, "chars": [4, 4], "version": 1, "shows": crop},
        {"author": "policy", "n": 2, "chars": [4, 10], "version": 1, "shows": None},
    ]
    return {"response": "zoomanswer", "answer": None, "answer_text": None, "segments": segments}


def _dropped(row: Row) -> Row:
    kept = {key: value for key, value in row.items() if key not in ("terms", "total")}
    return {**kept, "advantage": None, "dropped": {"iou": "timeouts: took more than 10 s"}}


def _span() -> Row:
    value = {"answer": [1.0, 2.5], "target": [1.0, 2.0], "answer_text": "1.0 to 2.5", "response": "1.0 to 2.5"}
    return {**value, "answer_type": "span", "target_frame": None}
