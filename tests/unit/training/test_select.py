"""What a `select` stage keeps: of rollouts that were written down, and of how samples fared."""

import json

import pytest

from mmrl.config.schema import SelectStage
from mmrl.data.stage_data import merge_visits_of_copies
from mmrl.data.stage_tables import read_selected_samples, read_table, write_history_table
from mmrl.training.select_stage import SelectionCounts, select_samples
from mmrl.types import AnswerType, Sample, SampleStats, Target, UserError

RATES = {"easy": (1, 1, 1, 1), "some": (0, 0, 1, 1), "late": (0, 0, 0, 1), "hard": (0, 0, 0, 0)}


def sample(name, **more):
    return Sample(id=name, task="t", parts=("?",), target=Target(answer_type=AnswerType.NUMBER, value=1), **more)


def stage(**options):
    return SelectStage(**{"name": "out", "kind": "select", "results_of": "in", "correct": ("count",), **options})


@pytest.fixture
def folder(tmp_path):
    rows = [
        {
            **{"sample": name, "id": f"{name}#{k}", "response": f"r{k}", "tokens": 9 - k, "rollout": k, "level": 5},
            "terms": {"count": float(right), "format": 1.0},
        }
        for name, verdicts in RATES.items()
        for k, right in enumerate(verdicts)
    ]
    rows.append({"sample": "unjudged", "id": "unjudged#0", "response": "?", "tokens": 1, "rollout": 0, "terms": {}})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def kept(folder, **options):
    select_samples(stage(**options), folder)
    return [row["id"] for row in read_table(folder / "out.jsonl")]


def test_samples_are_judged_by_pass_rate_and_attempts(folder):
    assert select_samples(stage(), folder) == SelectionCounts(kept=4, total=4, rows=4, median=0.375)
    rows = {row["id"]: row for row in read_table(folder / "out.jsonl")}
    assert {name: row["pass_rate"] for name, row in rows.items()} == {"easy": 1, "some": 0.5, "late": 0.25, "hard": 0}
    assert {name: row["first_correct"] for name, row in rows.items()} == {"easy": 1, "some": 3, "late": 4, "hard": 5}
    assert rows["easy"]["level"] == 5 and "terms" not in rows["easy"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"range": (0.1, 0.9)}, ["some", "late"]),
        ({"range": (0.5, None)}, ["easy", "some"]),
        ({"range": (0.0, 0.0)}, ["hard"]),
        ({"metric": "first_correct", "range": (4.0, None)}, ["late", "hard"]),  # ThinkLite: late, and not at all
        ({"metric": "first_correct", "range": (3.0, 4.0)}, ["some", "late"]),
        ({"top_k": 2}, ["easy", "some"]),
        ({"metric": "first_correct", "top_k": 1}, ["hard"]),
        ({"output": "responses"}, ["easy#0", "easy#1", "easy#2", "easy#3", "some#2", "some#3", "late#3"]),
        ({"output": "responses", "max_responses": 1}, ["easy#3", "some#3", "late#3"]),  # the shortest
        ({"output": "responses", "range": (0.1, 0.4)}, ["late#3"]),
    ],
)
def test_select_keeps_the_rows_of_its_options(folder, options, names):
    assert kept(folder, **options) == names


def test_every_term_that_applies_has_to_say_that_a_response_is_right(folder):
    assert kept(folder, correct=("count", "format", "iou"), range=(1.0, None)) == ["easy"]
    assert kept(folder, correct=("format",), range=(1.0, None)) == list(RATES)
    assert kept(folder, threshold=0.0, range=(1.0, None)) == list(RATES)


def test_a_selection_of_nothing_is_refused_with_the_ranges(folder):
    with pytest.raises(UserError, match="none of 4 samples: their pass_rate ranges from 0 to 1 with median 0.375"):
        select_samples(stage(range=(0.6, 0.9)), folder)
    with pytest.raises(UserError, match="keeps none of 4"):
        select_samples(stage(output="responses", range=(0.0, 0.0)), folder)
    with pytest.raises(UserError, match=r"no rollout has a term of `correct` \(iou\)"):
        select_samples(stage(correct=("iou",)), folder)
    with pytest.raises(UserError, match=r"gone.jsonl: cannot be read"):
        select_samples(stage(results_of="gone"), folder)
    assert not (folder / "out.jsonl").exists()


def test_samples_are_ranked_by_their_history(tmp_path):
    """One-example RLVR takes the sample whose reward varied most; LIMR those that follow the mean of all."""
    history = {"up": [0.0, 1.0], "flat": [0.5, 0.5], "slow": [0.2, 0.6]}
    visits = {name: [SampleStats(value, 0.0) for value in values] for name, values in history.items()}
    write_history_table(tmp_path / "in.jsonl", [*map(sample, history), sample("never drawn")], visits)
    by = {"correct": ()}
    assert kept(tmp_path, metric="reward_std", top_k=1, **by) == ["up"]
    assert kept(tmp_path, metric="reward_mean", range=(0.45, None), **by) == ["up", "flat"]
    assert kept(tmp_path, metric="limr", top_k=1, **by) == ["slow"]
    rows = read_table(tmp_path / "out.jsonl")
    assert rows[0]["limr"] == pytest.approx(1 - ((0.2 - 7 / 30) ** 2 + 0.1**2) / ((23 / 30) ** 2 + 0.3**2))
    assert "visits" not in rows[0]


def test_visits_of_copies_are_those_of_their_sample(tmp_path):
    """The last copy of the first sample was drawn once, and of the second only a copy."""
    samples = [sample("x"), sample("y"), sample("never drawn")]
    rewards = {"x": (0.1, 0.4), "x#2": (0.2, 0.5), "x#3": (0.3,), "y#2": (0.6,)}
    history = {name: [SampleStats(value, 0.0) for value in values] for name, values in rewards.items()}
    write_history_table(tmp_path / "in.jsonl", samples, merge_visits_of_copies(samples, 7, history))
    first, second = read_table(tmp_path / "in.jsonl")
    assert (first["id"], second["id"]) == ("x", "y")
    assert [mean for mean, _ in first["visits"]] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert [mean for mean, _ in second["visits"]] == [0.6]
    write_history_table(tmp_path / "in.jsonl", samples, merge_visits_of_copies(samples, None, history))
    assert [row["visits"] for row in read_table(tmp_path / "in.jsonl")] == [[[0.1, 0.0], [0.4, 0.0]]]


def test_an_empty_history_is_refused(tmp_path):
    write_history_table(tmp_path / "in.jsonl", [sample("a")], {})
    with pytest.raises(UserError, match="no sample has recorded rewards in "):
        select_samples(stage(metric="reward_std", correct=()), tmp_path)


def test_the_next_stage_gets_the_samples_it_knows(folder):
    known = [sample(name, meta={"level": 5}, response="own") for name in RATES]
    select_samples(stage(range=(0.1, 0.4)), folder)
    (late,) = read_selected_samples(folder / "out.jsonl", known)
    assert (late.id, late.response) == ("late", "own")
    assert late.meta == {"level": 5, "pass_rate": 0.25, "first_correct": 4}
    select_samples(stage(range=(0.1, 0.4), output="responses"), folder)
    (late,) = read_selected_samples(folder / "out.jsonl", known)
    assert (late.id, late.response) == ("late#3", "r3")
    with pytest.raises(UserError, match="sample 'late' is no longer a training sample"):
        read_selected_samples(folder / "out.jsonl", known[:1])
