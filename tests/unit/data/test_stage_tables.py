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
    """Counting, boxes in pixels, a part of a video, text without any; a label, a thought, a response."""
    counted, *_ = scenes.counting(run, split="train", size=1, label_miss_prob=1.0)
    grounded, *_ = scenes.grounding(run, split="train", size=1)
    film = replace(clip, path=str(Path(clip.path).resolve()), start=0.1, end=0.6)
    seen = Sample(
        id="film/train/a",
        task="film",
        parts=(film, "Which way?"),
        target=Target(answer_type=AnswerType.TEXT, value="up"),
    )
    logic = Sample(
        id="mine",
        task="logic",
        parts=("<image> is a word here?",),
        target=Target(answer_type=AnswerType.JSON, value={"a": 1}),
    )
    return (replace(counted, thinking="one, two"), replace(grounded, response="<answer>[1]</answer>"), seen), logic


def back(run, folder, name="t.jsonl"):
    place = replace_base(run, folder)
    return list(table.rows(place, path=name, **READ))


def replace_base(run, folder):
    return DatasetContext(work_dir=run.work_dir, base_dir=folder, seed=0, media_policy=run.media_policy)


def facts(sample):
    """A sample without the keys that a table adds to `meta`; numbers and lists as JSON has them."""
    own = [part if isinstance(part, str) else (part.sha256, *clip_of(part)) for part in sample.parts]
    answers = [
        t and (t.answer_type, t.coordinate_system, t.media_index, t.value) for t in (sample.target, sample.label)
    ]
    return json.loads(json.dumps((sample.id, sample.task, own, answers, sample.thinking, sample.response)))


def clip_of(ref):
    return (ref.start, ref.end) if isinstance(ref, VideoRef) else ()


def test_samples_of_any_kind_come_back(run, samples):
    folder = run.work_dir.parent / "outputs"
    save_table(folder / "t.jsonl", [build_sample_row(sample, folder) for sample in samples[0]])
    again = back(run, folder)
    assert [facts(sample) for sample in again] == [facts(sample) for sample in samples[0]]
    assert again[1].target.coordinate_system is CoordinateSystem.PX_ORIGINAL
    rows = read_table(folder / "t.jsonl")
    assert rows[0]["images"] == [f"../data/count-train/{Path(samples[0][0].images[0].path).name}"]  # a run may be moved
    assert Path(rows[2]["videos"][0]).is_absolute()
    assert again[0].meta["sample"] == samples[0][0].id


def test_a_kind_that_may_have_a_frame_needs_none(run, samples):
    folder = run.work_dir.parent / "outputs"
    logic = replace(samples[1], parts=("Is it so?",))
    save_table(folder / "t.jsonl", [build_sample_row(logic, folder)])
    (again,) = back(run, folder)
    assert again.id == "logic/train/mine"  # an id that does not say task and split gets them
    assert (again.target.value, again.target.coordinate_system) == ({"a": 1}, None)


def test_a_frame_by_template_goes_with_a_kind_by_template(run, samples):
    with pytest.raises(UserError, match="is a template, so `answer_type` must be one too"):
        list(
            table.rows(
                run, path="t.jsonl", columns={"question": "q", "answer": "a"}, answer_type="box", coordinates="{{ f }}"
            )
        )


def test_a_part_of_one_of_several_videos_cannot_be_said(clip):
    two = Sample(
        id="t/train/a",
        task="t",
        parts=(clip, replace(clip, end=0.5), "Which?"),
        target=Target(answer_type=AnswerType.TEXT, value="a"),
    )
    with pytest.raises(UserError, match="t/train/a shows a part of one of 2 videos"):
        sample_columns(two, lambda ref: ref.path)


def test_a_part_of_a_picture_cannot_be_said(samples):
    part = replace(samples[0][0], parts=(replace(samples[0][0].images[0], crop=(0, 0, 4, 4)), "Which?"))
    with pytest.raises(UserError, match="shows a crop of an image or a video's frame"):
        sample_columns(part, lambda ref: ref.path)


def test_an_exported_table_keeps_parts_of_videos_and_responses(run, samples, tmp_path):
    film = replace(samples[0][2], response="<answer>up</answer>")
    folder = tmp_path / "made"
    folder.mkdir()
    options = write_table([film], folder, "jsonl")
    place = DatasetContext(work_dir=folder, base_dir=folder, seed=0, media_policy=run.media_policy)
    (again,) = table.rows(place, **options)
    assert facts(again) == facts(film)


def test_lines_end_where_they_should(tmp_path):
    save_table(tmp_path / "t.jsonl", [{"response": "a\u2028b\x85c"}, {"response": "d"}])
    assert [row["response"] for row in read_table(tmp_path / "t.jsonl")] == ["a\u2028b\x85c", "d"]
