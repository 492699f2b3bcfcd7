"""Random generators whose streams depend on a seed and a name alone, not on the order or number of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

POOL_WORDS: Final = 4  # 32-bit words in the entropy pool of numpy's `SeedSequence`
# The constants of numpy's `SeedSequence` (numpy/random/bit_generator.pyx).
XSHIFT: Final = np.uint32(16)
MIX_MULT_L, MIX_MULT_R = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
INIT_A, MULT_A = 0x43B0D7E5, 0x931E8875
INIT_B, MULT_B = 0x8B51F9DD, 0x58F38DED
Words = NDArray[np.uint32]


def make_rngs(seed: int, names: Sequence[str]) -> list[np.random.Generator]:
    """Return one generator for each name.

    Each is equal to `np.random.default_rng` of the first 128 bits of sha256("seed/name"), read as a big-endian number.
    """
    # Seeding the generators together is five times faster than calling default_rng for each: numpy's SeedSequence
    # makes many small arrays.
    hashed = b""
    for name in names:
        hashed += hashlib.sha256(f"{seed}/{name}".encode()).digest()[: 4 * POOL_WORDS]
    # SeedSequence splits a big integer into words, the lowest first.
    entropy = np.frombuffer(hashed, ">u4").reshape(-1, POOL_WORDS)[:, ::-1]
    rngs = []
    for state in _seed_states(entropy.astype(np.uint32)):
        bits = np.random.PCG64(_PrecomputedSeed(state))  # type: ignore[arg-type] # numpy's stubs omit ISeedSequence
        rngs.append(np.random.Generator(bits))
    return rngs


class _PrecomputedSeed(ISeedSequence):
    def __init__(self, state: NDArray[np.uint64]) -> None:
        self._state = state

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:
        if (n_words, dtype) != (len(self._state), np.uint64):
            raise ValueError(f"this seed has {len(self._state)} words of 64 bits, not {n_words} of {dtype}")
        return self._state


def _seed_states(entropy_ND: Words) -> NDArray[np.uint64]:
    """Compute numpy's `SeedSequence(entropy).generate_state(4, np.uint64)` for many entropies at once.

    Args:
        entropy_ND: uint32 [N, 4], one entropy a row.

    Returns:
        uint64 [N, 4], one state a row.

    Source: M. O'Neill, "Developing a seed_seq alternative" (2015), as implemented in numpy/random/bit_generator.pyx.
    """
    # First every word is hashed into the pool, then each is mixed into the others, then the state is read out.
    multipliers = _multiplier_powers(INIT_A, MULT_A, POOL_WORDS * POOL_WORDS + 1)
    pool = [_hash_words(entropy_ND[:, i], *multipliers[i : i + 2]) for i in range(POOL_WORDS)]
    used = POOL_WORDS
    for source in range(POOL_WORDS):
        for other in range(POOL_WORDS):
            if source != other:
                hashed = _hash_words(pool[source], *multipliers[used : used + 2])
                mixed = MIX_MULT_L * pool[other] - MIX_MULT_R * hashed
                pool[other] = mixed ^ (mixed >> XSHIFT)
                used += 1
    multipliers = _multiplier_powers(INIT_B, MULT_B, 2 * POOL_WORDS + 1)
    words = [_hash_words(pool[i % POOL_WORDS], *multipliers[i : i + 2]) for i in range(2 * POOL_WORDS)]
    # Two words make one of 64 bits, the lower half first, on machines of either byte order.
    return np.stack(words, axis=1).astype("<u4").view("<u8").astype(np.uint64)


def _hash_words(words: Words, before: np.uint32, after: np.uint32) -> Words:
    product = (words ^ before) * after
    hashed: Words = product ^ (product >> XSHIFT)
    return hashed


def _multiplier_powers(first: int, factor: int, count: int) -> list[np.uint32]:
    # In numpy's C code the multiplier changes after every word that is hashed; here all its values come in a list.
    return [np.uint32(first * pow(factor, k, 2**32) % 2**32) for k in range(count)]
