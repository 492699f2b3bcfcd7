"""Seeds derived from the purpose of a draw, so that no random number depends on what was drawn before."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2**63), e.g. `derive_seed(run_seed, "rollout", step, sample_id, index)`.

    It is the same on every machine and in every process. `1` and `"1"` are different parts, and so are `("ab",)` and
    `("a", "b")`.
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
