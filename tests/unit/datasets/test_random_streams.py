"""Random streams of samples follow from the seed and a name."""

import hashlib

import numpy as np

from mmrl_datasets.generators.common import _make_rng


def test_a_stream_begins_from_the_hash_of_seed_and_name():
    name = "count/train/000299/pixels"
    entropy = int.from_bytes(hashlib.sha256(f"7/{name}".encode()).digest()[:16], "big")
    assert _make_rng(7, name).random(3).tolist() == np.random.default_rng(entropy).random(3).tolist()
