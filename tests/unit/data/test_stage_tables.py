"""Tables of samples by reference: what `mmrl_datasets.readers.table:rows` makes of them is what they were made of."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmrl.data.stage_tables import build_sample_row, read_table, save_table
from mmrl.types import AnswerType, CoordinateSystem, DatasetContext, MediaPolicy, Sample, Target, UserError, VideoRef
from mmrl_datasets.export import sample_columns, write_table
from mmrl_datasets.generators import scenes
from mmrl_datasets.readers import table

COLUMNS = ("id", "task", "images", "videos", "start", "end", "question", "answer", "label", "thinking", "response")
READ = {
    "columns": {name: name for name in (*COLUMNS, "media_index")},
    "answer_type": "{{ answer_type }}",
    "coordinates": "{{ coordinates or '' }}",
}


@pytest.fixture
def run(tmp_path):
    """A run directory whose data lie within."""
    return DatasetContext(
        work_dir=tmp_path / "run" / "data", base_dir=tmp_path, seed=0, media_policy=MediaPolicy(roots=(Path("/"),))
    )


@pytest.fixture
def samples(run, clip):
    """A count with label and thinking, a box in pixels with a response, and a clip of a video."""
    counted, *_ = scenes.counting(run, split="train", size=1, label_miss_prob=1.0)
    grounded, *_ = scenes.grounding(run, split="train", size=1)
    film = replace(clip, path=str(Path(clip.path).resolve()), start=0.1, end=0.6)
    up = Target(answer_type=AnswerType.TEXT, value="up")
    seen = Sample(id="film/train/a", task="film", parts=(film, "Which way?"), target=up)
    return replace(counted, thinking="one, two"), replace(grounded, response="<answer>[1]</answer>"), seen


def read_back(run, folder):
    context = DatasetContext(work_dir=run.work_dir, base_dir=folder, seed=0, media_policy=run.media_policy)
    return list(table.rows(context, path="t.jsonl", **READ))


def facts(sample):
    """A sample without the keys that a table adds to `meta`; numbers and lists as JSON has them."""
    own = [part if isinstance(part, str) else (part.sha256, *clip_of(part)) for part in sample.parts]
    answers = [
        t and (t.answer_type, t.coordinate_system, t.media_index, t.value) for t in (sample.target, sample.label)
    ]
    return json.loads(json.dumps((sample.id, sample.task, own, answers, sample.thinking, sample.response)))


def clip_of(ref):
    return (ref.start, ref.end) if isinstance(ref, VideoRef) else ()


def test_samples_survive_a_table(run, samples):
    folder = run.work_dir.parent / "outputs"
    save_table(folder / "t.jsonl", [build_sample_row(sample, folder) for sample in samples])
    again = read_back(run, folder)
    assert [facts(sample) for sample in again] == [facts(sample) for sample in samples]
    assert again[1].target.coordinate_system is CoordinateSystem.PX_ORIGINAL
    rows = read_table(folder / "t.jsonl")
    assert rows[0]["images"] == [f"../data/count-train/{Path(samples[0].images[0].path).name}"]  # a run may be moved
    assert Path(rows[2]["videos"][0]).is_absolute()
    assert again[0].meta["sample"] == samples[0].id


def test_a_json_answer_needs_no_coordinate_system(run):
    folder = run.work_dir.parent / "outputs"
    target = Target(answer_type=AnswerType.JSON, value={"a": 1})
    logic = Sample(id="mine", task="logic", parts=("Is it so?",), target=target)
    save_table(folder / "t.jsonl", [build_sample_row(logic, folder)])
    (again,) = read_back(run, folder)
    assert again.id == "logic/train/mine"  # an id that does not say task and split gets them
    assert (again.target.value, again.target.coordinate_system) == ({"a": 1}, None)


def test_coordinates_by_template_need_an_answer_type_by_template(run, samples):
    options = {"columns": {"question": "q", "answer": "a"}, "answer_type": "box", "coordinates": "{{ f }}"}
    with pytest.raises(UserError, match="is a template, so `answer_type` must be one too"):
        list(table.rows(run, path="t.jsonl", **options))


def test_a_clip_of_one_of_several_videos_is_refused(clip):
    target = Target(answer_type=AnswerType.TEXT, value="a")
    two = Sample(id="t/train/a", task="t", parts=(clip, replace(clip, end=0.5), "Which?"), target=target)
    with pytest.raises(UserError, match="t/train/a shows a part of one of 2 videos"):
        sample_columns(two, lambda ref: ref.path)


def test_a_crop_is_refused(samples):
    part = replace(samples[0], parts=(replace(samples[0].images[0], crop=(0, 0, 4, 4)), "Which?"))
    with pytest.raises(UserError, match="shows a crop of an image or a video's frame"):
        sample_columns(part, lambda ref: ref.path)


def test_an_exported_table_keeps_clips_and_responses(run, samples, tmp_path):
    film = replace(samples[2], response="<answer>up</answer>")
    folder = tmp_path / "made"
    folder.mkdir()
    options = write_table([film], folder, "jsonl")
    place = DatasetContext(work_dir=folder, base_dir=folder, seed=0, media_policy=run.media_policy)
    (again,) = table.rows(place, **options)
    assert facts(again) == facts(film)


def test_unicode_line_breaks_do_not_end_a_row(tmp_path):
    save_table(tmp_path / "t.jsonl", [{"response": "a\u2028b\x85c"}, {"response": "d"}])
    assert [row["response"] for row in read_table(tmp_path / "t.jsonl")] == ["a\u2028b\x85c", "d"]
