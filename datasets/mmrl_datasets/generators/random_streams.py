"""Random streams that depend on names alone, never on order, size or clock; many are begun at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

POOL_WORDS: Final = 4  # words of 32 bits that hold the entropy
XSHIFT: Final = np.uint32(16)
MIX_MULT_L, MIX_MULT_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
Words = NDArray[np.uint32]


def make_rngs(seed: int, names: Sequence[str]) -> list[np.random.Generator]:
    """A stream for each name, as `np.random.default_rng` begins it from the first 128 bits of sha256("seed/name").

    One by one they would take five times as long: numpy makes many small arrays for each.
    """
    hashed = b"".join(hashlib.sha256(f"{seed}/{name}".encode()).digest()[: 4 * POOL_WORDS] for name in names)
    entropy = np.frombuffer(hashed, ">u4").reshape(-1, POOL_WORDS)[:, ::-1]  # a big number, its lowest word first
    return [_make_rng(state) for state in _seed_states(entropy.astype(np.uint32))]


def _make_rng(state: NDArray[np.uint64]) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(_PrecomputedSeed(state)))  # type: ignore[arg-type] # numpy's stubs forget it


class _PrecomputedSeed(ISeedSequence):
    """The state that a bit generator begins with, known already."""

    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:
        if (n_words, dtype) != (len(self._state), np.uint64):
            raise ValueError(f"this is a seed of {len(self._state)} words of 64 bits, not of {n_words} {dtype}")
        return self._state


def _seed_states(entropy_ND: Words) -> NDArray[np.uint64]:
    """What numpy's `SeedSequence` makes of each row of four words: four words of 64 bits (after M. O'Neill, randutils,
    2015).
    """
    multipliers = _multiplier_powers(0x43B0D7E5, 0x931E8875, POOL_WORDS * POOL_WORDS + 1)
    pool = [_hash_words(entropy_ND[:, i], *multipliers[i : i + 2]) for i in range(POOL_WORDS)]
    used = POOL_WORDS
    for source in range(POOL_WORDS):
        for other in range(POOL_WORDS):
            if source != other:
                mixed = MIX_MULT_L * pool[other] - MIX_MULT_R * _hash_words(pool[source], *multipliers[used : used + 2])
                pool[other] = mixed ^ (mixed >> XSHIFT)
                used += 1
    multipliers = _multiplier_powers(0x8B51F9DD, 0x58F38DED, 2 * POOL_WORDS + 1)
    words = [_hash_words(pool[i % POOL_WORDS], *multipliers[i : i + 2]) for i in range(2 * POOL_WORDS)]
    return np.stack(words, axis=1).astype("<u4").view("<u8").astype(np.uint64)


def _hash_words(words: Words, before: np.uint32, after: np.uint32) -> Words:
    product = (words ^ before) * after
    hashed: Words = product ^ (product >> XSHIFT)
    return hashed


def _multiplier_powers(first: int, factor: int, count: int) -> list[np.uint32]:
    """`first` times the powers of `factor`, in 32 bits."""
    return [np.uint32(first * pow(factor, k, 2**32) % 2**32) for k in range(count)]
