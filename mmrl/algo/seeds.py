"""Seeds that depend on what they are for, never on order or clock."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: str | int) -> int:
    """A seed in [0, 2**63) from what it is for, e.g. `derive(run_seed, "rollout", step, sample_id, index)`.

    The same on every machine and in every process. `1` and `"1"` are different parts, and so are "ab" and "a", "b".
    """
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
