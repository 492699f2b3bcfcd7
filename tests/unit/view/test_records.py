"""Run folders in any state: whatever cannot be read is a notice, never an error."""

import json
import shutil

import pytest
from view_runs import make_run, rollout_row, write_lines

from mmrl.view.bundle import to_json
from mmrl.view.media import PictureStore
from mmrl.view.records import make_key, parse_object
from mmrl.view.run_documents import RunDocuments, build_all_documents


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "small")


def build_everything(path):
    run = RunDocuments("r0", path, PictureStore(with_media=False), ())
    documents = dict(build_all_documents([run]))
    return run.build_entry(), documents


def test_a_whole_run_has_no_notices_and_its_steps_in_order(run):
    entry, documents = build_everything(run)
    assert entry["notices"] == []
    labels = [step["label"] for step in entry["steps"]]
    assert labels == ["test before", "rl 2", "rl 2 validation", "test after"]
    assert [step["kind"] for step in entry["steps"]] == ["test", "train", "validation", "test"]
    assert entry["steps"][1] | {"groups": 3, "rollouts": 6, "tokens": "r0/rl-000002.tokens"} == entry["steps"][1]
    assert entry["samples"] == {"find/t": [0, 3]}
    assert {step["key"] for step in entry["steps"]} < documents.keys()
    for document in documents.values():
        json.loads(to_json(document))


def test_facts_stages_and_events_come_from_the_files(run):
    entry, _ = build_everything(run)
    assert ["commit", "ab12cd34ef (changed)"] in entry["facts"]
    assert entry["stages"][1] == {"name": "rl", "kind": "rl", "steps": 4}
    expected = {"stage": "rl", "step": 1, "name": "min_entropy", "message": "low", "begin": 1, "end": 2}
    assert entry["events"] == [expected]


def test_an_event_without_an_end_is_still_there(run):
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text(lines[0])
    assert build_everything(run)[0]["events"][0]["end"] is None


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (None, "unknown"),
        ({"state": "finished"}, "finished"),
        ({"state": "failed"}, "failed"),
        ({"state": "running", "updated": "2020-01-01T00:00:00+00:00", "heartbeat_s": 10}, "dead"),
        ({"state": "running", "updated": "9999-01-01T00:00:00+00:00", "heartbeat_s": 10}, "running"),
        ({"state": "running", "updated": 3, "heartbeat_s": 10}, "unknown"),
        ({"state": ["running"]}, "unknown"),
    ],
)
def test_the_state_is_that_of_the_status_file_unless_its_heartbeat_stopped(run, status, state):
    if status is not None:
        (run / "status.json").write_text(json.dumps(status))
    assert build_everything(run)[0]["state"] == state


def test_a_half_written_last_line_is_left_out_without_a_notice(run):
    for name in ("metrics.jsonl", "rollouts/rl-000002.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"stage": "rl", "st')
    entry, documents = build_everything(run)
    assert entry["notices"] == []
    assert entry["steps"][1]["rollouts"] == 6
    assert len(documents["r0/metrics"]["step"]) == 4


def test_damaged_lines_are_counted_in_a_notice_and_the_others_shown(run):
    file = run / "rollouts/rl-000002.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    hostile = ["null\n", "not json\n", "[" * 100_000 + "\n", json.dumps({**rollout_row(group=9), "response": 7}) + "\n"]
    file.write_text("".join([lines[0], *hostile, *lines[1:]]))
    entry, documents = build_everything(run)
    assert len(documents["r0/rl-000002"]["groups"][0]["rollouts"]) == 4
    assert any("rollouts/rl-000002.jsonl" in notice for notice in entry["notices"])


@pytest.mark.parametrize("key", sorted(rollout_row()))
def test_a_record_with_a_wrong_value_of_any_key_is_read_without_an_error(tmp_path, key):
    values = [None, 3, "x", [], {}, [[1]], {"a": []}, 10**400, True]
    rows = [rollout_row(), *({**rollout_row(group=1 + number), key: value} for number, value in enumerate(values))]
    write_lines(tmp_path / "run/rollouts/rl-000001.jsonl", rows)
    _, documents = build_everything(tmp_path / "run")
    json.dumps(documents, allow_nan=False)
    assert documents["r0/rl-000001"]["groups"]


def test_a_line_of_a_megabyte_and_numbers_that_are_not_finite_are_shown(tmp_path):
    row = rollout_row(response="a" * 1_000_000, total=float("nan"), advantage=float("-inf"))
    write_lines(tmp_path / "run/rollouts/rl-000001.jsonl", [row])
    _, documents = build_everything(tmp_path / "run")
    rollout = documents["r0/rl-000001"]["groups"][0]["rollouts"][0]
    assert len(rollout["response"]) == 1_000_000
    assert (rollout["total"], rollout["advantage"]) == (None, None)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "manifest.json", "rollouts", "data", "benchmarks"])
def test_a_run_that_is_half_deleted_is_shown_with_a_notice(run, name):
    shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()
    entry, _ = build_everything(run)
    if name.endswith((".yaml", ".json", ".jsonl")):
        assert any(name in notice or "older version" in notice for notice in entry["notices"])


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "status.json", "summary.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1, 2", b"3", b"PK\x03\x04 cut off"])
def test_a_damaged_file_is_a_notice(run, name, content):
    (run / name).write_bytes(content)
    entry, documents = build_everything(run)
    assert any(notice.startswith(name) for notice in entry["notices"])
    for document in documents.values():
        json.loads(to_json(document))


def test_records_of_an_older_version_are_shown_with_a_notice(tmp_path):
    old = {"sample": "a", "task": "find", "question": "<image>Where?", "response": "there", "answer": [1, 2, 3, 4]}
    old |= {"target": [1, 2, 3, 4], "frame": "px_original", "finish": "eos", "media": ["data/a.png"]}
    old |= {"segments": [{"author": "policy", "n": 3}], "terms": {"iou": {"value": 1.0, "reason": "same"}}}
    rows = [{**old, "rollout": index, "total": 1.0, "advantage": 0.5} for index in (0, 1, 0, 1)]
    rows.append({**old, "rollout": 2})
    write_lines(tmp_path / "run/rollouts/rl-000001.jsonl", rows)
    (tmp_path / "run/manifest.json").write_text("{}")
    entry, documents = build_everything(tmp_path / "run")
    assert any("older version" in notice for notice in entry["notices"])
    groups = documents["r0/rl-000001"]["groups"]
    assert [len(group["rollouts"]) for group in groups] == [2, 3]
    rollout = groups[1]["rollouts"][2]
    assert rollout["segments"][0]["chars"] == [0, 5]
    assert rollout["marks"] == []
    assert groups[0]["media"][0]["problem"] == "its record is damaged"


def test_keys_are_plain_and_differ_where_names_differ():
    assert make_key("rl-000010") == "rl-000010"
    assert make_key("a b") != make_key("a_b")
    assert make_key("../é").isascii()


def test_json_numbers_that_are_not_finite_become_none():
    assert parse_object(b'{"a": [NaN, Infinity, -Infinity, 1e999, 1.5]}') == {"a": [None, None, None, None, 1.5]}
