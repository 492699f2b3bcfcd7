"""The verdict on a rollout, by the reward terms that a config names in `correct`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def terms_reach(values_by_term: Mapping[str, float], names: Iterable[str], threshold: float) -> bool | None:
    """Return True if all of the named terms that apply reach the threshold; None if none of them applies."""
    values = [values_by_term[name] for name in names if name in values_by_term]
    return min(values) >= threshold if values else None
