"""Pictures of kept rollouts: boxes where the resize map puts them, and nothing from outside the run's folders."""

import json

import pytest
from PIL import Image
from tracked_runs import append, expected_lines, make_run, write_rollouts

from mmrl.config import load_config
from mmrl.trackers.pictures import PictureReader, draw_boxes
from mmrl.trackers.run_lines import RunLines


@pytest.fixture
def run_dir(tmp_path):
    made = make_run(tmp_path / "inside")
    append(made, expected_lines())
    write_rollouts(made, 2)
    return made


def read(run_dir, sent=()):
    lines = RunLines(run_dir)
    lines.read_new()
    reader = PictureReader(load_config(run_dir.config).config, run_dir.path, run_dir)
    return list(reader.read_new(dict.fromkeys(sent, 0), lines))


def change(run_dir, **values):
    """Change keys of the recorded rollouts, and of their medium."""
    path = run_dir.rollouts / "rl-000002.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        for key, value in values.items():
            (record["media"][0] if key in record["media"][0] else record)[key] = value
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_boxes_lie_where_the_resize_map_puts_them(run_dir):
    [(name, step, pictures)] = read(run_dir)
    assert (name, step, len(pictures)) == ("rl-000002.jsonl", 6, 2)
    gold, predicted = pictures[0].boxes
    # Both are 10 x 5 pixels: of the file, 40 x 20, and of what the model saw, 20 x 10.
    assert (gold.is_gold, gold.corners) == (True, (0.0, 0.0, 0.25, 0.25))
    assert (predicted.is_gold, predicted.corners) == (False, (0.0, 0.0, 0.5, 0.5))
    drawn = draw_boxes(pictures[0])
    assert drawn.getpixel((20, 5)) == (230, 97, 0)
    assert drawn.getpixel((10, 3)) == (0, 158, 115)
    assert drawn.getpixel((30, 15)) == (0, 0, 200)
    assert "reward: 0.500" in pictures[0].text
    assert "response: here" in pictures[0].text


def test_a_file_that_was_sent_is_not_read_again(run_dir):
    assert read(run_dir, sent=["rl-000002.jsonl"]) == []


@pytest.mark.parametrize(
    "broken",
    [
        {"sha256": "0" * 64},
        {"path": "data/gone.png"},
        {"kind": "video"},
        {"media_index": 3},
    ],
)
def test_a_medium_that_cannot_be_shown_is_left_out(run_dir, broken):
    change(run_dir, **broken)
    assert read(run_dir) == [("rl-000002.jsonl", 6, [])]


def test_a_picture_outside_the_roots_is_not_sent(run_dir, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (40, 20)).save(secret)
    change(run_dir, path=str(secret))
    assert read(run_dir) == [("rl-000002.jsonl", 6, [])]


@pytest.mark.parametrize("answer", [None, [5, 5], "text", [[1, 2]], [1, 2, "x", 4], [0, 0, float("inf"), 5]])
def test_an_answer_that_is_no_box_is_not_drawn(run_dir, answer):
    change(run_dir, answer=answer)
    [(_, _, pictures)] = read(run_dir)
    assert [box.is_gold for box in pictures[0].boxes] == [True]
    draw_boxes(pictures[0])


def test_each_of_several_boxes_is_drawn(run_dir):
    change(run_dir, answer_type="boxes", target=[[[0, 0, 20, 10], "cat", None], [[20, 10, 40, 20], "dog", None]])
    change(run_dir, answer=[[[0, 0, 5, 5], "cat", 0.5], "nothing", []])
    [(_, _, pictures)] = read(run_dir)
    found = [(box.is_gold, box.corners) for box in pictures[0].boxes]
    assert found == [
        (True, (0.0, 0.0, 0.5, 0.5)),
        (True, (0.5, 0.5, 1.0, 1.0)),
        (False, (0.0, 0.0, 0.25, 0.5)),
    ]


def test_rollouts_of_an_older_version_are_passed_over(run_dir):
    (run_dir.rollouts / "rl-000002.jsonl").write_text(json.dumps({"sample": "a", "media": ["x.png"]}) + "\n")
    assert read(run_dir) == [("rl-000002.jsonl", 0, [])]
