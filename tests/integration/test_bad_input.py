"""What a user gets wrong: one clear message that names the thing, exit code 2, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Command, Done, contents, counting, experiment, jsonl, mmrl, rl_stage, rows, sft_stage, write
from transformers import BertConfig

from mmrl.benchmarks.verdict import ResponseOutcome, Verdict

Config = dict[str, Any]

REWARDS = """
from mmrl_rewards.contract import reward

@reward(name="raises")
def raises(response, sample) -> float:
    return 1 / 0

@reward(name="nan")
def nan(response, sample) -> float:
    return float("nan")

@reward(name="loops")
def loops(response, sample) -> float:
    while True:
        pass

@reward(name="fragile")
def fragile(response, sample) -> float:
    if response.answer.value is None:
        return 0.0
    return 1 / (response.answer.value == sample.target.value)
"""


def term(fn: str, **options: object) -> Config:
    return {"terms": [{"fn": fn, **options}]}


def missing_model(folder: Path) -> Config:
    return {"model": {"path": str(folder / "no-such-model")}}


def other_model(folder: Path) -> Config:
    BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1).save_pretrained(folder / "bert")
    return {"model": {"path": str(folder / "bert")}}


def wrong_column(folder: Path) -> Config:
    return {"data": {"train": [jsonl(folder, rows(4), answer="cuont")]}}


def unknown_key(_: Path) -> Config:
    return {"stages": [rl_stage(grup_size=4)]}


def lone_rollout(_: Path) -> Config:
    return {"stages": [rl_stage(group_size=1)]}


def no_samples(folder: Path) -> Config:
    return {"data": {"train": [jsonl(folder, [])]}}


def lost_picture(folder: Path) -> Config:
    return {"data": {"train": [jsonl(folder, [*rows(3), {**rows(1)[0], "id": "lost", "picture": "lost.png"}])]}}


def corrupt_picture(folder: Path) -> Config:
    origin = jsonl(folder, rows(4))
    whole = (folder / "2.png").read_bytes()
    (folder / "2.png").write_bytes(whole[: len(whole) // 2])
    return {"data": {"train": [origin]}}


def unknown_reward(_: Path) -> Config:
    return {"rewards": term("mmrl_rewards.number:exakt")}


def unknown_reward_module(_: Path) -> Config:
    return {"rewards": term("mmrl_rewards.numbers:exact")}


def unknown_reward_option(_: Path) -> Config:
    return {"rewards": term("mmrl_rewards.number:exact", args={"tolerence": 1})}


def unknown_data_option(_: Path) -> Config:
    return {"data": {"train": [counting("train", 4, colors=["red", "blue"])]}}


def no_reward_for_the_task(_: Path) -> Config:
    return {"rewards": term("mmrl_rewards.number:exact", when={"task": ["ground"]})}


def no_label(folder: Path) -> Config:
    return {"data": {"train": [jsonl(folder, rows(4))]}, "stages": [sft_stage()]}


def raising_reward(folder: Path) -> Config:
    (folder / "mine.py").write_text(REWARDS)
    return {"rewards": term("./mine.py:raises")}


def wrong_table(folder: Path) -> Config:
    row = {"fn": "./mine.py:raises", "sample": {"answer_type": "number", "value": 1}, "response": "", "expected": 1}
    (folder / "mine.json").write_text(json.dumps([{**row, "source": "as wished"}]))
    return raising_reward(folder)


def looping_table(folder: Path) -> Config:
    row = {"fn": "./mine.py:loops", "sample": {"answer_type": "number", "value": 1}, "response": "x", "expected": 1}
    (folder / "mine.json").write_text(json.dumps([{**row, "source": "as wished"}]))
    (folder / "mine.py").write_text(REWARDS)
    return {"rewards": {**term("./mine.py:loops"), "timeout_s": 2.0}}


def reward_of_right_answers(folder: Path) -> Config:
    (folder / "mine.py").write_text(REWARDS)
    return {"rewards": term("./mine.py:fragile")}


def nan_reward(folder: Path) -> Config:
    (folder / "mine.py").write_text(REWARDS)
    return {"rewards": term("./mine.py:nan")}


def same_id_twice(folder: Path) -> Config:
    return {"data": {"train": [jsonl(folder, rows(3))] * 2}}


def overlap(_: Path) -> Config:
    same = counting("train", 4)
    return {"data": {"train": [same], "test": [same]}}


def all_frozen(_: Path) -> Config:
    return {"model": {**experiment(Path())["model"], "freeze": ["vision", "projector", "language"]}}


MISTAKES: list[tuple[Callable[[Path], Config], list[str]]] = [
    (missing_model, ["model.path", "no-such-model"]),
    (other_model, ["model.path", "'bert'", "qwen2_5_vl"]),
    (wrong_column, ["rows.jsonl:1", "no column 'cuont'", "did you mean 'count'"]),
    (unknown_key, ["bad.yaml:", "stages.0.grup_size", "did you mean `group_size`?"]),
    (lone_rollout, ["bad.yaml:", "stages.0", "group_size 1", "use 2 or more"]),
    (no_samples, ["rows.jsonl", "holds no row"]),
    (lost_picture, ["1 of 4 samples", "lost.png", "data.on_bad_sample=skip"]),
    (corrupt_picture, ["1 of 4 samples", "count/train/r2", "2.png", "damaged", "data.on_bad_sample=skip"]),
    (unknown_reward, ["mmrl_rewards.number:exakt", "did you mean 'exact'"]),
    (unknown_reward_module, ["no module 'mmrl_rewards.numbers'"]),
    (unknown_reward_option, ["tolerence", "did you mean 'tolerance'"]),
    (unknown_data_option, ["mmrl_datasets.generators.scenes:counting", "'colors'", "did you mean 'colours'"]),
    (no_reward_for_the_task, ["no reward term applies", "task 'count'"]),
    (no_label, ["count/train/r0", "no label", "target_field: target"]),
    (nan_reward, ["reward 'nan'", "count/train/000000", "returned nan"]),
    (raising_reward, ["reward 'raises'", "count/train/000000", "raised ZeroDivisionError", "(mine.py:6)"]),
    (wrong_table, ["reward './mine.py:raises' contradicts its case table: expected 1.0", "source: as wished"]),
    (looping_table, ["'./mine.py:loops'", "response 'x'", "a process for rewards took more than 2 s"]),
    (
        reward_of_right_answers,
        [
            "reward 'fragile'",
            "count/train/",
            "raised ZeroDivisionError",
            "(mine.py:21)",
            "response: '<answer>347</answer>'",
        ],
    ),
    (same_id_twice, ["two samples have the id 'count/train/r0'"]),
    (overlap, ["count/train/000000", "training and the held-out data"]),
    (all_frozen, ["model: `freeze` holds every component", "leave at least one to train"]),
]


@pytest.mark.parametrize(("mistake", "named"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_a_mistake_is_refused_by_name_and_leaves_nothing(
    tmp_path: Path, here: Command, mistake: Callable[[Path], Config], named: list[str]
) -> None:
    sections = {"stages": [rl_stage()], **mistake(tmp_path)}
    done = here("train", write(experiment(tmp_path / "run", **sections), tmp_path / "bad.yaml"))
    assert_refused(done, *named)
    assert not (tmp_path / "run").exists()


def _lines_of(path: Path, *keys: str) -> str:
    """`file:line` of the first line that holds the last key, after lines that hold the others."""
    number, lines = -1, path.read_text().splitlines()
    for key in keys:
        number = next(index for index in range(number + 1, len(lines)) if f'"{key}"' in lines[index])
    return f"{path}:{number + 1}"


SETTINGS: dict[str, tuple[Callable[[Path], Config], tuple[str, ...], str]] = {
    "a huge picture": (
        lambda _: {"data": {"train": [counting("train", 4), {**counting("train", 4), "name": "b"}, BIG]}},
        ("data", "fn", "fn", "fn", "image_px"),
        "data.train.2.args.image_px: data source 'mmrl_datasets.generators.scenes:counting', option 'image_px' = "
        "1000000: must be less than or equal to 10000",
    ),
    "an unknown option": (
        lambda _: {"data": {"train": [counting("train", 4)], "test": [counting("test", 4, colors=["red"])]}},
        ("data", "test", "colors"),
        "data.test.0.args.colors: data source",
    ),
    "a wrong type": (
        lambda _: {"data": {"train": [counting("train", 4, max_count="many")]}},
        ("data", "max_count"),
        "data.train.0.args.max_count: data source",
    ),
    "a value out of range": (
        lambda _: {"data": {"train": [counting("train", 4, label_miss_prob=2.0)]}},
        ("data", "label_miss_prob"),
        "data.train.0.args.label_miss_prob: label_miss_prob=2.0 must lie between 0 and 1",
    ),
    "no such file": (
        lambda folder: {"data": {"train": [jsonl(folder, rows(4)), LOST]}},
        ("data", "fn", "fn", "path"),
        "data.train.1.args.path: ",
    ),
    "no such function": (
        lambda _: {"data": {"train": [{**counting("train", 4), "fn": "mmrl_datasets.generators.scenes:count"}]}},
        ("data", "fn"),
        "data.train.0.fn: 'mmrl_datasets.generators.scenes:count'",
    ),
    "a reward's option": (
        lambda _: {"rewards": term("mmrl_rewards.number:exact", args={"tolerence": 1})},
        ("rewards", "tolerence"),
        "rewards.terms.0.args.tolerence: reward",
    ),
    "a response beyond the context": (
        lambda _: {"stages": [rl_stage(sampling={"max_new_tokens": 5000})]},
        ("stages", "sampling", "max_new_tokens"),
        "stages.0.sampling.max_new_tokens: 5000 tokens of a response and its prompt do not fit the model's context of "
        "4096",
    ),
}
BIG = {**counting("train", 4, image_px=1_000_000), "name": "c"}
COLUMNS = {"images": "picture", "question": "question", "answer": "count"}
LOST = {
    "fn": "mmrl_datasets.readers.table:rows",
    "args": {"path": "lost.jsonl", "columns": COLUMNS, "task": "t", "answer_type": "number"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_option_is_named_by_file_line_and_key(tmp_path: Path, here: Command, name: str) -> None:
    mistake, keys, said = SETTINGS[name]
    path = write(experiment(tmp_path / "run", **{"stages": [rl_stage()], **mistake(tmp_path)}), tmp_path / "bad.yaml")
    done = here("train", path)
    assert_refused(done, f"mmrl: error: {_lines_of(path, *keys)}: {said}")
    assert not (tmp_path / "run").exists()
    if "context" not in name and "reward" not in name:
        shown = here("data", "show", path)
        assert f"{_lines_of(path, *keys)}: {said}" in shown.errors or "test" in keys


def test_an_override_that_a_function_refuses_is_named_as_such(tmp_path: Path, here: Command) -> None:
    path = write(experiment(tmp_path / "run", stages=[rl_stage()]), tmp_path / "bad.yaml")
    done = here("train", path, "data.train.0.args.image_px=1000000")
    assert_refused(done, "command line: data.train.0.args.image_px: data source", "must be less than or equal to 10000")


def test_a_prompt_that_is_too_long_is_never_cut(tmp_path: Path, here: Command) -> None:
    config = experiment(tmp_path / "run")
    config["model"]["max_prompt_tokens"] = 10
    done = here("train", write(config, tmp_path / "bad.yaml"))
    assert_refused(done, "data.train: ", "count/train/0000", "tokens exceed model.max_prompt_tokens=10")
    assert not (tmp_path / "run").exists()


def test_bad_samples_may_be_skipped_and_are_counted_and_listed(tmp_path: Path, here: Command) -> None:
    data = {**corrupt_picture(tmp_path)["data"], "on_bad_sample": "skip"}
    config = experiment(tmp_path / "run", data=data, stages=[sft_stage(steps=1, target_field="target")])
    done = here("train", write(config, tmp_path / "skip.yaml"))
    assert done.code == 0
    assert "warning: data.train: 1 of 4 samples cannot be used and are left out:\n  count/train/r2: " in done.output


def test_a_setting_that_is_hardly_meant_is_warned_of_by_file_line_and_key(tmp_path: Path, here: Command) -> None:
    loss = {"importance_ratio_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    path = write(experiment(tmp_path / "run", stages=[rl_stage(steps=1, loss=loss)]), tmp_path / "narrow.yaml")
    line = path.read_text().split('"loss"')[0].count("\n") + 1
    done = here("train", path)
    assert done.code == 0
    assert f"warning: {path}:{line}: stages.0.loss.old_logprobs: the ratio of a whole response" in done.output


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, here: Command) -> None:
    (tmp_path / "file").write_text("in the way")
    done = here("train", write(experiment(tmp_path / "file" / "run"), tmp_path / "bad.yaml"))
    assert_refused(done, str(tmp_path / "file"), "cannot be written")
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path, here: Command) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    done = here("train", write(experiment(tmp_path / "run"), tmp_path / "bad.yaml"))
    assert_refused(done, "thesis.tex", "no run of mmrl")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


FULL_DISKS = {  # from the Nth call of a function on, no file can grow past so many bytes
    "the second checkpoint's weights": ("mmrl.checkpoint.manager:write_part", 2, 60_000, "checkpoints/00-000006"),
    "the second checkpoint's optimizer": ("mmrl.checkpoint.manager:write_part", 2, 160_000, "checkpoints/00-000006"),
    "the export": ("mmrl.checkpoint:export_hf_folder", 2, 60_000, "model"),
}


@pytest.mark.parametrize("moment", FULL_DISKS)
def test_a_disk_that_fills_up_costs_nothing_but_time(tmp_path: Path, whole: Path, here: Command, moment: str) -> None:
    *strike, unsaved = FULL_DISKS[moment]
    config = write(experiment(tmp_path / "run"), tmp_path / "tiny.yaml")
    done = mmrl("train", config, strike=strike)
    assert_refused(done, f"cannot save {tmp_path}/run/{unsaved}", "earlier checkpoints are intact", "free some space")
    assert not (tmp_path / "run" / unsaved).exists()
    assert not list(tmp_path.rglob("*.partial"))
    again = here("train", config)  # the limit is gone
    assert again.code == 0
    assert "damaged" not in again.output
    assert contents(tmp_path / "run") == contents(whole)


def test_a_mistake_in_a_begun_run_leaves_it_unchanged(tmp_path: Path, whole: Path, here: Command) -> None:
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    done = here("train", write(experiment(run_dir, **lone_rollout(tmp_path)), tmp_path / "bad.yaml"))
    assert done.code == 2
    assert contents(run_dir) == contents(whole)


def assert_refused(done: Done, *named: str) -> None:
    assert done.code == 2, done
    for word in named:
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
def test_a_run_directory_that_is_deleted_ends_the_run(tmp_path: Path, here: Command, how: str, every: int) -> None:
    (tmp_path / "mine.py").write_text(DELETING)
    config = experiment(tmp_path / "run", stages=[rl_stage(steps=4)], checkpoints={"every": every})
    callbacks = [{"fn": "./mine.py:make", "args": {"how": how}}]
    done = here("train", write({**config, "callbacks": callbacks}, tmp_path / "tiny.yaml"))
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
def test_no_control_character_of_the_data_reaches_the_terminal(
    tmp_path: Path, here: Command, arguments: list[str], code: int
) -> None:
    given = [{**row, "id": f"{HOSTILE}{row['id']}", "question": f"How many?{HOSTILE}"} for row in rows(6)]
    stages = [rl_stage(steps=1, prompts_per_step=2, group_size=2)]
    data = {"train": [jsonl(tmp_path, given)]}
    files = {"CONFIG": write(experiment(tmp_path / "run", data=data, stages=stages), tmp_path / "config.yaml")}
    (tmp_path / "mine.py").write_text(REWARDS)
    rewards = {"rewards": term("./mine.py:raises", when={"task": ["count", HOSTILE]})}
    files["TERM"] = write(experiment(tmp_path / "run", data=data, stages=stages, **rewards), tmp_path / "term.yaml")
    lost = tmp_path / f"lost{HOSTILE[:-1]}.jsonl"
    lost.write_text(
        (tmp_path / "rows.jsonl").read_text() + json.dumps({**given[0], "id": HOSTILE, "picture": "no.png"})
    )
    data = {"train": [{**data["train"][0], "args": {**data["train"][0]["args"], "path": lost.name}}]}
    files["LOST"] = write(experiment(tmp_path / "run", data=data, stages=stages), tmp_path / "lost.yaml")
    for name, right in (("VERDICTS", True), ("MORE", False)):
        outcome = next(iter(ResponseOutcome))
        verdict = Verdict(id=HOSTILE, outcome=outcome, rule="tags", strict=right, subsets={HOSTILE: (HOSTILE,)})
        files[name] = tmp_path / name
        files[name].write_text(json.dumps(verdict.to_row("3")))
    done = here(*[files.get(word, word) for word in arguments])
    assert done.code == code, done.errors
    printed = done.output + done.errors
    assert "\\u001b" in printed or "\\x1b" in printed
    assert {character for character in printed if unicodedata.category(character) == "Cc"} <= {"\n", "\t"}
