"""A tracker gets each point exactly once, whatever is killed and wherever the run resumes."""

import json
import signal

import pytest
import tracked_runs
from follow_and_die import follow_in_fork
from json_lines import read_json_lines

from mmrl.log.trackers.backends import TRACKERS
from mmrl.log.trackers.process import Mark, count_unsent

LINES = tracked_runs.expected_lines()
POINTS = tracked_runs.expected_points(LINES)


@pytest.fixture
def run_dir(tmp_path):
    return tracked_runs.make_run(tmp_path)


@pytest.fixture
def tracker(tmp_path):
    return tracked_runs.FakeTracker(tmp_path / "points")


def test_every_line_becomes_a_point_of_a_step_that_never_falls(run_dir, tracker):
    follower = tracked_runs.fake_follower(run_dir, tracker)
    for line in LINES:
        tracked_runs.append(run_dir, [line])
        follower.send_new()
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS
    rows = read_json_lines(tracker.path)
    steps = [row[0] for row in rows]
    assert steps == sorted(steps)
    assert [5, {"learner/lr": 0.1, "reward/mean": 1 / 7, "stage/index": 2, "stage/step": 1, "time/step_s": 1}] in rows
    assert not count_unsent(run_dir, "fake")


@pytest.mark.parametrize("at_once", [True, False])
def test_measurements_before_the_steps_of_a_later_stage_have_a_step_of_their_own(run_dir, tracker, at_once):
    lines = [
        {"stage": "first", "step": 0, "logprob_check/diff_mean": 0.1},
        {"stage": "first", "step": 1, "learner/lr": 0.1, "reward/mean": 0.25, "logprob_check/diff_mean": 0.2},
        {"stage": "again", "step": 0, "reward/mean": 0.5},  # of a sample stage
        {"stage": "second", "step": 0, "logprob_check/diff_mean": 0.3},
        {"stage": "second", "step": 1, "learner/lr": 0.1, "reward/mean": 0.75},
        {"stage": None, "step": 0, "test/mean": 0.9},
    ]
    follower = tracked_runs.fake_follower(run_dir, tracker)
    for line in lines:
        tracked_runs.append(run_dir, [line])
        if not at_once:
            follower.send_new()
    follower.send_new()
    sent = {}
    for step, values in read_json_lines(tracker.path):
        sent.setdefault(step, {}).update(values)
    assert [values.get("reward/mean") for values in sent.values()] == [None, 0.25, 0.5, None, 0.75]
    assert [values.get("logprob_check/diff_mean") for values in sent.values()] == [0.1, 0.2, None, 0.3, None]
    places = [(values["stage/index"], values["stage/step"]) for values in sent.values()]
    assert places == [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert list(sent) == [0, 1, 2, 3, 4] and sent[4]["test/mean"] == 0.9


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 4))
def test_a_follower_killed_around_a_batch_doubles_and_loses_no_point(run_dir, tmp_path, moment, number):
    points = tmp_path / "points"
    tracked_runs.append(run_dir, LINES[:9])
    assert follow_in_fork(run_dir, "tensorboard", moment, number, points) == -signal.SIGKILL
    # The run itself was killed with it, and resumes from a checkpoint after its 4th line.
    tracked_runs.resume_at(run_dir, 4)
    tracked_runs.append(run_dir, LINES[4:])
    assert follow_in_fork(run_dir, "tensorboard", "end", 1, points) == 0
    assert tracked_runs.ours(tracked_runs.read_fake(points)) == POINTS


def test_a_resumed_run_sends_nothing_up_to_its_mark(run_dir, tracker):
    tracked_runs.append(run_dir, LINES[:9])
    tracked_runs.fake_follower(run_dir, tracker).send_new()
    before = tracked_runs.read_fake(tracker.path)
    tracked_runs.resume_at(run_dir, 3)
    follower = tracked_runs.fake_follower(run_dir, tracker)
    for line in LINES[3:9]:
        tracked_runs.append(run_dir, [line])
        follower.send_new()
        assert tracked_runs.read_fake(tracker.path) == before
    tracked_runs.append(run_dir, LINES[9:])
    follower.send_new()
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS


def test_a_tracker_without_a_list_of_steps_resumes_at_the_saved_mark(run_dir, tracker, monkeypatch):
    monkeypatch.setattr(tracked_runs.FakeTracker, "begin", lambda self, step, sent: sent)
    tracked_runs.append(run_dir, LINES[:4])  # the last is a validation at the same step as the line before
    tracked_runs.fake_follower(run_dir, tracker).send_new()
    tracked_runs.append(run_dir, LINES[4:])
    tracked_runs.fake_follower(run_dir, tracker).send_new()
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS


def test_a_lengthened_run_continues_behind_its_end(run_dir, tracker):
    tracked_runs.append(run_dir, LINES)
    tracked_runs.fake_follower(run_dir, tracker).finish("finished")
    # The line after the last stage goes, as it is written again at the new end.
    tracked_runs.resume_at(run_dir, len(LINES) - 1)
    longer = [{"stage": "rl", "step": step, "learner/lr": 0.5, "reward/mean": 0.5} for step in (7, 8)]
    tracked_runs.append(run_dir, [*longer, {"stage": None, "step": 0, "test/mean": 0.95}])
    tracked_runs.fake_follower(run_dir, tracker).finish("finished")
    sent = tracked_runs.ours(tracked_runs.read_fake(tracker.path))
    assert set(sent.values()) == {1}
    assert {key for key in sent if key[0] > 10} == {
        *((step, name) for step in (11, 12) for name in ("learner/lr", "reward/mean", "time/step_s")),
        (12, "test/mean"),
    }


def test_the_times_of_a_repeated_step_are_sent_once_and_the_last_of_them(run_dir, tracker):
    tracked_runs.append(run_dir, LINES[:9])
    tracked_runs.resume_at(run_dir, 4)
    tracked_runs.append(run_dir, LINES[4:])
    with run_dir.timings.open("a") as file:
        file.write(json.dumps({"stage": "rl", "step": 6, "time/step_s": 7.0}) + "\n")
    tracked_runs.fake_follower(run_dir, tracker).send_new()
    rows = read_json_lines(tracker.path)
    assert [row[1]["time/step_s"] for row in rows if row[0] == 10 and "time/step_s" in row[1]] == [7.0]
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS


def test_times_of_steps_that_are_done_again_wait_for_them(run_dir, tracker):
    tracked_runs.append(run_dir, LINES[:9])
    tracked_runs.resume_at(run_dir, 4)  # timings.jsonl keeps the lines of later steps
    follower = tracked_runs.fake_follower(run_dir, tracker)
    follower.send_new()
    assert max(step for step, _ in tracked_runs.read_fake(tracker.path)) == 2
    tracked_runs.append(run_dir, LINES[4:])
    follower.send_new()
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS


def test_a_run_has_its_id_before_the_tracker_does(run_dir, monkeypatch):
    ids = []

    def die(run):
        ids.append(run.id)
        raise ConnectionError

    monkeypatch.setitem(TRACKERS, "fake", die)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            tracked_runs.make_follower(run_dir, "fake").send_new()
    assert ids[0] == ids[1]


def test_after_a_failure_the_rest_is_sent_once(run_dir, tracker, monkeypatch):
    follower, log = tracked_runs.fake_follower(run_dir, tracker), tracker.log
    tracked_runs.append(run_dir, LINES[:2])
    follower.send_new()
    tracked_runs.append(run_dir, LINES[2:])

    def fail_in_the_middle(rows):
        log(rows[:3])
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(tracker, "log", fail_in_the_middle)
    with pytest.raises(ConnectionError):
        follower.send_new()
    assert count_unsent(run_dir, "fake") == 9  # of 11, two were sent
    monkeypatch.setattr(tracker, "log", log)
    follower.send_new()
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS
    assert not count_unsent(run_dir, "fake")


def test_the_end_of_a_run_is_sent_with_its_summary(run_dir, tracker, tmp_path):
    tracked_runs.append(run_dir, LINES)
    run_dir.summary.write_text(json.dumps({"name": "x", "mean_rise": 0.4, "tasks": [{"task": "a", "after": 0.9}]}))
    tracked_runs.fake_follower(run_dir, tracker).finish("finished")
    end = json.loads((tmp_path / "points.end").read_text())
    assert end == ["finished", {"summary/mean_rise": 0.4, "summary/tasks.0.after": 0.9}]


def test_pictures_are_sent_once_and_after_their_step(run_dir, tracker, tmp_path):
    follower = tracked_runs.fake_follower(run_dir, tracker)
    tracked_runs.write_rollouts(run_dir, 2)
    tracked_runs.append(run_dir, LINES[:3])
    follower.send_new()
    assert not (tmp_path / "points.pictures").exists()  # no line of that step yet
    tracked_runs.append(run_dir, LINES[3:])
    follower.send_new()
    follower.send_new()
    tracked_runs.fake_follower(run_dir, tracker).send_new()
    assert (tmp_path / "points.pictures").read_text() == "6 2\n"  # the first rollout of each of two groups


def test_the_mark_survives_in_a_file_of_its_own(run_dir, tracker):
    tracked_runs.append(run_dir, LINES)
    tracked_runs.fake_follower(run_dir, tracker).send_new()
    mark = Mark.read(run_dir.trackers / "fake.json")
    assert mark.step == 10
    assert {(10, "test/mean"), (10, "time/step_s"), (10, "pictures")} <= mark.sent
    assert list(run_dir.trackers.iterdir()) == [run_dir.trackers / "fake.json"]


def test_a_line_that_is_being_written_waits_for_its_end(run_dir, tracker):
    tracked_runs.append(run_dir, LINES)
    content = run_dir.metrics.read_bytes()
    run_dir.metrics.write_bytes(content[:-9])
    follower = tracked_runs.fake_follower(run_dir, tracker)
    follower.send_new()
    assert (10, "test/mean") not in tracked_runs.read_fake(tracker.path)
    run_dir.metrics.write_bytes(content)
    follower.send_new()
    assert tracked_runs.ours(tracked_runs.read_fake(tracker.path)) == POINTS


def test_a_secret_in_a_setting_is_not_sent(tmp_path, monkeypatch):
    sent = []
    run_dir = tracked_runs.make_run(
        tmp_path, callbacks='[{fn: "c:make", args: {url: "https://me:hush@host/m", api_key: hush}}]'
    )
    monkeypatch.setitem(TRACKERS, "fake", lambda run: sent.append(run) or tracked_runs.FakeTracker(tmp_path / "points"))
    tracked_runs.make_follower(run_dir, "fake").send_new()
    assert sent[0].config["callbacks.0.args.url"] == "https://••••@host/m"
    assert sent[0].config["callbacks.0.args.api_key"] == "••••"
    assert sent[0].config["logging.rollouts.tokens"] == "True"
    assert sent[0].config["manifest.mmrl"] == "0.2.0"
