"""Mistakes of a user: one clear message that names the cause, exit code 2, and nothing half-written."""

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import (
    Done,
    check_metrics_alike,
    counting,
    experiment,
    jsonl,
    metrics,
    reproducible_files,
    rl_stage,
    rows,
    run_mmrl,
    sft_stage,
    stop_in_rl,
    succeed,
    write,
)
from PIL import Image

from mmrl.benchmarks.verdict import ResponseOutcome, Verdict

pytestmark = pytest.mark.slow

Config = dict[str, Any]

REWARDS = """
from mmrl_rewards.contract import reward

@reward(name="raises")
def raises(response, sample) -> float:
    return 1 / 0
"""


def train_on(*sources: Config) -> Config:
    return {"data": {"train": list(sources)}}


def term(fn: str, **options: object) -> Config:
    return {"rewards": {"terms": [{"fn": fn, **options}]}}


def own_reward(folder: Path, name: str, case_response: str | None = None) -> Config:
    """A config with a reward of `REWARDS`; with `case_response`, its case table expects 1 for this response."""
    (folder / "mine.py").write_text(REWARDS)
    if case_response is not None:
        sample = {"answer_type": "number", "value": 1}
        case = {"fn": f"./mine.py:{name}", "sample": sample, "response": case_response, "expected": 1, "source": "mine"}
        (folder / "mine.json").write_text(json.dumps([case]))
    return term(f"./mine.py:{name}")


MISTAKES: dict[str, tuple[Callable[[Path], Config], list[str]]] = {
    "no label": (
        lambda folder: {**train_on(jsonl(folder, rows(4))), "stages": [sft_stage()]},
        ["count/train/r0", "no label", "target_field: target"],
    ),
    "tracked reward that does not exist": (
        lambda _: {"stages": [rl_stage(track_rewards=["cuont"])]},
        ["stage 'rl': track_rewards: there is no reward term 'cuont'; there are count, format"],
    ),
    "difficulty by a reward that does not exist": (
        lambda _: {"stages": [rl_stage(advantage={"difficulty_weight": {"term": "cuont"}})]},
        ["stage 'rl': advantage.difficulty_weight.term: there is no reward term 'cuont'; there are count, format"],
    ),
    "reward that raises": (
        lambda folder: own_reward(folder, "raises"),
        ["reward 'raises'", "count/train/000000", "raised ZeroDivisionError", "(mine.py:6)"],
    ),
    "reward unlike its case table": (
        lambda folder: own_reward(folder, "raises", ""),
        ["reward './mine.py:raises' contradicts its case table: expected 1.0", "source: mine"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_by_name_and_leaves_nothing(tmp_path, in_process, name):
    make_sections, words = MISTAKES[name]
    sections = {"stages": [rl_stage()], **make_sections(tmp_path)}
    done = in_process("train", write(experiment(tmp_path / "run", **sections), tmp_path / "bad.yaml"))
    assert_refused(done, *words)
    assert not (tmp_path / "run").exists()


def line_of(path: Path, *keys: str) -> str:
    """Return `file:line` of the first line that holds the last key, after lines that hold the others."""
    number, lines = -1, path.read_text().splitlines()
    for key in keys:
        number = next(index for index in range(number + 1, len(lines)) if f'"{key}"' in lines[index])
    return f"{path}:{number + 1}"


LOST = {
    "fn": "mmrl_datasets.readers.table:rows",
    "args": {"path": "lost.jsonl", "columns": {"question": "question", "answer": "count"}, "answer_type": "number"},
}
OPTIONS: dict[str, tuple[Callable[[Path], Config], tuple[str, ...], str]] = {
    "a huge image": (
        lambda _: train_on(counting("train", 4), {**counting("train", 4, image_px=1_000_000), "name": "b"}),
        ("data", "fn", "fn", "image_px"),
        "data.train.1.args.image_px: data source 'mmrl_datasets.generators.scenes:counting', option 'image_px' = "
        "1000000: must be less than or equal to 10000",
    ),
    "a wrong type": (
        lambda _: train_on(counting("train", 4, max_count="many")),
        ("data", "max_count"),
        "data.train.0.args.max_count: data source",
    ),
    "a value that the function refuses": (
        lambda _: train_on(counting("train", 4, colours=["red"])),
        ("data", "colours"),
        "data.train.0.args.colours: colours=['red'] must be two or more",
    ),
    "no such file": (
        lambda folder: train_on(jsonl(folder, rows(4)), LOST),
        ("data", "fn", "fn", "path"),
        "data.train.1.args.path: ",
    ),
    "no such function": (
        lambda _: train_on({**counting("train", 4), "fn": "mmrl_datasets.generators.scenes:countin"}),
        ("data", "fn"),
        "data.train.0.fn: 'mmrl_datasets.generators.scenes:countin'",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_named_by_file_line_and_key(tmp_path, in_process, name):
    make_sections, keys, message = OPTIONS[name]
    sections = {"stages": [rl_stage()], **make_sections(tmp_path)}
    path = write(experiment(tmp_path / "run", **sections), tmp_path / "bad.yaml")
    assert_refused(in_process("train", path), f"mmrl: error: {line_of(path, *keys)}: {message}")
    assert not (tmp_path / "run").exists()
    if keys[0] == "data" and "test" not in keys:
        assert f"{line_of(path, *keys)}: {message}" in in_process("data", "show", path).errors


def test_an_override_that_a_function_refuses_is_named_as_such(tmp_path, in_process):
    path = write(experiment(tmp_path / "run", stages=[rl_stage()]), tmp_path / "bad.yaml")
    done = in_process("train", path, "data.train.0.args.image_px=1000000")
    assert_refused(done, "command line: data.train.0.args.image_px: data source", "must be less than or equal to 10000")


FEW = """
from mmrl_rewards.contract import reward
from mmrl.types import Unscorable

@reward(name="few")
def few(response, sample) -> float:
    if sample.target.value > 2:
        raise Unscorable("too many to count")
    return float(response.answer.value == sample.target.value)
"""


def counting_few(folder: Path, name: str, *counts: int, **data: object) -> Path:
    """Write a config whose reward cannot score more than two; held-out data have the same counts under other ids."""
    (folder / "few.py").write_text(FEW)
    sources = {}
    for split in ("train", "validation", "test"):
        listed = [
            {"id": f"{split}{number}", "question": "How many?", "count": count} for number, count in enumerate(counts)
        ]
        for number, row in enumerate(listed):
            row["picture"] = f"{row['id']}.png"
            Image.new("RGB", (32, 32), (8 * number, 99, 99)).save(folder / row["picture"])
        sources[split] = [jsonl(folder, [row for row in listed if row["count"] >= 0], f"{name}_{split}")]
    rewards = {"terms": [{"fn": "./few.py:few", "name": "few"}, {"fn": "mmrl_rewards.format:tags", "name": "format"}]}
    stages = [rl_stage(steps=3, prompts_per_step=2, validation={"every": 2})]
    config = experiment(folder / name, data={**sources, **data}, rewards=rewards, stages=stages)
    return write(config, folder / f"{name}.yaml")


def test_targets_that_a_reward_cannot_score_are_skipped_and_listed_on_all_ranks_and_on_resume(tmp_path, in_process):
    counts, usable = (0, 9, 1, 2, 7, 1), (0, -1, 1, 2, -1, 1)
    once, twice, shared, clean = (
        counting_few(tmp_path, name, *(usable if name == "clean" else counts), on_bad_sample="skip")
        for name in ("once", "twice", "shared", "clean")
    )
    done = succeed(in_process("train", once))
    for split in ("train", "validation", "test"):
        told = (
            f"warning: data.{split}: 2 of 6 samples cannot be used and are left out:\n  count/train/{split}1: reward "
        )
        assert told in done.output
    assert "too many to count" in done.output
    succeed(in_process("train", clean))
    assert reproducible_files(tmp_path / "once") == reproducible_files(tmp_path / "clean")
    stop_in_rl(twice, 2)
    succeed(in_process("train", twice))
    assert reproducible_files(tmp_path / "twice") == reproducible_files(tmp_path / "once")
    succeed(run_mmrl("train", shared, "--nproc", 2))
    check_metrics_alike(metrics(tmp_path / "shared"), metrics(tmp_path / "once"))


def test_a_target_that_a_reward_cannot_score_ends_the_run_without_skip(tmp_path, in_process):
    done = in_process("train", counting_few(tmp_path, "strict", 0, 9, 1, 2))
    assert_refused(done, "data.train: 1 of 4 samples", "count/train/train1", "too many to count", "on_bad_sample=skip")


def test_a_doubtful_setting_is_warned_of_by_file_line_and_key(tmp_path, in_process):
    loss = {"importance_ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    path = write(experiment(tmp_path / "run", stages=[rl_stage(steps=1, loss=loss)]), tmp_path / "narrow.yaml")
    line = path.read_text().split('"loss"')[0].count("\n") + 1
    done = succeed(in_process("train", path))
    assert f"warning: {path}:{line}: stages.0.loss.old_logprobs: the ratio of a whole response" in done.output


FULL_DISKS = {  # from the Nth call of a function on, no file can grow past so many bytes
    "the second checkpoint's weights": ("mmrl.checkpoint.manager:write_part", 2, 60_000, "checkpoints/00-000006"),
    "the second checkpoint's optimizer": ("mmrl.checkpoint.manager:write_part", 2, 160_000, "checkpoints/00-000006"),
    "the export": ("mmrl.checkpoint:export_hf_folder", 2, 60_000, "model"),
}


@pytest.mark.parametrize("moment", FULL_DISKS)
def test_a_run_ended_by_a_full_disk_resumes(tmp_path, whole, in_process, moment):
    *fault, unsaved = FULL_DISKS[moment]
    config = write(experiment(tmp_path / "run"), tmp_path / "tiny.yaml")
    done = run_mmrl("train", config, fault=fault)
    assert_refused(done, f"cannot save {tmp_path}/run/{unsaved}", "earlier checkpoints are intact", "free some space")
    assert not (tmp_path / "run" / unsaved).exists()
    assert not list(tmp_path.rglob("*.partial"))
    again = in_process("train", config)  # the disk has room again
    assert again.code == 0
    assert "damaged" not in again.output
    assert reproducible_files(tmp_path / "run") == reproducible_files(whole)


def test_a_mistake_in_a_begun_run_leaves_it_unchanged(tmp_path, whole, in_process):
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    done = in_process("train", write(experiment(run_dir, stages=[rl_stage(group_size=1)]), tmp_path / "bad.yaml"))
    assert done.code == 2
    assert reproducible_files(run_dir) == reproducible_files(whole)


def assert_refused(done: Done, *words: str) -> None:
    assert done.code == 2, done
    for word in words:
        assert word in done.errors
    assert all(line.startswith("mmrl: error: ") for line in done.errors.splitlines())
    assert len(done.errors) < 1000


DELETING = """
import shutil

class Delete:
    def __init__(self, path, how):
        self.path, self.how = path, how

    def on_step_end(self, state, result):
        if state.step == 2 and self.how == "move":
            self.path.rename(self.path.with_name("elsewhere"))
        elif state.step == 2:
            shutil.rmtree(self.path)

def make(context, *, how: str):
    return Delete(context.run_dir.path, how)
"""


@pytest.mark.parametrize(("how", "every"), [("delete", 1), ("delete", 100), ("move", 100)])
def test_a_run_directory_that_is_deleted_ends_the_run(tmp_path, in_process, how, every):
    (tmp_path / "mine.py").write_text(DELETING)
    config = experiment(tmp_path / "run", stages=[rl_stage(steps=4)], checkpoints={"every": every})
    callbacks = [{"fn": "./mine.py:make", "args": {"how": how}}]
    done = in_process("train", write({**config, "callbacks": callbacks}, tmp_path / "tiny.yaml"))
    assert_refused(done, f"{tmp_path}/run was deleted or moved while the run was writing to it", "checkpoints")
    assert len(done.errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rgone\x7f\x00"
"""It renames the window, clears the screen, turns text red, and hides the start of its line."""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["data", "show", "CONFIG", "--count", "2"], 0),
        (["data", "check", "CONFIG"], 0),
        (["data", "check", "LOST"], 1),
        (["data", "check", "LOST", "--json", "-"], 1),
        (["train", "LOST"], 2),
        (["train", "LOST", "data.on_bad_sample=skip"], 0),
        (["train", "TERM"], 2),
        (["explain", "TERM"], 0),
        (["eval", "compare", "VERDICTS", "MORE"], 0),
    ],
)
def test_no_control_character_of_the_data_reaches_the_terminal(tmp_path, in_process, arguments, code):
    given = [{**row, "id": f"{HOSTILE}{row['id']}", "question": f"How many?{HOSTILE}"} for row in rows(6)]
    stages = [rl_stage(steps=1, prompts_per_step=2, group_size=2)]
    data = {"train": [jsonl(tmp_path, given)]}
    files = {"CONFIG": write(experiment(tmp_path / "run", data=data, stages=stages), tmp_path / "config.yaml")}
    (tmp_path / "mine.py").write_text(REWARDS)
    rewards = term("./mine.py:raises", when={"task": ["count", HOSTILE]})
    files["TERM"] = write(experiment(tmp_path / "run", data=data, stages=stages, **rewards), tmp_path / "term.yaml")
    lost = tmp_path / f"lost{HOSTILE[:-1]}.jsonl"
    bad_row = json.dumps({**given[0], "id": HOSTILE, "picture": "no.png"})
    lost.write_text((tmp_path / "rows.jsonl").read_text() + bad_row)
    data = {"train": [{**data["train"][0], "args": {**data["train"][0]["args"], "path": lost.name}}]}
    files["LOST"] = write(experiment(tmp_path / "run", data=data, stages=stages), tmp_path / "lost.yaml")
    for name, right in (("VERDICTS", True), ("MORE", False)):
        outcome = next(iter(ResponseOutcome))
        verdict = Verdict(id=HOSTILE, outcome=outcome, rule="tags", strict=right, subsets={HOSTILE: (HOSTILE,)})
        files[name] = tmp_path / name
        files[name].write_text(json.dumps(verdict.to_row("3")))
    done = in_process(*[files.get(word, word) for word in arguments])
    assert done.code == code, done.errors
    printed = done.output + done.errors
    assert "\\u001b" in printed or "\\x1b" in printed
    assert {character for character in printed if unicodedata.category(character) == "Cc"} <= {"\n", "\t"}
