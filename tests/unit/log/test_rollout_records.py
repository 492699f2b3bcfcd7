"""Records of rollouts: the keys of a line, its authors, what was selected and replayed, and the numbers of tokens."""

import math
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from factories import make_answer, make_group, make_prompt, make_rollout, make_sample, make_score, write_file
from json_lines import read_json_lines
from selection import make_experiences

from mmrl import types
from mmrl.log.rollout_records import list_scored_records, list_step_records, write_records

PLACE = {"stage": "rl", "step": 12, "version": 40}


def one_char_a_token(rollout):
    return list(range(1, rollout.num_tokens + 1))


TEXTS = SimpleNamespace(render_prompt=lambda prompt: f"prompt of {prompt.sample.id}", find_token_ends=one_char_a_token)


def select(groups, advantages, **fields):
    """Select all rollouts of some groups for training."""
    rows = tuple(make_experiences(group, *row) for group, row in zip(groups, advantages, strict=True))
    defaults = {"experiences": tuple(chain.from_iterable(rows)), "has_signal": True}
    return types.SelectedExperiences(groups=tuple(groups), experiences_by_group=rows, **defaults | fields)


def make_pair(name="a", **prompt_fields):
    """Return a group of two rollouts that earned 1 and 0."""
    prompt = make_prompt(make_sample(id=name, **prompt_fields.pop("sample", {})), **prompt_fields)
    rollouts = [make_rollout(prompt, index, text) for index, text in enumerate(("yes", "no"))]
    return make_group(prompt, rollouts, [make_score(exact=1.0), make_score(exact=0.0)])


def record(tmp_path, selected, *, max_groups=9, texts=TEXTS, has_gradient=bool):
    records = list_step_records(selected, max_groups=max_groups, version=40, has_gradient=has_gradient)
    write_records(tmp_path / "rollouts" / "rl-000012.jsonl", records, PLACE, texts)
    return read_json_lines(tmp_path / "rollouts" / "rl-000012.jsonl")


def test_line_has_all_that_a_picture_of_a_rollout_needs(tmp_path):
    image = write_file(tmp_path / "data" / "7.png", b"")
    outside = types.VideoRef(path="/clips/a.mp4", sha256="ab", start=1.0, end=2.5)
    resize_maps = (
        types.ResizeMap(types.Size(640, 480), types.Size(56, 84), (3, 4)),
        types.ResizeMap(types.Size(64, 48), types.Size(28, 28)),
    )
    sample = make_sample(
        (1, 2, 3, 4),
        types.AnswerType.BOX,
        id="box-7",
        task="ground",
        parts=(image, "Where in ", outside, "?"),
        coordinate_system=types.CoordinateSystem.PX_ORIGINAL,
    )
    prompt = make_prompt(sample, resize_maps=resize_maps, coordinate_system=types.CoordinateSystem.PX_RESIZED)
    answer = replace(make_answer((5.0, 6.0, 7.0, 8.0)), thinking="hm", text="[5, 6, 7, 8]")
    zoomed = types.ImageRef(path=image.path, sha256=image.sha256, crop=(0, 0, 9, 9))
    shown = types.MediaObservation(
        ref=zoomed, grid=(1, 2, 2), resize_map=types.ResizeMap(types.Size(9, 9), types.Size(28, 28)), digest="d"
    )
    segments = (
        types.Segment(token_ids=(5, 6), logprobs=(-1.0, -2.0), author=types.Author.POLICY, version=38),
        types.Segment(token_ids=(7,), logprobs=(0.0,), author=types.Author.ENVIRONMENT, observation=shown),
        types.Segment(token_ids=(8, 9, 10), logprobs=(-1.0,) * 3, author=types.Author.POLICY, version=39),
    )
    rethought = {"parent_index": 0, "is_correct": True, "first_is_correct": False}
    rollout = replace(make_rollout(prompt, 0, "abcdef", answer), segments=segments, **rethought)
    score = types.Score(
        terms={
            "iou": types.RewardValue(0.5, "overlap"),
            "slow": types.RewardValue(0.0, "fallback: took more than 1 s"),
        },
        total=1.0,
        failures={"slow": types.Failure(types.FailureKind.TIMEOUT, "took more than 1 s")},
        contributions={
            "iou": types.Contribution(0.25, 4.0, True, 1.0),
            "slow": types.Contribution(0.0, 1.0, False, 0.0),
        },
    )
    group = make_group(prompt, [rollout], [score], probes={"blind": (make_score(iou=0.2), make_score(iou=0.4))})
    [line] = record(tmp_path, select([group], [(0.7,)]))
    file = {"sha256": image.sha256, "corruption": None, "fps": None}
    assert line == {
        **PLACE,
        **{"group": 0, "prompt": "prompt of box-7", "sample": "box-7", "task": "ground", "rollout": 0},
        **{"question": "<image>Where in <video>?", "response": "abcdef", "thinking": "hm", "finish": "eos"},
        **{"answer": [5.0, 6.0, 7.0, 8.0], "answer_text": "[5, 6, 7, 8]", "answer_type": "box", "frame": "px_resized"},
        **{"target": [1, 2, 3, 4], "target_frame": "px_original", "media_index": 0, "tokens": 6, "turns": []},
        **{"parent": 0, "is_correct": True, "first_correct": False, "total": 1.0, "advantage": 0.7},
        "media": [
            {"kind": "image", "path": "data/7.png", **file, "timestamp": None, "crop": None}
            | {"original": [640, 480], "resized": [56, 84], "offset": [3, 4]},
            {"kind": "video", "path": "/clips/a.mp4", **file, "sha256": "ab", "start": 1.0, "end": 2.5}
            | {"original": [64, 48], "resized": [28, 28], "offset": [0, 0]},
        ],
        "segments": [
            {"author": "policy", "n": 2, "version": 38, "chars": [0, 2], "shows": None},
            {"author": "environment", "n": 1, "version": 0, "chars": [2, 3]}
            | {
                "shows": {"kind": "image", "path": "data/7.png", **file, "timestamp": None, "crop": [0, 0, 9, 9]}
                | {"original": [9, 9], "resized": [28, 28], "offset": [0, 0]}
            },
            {"author": "policy", "n": 3, "version": 39, "chars": [3, 6], "shows": None},
        ],
        "terms": {
            "iou": {"value": 0.5, "reason": "overlap", "failure": None}
            | {"transformed": 0.25, "weight": 4.0, "counts": True, "contribution": 1.0},
            "slow": {"value": 0.0, "reason": "fallback: took more than 1 s", "failure": "timeouts"}
            | {"transformed": 0.0, "weight": 1.0, "counts": False, "contribution": 0.0},
        },
        "selection": {"status": "trained", "reason": None, "carried_over": False, "staleness": 2},
        "in_forward": True,
        "probes": {"blind": {"iou": pytest.approx(0.3), "total": pytest.approx(0.3)}},
    }


def test_dropped_rollout_has_the_reason_and_no_score(tmp_path):
    group = make_pair()
    kept, dropped = group.rollouts
    failures = {"exact": types.Failure(types.FailureKind.TIMEOUT, "took more than 1 s")}
    group = replace(group, rollouts=(kept,), scores=group.scores[:1], dropped=(types.Dropped(dropped, failures),))
    first, second = record(tmp_path, select([group], [(float("nan"),)]))
    assert first["total"] == 1.0 and first["advantage"] is None
    assert second["dropped"] == {"exact": "timeouts: took more than 1 s"}
    assert second["response"] == dropped.text and "total" not in second


def test_rejected_groups_are_there_with_the_reason_and_groups_beyond_the_most_are_not(tmp_path):
    groups = [make_pair(name) for name in "abc"]
    selections = (
        types.GroupSelection("trained", carried_over=True),
        types.GroupSelection("rejected", "exact"),
        types.GroupSelection("no_room"),
    )
    lines = record(tmp_path, select(groups, [(0.5, -0.5)] * 3, selections=selections), max_groups=2)
    shown = [(one["group"], one["sample"], one["selection"]["status"], one["selection"]["reason"]) for one in lines]
    assert shown == [(0, "a", "trained", None)] * 2 + [(1, "b", "rejected", "exact")] * 2
    assert lines[0]["selection"]["carried_over"] is True


def test_replayed_rollouts_follow_as_groups_of_their_prompts_and_count_how_often_they_were_drawn(tmp_path):
    new, old, older = make_pair("a"), make_pair("b"), make_pair("c")
    drawn = [types.Experience(rollout=old.rollouts[index], advantage=0.5, staleness=3) for index in (0, 1, 0)]
    drawn.append(types.Experience(rollout=older.rollouts[0], advantage=-0.5, staleness=9))
    selected = select([new], [(1.0, -1.0)])
    selected = replace(selected, experiences=(*selected.experiences, *drawn), replayed=tuple(drawn))
    lines = record(tmp_path, selected)[2:]
    found = [(line["group"], line["sample"], line["rollout"], line["advantage"]) for line in lines]
    assert found == [(1, "b", 0, 0.5), (1, "b", 1, 0.5), (2, "c", 0, -0.5)]
    assert [line["selection"] for line in lines] == [
        {"status": "replayed", "staleness": 3, "times": 2},
        {"status": "replayed", "staleness": 3, "times": 1},
        {"status": "replayed", "staleness": 9, "times": 1},
    ]
    assert [line["sample"] for line in record(tmp_path, selected, max_groups=1)] == ["a", "a", "b", "b"]


def test_records_say_for_which_rollouts_the_learner_ran_a_forward_pass(tmp_path):
    new, old = make_pair("a"), make_pair("b")
    drawn = tuple(types.Experience(rollout=rollout, advantage=0.5, staleness=3) for rollout in old.rollouts)
    selected = select([new], [(1.0, -1.0)])
    # As with `replay.preset: code`, the second rollout of the step's own is not drawn.
    selected = replace(selected, experiences=(selected.experiences[0], *drawn), replayed=drawn)
    lines = record(tmp_path, selected, has_gradient=lambda experience: experience.rollout is not old.rollouts[1])
    assert [line["in_forward"] for line in lines] == [True, False, True, False]


def test_replayed_copies_of_a_sample_are_groups_of_their_own(tmp_path):
    copies = [make_pair("b"), make_pair("b#2")]
    digest = copies[0].prompt.digest
    drawn = [
        types.Experience(
            rollout=replace(rollout, prompt=replace(rollout.prompt, digest=digest)), advantage=0.5, staleness=1
        )
        for group in copies
        for rollout in group.rollouts
    ]
    selected = replace(select([], []), experiences=tuple(drawn), replayed=tuple(drawn))
    shown = [(line["group"], line["sample"]) for line in record(tmp_path, selected)]
    assert shown == [(0, "b"), (0, "b"), (1, "b#2"), (1, "b#2")]


def test_held_out_samples_are_groups_without_advantages(tmp_path):
    groups = [replace(one, rollouts=one.rollouts[:1], scores=(make_score(exact=1.0),)) for one in map(make_pair, "ab")]
    path = tmp_path / "rollouts" / "test-before.jsonl"
    write_records(path, list_scored_records(groups), {"stage": None, "step": 0, "version": 0}, TEXTS)
    lines = read_json_lines(path)
    assert [(line["group"], line["sample"], line["total"]) for line in lines] == [(0, "a", 1.0), (1, "b", 1.0)]
    assert lines[0]["stage"] is None and "advantage" not in lines[0]


def test_text_that_tokens_do_not_spell_leaves_the_segments_without_places(tmp_path):
    texts = SimpleNamespace(**vars(TEXTS) | {"find_token_ends": lambda rollout: None})
    lines = record(tmp_path, select([make_pair()], [(0.5, -0.5)]), texts=texts)
    assert [segment["chars"] for segment in lines[0]["segments"]] == [None]


def test_token_file_has_the_learners_values_at_the_policys_tokens_alone(tmp_path):
    group = make_pair()
    first, second = group.rollouts
    segments = (
        types.Segment(token_ids=(11, 12), logprobs=(-1.0, -2.0), author=types.Author.POLICY),
        types.Segment(token_ids=(13,), logprobs=(0.0,), author=types.Author.FORCED),
        types.Segment(token_ids=(14,), logprobs=(-3.0,), author=types.Author.POLICY),
    )
    group = replace(group, rollouts=(first, replace(second, segments=segments)))
    selected = select([group], [(0.5, -0.5)])
    records = list_step_records(selected, max_groups=9, version=0, has_gradient=bool)
    values = types.TokenValues((-1.5, -2.5, -3.5), (0.6, 0.7, 0.8), (2.0, 3.0, 4.0), (-0.5,) * 3, (0.0, 1.0, 2.0))
    ends = iter([[1, 3], None])
    texts = SimpleNamespace(**vars(TEXTS) | {"find_token_ends": lambda rollout: next(ends)})
    write_records(tmp_path / "rollouts/rl-000012.jsonl", records, PLACE, texts, {1: values})
    with np.load(tmp_path / "rollouts/rl-000012.npz", allow_pickle=False) as file:
        arrays = dict(file)
    nan = math.nan
    expected = {
        "offset": [0, 2, 6],
        "token_id": [5, 5, 11, 12, 13, 14],
        "end": [1, 3, -1, -1, -1, -1],
        "author": [0, 0, 0, 0, 2, 0],
        "recorded_logprob": [-1.0, -1.0, -1.0, -2.0, nan, -3.0],
        "logprob": [nan, nan, -1.5, -2.5, nan, -3.5],
        "ratio": [nan, nan, 0.6, 0.7, nan, 0.8],
        "entropy": [nan, nan, 2.0, 3.0, nan, 4.0],
        "advantage": [nan, nan, -0.5, -0.5, nan, -0.5],
        "clipped": [-1, -1, 0, 1, -1, 2],
    }
    assert arrays.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(arrays[name], values, err_msg=name)


def test_same_tokens_give_the_same_bytes_at_any_time(tmp_path, monkeypatch):
    records = list_step_records(select([make_pair()], [(0.5, -0.5)]), max_groups=9, version=0, has_gradient=bool)
    write_records(tmp_path / "rollouts/now.jsonl", records, PLACE, TEXTS, {})
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.localtime", lambda *_: (1999, 1, 1, 0, 0, 0, 0, 1, 0))
    write_records(tmp_path / "rollouts/then.jsonl", records, PLACE, TEXTS, {})
    assert (tmp_path / "rollouts/now.npz").read_bytes() == (tmp_path / "rollouts/then.npz").read_bytes()
