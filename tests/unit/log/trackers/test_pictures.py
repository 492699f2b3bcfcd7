"""Pictures of kept rollouts: boxes where the resize map puts them, and nothing from outside the run's folders."""

import json

import numpy as np
import pytest
from json_lines import read_json_lines
from PIL import Image
from tracked_runs import append, expected_lines, make_run, write_rollouts

from mmrl.config import load_config
from mmrl.log.trackers.process import read_pictures


@pytest.fixture
def run_dir(tmp_path):
    made = make_run(tmp_path / "inside")
    append(made, expected_lines())
    write_rollouts(made, 2)
    return made


def read(run_dir):
    config = load_config(run_dir.config).config
    return read_pictures(run_dir.rollouts / "rl-000002.jsonl", run_dir, config, run_dir.path)


def colours(image):
    """Where a picture is green or orange: the box around the pixels of each colour, None if there are none."""
    found = []
    for colour in ((0, 158, 115), (230, 97, 0)):
        found.append(Image.fromarray((np.asarray(image) == colour).all(axis=2)).getbbox())
    return found


def change(run_dir, **values):
    """Change keys of the recorded rollouts, and of their medium."""
    path = run_dir.rollouts / "rl-000002.jsonl"
    records = read_json_lines(path)
    for record in records:
        for key, value in values.items():
            (record["media"][0] if key in record["media"][0] else record)[key] = value
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_boxes_lie_where_the_resize_map_puts_them(run_dir):
    pictures = read(run_dir)
    assert len(pictures) == 2  # the first rollout of each group
    # Both are 10 x 5 pixels: of the file, 40 x 20, and of what the model saw, 20 x 10.
    change(run_dir, answer=None)
    assert colours(read(run_dir)[0].image) == [(0, 0, 11, 6), None]
    change(run_dir, answer=[0, 0, 10, 5], target=None)
    assert colours(read(run_dir)[0].image) == [None, (0, 0, 21, 11)]
    assert "reward: 0.5" in pictures[0].text
    assert "response: here" in pictures[0].text


@pytest.mark.parametrize("broken", [{"sha256": "0" * 64}, {"path": "gone.png"}, {"kind": "video"}, {"media_index": 3}])
def test_a_medium_that_cannot_be_shown_is_left_out(run_dir, broken):
    change(run_dir, **broken)
    assert read(run_dir) == []


def test_a_picture_outside_the_roots_is_not_sent(run_dir, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (40, 20)).save(secret)
    change(run_dir, path=str(secret))
    assert read(run_dir) == []


@pytest.mark.parametrize("answer", [None, [5, 5], "text", [[1, 2]], [1, 2, "x", 4], [0, 0, float("inf"), 5]])
def test_an_answer_that_is_no_box_is_not_drawn(run_dir, answer):
    change(run_dir, answer=answer)
    assert colours(read(run_dir)[0].image) == [(0, 0, 11, 6), None]


def test_each_of_several_boxes_is_drawn(run_dir):
    change(run_dir, answer_type="boxes", target=[[[0, 0, 20, 10], "cat", None], [[20, 10, 40, 20], "dog", None]])
    change(run_dir, answer=[[[0, 0, 5, 5], "cat", 0.5]])
    # A corner of the first predicted box hides one of the first gold box.
    assert colours(read(run_dir)[0].image) == [(2, 0, 40, 20), (0, 0, 11, 11)]
    change(run_dir, answer=None)
    assert colours(read(run_dir)[0].image) == [(0, 0, 40, 20), None]
