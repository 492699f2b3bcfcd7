"""The console shows what a long step is doing: a live line on a terminal, a line a minute in a pipe."""

import re
import time
from threading import active_count

from consoles import piped_console, terminal_console, without_escapes
from waiting import wait_for

from mmrl.log.console import Console, describe_activity
from mmrl.training.callbacks import StepTimer
from mmrl.utils.activity import Activity


def activity_since(seconds: float, name: str, done: int = 0, total: int = 0) -> Activity:
    activity = Activity(name=name, started_at=time.monotonic() - seconds)
    if total:
        activity.begin_count(name, total)
        activity.advance(name, done)
    return activity


def test_activity_is_described_with_its_count_and_the_time_left():
    generating = activity_since(30, "rollout", 128, 512)
    assert describe_activity(generating, 1) == "generating responses 128 of 512, 0:01:30 left"
    assert describe_activity(activity_since(30, "rollout", 12, 512), 1) == "generating responses 12 of 512"
    assert describe_activity(activity_since(30, "learn", 8, 8), 1) == "learning from micro-batches 8 of 8"
    assert describe_activity(activity_since(30, "rollout", 0, 512), 1) == "generating responses 0 of 512"
    assert describe_activity(activity_since(30, "score"), 1) == "scoring"
    assert describe_activity(activity_since(30, "answering \x1b[31mmine"), 1) == "answering \\u001b[31mmine"


def test_short_activity_and_none_are_not_described():
    assert describe_activity(activity_since(0.5, "rollout", 1, 8), 1) == ""
    assert describe_activity(Activity(), 1) == ""


def test_count_of_another_activity_is_not_shown():
    activity = activity_since(30, "learn", 2, 4)
    activity.begin_count("rollout", 100)  # the thread of asynchronous rollouts
    activity.advance("rollout", 3)
    assert describe_activity(activity, 1).startswith("learning from micro-batches 2 of 4, ")


def test_timer_names_the_activity_and_restores_the_outer_one_when_a_block_fails():
    activity = Activity()
    timer = StepTimer(activity)
    seen = []
    try:
        with timer.time("learn"):
            seen.append(activity.name)
            with activity.during("sync"):
                seen.append(activity.name)
            seen.append(activity.name)
            raise ZeroDivisionError
    except ZeroDivisionError:
        seen.append(activity.name)
    assert seen == ["learn", "sync", "learn", ""]


def test_terminal_shows_the_activity_beneath_the_bar_of_the_stage(monkeypatch):
    monkeypatch.setattr("mmrl.log.console._MIN_ACTIVITY_S", 0.0)
    console, out = terminal_console()
    console.start_stage("rl", 20)
    console.show_step(7, {"reward/mean": 0.25}, {})
    with console.activity.during("rollout"):
        console.activity.begin_count("rollout", 64)
        console.activity.advance("rollout", 16)
        console._bar.refresh()  # as it does by itself four times a second
    console.end_stage()
    text = without_escapes(out)
    assert "7/20" in text
    assert "reward 0.250" in text
    assert "\n  generating responses 16 of 64, 0:00:00 left" in text
    assert "generating" not in text.rpartition("7/20")[2]  # the display that stays when the stage is over


def test_terminal_shows_the_time_left_of_a_task_outside_a_stage():
    console, out = terminal_console()
    for _ in console.track("opening media", range(8), 8):
        time.sleep(0.12)  # rich measures the speed ten times a second
    text = without_escapes(out)
    assert "opening media" in text and re.search(r"8/8  0:\d\d:\d\d", text)
    assert " left" in text


def test_terminal_shows_no_count_of_a_task_of_unknown_length():
    console, out = terminal_console()
    console.wait_for("loading the model", lambda: time.sleep(0.3))
    text = without_escapes(out)
    assert "loading the model" in text and "0:00:00" in text
    assert "?" not in text and " left" not in text


def test_pipe_gets_a_line_about_an_activity_that_lasts(monkeypatch):
    monkeypatch.setattr("mmrl.log.console._MAX_SILENCE_S", 0.02)
    console, out = piped_console()
    console.start_stage("rl", 20)
    time.sleep(0.1)
    assert out.getvalue() == ""  # nothing is going on
    with console.activity.during("learn"):
        console.activity.begin_count("learn", 8)
        line = r"rl: learning from micro-batches 0 of 8, \d+ s so far\n"
        wait_for(lambda: re.search(line, out.getvalue()))
    console.end_stage()
    length = len(out.getvalue())
    time.sleep(0.1)
    assert len(out.getvalue()) == length


def test_pipe_gets_no_line_about_activities_of_seconds():
    console, out = piped_console()
    console.start_stage("rl", 20)
    with console.activity.during("rollout"):
        assert console._describe_long_activity("rl") == ""
    console.activity = activity_since(61, "rollout", 16, 64)
    assert console._describe_long_activity("rl") == "rl: generating responses 16 of 64, 0:03:03 left, 61 s so far"
    console.end_stage()
    assert out.getvalue() == ""


def test_other_ranks_print_nothing_and_start_no_thread(capsys):
    threads = active_count()
    console = Console(quiet=True)
    console.info("a line")
    console.warn("a line")
    console.start_stage("rl", 20)
    console.show_step(1, {"reward/mean": 0.5}, {})
    assert list(console.track("opening media", range(3), 3)) == [0, 1, 2]
    assert active_count() == threads
    console.end_stage()
    console.print_table("a table", ("column",), [("cell",)])
    assert capsys.readouterr() == ("", "")
