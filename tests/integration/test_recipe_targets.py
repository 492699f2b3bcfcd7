"""Templates of recipes turn published rows into targets, thoughts and questions."""

import json

import pytest
from published_rows import read_samples, write_data

from mmrl.config.load import load_config
from mmrl.types import Action, CoordinateSystem


@pytest.fixture
def read(tmp_path):
    """A function that reads all sources of a recipe on its published rows, by task; each row comes several times."""

    def samples(name):
        data = write_data(name, tmp_path / "data")
        config = load_config(name, [f"data.dir={json.dumps(str(data))}"]).config
        found = {}
        for sample in read_samples(config, tmp_path):
            found.setdefault(sample.task, []).append(sample)
        return found

    return samples


def test_ton_writes_places_x_first_and_actions_in_json(read):
    click, typed, done, *_ = read("ton_gui")["screen"]
    # lift_yx of Android in the Zoo is y first: [0.75, 0.4] is low on the screen, left of its middle.
    assert click.target.value == Action("CLICK", {"coordinate": [0.4, 0.75]})
    assert click.target.coordinate_system is CoordinateSystem.NORM_1
    assert typed.target.value == Action("TYPE", {"value": "what's new"})
    assert done.target.value == Action("STATUS_TASK_COMPLETE", {})
    assert [one.thinking for one in (click, typed, done)] == ["The clock is on the home screen.", None, "It is done."]
    question = "".join(part for part in click.parts if isinstance(part, str))
    assert '{"action": "ACTION_TYPE", "value": "element", "coordinate": [x, y]}' in question
    assert "leave it out" in question and "pixels of the screenshot" in question and "ACTION_TYPE'" not in question
    assert "Step0: {'action': 'PRESS HOME'" in question


def test_curr_reft_asks_each_task_in_three_forms(read):
    found = read("curr_reft")
    targets = {task: samples[0].target.value for task, samples in found.items()}
    assert targets == {
        **{"judge_detection": "yes", "judge_classify": "no", "judge_math": "yes"},
        **{"choice_detection": "B", "choice_classify": "A,C", "choice_math": "B"},
        **{"open_detection": [1, 2, 9, 9], "open_classify": "cup, traffic light", "open_math": r"\frac{1}{2}"},
        "chosen": "0.5",
    }
    assert found["open_detection"][1].target.value == [2, 2, 20, 30]
    assert found["chosen"][1].response == "<answer>2</answer>" and not found["chosen"][1].media
    asked = {task: samples[0].parts[-1] for task, samples in found.items()}
    assert asked["judge_math"].endswith("exactly 'yes' or 'no'.")
    assert "one or more of the provided option letters" in asked["choice_classify"]
    assert "exactly one of the provided option letters" in asked["choice_math"]
    assert asked["open_detection"].endswith("Output the final answer in JSON format in <answer> </answer> tags.")
    assert asked["open_math"].endswith("in <answer> </answer> tags.") and "JSON" not in asked["open_math"]


def test_human_omni_vision_takes_solutions_apart_and_keeps_them_for_the_judge(read):
    found = read("human_omni_vision")
    assert {task: samples[0].target.value for task, samples in found.items()} == {
        **{"emer_ov_mc": "B,C", "multiple choice": "B", "numerical": 2, "regression": 2.5},
        **{"OCR": "stop here", "free-form": "a thing moves"},
    }
    letters = found["emer_ov_mc"][0]
    assert letters.response == letters.meta["solution"] and letters.response.startswith("<context>")
    assert "Options:\nA. Urgent\nB. Happy\nC. Relaxed\n" in letters.parts[-1]
    assert letters.parts[-1].endswith("A,E for multi option, etc.) within the <answer> </answer> tags.")
    assert found["regression"][0].parts[-1].endswith("(e.g., 42 or 3.14) within the <answer> </answer> tags.")


def test_video_r1_keeps_what_looks_like_a_tag_in_an_answer(read):
    assert read("video_r1")["OCR"][0].target.value == "fresh bread < 1 kg"


def test_affordance_r1_reads_its_objects_and_their_name(read):
    handle, cut, *_ = read("affordance_r1")["afford"]
    assert handle.target.value == [{"bbox_2d": [4, 4, 20, 28], "point_2d": [12, 16]}]
    assert len(cut.target.value) == 2 and cut.meta["aff_name"] == "cut"
    assert 'Please answer "which part should be gripped to lift the cup" with' in handle.parts[-1]


def test_sgp_asks_for_drawings_of_captions(read):
    found = read("sgp")
    for task, text in (
        ("scene", "A bicycle replica with a clock as the front wheel."),
        ("object", "A red apple with a leaf."),
    ):
        assert found[task][0].target.value == text
        assert found[task][0].parts[-1].endswith(f"the following description: {text}")
