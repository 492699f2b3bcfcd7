"""The document of a step: groups and rollouts with everything that the page draws."""

import json

import pytest
from view_runs import image_medium, make_run, rollout_row, write_lines

from mmrl.view.media import PictureStore
from mmrl.view.run_documents import RunDocuments

SMILE = "\U0001f600"


def build(path, name="rl-000002"):
    return RunDocuments("r0", path, PictureStore(with_media=False), ()).list_documents()[f"r0/{name}"]()


@pytest.fixture
def groups(tmp_path):
    return build(make_run(tmp_path / "small"))["groups"]


def test_a_group_has_its_prompt_target_and_gold_marks(groups):
    group = groups[0]
    assert group["prompt"] == "<|im_start|>⟨image: 8 tokens⟩Where?"
    assert group["target"] == "[20, 40, 100, 80]"
    # The target is in pixels of the file, 200 x 100, the answer in those of the model, 112 x 56.
    assert group["marks"][0]["at"] == pytest.approx([0.1, 0.4, 0.5, 0.8])
    assert group["rollouts"][0]["marks"][0]["at"] == pytest.approx([10 / 112, 20 / 56, 60 / 112, 40 / 56])
    assert group["media"][0] | {"width": 112, "height": 56, "original": [200, 100]} == group["media"][0]


def test_a_span_is_in_seconds_of_its_video(groups):
    assert groups[1]["media"][0]["kind"] == "video"
    assert [mark["at"] for mark in (*groups[1]["marks"], *groups[1]["rollouts"][0]["marks"])] == [[1, 2], [1, 2.5]]


def test_a_rethought_response_has_its_authors_flip_and_last_answer(groups):
    rollout = groups[0]["rollouts"][1]
    texts = [rollout["response"][slice(*segment["chars"])] for segment in rollout["segments"]]
    assert [segment["author"] for segment in rollout["segments"]] == ["policy", "forced", "policy"]
    assert texts[1] == " Wait. "
    assert (rollout["parent"], rollout["first_correct"], rollout["is_correct"]) == (0, False, True)
    start, end = rollout["answer_chars"]
    assert rollout["response"][start:end] == "[10, 20, 60, 40]"
    assert start > len(texts[0])


def test_a_tools_crop_is_a_fraction_of_the_samples_picture(groups):
    shown = groups[0]["rollouts"][2]["segments"][1]
    assert shown["crop"] == pytest.approx([0.5, 0, 1, 0.5])
    assert (shown["shows"]["width"], shown["shows"]["height"]) == (56, 28)
    assert groups[0]["rollouts"][2]["answer_chars"] is None


def test_a_dropped_rollout_has_its_reasons_and_no_terms(groups):
    rollout = groups[0]["rollouts"][3]
    assert rollout["dropped"] == {"iou": "timeouts: took more than 10 s"}
    assert (rollout["terms"], rollout["total"]) == ({}, None)


def test_a_replayed_rollout_is_a_group_of_its_own(groups):
    assert groups[2]["selection"]["status"] == "replayed"
    assert groups[2]["rollouts"][0] | {"trained": True, "age": 5} == groups[2]["rollouts"][0]


def test_held_out_rollouts_were_not_trained_on(tmp_path):
    document = build(make_run(tmp_path / "small"), "rl-000002-validation")
    assert (document["kind"], document["stage"], document["step"]) == ("validation", "rl", 2)
    assert document["groups"][0]["rollouts"][0]["trained"] is False


def test_equal_texts_and_answers_name_the_first_sibling(tmp_path):
    rows = [rollout_row(), rollout_row(rollout=1), rollout_row("", "other", rollout=2), rollout_row(rollout=3)]
    rows[2]["answer_text"] = rows[0]["answer_text"]
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", rows)
    rollouts = build(tmp_path, "rl-000001")["groups"][0]["rollouts"]
    found = {rollout["rollout"]: (rollout["same_text_as"], rollout["same_answer_as"]) for rollout in rollouts}
    assert found == {0: (None, None), 1: (0, 0), 2: (None, 0), 3: (0, 0)}


def test_places_in_a_text_count_as_javascript_does(tmp_path):
    response = f"{SMILE}<think>a{SMILE}</think>b"
    segments = [
        {"author": "policy", "n": 1, "chars": [0, 1], "version": 1, "shows": None},
        {"author": "policy", "n": 1, "chars": [1, len(response)], "version": 1, "shows": None},
    ]
    row = rollout_row((), response, segments=segments, thinking=f"a{SMILE}", answer_text="b")
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", [row])
    rollout = build(tmp_path, "rl-000001")["groups"][0]["rollouts"][0]
    units = response.encode("utf-16-le")

    def cut(places):
        return units[2 * places[0] : 2 * places[1]].decode("utf-16-le")

    assert [cut(segment["chars"]) for segment in rollout["segments"]] == [SMILE, response[1:]]
    assert cut(rollout["thinking"]) == f"a{SMILE}"
    assert cut(rollout["answer_chars"]) == "b"


def test_tokens_are_the_file_of_the_run_and_belong_to_a_line(tmp_path):
    run = make_run(tmp_path / "small")
    file = run / "rollouts/rl-000002.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(["damaged\n", *lines[1:]]))
    documents = RunDocuments("r0", run, PictureStore(with_media=False), ()).list_documents()
    step = documents["r0/rl-000002"]()
    assert step["groups"][0]["rollouts"][0]["line"] == 1
    assert documents[step["tokens"]]() == file.with_suffix(".npz").read_bytes()


def test_the_second_media_of_a_sample_takes_the_marks_that_refer_to_it(tmp_path):
    media = [image_medium("a.png", ""), image_medium("b.png", "", resized=[56, 56])]
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", [rollout_row(media, media_index=1)])
    mark = build(tmp_path, "rl-000001")["groups"][0]["rollouts"][0]["marks"][0]
    assert mark["medium"] == 1
    assert mark["at"] == pytest.approx([10 / 56, 20 / 56, 60 / 56, 40 / 56])


def test_half_of_a_surrogate_pair_survives(tmp_path):
    (tmp_path / "rollouts").mkdir()
    line = json.dumps(rollout_row((), "x\ud83dy", answer_text=None))
    (tmp_path / "rollouts/rl-000001.jsonl").write_text(line + "\n")
    assert build(tmp_path, "rl-000001")["groups"][0]["rollouts"][0]["response"] == "x\ud83dy"
