"""`mmrl data check` finds the planted faults and nothing else; `mmrl data show` shows what the model sees."""

import io
import json
import os
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import TINY, Command, experiment, rl_stage, sft_stage, succeed, write
from PIL import Image

from mmrl.utils.processes import list_tree

Config = dict[str, Any]
Splits = dict[str, list[Config]]


def noise_image(seed: int) -> Image.Image:
    """Return an image that looks like no other."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(noise).resize((160, 120), Image.Resampling.BICUBIC)


def table(folder: Path, name: str, rows: list[Config], **options: object) -> Config:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    columns = {"id": "id", "images": "picture", "question": "question", "answer": "answer"}
    args = {"path": f"{name}.jsonl", "columns": columns, "answer_type": "number", "task": name, **options}
    return {"fn": "mmrl_datasets.readers.table:rows", "args": args}


def count_row(folder: Path, seed: int, **changes: object) -> Config:
    noise_image(seed).save(folder / f"{seed}.png")
    return {"id": f"r{seed}", "picture": f"{seed}.png", "question": "How many?", "answer": seed % 5, **changes}


def box_row(folder: Path, seed: int, box: list[float]) -> Config:
    return count_row(folder, seed, question="Where is it?", answer=box)


COUNT = {"fn": "mmrl_rewards.number:exact", "name": "count", "when": {"task": ["count", "held"]}}
IOU = {"fn": "mmrl_rewards.box:iou", "when": {"task": ["box"]}}


def write_config(folder: Path, splits: Splits | None = None, **sections: object) -> Path:
    """Write a config of these data, or of clean ones; `sections` replace its sections."""
    defaults = {"data": splits or clean_splits(folder), "rewards": {"terms": [COUNT, IOU]}}
    defaults["stages"] = [sft_stage(target_field="target"), rl_stage()]
    config = experiment(folder / "run", **(defaults | sections))
    config["model"]["max_prompt_tokens"] = 300
    return write(config, folder / "check.yaml")


def run_check(in_process: Command, path: Path, *overrides: object) -> tuple[int, Config]:
    """Run `mmrl data check`; return the exit code and the report."""
    done = in_process("data", "check", path, *overrides, "--json", "-")
    return done.code, json.loads(done.output)


def clean_splits(folder: Path) -> Splits:
    boxes = [box_row(folder, seed, [10, 20, 150, 110]) for seed in range(20, 24)]
    return {
        "train": [
            table(folder, "count", [count_row(folder, seed) for seed in range(8)]),
            table(folder, "box", boxes, answer_type="box", coordinates="px_original"),
        ],
        "test": [table(folder, "held", [count_row(folder, seed) for seed in range(40, 44)], split="test")],
    }


ENDLESS = """
from itertools import count
from mmrl.types import AnswerType, Sample, Target

def rows(context):
    for number in count():
        if number > 1000:
            raise RuntimeError("more than 1000 rows were read")
        target = Target(answer_type=AnswerType.NUMBER, value=number)
        meta = {"number": number}
        yield Sample(id=f"count/{number}", task="count", parts=(f"Name {number}.",), target=target, meta=meta)
"""


def huge_png(path: Path) -> None:
    """A few bytes whose header promises 11 000 x 11 000 pixels."""
    noise_image(0).save(path)
    whole = bytearray(path.read_bytes())
    whole[16:24] = struct.pack(">II", 11_000, 11_000)
    whole[29:33] = struct.pack(">I", zlib.crc32(whole[12:29]))
    path.write_bytes(whole)


def faulty_splits(folder: Path) -> tuple[Splits, set[tuple[str, str, str]]]:
    """Clean rows with ten faults among them, and what should be found: code, part, sample."""
    count = [count_row(folder, seed) for seed in range(8)]
    whole = io.BytesIO()
    noise_image(10).save(whole, "JPEG")
    (folder / "cut.jpg").write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
    (folder / "text.jpg").write_text("not a picture at all")
    huge_png(folder / "huge.png")
    count += [
        count_row(folder, 10, id="cut", picture="cut.jpg"),
        count_row(folder, 11, id="missing", picture="nowhere.png"),
        count_row(folder, 12, id="text", picture="text.jpg"),
        count_row(folder, 13, id="huge", picture="huge.png"),
        count_row(folder, 14, id="r3"),
        {**count[5], "id": "again"},
        count_row(folder, 15, answer="many"),
        count_row(folder, 16, question="How many? " + "Look closely! " * 100),
    ]
    boxes = [box_row(folder, 20, [10, 20, 150, 110]), box_row(folder, 21, [10, 20, 170, 110])]
    held = [count_row(folder, seed) for seed in range(40, 44)]
    noise_image(2).resize((120, 90), Image.Resampling.LANCZOS).save(folder / "copy.jpg", quality=60)
    held.append(count_row(folder, 44, id="leak", picture="copy.jpg", question="How many then?"))
    splits = {
        "train": [
            table(folder, "count", count),
            table(folder, "box", boxes, answer_type="box", coordinates="px_original"),
        ],
        "test": [table(folder, "held", held, split="test")],
    }
    expected = {
        ("media", "train", "count/train/cut"),
        ("row", "train", "count/train/line-10"),
        ("media", "train", "count/train/text"),
        ("media", "train", "count/train/huge"),
        ("row", "train", "count/train/line-13"),
        ("duplicate", "train", "count/train/again"),
        ("row", "train", "count/train/line-15"),
        ("too_long", "train", "count/train/r16"),
        ("outside_image", "train", "box/train/r21"),
        ("shared_media", "test", "held/test/leak"),
    }
    return splits, expected


def found(report: Config) -> list[tuple[str, str, str]]:
    return [(finding["code"], finding["split"], finding["sample_id"]) for finding in report["findings"]]


def test_benchmarks_are_compared_with_training_by_name(tmp_path, in_process):
    rows = [
        {"id": "fresh", "images": "40.png", "question": "How many?"},
        {"id": "asked", "images": "3.png", "question": "how  many?"},
        {"id": "shown", "images": "4.png", "question": "What colour?"},
        {"id": "similar", "images": "copy.jpg", "question": "What colour?"},
        {"id": "gone", "images": "nowhere.png", "question": "What colour?"},
    ]
    lines = [json.dumps({**row, "answer": 1, "answer_type": "count"}) for row in rows]
    (tmp_path / "bench.jsonl").write_text("\n".join(lines))
    ten = {"name": "ten", "benchmark": "counting", "data": ["bench.jsonl"]}
    lenient, none = {**ten, "name": "lenient", "allow_missing": True}, {**ten, "name": "none", "data": ["none.jsonl"]}
    path = write_config(tmp_path, evaluation={"max_new_tokens": 6, "benchmarks": [ten, lenient, none]})
    noise_image(5).resize((120, 90), Image.Resampling.LANCZOS).save(tmp_path / "copy.jpg", quality=60)
    _, report = run_check(in_process, path)
    expected = [("media", "gone"), ("leak", "asked"), ("shared_media", "shown"), ("shared_media", "similar")]
    assert [(code, split, sample_id.rpartition("/")[2]) for code, split, sample_id in found(report)] == [
        *((code, "benchmark ten", sample_id) for code, sample_id in expected),
        *((code, "benchmark lenient", sample_id) for code, sample_id in expected),
        ("source", "benchmark none", ""),
    ]
    severities = [finding["severity"] for finding in report["findings"] if finding["code"] == "media"]
    assert severities == ["error", "warning"]
    messages = {finding["sample_id"]: finding["message"] for finding in report["findings"]}
    assert messages["counting/asked"] == "training sample count/train/r3 asks the same about the same media"
    assert "copy.jpg looks like" in messages["counting/similar"]
    counts = {"questions": 5, "media": 4, "leaked": 1, "shared": 2}
    assert report["benchmarks"] == {"ten": counts, "lenient": counts}
    done = in_process("data", "check", path)
    assert done.code == 1
    assert "benchmark ten: 5 questions, 4 media; training asks 1 of them too, and shows media of 2" in done.output


def test_ten_planted_faults_are_found_and_nothing_else(tmp_path, in_process):
    splits, expected = faulty_splits(tmp_path)
    code, report = run_check(in_process, write_config(tmp_path, splits))
    assert code == 1
    assert set(found(report)) == expected
    assert len(report["findings"]) == len(expected) == 10
    assert report["counts"] == {"error": 7, "warning": 3, "note": 0}
    reasons = {finding["sample_id"]: finding["message"] for finding in report["findings"]}
    for sample, words in {
        "count/train/cut": "cut.jpg: damaged",
        "count/train/line-10": "nowhere.png",
        "count/train/text": "text.jpg: not a",
        "count/train/huge": "11000x11000 pixels exceed",
        "count/train/line-13": "the id 'count/train/r3' is also the id of line-4",
        "count/train/line-15": "answer must be a finite number, is 'many'",
        "box/train/r21": "[10, 20, 170, 110] (px_original) leaves the image of 160x120 pixels",
        "held/test/leak": "2.png of training sample count/train/r2",
    }.items():
        assert words in reasons[sample]
    train = report["splits"]["train"]
    assert [source["rows"] for source in train["sources"]] == [16, 2]
    assert train["usable"] == 8 + 1 + 2  # the duplicate and the box outside its picture stay
    assert train["prompt_tokens"]["max"] > 300 == report["max_prompt_tokens"]
    assert not (tmp_path / "run").exists()


def test_faults_that_may_be_skipped_are_warnings(tmp_path, in_process):
    splits, expected = faulty_splits(tmp_path)
    lenient = ("data.on_bad_sample=skip", "data.on_too_long=skip", "data.media_workers=2")
    done = in_process("data", "check", write_config(tmp_path, splits), *lenient, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.code == 0
    assert set(found(report)) == expected
    assert report["counts"] == {"error": 0, "warning": 10, "note": 0}
    assert Image.open(tmp_path / "report.png").size == (920, 520)
    assert "warning: train: images and videos that cannot be used (3)" in done.output
    assert "count/train/huge: " in done.output


def test_clean_data_have_no_findings(tmp_path, in_process):
    config = write_config(tmp_path)
    code, report = run_check(in_process, config)
    assert (code, report["findings"]) == (0, [])
    assert {name: split["usable"] for name, split in report["splits"].items()} == {"train": 12, "test": 4}
    assert report["splits"]["train"]["tasks"]["count"] == {
        "samples": 8,
        "answer_types": ["number"],
        "distinct_answers": 5,
        "most_common": [["0", 2], ["1", 2], ["2", 2], ["3", 1], ["4", 1]],
    }
    printed = in_process("data", "check", config)
    assert printed.code == 0
    assert "train: 12 rows, 12 usable samples, 12 media" in printed.output
    assert "tiny: 0 errors, 0 warnings, 0 notes." in printed.output


def test_answers_that_begin_alike_are_counted_apart_and_shown_shortened(tmp_path, in_process):
    beginning = "A red traffic light at a"
    answers = [f"{beginning} crossing", f"{beginning} bridge", f"{beginning} crossing"]
    rows = [count_row(tmp_path, seed, answer=answer) for seed, answer in enumerate(answers)]
    splits = {"train": [table(tmp_path, "say", rows, answer_type="text")]}
    label = {"fn": "mmrl_rewards.classify:label"}
    _, report = run_check(in_process, write_config(tmp_path, splits, rewards={"terms": [label]}))
    task = report["splits"]["train"]["tasks"]["say"]
    shown = "A red traffic light a..."
    assert (task["distinct_answers"], task["most_common"]) == (2, [[shown, 2], [shown, 1]])


REWARDS = """
import time
from mmrl.types import Unscorable
from mmrl_rewards.contract import reward

@reward(name="one")
def one(response, sample) -> float:
    return 1.0

@reward(name="picky")
def picky(response, sample) -> float:
    if sample.id.endswith("r3"):
        raise Unscorable("an answer that it cannot use")
    return 1.0

@reward(name="slow")
def slow(response, sample) -> float:
    if response.answer.value is not None and not sample.id.endswith("r0"):
        time.sleep(600)
    return 1.0
"""


def test_a_check_does_not_stop_at_the_first_fault(tmp_path, in_process):
    splits = clean_splits(tmp_path)
    (tmp_path / "mine.py").write_text(REWARDS)
    held = table(tmp_path, "held", [count_row(tmp_path, seed) for seed in (1, 40, 42)], split="test")
    lost = {**held, "args": {**held["args"], "path": "lost.jsonl"}}
    splits |= {"validation": [table(tmp_path, "gone", []), splits["train"][0]], "test": [held]}
    splits["train"].append(lost)
    path = write_config(tmp_path, splits, rewards={"terms": [COUNT, IOU, {"fn": "./mine.py:picky"}]})
    code, report = run_check(in_process, path)
    assert code == 1
    line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "lost.jsonl" in text)
    assert f"{path}:{line}: data.train.2.args.path: " in report["findings"][0]["message"]
    repeated = [("id", "validation", f"count/train/r{seed}") for seed in range(8)]
    assert [finding for finding in found(report) if finding[0] == "id"] == repeated
    assert [finding for finding in found(report) if finding[0] != "id"] == [
        ("source", "train", ""),
        ("source", "validation", ""),
        ("unscorable", "train", "count/train/r3"),
        ("leak", "test", "held/test/r1"),
        ("empty", "validation", ""),
    ]


def test_missing_rewordings_and_a_reserved_task_are_found(tmp_path, in_process):
    rows = [count_row(tmp_path, seed) | {"reworded": "How many are there?"} for seed in range(7)]
    splits = {"train": [table(tmp_path, "count", [*rows, count_row(tmp_path, 7)])]}
    splits["validation"] = [table(tmp_path, "mean", [count_row(tmp_path, 40)])]
    step = {"kind": "custom", "fn": "mmrl.rollout.steps.rewording:MajorityTargets", "args": {"column": "reworded"}}
    stage = rl_stage(rollout_steps=[{"kind": "generate"}, {**step, "max_added_tokens": 64}])
    rewards = {"terms": [{"fn": "mmrl_rewards.number:exact"}]}
    code, report = run_check(in_process, write_config(tmp_path, splits, stages=[stage], rewards=rewards))
    assert code == 1
    assert found(report) == [("rewording", "train", "count/train/r7"), ("task", "validation", "")]
    assert "has no text in the column 'reworded' of its meta" in report["findings"][0]["message"]


def test_a_column_that_a_row_filter_misses_is_a_finding(tmp_path, in_process):
    splits = clean_splits(tmp_path)
    splits["test"][0]["row_filter"] = {"column": "level", "low": 1}
    code, report = run_check(in_process, write_config(tmp_path, splits))
    assert code == 1
    assert ("source", "test", "") in found(report)
    assert report["splits"]["train"]["usable"]


def test_a_check_leaves_no_process_behind(tmp_path, in_process):
    (tmp_path / "mine.py").write_text(REWARDS)
    before = set(list_tree(os.getpid()))
    config = experiment(tmp_path / "run", rewards={"terms": [{"fn": "./mine.py:one"}]})
    succeed(in_process("data", "check", write(config, tmp_path / "mine.yaml")))
    assert set(list_tree(os.getpid())) <= before


def test_a_reward_that_hangs_is_not_tried_again(tmp_path, in_process):
    (tmp_path / "mine.py").write_text(REWARDS)
    rewards = {"terms": [{"fn": "./mine.py:slow"}], "timeout_s": 2.0}
    code, report = run_check(in_process, write_config(tmp_path, rewards=rewards))
    assert (code, found(report)) == (1, [("reward", "train", "count/train/r1")])
    message = report["findings"][0]["message"]
    assert "reward 'slow' on sample 'count/train/r1' (task 'count'): took more than 2 s;" in message
    assert "Rewards were not tried on the samples after this one." in message


def test_conditions_that_no_sample_meets_are_found(tmp_path, in_process):
    terms = [{"fn": "format:tags"}, {"fn": "number:exact", "when": {"task": ["cuont"]}}]
    code, report = run_check(in_process, write_config(tmp_path, rewards={"terms": terms}))
    assert (code, report["counts"]) == (0, {"error": 0, "warning": 4, "note": 0})
    assert {finding["code"] for finding in report["findings"]} == {"condition"}
    assert "`when` names task 'cuont', which no sample has; did you mean 'count'?" in report["findings"][0]["message"]


def test_a_source_without_rows_is_not_blamed_on_conditions(tmp_path, in_process):
    empty = table(tmp_path, "count", [])
    code, report = run_check(in_process, write_config(tmp_path, {"train": [empty]}))
    assert code == 1
    assert {finding["code"] for finding in report["findings"]} == {"source", "empty", "too_few"}


def test_of_an_endless_stream_the_first_rows_are_checked_and_shown(tmp_path, in_process):
    (tmp_path / "endless.py").write_text(ENDLESS)
    source = {"fn": "./endless.py:rows", "row_filter": {"column": "number", "high": 5}}
    config = write_config(tmp_path, data={"train": [source], "streaming": {"shuffle_buffer_size": 10}})
    done = in_process("data", "check", config)
    assert "data.train is streamed: only the first 10 rows of each source are checked." in done.output
    assert "train: 6 rows, 6 usable samples" in done.output
    done = succeed(in_process("data", "show", config, "--index", "-1"))
    assert "data.train is streamed: only the first 10 rows of each source are read." in done.output
    assert "sample   count/5, task count" in done.output


def test_a_model_that_cannot_be_loaded_costs_only_the_prompts(tmp_path, in_process):
    model = {"path": str(tmp_path / "no-such-model")}
    code, report = run_check(in_process, write_config(tmp_path, model=model))
    assert (code, found(report)) == (1, [("model", "train", "")])
    assert report["splits"]["train"]["prompt_tokens"] is None


def test_show_prints_the_prompt_and_draws_the_box_where_it_is(tmp_path, in_process):
    count, boxes = clean_splits(tmp_path)["train"]
    config = write_config(tmp_path, {"train": [boxes], "test": [count]})
    done = succeed(in_process("data", "show", config, "--id", "box/train/r21", "--out", tmp_path / "seen.png"))
    size = 32, 16  # 160 x 120 pixels brought to an area of at most 1024, sides multiples of 16
    assert "<|vision_start|>⟨image: 2 tokens⟩<|vision_end|>Where is it?" in done.output
    answer = "box: [10, 20, 150, 110] (px_original, media 0); for the model [[2.0, 2.7, 30.0, 14.7]]"
    assert f"answer   {answer}" in done.output
    seen = np.asarray(Image.open(tmp_path / "seen.png"))
    green = np.argwhere((seen == (18, 183, 106)).all(axis=2))
    factor = 420 // size[0]
    left, top = 24 + 24, green[:, 0].min() + 3 - round(20 / 120 * size[1] * factor)
    inside = seen[top : top + size[1] * factor, left : left + size[0] * factor]
    box = np.argwhere((inside == (18, 183, 106)).all(axis=2))
    assert box.min(axis=0) + 3 == pytest.approx((20 / 120 * size[1] * factor, 10 / 160 * size[0] * factor), abs=1)
    assert box.max(axis=0) - 2 == pytest.approx((110 / 120 * size[1] * factor, 150 / 160 * size[0] * factor), abs=1)


def test_show_converts_the_coordinates_of_actions(tmp_path, in_process):
    row = {**box_row(tmp_path, 20, []), "answer": {"action": "click", "coordinate": [10, 20]}}
    source = table(tmp_path, "tap", [row], answer_type="action", coordinates="px_original")
    config = write_config(tmp_path, {"train": [source]})
    done = succeed(in_process("data", "show", config, "--out", tmp_path / "seen.png"))
    assert "(px_original, media 0); for the model [[2.0, 2.7]] (px_resized)" in done.output


def test_show_chooses_samples(tmp_path, in_process):
    config = write_config(tmp_path)

    def shown(*options):
        lines = in_process("data", "show", config, *options).output.splitlines()
        return [line.split()[1].rstrip(",") for line in lines if line.startswith("sample ")]

    assert shown() == ["count/train/r0"]
    assert shown("--index", "-1", "--count", 3) == ["box/train/r23"]
    assert shown("--index", 2, "--count", 2) == ["count/train/r2", "count/train/r3"]
    assert shown("--split", "test", "--id", "held/test/r41") == ["held/test/r41"]
    assert len(set(shown("--random", 1, "--count", 5))) == 5
    assert shown("--random", 1, "--count", 5) == shown("--random", 1, "--count", 5)
    refused = in_process("data", "show", config, "--id", "count/train/r99")
    assert (refused.code, refused.output) == (2, "")
    assert "there is no sample 'count/train/r99'; there are 12" in refused.errors
    assert in_process("data", "show", config, "--index", 12).code == 2
    assert in_process("data", "show", config, "--split", "validation").code == 2


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("seen", ""),  # a PNG, whatever its name
        ("nowhere/seen.png", "cannot be written: No such file or directory; free space or choose another place"),
    ],
)
def test_show_writes_any_name_and_says_where_it_cannot(tmp_path, in_process, out, message):
    done = in_process("data", "show", write_config(tmp_path), "--out", tmp_path / out)
    assert message in done.errors
    assert done.code == (2 if message else 0)
    assert message or (tmp_path / out).read_bytes().startswith(b"\x89PNG")


CLIPS = """
import hashlib
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Sample, Target, VideoRef

def rows(context):
    def digest(name):
        return hashlib.sha256((context.base_dir / name).read_bytes()).hexdigest()

    image = ImageRef(path=str(context.base_dir / "0.png"), sha256=digest("0.png"))
    clip = VideoRef(path=str(context.base_dir / "clip.mp4"), sha256=digest("clip.mp4"))
    parts = ("Compare", image, "with", clip, "and say where it is.")
    box, system = [0.25, 0.25, 0.75, 0.75], CoordinateSystem.NORM_1
    target = Target(answer_type=AnswerType.BOX, value=box, coordinate_system=system, media_index=1)
    yield Sample(id="mixed", task="box", parts=parts, target=target)
"""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_an_image_and_a_video_are_checked_and_shown(tmp_path, in_process, clip, family):
    (tmp_path / "mine.py").write_text(CLIPS)
    noise_image(0).save(tmp_path / "0.png")
    shutil.copy(clip.path, tmp_path / "clip.mp4")
    model = {**experiment(tmp_path)["model"], "video": {"min_pixels": 1024, "max_pixels": 2304}}
    model["from_scratch"] = {**TINY, "family": family}
    stages, rewards = [sft_stage(target_field="target", prompts_per_step=1)], {"terms": [{"fn": "box:iou"}]}
    splits = {"train": [{"fn": "./mine.py:rows"}]}
    path = write_config(tmp_path, splits, model=model, stages=stages, rewards=rewards)
    code, report = run_check(in_process, path)
    assert (code, report["findings"]) == (0, [])
    assert report["splits"]["train"]["media"] == 2
    shown = in_process("data", "show", path, "--out", tmp_path / "seen.png")
    assert shown.code == 0
    prompt = shown.output[shown.output.index("  | ") : shown.output.index("media 0")]
    counts = {word: [int(n) for n in re.findall(rf"⟨{word}: (\d+) tokens⟩", prompt)] for word in ("image", "video")}
    assert prompt.index("⟨image") < prompt.index("⟨video")
    assert len(counts["image"]) == 1
    assert (len(counts["video"]) > 1) == (family != "qwen2_5_vl")  # others tell the time before each pair of frames
    visual = report["splits"]["train"]["visual_tokens"]["sum"]
    assert sum(counts["image"]) + sum(counts["video"]) == visual
    assert f"{visual} of them visual" in shown.output
    assert (np.asarray(Image.open(tmp_path / "seen.png")) == (18, 183, 106)).all(axis=2).any()
