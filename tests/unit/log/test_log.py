"""Logging: files that survive a kill, and a console for terminal and pipe."""

import logging
import math
import os
import re
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from consoles import piped_console, terminal_console, without_escapes
from factories import make_config
from json_lines import read_json_lines
from waiting import wait_for

from mmrl.log.library_messages import log_library_messages
from mmrl.log.logger import MetricsFile, RunLogger
from mmrl.log.run_dir import RunDir
from mmrl.types import TrainingState, UserError
from mmrl.utils.files import json_line, write_atomically

NO_TEXTS = SimpleNamespace(render_prompt=lambda prompt: "", find_token_ends=lambda rollout: None)


# Files


def test_json_lines_are_strict_stable_and_readable():
    assert json_line({"b": 0.1 + 0.2, "a": 1e-07}) == '{"b": 0.30000000000000004, "a": 1e-07}\n'
    assert json_line({"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}]}) == (
        '{"a": null, "b": [null, {"c": null}]}\n'
    )
    assert json_line({"text": "数é", "path": Path("x/y")}) == '{"text": "数é", "path": "x/y"}\n'


def test_atomic_write_replaces_the_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "one")
    write_atomically(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["a.json"]


def test_failed_write_names_the_path_and_keeps_what_was_there(tmp_path):
    path = tmp_path / "folder"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match="folder cannot be written: Is a directory"):
        write_atomically(path, "text")
    assert os.listdir(tmp_path) == ["folder"]
    assert (path / "inside").is_dir()


FULL_DISK = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
from mmrl.log.logger import MetricsFile
from mmrl.utils.files import write_atomically
from mmrl.types import UserError

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
folder = Path(sys.argv[1])
metrics = MetricsFile(folder / "m.jsonl")
for attempt in (lambda: [metrics.append({"step": step, "x": "y" * 20}) for step in range(9)],
                lambda: write_atomically(folder / "s.json", "x" * 200)):
    try:
        attempt()
    except UserError as error:
        print(error)
"""


def test_full_disk_is_reported_and_leaves_complete_lines(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=False)
    messages = done.stdout.splitlines()
    assert len(messages) == 2, done.stderr
    assert "m.jsonl cannot be written: File too large" in messages[0]
    assert "s.json cannot be written: File too large" in messages[1]
    assert os.listdir(tmp_path) == ["m.jsonl"]
    assert (tmp_path / "m.jsonl").stat().st_size == 100
    MetricsFile(tmp_path / "m.jsonl").close()
    assert [line["step"] for line in read_json_lines(tmp_path / "m.jsonl")] == [0, 1]


# Metrics


def test_metrics_cut_back_to_a_checkpoint_equal_those_of_an_uninterrupted_run(tmp_path):
    uninterrupted, killed = tmp_path / "uninterrupted.jsonl", tmp_path / "killed.jsonl"
    records = [{"step": step, "x": step / 7} for step in range(10)]

    def append(path, some_records):
        file = MetricsFile(path)
        for record in some_records:
            file.append(record)
        return file

    append(uninterrupted, records)
    saved = append(killed, records[:4]).position()
    append(killed, records[4:7])
    with killed.open("ab") as incomplete:
        incomplete.write(b'{"step": 7, "x"')
    file = MetricsFile(killed)
    assert len(read_json_lines(killed)) == 7
    file.truncate(saved)
    assert append(killed, records[4:]).position() == uninterrupted.stat().st_size
    assert killed.read_bytes() == uninterrupted.read_bytes()


@pytest.mark.parametrize("content", [b"", b'{"torn', b'{"a": 1}\n', b'{"a": 1}\n{"b'])
def test_incomplete_last_line_is_cut_when_the_file_is_opened(tmp_path, content):
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    MetricsFile(path).append({"c": 2})
    assert read_json_lines(path)[-1] == {"c": 2}
    assert len(read_json_lines(path)) == 1 + content.count(b"\n")


def test_position_at_which_no_line_ends_is_refused(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl")
    file.append({"a": 1})
    for position in (3, 100):
        with pytest.raises(UserError, match=rf"m\.jsonl was changed .* byte {position} of 9"):
            file.truncate(position)
    file.truncate(0)
    assert file.position() == 0


# Messages of libraries


def test_library_warnings_go_to_the_log_once_and_errors_to_the_terminal_too(tmp_path, capsys):
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
    said = ("FutureWarning: out of date", "some.library: careful", "DeepSpeed: slow kernel", "transformers: no memory")
    assert [text.count(message) for message in said] == [1] * 4
    assert text.count("rank 3") == 4
    assert known.handlers == handlers
    assert "addHandler" not in vars(late)


def test_no_log_is_written_without_messages_of_libraries(tmp_path):
    with log_library_messages(tmp_path / "log.txt"):
        pass
    assert not list(tmp_path.iterdir())


# Console


def test_pipe_gets_the_first_the_last_and_every_tenth_part_of_the_steps():
    console, out = piped_console()
    console.start_stage("rl", 200)
    for step in range(1, 201):
        console.show_step(step, {"reward/mean": 0.5, "groups/nonzero_advantage_frac": 0.625, "learner/loss": 0.01}, {})
    console.end_stage()
    lines = out.getvalue().splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, *range(20, 201, 20)]
    assert lines[0] == "rl   1/200  reward 0.500  informative 62%  loss 0.0100"
    assert lines[1].startswith("rl  20/200") and lines[1].endswith(" left")  # the first steps do not predict the rest
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_stage_that_ends_early_shows_its_last_step():
    console, out = piped_console()
    console.start_stage("cold", 1000, 30)
    for step in range(31, 58):
        console.show_step(step, {}, {})
    console.end_stage()
    lines = [line.split(" 0:")[0].rstrip() for line in out.getvalue().splitlines()]
    assert lines == ["cold   31/1000", "cold   57/1000"]


def test_messages_and_tables_stay_as_written_in_a_pipe():
    console, out = piped_console()
    message = "[bold]not markup[/] :smile: " + "long " * 60
    console.info(message)
    console.warn("3 samples left out")
    console.print_table("held out", ["task", "before", "after"], [["count [x]", "0.10", "0.55"]])
    text = out.getvalue()
    for words in (f"{message}\n", "warning: 3 samples left out\n", "held out", "count [x]"):
        assert words in text
    assert "\x1b" not in text


def test_terminal_gets_a_bar_with_metrics_beneath():
    console, out = terminal_console()
    console.start_stage("rl", 20)
    console.show_step(7, {"reward/mean": 0.25}, {"rollout/tokens_per_s": 912.0})
    console.info("a word in between")
    console.end_stage()
    text = without_escapes(out)
    assert "7/20" in text and "reward 0.250  tokens/s 912" in text and "a word in between" in text


def test_task_within_a_stage_has_a_bar_beneath_that_of_the_stage():
    console, out = terminal_console()
    console.start_stage("rl", 20)
    for _ in console.track("held-out samples", range(3), 3):
        console._bar.refresh()  # as it does by itself four times a second
    console.end_stage()
    text = without_escapes(out)
    both = re.search(r"rl +\S* +0/20 .*\nheld-out samples +\S* +\d/3", text)
    assert both and "held-out" not in text.rpartition("\r")[2]


def test_pipe_shows_the_progress_of_a_task_that_takes_long(monkeypatch):
    monkeypatch.setattr("mmrl.log.console._FIRST_REMINDER_S", 0.02)
    console, out = piped_console()
    tracked = console.track("trying rewards", range(3), 3)
    assert [next(tracked), next(tracked)] == [0, 1]
    wait_for(lambda: re.search(r"trying rewards \.\.\. 1 of 3, \d+ s\n", out.getvalue()))
    assert list(tracked) == [2]
    is_shown = partial(wait_for, lambda: re.search(r"loading the model \.\.\. \d+ s\n", out.getvalue()))
    console.wait_for("loading the model", is_shown)
    length = len(out.getvalue())
    time.sleep(0.1)
    assert len(out.getvalue()) == length


# Logger


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.claim(make_config(), pytest.fail)
    return run_dir


def test_logger_separates_reproducible_metrics_from_times(run_dir):
    console, out = piped_console()
    logger = RunLogger(run_dir, console, NO_TEXTS)
    with logger.log_stage("rl", 4):
        for step in range(1, 5):
            state = TrainingState(step=step)
            logger.log(state, {"reward/mean": 0.5, "b": 1.0, "a": float("nan")}, {"rollout/tokens_per_s": 12.0})
        logger.log_metrics(TrainingState(step=4), {"validation/reward": 0.75})
    logger.log_metrics(TrainingState(stage_index=1), {"test/count": 1.0})
    logger.close()
    metrics = read_json_lines(run_dir.metrics)
    assert metrics[0] == {"stage": "rl", "step": 1, "a": None, "b": 1.0, "reward/mean": 0.5}
    assert metrics[-2:] == [
        {"stage": "rl", "step": 4, "validation/reward": 0.75},
        {"stage": None, "step": 0, "test/count": 1.0},
    ]
    assert read_json_lines(run_dir.timings)[0] == {"stage": "rl", "step": 1, "rollout/tokens_per_s": 12.0}
    assert "tokens/s 12" in out.getvalue()


def test_resumed_logger_cuts_events_after_the_checkpoint_and_reads_the_steps_before_it(run_dir):
    console, _ = piped_console()
    logger = RunLogger(run_dir, console, NO_TEXTS)
    with logger.log_stage("rl", 4):
        for step in (1, 2):
            state = TrainingState(step=step, version=40 + step)
            logger.log(state, {"learner/lr": 0.1 * step, "a": float("nan")}, {})
            logger.log_metrics(state, {"validation/mean": 0.5})
            logger.log_event(state, "min_entropy", f"step {step}: too certain")
    logger.resume_from(TrainingState(step=1, version=41, metrics_bytes=run_dir.metrics.stat().st_size))
    [event] = read_json_lines(run_dir.events)
    place = {"stage": "rl", "step": 1, "version": 41}
    problem = {"event": "health", "name": "min_entropy", "state": "begin", "message": "step 1: too certain"}
    assert event == {**place, **problem}
    steps = list(logger.step_metrics("rl"))
    assert [(step, metrics["learner/lr"]) for step, metrics in steps] == [(1, 0.1), (2, 0.2)]
    assert math.isnan(steps[0][1]["a"]) and "validation/mean" not in steps[0][1]
    assert list(logger.step_metrics("cold")) == []


def test_display_is_closed_when_a_stage_fails(run_dir):
    console, out = piped_console()
    logger = RunLogger(run_dir, console, NO_TEXTS)
    with pytest.raises(ZeroDivisionError), logger.log_stage("rl", 100):
        for step in (1, 2):
            logger.log(TrainingState(step=step), {}, {})
        raise ZeroDivisionError
    assert "rl   2/100" in out.getvalue()
    with logger.log_stage("next", 1):
        logger.log(TrainingState(step=1), {}, {})
    assert read_json_lines(run_dir.metrics)[-1]["stage"] == "next"
