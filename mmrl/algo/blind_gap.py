"""Does the model look? Rewards with what is to be looked at, against rewards without it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from mmrl.types import Group


def blind_gaps(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics `probe/blind_gap/<probe>/<term>`: mean of a reward term over rollouts, minus its mean over the probes of
    the same groups.

    0 means that the term is earned without looking. Terms are compared, never totals: some of what totals hold is paid
    to rollouts that train alone.
    """
    pairs: dict[str, tuple[list[float], list[float]]] = {}
    for group in groups:
        for probe, blind in group.probes.items():
            for name in {name for score in blind for name in score.terms}:
                seen, hidden = pairs.setdefault(f"probe/blind_gap/{probe}/{name}", ([], []))
                seen += [score.terms[name].value for score in group.scores]
                hidden += [score.terms[name].value for score in blind]
    return {name: fmean(seen) - fmean(hidden) for name, (seen, hidden) in sorted(pairs.items()) if seen}
