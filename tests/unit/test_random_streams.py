"""Streams begun many at a time are numpy's own."""

import hashlib

import numpy as np
import pytest

from mmrl_datasets.generators.random_streams import _seed_states, make_rngs


def test_a_stream_is_what_numpy_begins_from_the_hash_of_its_name():
    names = [f"count/train/{index:06d}/pixels" for index in range(300)]
    for name, stream in zip(names, make_rngs(7, names), strict=True):
        entropy = int.from_bytes(hashlib.sha256(f"7/{name}".encode()).digest()[:16], "big")
        theirs = np.random.default_rng(entropy)
        assert stream.bit_generator.state == theirs.bit_generator.state
        assert stream.random(3).tolist() == theirs.random(3).tolist()


@pytest.mark.parametrize("entropy", [0, 1, 2**32 - 1, 2**32, 2**96 - 1, 2**127, 2**128 - 1])
def test_a_state_is_numpys_whatever_words_are_zero(entropy):
    words = np.array([[entropy >> 32 * k & 0xFFFFFFFF for k in range(4)]], dtype=np.uint32)
    assert _seed_states(words)[0].tolist() == np.random.SeedSequence(entropy).generate_state(4, np.uint64).tolist()


def test_names_and_seeds_lead_apart_and_their_order_changes_nothing():
    names = ["a/layout", "a/pixels", "b/layout"]
    first, backwards = make_rngs(0, names), make_rngs(0, names[::-1])[::-1]
    assert [stream.random() for stream in first] == [stream.random() for stream in backwards]
    assert len({stream.random() for stream in (*first, *make_rngs(1, names))}) == 6


def test_no_names_no_streams():
    assert make_rngs(0, []) == []


def test_another_bit_generator_is_not_begun_from_a_state_that_is_not_its_own():
    (stream,) = make_rngs(0, ["a"])
    seed = stream.bit_generator.seed_seq
    with pytest.raises(ValueError, match="not 624"):
        np.random.MT19937(seed)
    with pytest.raises(ValueError, match="not 8"):
        seed.generate_state(8, np.uint64)
