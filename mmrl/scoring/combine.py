"""From the values of rewards to a total: transforms, gates, schedules, and four ways to combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mmrl.config.schema import Term as Options
from mmrl.types import Sample, UserError
from mmrl_rewards.contract import BoundReward

_LEVELS = 100
"""In lexicographic totals, what differs by less than 1/100 of a term's range is equal."""

Combine = Literal["sum", "product", "min", "lexicographic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """A term of the total and its reward, which `load` makes anew in another process."""

    name: str
    reward: BoundReward
    load: Callable[[], BoundReward]
    options: Options

    def __post_init__(self) -> None:
        """Raises UserError for a transform or fallback that does not suit the reward's range."""
        low, high = self.reward.reward.low, self.reward.reward.high
        clip, scale, fallback = self.options.transform.clip, self.options.transform.scale, self.options.fallback
        least = low if clip is None else max(low, clip[0])
        if self.options.transform.power != 1.0 and least < 0.0:
            raise UserError(f"term {self.name!r}: a power of values from {least:g} is not defined; set transform.clip")
        if self._curved(high) <= self._curved(low) or (scale is not None and scale[0] == scale[1]):
            raise UserError(f"term {self.name!r}: its transform makes all values from {low:g} to {high:g} equal")
        if fallback is not None and not low <= fallback <= high:
            raise UserError(f"term {self.name!r}: fallback {fallback:g} is outside the range {low:g} to {high:g}")

    @property
    def fallback(self) -> float:
        """What stands in for a value that is not to be had."""
        return self.reward.reward.low if self.options.fallback is None else self.options.fallback

    @property
    def deadline_s(self) -> float | None:
        """Seconds a call may take, where term or reward says so."""
        return self.reward.reward.deadline_s if self.options.deadline_s is None else self.options.deadline_s

    def applies(self, sample: Sample, *, evaluation: bool) -> bool:
        """Whether the term has a say about this sample."""
        if evaluation and self.options.train_only:
            return False
        return self.options.concerns(sample)

    def weight(self, step: int | None) -> float:
        """The weight at a step of the stage, or the scheduleless one."""
        return self.options.weight_at(step)

    def shaped(self, value: float) -> float:
        """A value of the reward after the term's transform."""
        curved, scale = self._curved(value), self.options.transform.scale
        if scale is None:
            return curved
        low, high = self._curved(self.reward.reward.low), self._curved(self.reward.reward.high)
        return scale[0] + (scale[1] - scale[0]) * (curved - low) / (high - low)

    def _curved(self, value: float) -> float:
        transform = self.options.transform
        if transform.clip is not None:
            value = min(max(value, transform.clip[0]), transform.clip[1])
        if transform.threshold is not None:
            value = float(value >= transform.threshold)
        return value if transform.power == 1.0 else value**transform.power


def check_terms(terms: Sequence[BoundTerm], combine: Combine) -> None:
    """Raises UserError when two terms share a name, a gate is none, or a range does not suit `combine`."""
    known = {term.name: term for term in terms}
    for term in terms:
        name, gate = term.name, term.options.gate
        if known[name] is not term:
            raise UserError(f"two reward terms are named {name!r}; give one another `name`")
        if gate is not None and (gate not in known or gate == name):
            raise UserError(f"term {name!r}: its gate {gate!r} is no other term; there are {', '.join(known)}")
        if gate is not None and known[gate].options.train_only and not term.options.train_only:
            raise UserError(f"term {name!r} counts in evaluation, but its gate {gate!r} is train_only")
        ends = sorted(map(term.shaped, (term.reward.reward.low, term.reward.reward.high)))
        if combine != "sum" and ends[0] < 0.0:
            raise UserError(f"combine {combine}: values of term {name!r} start at {ends[0]:g}; give it transform.scale")
    for name, term in known.items():
        if name in (gates := list(_gates(term, known))):
            raise UserError(f"term {name!r}: its gates lead in a circle: {' -> '.join([name, *gates])}")


def total(terms: Sequence[BoundTerm], values: Mapping[str, float], combine: Combine, *, step: int | None) -> float:
    """The total of a response from the values of the terms that apply; what a closed gate shuts out counts 0.

    sum: Σ w v. product: Π v^w. min: min v. lexicographic: Σ_k q_k / 102^k over Σ_k 1 / 102^k, where q_k is v_k over the
    high end of its range, rounded down to hundredths but for the last term. As 1/100 > Σ_{k>0} 1 / 102^k, a term
    outweighs all that follow it.

    Raises:
        UserError: a gate has no value, as it does not apply to this sample.
    """
    known = {term.name: term for term in terms}
    counted = [(term, term.shaped(values[term.name]) if _open(term, known, values) else 0.0) for term in terms]
    match combine:
        case "sum":
            return float(sum(term.weight(step) * value for term, value in counted))
        case "product":
            return float(prod(value ** term.weight(step) for term, value in counted))
        case "min":
            return min(value for _, value in counted)
        case "lexicographic":
            return _lexicographic([value / _top(term) for term, value in counted])


def _gates(term: BoundTerm, known: Mapping[str, BoundTerm]) -> Iterator[str]:
    """A term's gate, the gate of that one, and so on; a circle is gone round once."""
    seen = set[str]()
    while (gate := term.options.gate) is not None and gate not in seen:
        seen.add(gate)
        yield gate
        term = known[gate]


def _open(term: BoundTerm, known: Mapping[str, BoundTerm], values: Mapping[str, float]) -> bool:
    """Whether a term's gate is open, and those of its gate, in turn."""
    while (gate := term.options.gate) is not None:
        if gate not in values:
            raise UserError(f"term {term.name!r}: its gate {gate!r} does not apply to the same samples: see `when`")
        if values[gate] <= term.options.gate_above:
            return False
        term = known[gate]
    return True


def _top(term: BoundTerm) -> float:
    return max(map(term.shaped, (term.reward.reward.low, term.reward.reward.high)))


def _lexicographic(shares: Sequence[float]) -> float:
    *first, last = shares
    # What rounding took from a level is given back before rounding down.
    levels = [*(int(share * _LEVELS + 1e-9) / _LEVELS for share in first), last]
    places = [(_LEVELS + 2.0) ** -k for k in range(len(levels))]
    return sum(level * place for level, place in zip(levels, places, strict=True)) / sum(places)
