"""Mixtures and streams: exact shares, each row once per epoch, the same row at a position on every path to it."""

from collections import Counter
from itertools import count

import pytest
from factories import make_sample

from mmrl.data.order import (
    BLOCK_SIZE,
    CachedOrder,
    DistinctOrder,
    SequentialOrder,
    ShuffledOrder,
    StreamingOrder,
    allocate_quotas,
    fixed_mixture,
)
from mmrl.types import RejectedRow, TrainingState, UserError


def rows(name, size=None):
    """Yield `size` rows, or endless ones; every seventh is rejected."""
    for i in count() if size is None else range(size):
        if i % 7 == 6:
            yield RejectedRow(f"{name}-{i}", "no answer")
        else:
            yield make_sample(i, id=f"{name}-{i}", task=name)


def ids(taken):
    return [row.id for row in taken]


def source(row):
    return row.id.split("-")[0]


def held(name, size, seed=3):
    return ShuffledOrder(list(rows(name, size)), seed)


def streamed(name="s", size=50, buffer=8, seed=5):
    return StreamingOrder(lambda: rows(name, size), buffer=buffer, seed=seed)


ORDERS = {
    "shuffled": lambda: held("a", 11),
    "mixture": lambda: fixed_mixture([held("a", 10), held("b", 300), held("c", 7)], [1, 2.5, 0.5], seed=1),
    "stream": streamed,
    "stream held whole": lambda: streamed(size=5, buffer=100),
    "endless stream": lambda: streamed(size=None),
    "stream, remembered": lambda: CachedOrder(streamed()),
    "mixture of streams": lambda: fixed_mixture(
        [streamed("a", 20), streamed("b", None), held("c", 5)], [3, 2, 1], seed=1
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_position_holds_the_same_row_however_it_is_reached(name):
    order = ids(ORDERS[name]().take(0, 2300))
    pieces, position = [], 0
    one = ORDERS[name]()
    for size in (1, 4, 0, 45, 50, 900, 1, 1299):
        assert ids(ORDERS[name]().take(position, size)) == order[position : position + size]  # as after a restart
        pieces += ids(one.take(position, size))
        position += size
    assert pieces == order
    for position in (700, 0, 49, 50, 2298):
        assert ids(one.take(position, 2)) == order[position : position + 2]


def test_quotas_by_hand():
    assert allocate_quotas([1, 1], 10) == [5, 5]
    assert allocate_quotas([1, 1, 1], 10) == [4, 3, 3]
    assert allocate_quotas([0.1, 0.2, 0.7], 1000) == [100, 200, 700]
    # Exactly 2.22, 1.33 and 0.44: the last position goes to the largest remainder.
    assert allocate_quotas([5, 3, 1], 4) == [2, 1, 1]
    assert allocate_quotas([1000, 1], 10) == [10, 0]


@pytest.mark.parametrize("weights", [(1, 1, 1), (0.7, 0.2, 0.1), (3, 1, 2), (1, 100, 10)])
def test_shares_are_exact_in_every_block(weights):
    names = ("a", "b", "c")
    taken = fixed_mixture([held(name, 9) for name in names], weights, seed=0).take(0, 3 * BLOCK_SIZE)
    expected = dict(zip(names, allocate_quotas(weights, BLOCK_SIZE), strict=True))
    assert all(abs(expected[n] - BLOCK_SIZE * w / sum(weights)) < 1 for n, w in zip(names, weights, strict=True))
    blocks = [taken[start : start + BLOCK_SIZE] for start in range(0, len(taken), BLOCK_SIZE)]
    assert all(Counter(map(source, block)) == expected for block in blocks)
    assert len({tuple(map(source, block)) for block in blocks}) == 3, "no block is arranged like another"


def test_a_source_of_a_mixture_goes_through_its_own_order():
    taken = fixed_mixture([held("a", 10), held("b", 400)], [1, 1], seed=0).take(0, 2 * BLOCK_SIZE)
    for name, size in (("a", 10), ("b", 400)):
        own = [row for row in taken if source(row) == name]
        assert ids(own) == ids(held(name, size).take(0, BLOCK_SIZE))


@pytest.mark.parametrize(("min_gap", "kept_gap"), [(3, 3), (100, 3), (0, 0)])
def test_each_epoch_has_every_sample_once_and_repeats_keep_their_distance(min_gap, kept_gap):
    """Of 11 samples a third is 3, the largest gap that is kept; without the rule nearer repeats are common."""
    samples = [make_sample(id=str(number)) for number in range(11)]
    order = ids(ShuffledOrder(samples, 5, min_gap=min_gap).take(0, 11 * 40))
    assert order[:11] != ids(ShuffledOrder(samples, 6, min_gap=min_gap).take(0, 11))
    epochs = [order[start : start + 11] for start in range(0, len(order), 11)]
    assert all(sorted(epoch) == sorted(ids(samples)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 40
    latest: dict[str, int] = {}
    gaps = []
    for position, name in enumerate(order):
        gaps.append(position - latest.get(name, -99))
        latest[name] = position
    assert min(gaps) > kept_gap
    assert min_gap or min(gaps) <= 3
    pieces = [ids(ShuffledOrder(samples, 5, min_gap=min_gap).take(start, 7)) for start in range(0, 434, 7)]
    assert [name for piece in pieces for name in piece] == order[: 62 * 7]


def take_steps(order, counts):
    """Return the ids that steps of so many samples take from a `DistinctOrder` of `order`, a list for each step."""
    state = TrainingState()
    distinct, steps = DistinctOrder(order, state), []
    for count_of_step in counts:
        steps.append(ids(distinct.take(state.data_position, count_of_step)))
        state.data_position += count_of_step
        state.step_data_start = state.data_position
    return steps


@pytest.mark.parametrize("size", range(2, 41))
def test_no_step_gets_a_sample_twice_however_few_there_are(size):
    samples = [make_sample(id=str(number)) for number in range(size)]
    for step_size in range(1, size + 1):
        plain = ShuffledOrder(samples, 5, min_gap=step_size)
        steps = take_steps(plain, [step_size] * 50)
        assert all(len(set(step)) == step_size for step in steps)
        order = [name for step in steps for name in step]
        epochs = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        # Where no step had a sample twice without the rule, it changes nothing.
        plain_ids = ids(plain.take(0, len(order)))
        plain_steps = [plain_ids[start : start + step_size] for start in range(0, len(order), step_size)]
        assert (plain_steps == steps) == all(len(set(step)) == step_size for step in plain_steps)


def test_a_moved_sample_comes_after_its_step_and_rejected_rows_stay():
    a, b, c = (make_sample(id=name) for name in "abc")
    rejected = RejectedRow("r", "no answer")
    order = SequentialOrder([a, rejected, a, b, rejected, c])
    assert take_steps(order, [3, 2, 4]) == [["a", "r", "b"], ["a", "r"], ["c", "a", "r", "b"]]


def test_a_step_that_needs_more_samples_than_there_are_is_refused():
    order = SequentialOrder([make_sample(id=name) for name in "abc"])
    with pytest.raises(UserError, match=r"a step has 3 samples already, and the next 100,001 rows .* have no others"):
        take_steps(order, [4])


def test_a_mixture_depends_on_seed_and_relative_weights():
    def order(weights, seed):
        return ids(fixed_mixture([held("a", 5), held("b", 5)], weights, seed).take(0, 50))

    assert order([1, 1], 0) == order([2, 2], 0)
    assert order([1, 1], 0) != order([1, 1], 1)
    assert order([1, 1], 0) != order([1, 2], 0)


def test_a_weight_too_small_to_count_is_refused():
    with pytest.raises(UserError, match=r"weight 1 of 10001 in all is less than one sample in 1000"):
        fixed_mixture([held("a", 5), held("b", 5)], [10_000, 1], seed=0)


def test_a_stream_gives_every_row_once_per_epoch_in_an_order_of_its_own():
    order = ids(streamed(size=50, buffer=8).take(0, 150))
    epochs = [order[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(epoch) == sorted(ids(rows("s", 50))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert order != ids(streamed(size=50, buffer=8, seed=6).take(0, 150))


@pytest.mark.parametrize("buffer", [1, 8, 64])
def test_a_stream_holds_no_more_rows_than_its_buffer(buffer):
    read = []

    def watched():
        for row in rows("s"):
            read.append(row)
            yield row

    stream = StreamingOrder(watched, buffer=buffer, seed=0)
    for drawn in range(500):
        (row,) = stream.take(drawn, 1)
        assert len(read) - drawn <= buffer + 1
        assert int(row.id.split("-")[1]) <= drawn + buffer
    assert buffer > 1 or ids(read)[:500] == ids(streamed(size=None, buffer=1).take(0, 500))


def test_a_jump_to_a_position_reads_one_epoch_and_a_part_at_most():
    read = count()

    def counted():
        for row in rows("s", 50):
            next(read)
            yield row

    StreamingOrder(counted, buffer=8, seed=0).take(50 * 7 + 20, 1)
    assert next(read) <= 50 + 20 + 8 + 1


def test_a_stream_without_rows_is_refused():
    with pytest.raises(UserError, match="a streamed source gave no rows"):
        streamed(size=0).take(0, 1)
    assert len(streamed(size=1).take(0, 9)) == 9
