"""The shuffled order of samples: readable from any position, and without repeats nearby."""

import pytest
from factories import make_sample

from mmrl.data.order import ShuffledOrder

SAMPLES = [make_sample(id=str(number)) for number in range(11)]


def ids(samples):
    return [sample.id for sample in samples]


def test_position_means_the_same_sample_however_it_is_reached():
    order = ids(ShuffledOrder(SAMPLES, 5).take(0, 60))
    pieces, data_position = [], 0
    for count in (1, 4, 7, 0, 11, 30, 7):
        pieces += ids(ShuffledOrder(SAMPLES, 5).take(data_position, count))
        data_position += count
    assert pieces == order
    shuffled = ShuffledOrder(SAMPLES, 5)
    for start in (59, 0, 30, 12, 12):
        assert ids(shuffled.take(start, 1)) == [order[start]]


@pytest.mark.parametrize(("min_gap", "kept_gap"), [(3, 3), (100, 3), (0, 0)])
def test_each_epoch_has_every_sample_once_and_repeats_keep_their_distance(min_gap, kept_gap):
    """Of 11 samples a third is 3, the largest gap that is kept; without the rule nearer repeats are common."""
    order = ids(ShuffledOrder(SAMPLES, 5, min_gap=min_gap).take(0, 11 * 40))
    epochs = [order[start : start + 11] for start in range(0, len(order), 11)]
    assert all(sorted(epoch) == sorted(ids(SAMPLES)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 40
    latest: dict[str, int] = {}
    gaps = []
    for position, name in enumerate(order):
        gaps.append(position - latest.get(name, -99))
        latest[name] = position
    assert min(gaps) > kept_gap
    assert min_gap or min(gaps) <= 3
    pieces = [ids(ShuffledOrder(SAMPLES, 5, min_gap=min_gap).take(start, 7)) for start in range(0, 434, 7)]
    assert [name for piece in pieces for name in piece] == order[: 62 * 7]


def test_seeds_give_different_orders():
    assert ids(ShuffledOrder(SAMPLES, 1).take(0, 11)) != ids(ShuffledOrder(SAMPLES, 2).take(0, 11))
