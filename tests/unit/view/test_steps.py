"""The document of a step: groups and rollouts with everything that the page draws."""

import io
import json
import zlib
from operator import itemgetter

import numpy as np
import pytest
from view_runs import image_medium, make_run, rollout_row, write_lines, write_tokens

from mmrl.view.media import PictureStore
from mmrl.view.run_documents import RunDocuments
from mmrl.view.steps import count_units, make_scale


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
    assert (rollout["flip"], rollout["is_correct"]) == ("up", True)
    assert ("wrong → right", "good", "Rethinking corrected it.") in rollout["badges"]
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
    texts = [badge.text for badge in rollout["badges"]]
    assert texts == ["dropped", "iou: timeouts: took more than 10 s", "duplicate of 0"]
    assert (rollout["status"], rollout["trained"]) == ("dropped", False)
    assert (rollout["terms"], rollout["total"]) == ({}, None)


def test_a_replayed_rollout_is_a_group_of_its_own(groups):
    assert groups[2]["selection"]["status"] == "replayed"
    rollout = groups[2]["rollouts"][0]
    assert (rollout["status"], rollout["trained"]) == ("replayed", True)
    assert [badge.text for badge in rollout["badges"]] == ["replayed", "5 steps off-policy"]


def test_turns_of_an_episode_have_what_they_earned_and_their_advantage(tmp_path):
    turns = [
        {"action": "up", "state": "start", "reward": 0.5, "terminated": False, "truncated": False, "valid": True},
        {"action": None, "state": "level 4", "reward": 0.0, "terminated": False, "truncated": True, "valid": False},
    ]
    credited = rollout_row(turns=turns, turn_rewards=[0.25, 0.0], turn_advantages=[1.5, -0.5])
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", [credited, rollout_row(turns=turns, rollout=1)])
    first, second = (rollout["turns"] for rollout in build(tmp_path, "rl-000001")["groups"][0]["rollouts"])
    assert [(turn["action"], turn["state"], turn["valid"], turn["end"]) for turn in first] == [
        ("up", "start", True, ""),
        (None, "level 4", False, "truncated"),
    ]
    assert [(turn["earned"], turn["advantage"]) for turn in first] == [(0.25, 1.5), (0.0, -0.5)]
    assert [(turn["earned"], turn["advantage"]) for turn in second] == [(0.5, None), (0.0, None)]


def test_a_rollout_whose_turns_cancel_out_was_trained(tmp_path):
    turns = [{"action": action, "reward": 0.0} for action in ("up", "down")]
    # advantage.credit: to_go, as `list_records` writes it: the mean of the turns beside each turn's own
    credits = [(-1.5, 1.5), (0.0, 0.0)]
    rows = [
        rollout_row(turns=turns, turn_advantages=credit, advantage=0.0, rollout=index)
        for index, credit in enumerate(credits)
    ]
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", rows)
    document = build(tmp_path, "rl-000001")
    rollouts = document["groups"][0]["rollouts"]
    assert [rollout["trained"] for rollout in rollouts] == [True, False]
    assert [rollout["advantage_range"] for rollout in rollouts] == [[-1.5, 1.5], [0.0, 0.0]]
    trained, untrained = rollouts
    assert not trained["badges"]
    assert [badge.text for badge in untrained["badges"]] == ["zero advantage", "duplicate of 0"]
    assert document["scale"]["advantage"] == 1.5


@pytest.mark.parametrize(
    ("fields", "trained", "texts"),
    [
        ({"advantage": 0.5, "in_forward": True}, True, []),
        ({"advantage": 0.5, "in_forward": False}, False, ["not trained"]),  # masked, or not drawn by replay
        ({"advantage": 0.0, "in_forward": True}, True, []),  # it has a KL penalty, or an entropy bonus
        ({"advantage": 0.0, "in_forward": False}, False, ["zero advantage"]),
        ({"advantage": 0.5, "in_forward": False, "selection": {"status": "replayed"}}, False, ["replayed"]),
        ({"advantage": 0.5, "in_forward": False, "selection": {"status": "rejected"}}, False, []),
        ({"advantage": 0.5}, True, []),  # an older record
        ({"advantage": 0.0}, False, ["zero advantage"]),
    ],
)
def test_a_rollout_was_trained_if_the_learner_ran_a_forward_pass_for_it(tmp_path, fields, trained, texts):
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", [rollout_row(**fields)])
    (rollout,) = build(tmp_path, "rl-000001")["groups"][0]["rollouts"]
    assert rollout["trained"] is trained
    assert [badge.text for badge in rollout["badges"]] == texts


def test_held_out_rollouts_were_not_trained_on(tmp_path):
    document = build(make_run(tmp_path / "small"), "rl-000002-validation")
    assert (document["kind"], document["stage"], document["step"]) == ("validation", "rl", 2)
    assert document["groups"][0]["rollouts"][0]["trained"] is False


def test_equal_texts_and_answers_name_the_first_sibling(tmp_path):
    rows = [rollout_row(), rollout_row(rollout=1), rollout_row("", "other", rollout=2), rollout_row(rollout=3)]
    rows[2]["answer_text"] = rows[0]["answer_text"]
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", rows)
    rollouts = build(tmp_path, "rl-000001")["groups"][0]["rollouts"]
    first, *others = (rollout["badges"] for rollout in rollouts)
    assert first == []
    assert all(len(badges) == 1 for badges in others)
    assert [badges[0].text for badges in others] == ["duplicate of 0", "same answer as 0", "duplicate of 0"]


def test_tokens_are_the_file_of_the_run_and_belong_to_a_line(tmp_path):
    run = make_run(tmp_path / "small")
    file = run / "rollouts/rl-000002.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(["damaged\n", *lines[1:]]))
    documents = RunDocuments("r0", run, PictureStore(with_media=False), ()).list_documents()
    step = documents["r0/rl-000002"]()
    assert step["groups"][0]["rollouts"][0]["line"] == 1
    content = documents[step["tokens"]]()
    assert (content, step["problem"]) == (file.with_suffix(".npz").read_bytes(), "")
    with np.load(file.with_suffix(".npz")) as archive:
        for name, (start, end) in step["arrays"].items():
            array = np.lib.format.read_array(io.BytesIO(zlib.decompress(content[start:end], wbits=-15)))
            np.testing.assert_array_equal(array, archive[name], strict=True)
        assert step["arrays"].keys() == set(archive.files)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": np.array([0, 4, 3], np.int64)},
        {"offset": np.array([1, 4], np.int64)},
        {"offset": np.array([], np.int64)},
        {"offset": np.array(4, np.int64)},
        {"offset": np.array([0, 4], np.int32)},
        {"logprob": np.zeros(3, np.float32)},
        {"logprob": np.zeros(4, np.float64)},
        {"other": np.zeros(4)},
    ],
)
def test_tokens_that_do_not_fit_together_are_refused(tmp_path, changes):
    (tmp_path / "rollouts").mkdir()
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", [rollout_row()])
    write_tokens(tmp_path / "rollouts/rl-000001.npz", [{"segments": [{"n": 4}]}], **changes)
    document = build(tmp_path, "rl-000001")
    assert (document["arrays"], document["problem"]) == ({}, "cannot be read (its arrays do not fit together)")


@pytest.mark.parametrize("content", [b"", b"PK", b"not an archive", None])
def test_damaged_tokens_are_a_problem_of_their_document(tmp_path, content):
    run = make_run(tmp_path / "small")
    file = run / "rollouts/rl-000002.npz"
    whole = file.read_bytes()
    documents = RunDocuments("r0", run, PictureStore(with_media=False), ()).list_documents()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    document = documents["r0/rl-000002"]()
    assert document["arrays"] == {}
    assert document["problem"].startswith("cannot be read (")
    file.unlink()
    assert documents["r0/rl-000002"]()["problem"] == "the file is gone"


def test_segments_cover_a_text_of_which_parts_have_no_author(tmp_path):
    segments = [{"author": "forced", "n": 1, "chars": [2, 4]}, {"author": "environment", "n": 1, "chars": [3, 99]}]
    first = rollout_row((), "abcdefgh", segments=segments[:1])
    rows = [first, rollout_row((), "abcdefgh", segments=segments, rollout=1)]
    write_lines(tmp_path / "rollouts/rl-000001.jsonl", rows)
    (group,) = build(tmp_path, "rl-000001")["groups"]
    first, second = (each["segments"] for each in group["rollouts"])
    authors_and_places = itemgetter("author", "chars")
    assert list(map(authors_and_places, first)) == [("policy", [0, 2]), ("forced", [2, 4]), ("policy", [4, 8])]
    assert list(map(authors_and_places, second)) == [("policy", [0, 2]), ("forced", [2, 4]), ("environment", [4, 8])]


def test_ranges_count_units_of_utf16():
    text = "\U0001f600<think>a\U0001f600</think>b"
    thinking, beyond, nothing = [8, 10], [18, 99], None
    count_units(text, [thinking, beyond, nothing])
    units = text.encode("utf-16-le")
    assert units[2 * thinking[0] : 2 * thinking[1]].decode("utf-16-le") == "a\U0001f600"
    assert units[2 * beyond[0] : 2 * beyond[1]].decode("utf-16-le") == "b"


def test_a_scale_holds_all_totals_and_the_largest_advantage():
    numbers = ((-2, [0.5, 0.5]), (None, [None, None]), (0.5, [-3, 1]))
    rollouts = [{"total": total, "advantage_range": bounds} for total, bounds in numbers]
    assert make_scale([{"rollouts": rollouts}]) == {"low": -2, "high": 1, "advantage": 3}
    assert make_scale([]) == {"low": 0, "high": 1, "advantage": 0}


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
