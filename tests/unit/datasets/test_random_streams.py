"""Random streams of samples follow from the seed and a name."""

import hashlib

import numpy as np

from mmrl_datasets.generators.common import _make_rng


def test_a_stream_is_what_numpy_begins_from_the_hash_of_its_name():
    for index in range(300):
        name = f"count/train/{index:06d}/pixels"
        entropy = int.from_bytes(hashlib.sha256(f"7/{name}".encode()).digest()[:16], "big")
        stream, theirs = _make_rng(7, name), np.random.default_rng(entropy)
        assert stream.bit_generator.state == theirs.bit_generator.state
        assert stream.random(3).tolist() == theirs.random(3).tolist()


def test_names_and_seeds_lead_apart():
    names = ["a/layout", "a/pixels", "b/layout"]
    assert len({_make_rng(seed, name).random() for seed in (0, 1) for name in names}) == 6
