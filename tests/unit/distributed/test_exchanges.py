"""Shares of ranks and exchanges between them, one rank after another in one process."""

import pytest
from factories import make_group, make_prompt, make_sample
from fake_ranks import FakeRanks

from mmrl.distributed.exchanges import count_dropped_samples, measure_on_all_ranks, sum_metrics
from mmrl.distributed.ranks import SingleProcess, own_rows, own_slice
from mmrl.types import EvalRewards, UserError


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_shares_are_contiguous_and_differ_by_one_at_most(size, count):
    items = list(range(count))
    shares = [items[own_slice(count, FakeRanks(rank, size))] for rank in range(size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("num_unfinished", range(8))
def test_unfinished_groups_take_the_first_places_of_a_round_and_new_rows_the_rest(num_unfinished):
    """Over all ranks the order is that of a single process, and the ranks are evenly loaded."""

    def take_rows(start, count):
        return [f"row {place}" for place in range(start, start + count)]

    unfinished = [f"unfinished {place}" for place in range(num_unfinished)]
    shares = []
    for ranks in (FakeRanks(0, 3), FakeRanks(1, 3), FakeRanks(2, 3)):
        rows = own_rows(take_rows(20, 7 - num_unfinished), 7, ranks)
        shares.append([*unfinished[own_slice(7, ranks)], *rows])
    assert [place for share in shares for place in share] == [*unfinished, *take_rows(20, 7 - num_unfinished)]
    assert [len(share) for share in shares] == [2, 2, 3]
    assert own_rows(take_rows(20, 7), 7, SingleProcess()) == take_rows(20, 7)


def test_dropped_samples_are_counted_and_a_round_without_any_is_refused():
    assert count_dropped_samples(4, 1, FakeRanks(0, 2, (2,))) == {"data/dropped": 1.0}
    with pytest.raises(UserError, match="data.train: none of the 4 samples"):
        count_dropped_samples(4, 0, FakeRanks(0, 2, (0,)))
    assert count_dropped_samples(4, 0, FakeRanks(0, 2, (0,)), may_be_all=True) == {"data/dropped": 4.0}


def test_metrics_are_summed_over_all_ranks():
    ranks = FakeRanks(0, 2, ({"tools/calls": 3.0},))
    summed = sum_metrics({"tools/calls": 2.0, "tools/refused": 1.0}, ranks)
    assert summed == {"tools/calls": 5.0, "tools/refused": 1.0}


@pytest.mark.parametrize("rank", [0, 1])
def test_held_out_rewards_come_in_the_order_of_the_samples(rank):
    samples = [make_sample(id=str(i), task=task) for i, task in enumerate(("count", "find", "count", "read", "find"))]

    def measure(own):
        found, recorded = {}, []
        for sample in own:
            found.setdefault(sample.task, {})[sample.id] = float(sample.id)
            if sample.id != "2":
                recorded.append(make_group(make_prompt(sample), [], []))
        return EvalRewards(found, {"rethink/attempted": float(len(own))}, tuple(recorded), {("judge", "errors"): 2})

    rewards, counts, groups, failures = measure_on_all_ranks(
        measure, samples, FakeRanks(rank, 2, (measure(samples[1 - rank :: 2]),))
    )
    assert counts == {"rethink/attempted": 5.0}
    assert failures == {("judge", "errors"): 4}
    assert [group.prompt.sample.id for group in groups] == ["0", "1", "3", "4"]
    in_order = {"count": {"0": 0.0, "2": 2.0}, "find": {"1": 1.0, "4": 4.0}, "read": {"3": 3.0}}
    assert rewards == in_order
    assert [list(of_task) for of_task in rewards.values()] == [list(of_task) for of_task in in_order.values()]
