"""From the values of rewards to a total: transforms, gates, schedules, and four ways to combine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from mmrl.config.schema import RewardTermConfig as Options
from mmrl.types import Sample, UserError
from mmrl_rewards.contract import BoundReward

_LEXICOGRAPHIC_LEVELS = 100
"""In lexicographic totals, what differs by less than 1/100 of a term's range is equal."""

CombineMethod = Literal["sum", "product", "min", "lexicographic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTerm:
    """A term of the total and its reward, which `load` makes anew in another process."""

    name: str
    reward: BoundReward
    load_reward: Callable[[], BoundReward]
    options: Options

    def __post_init__(self) -> None:
        """Raises UserError for a transform or fallback that does not suit the reward's range."""
        low, high = self.reward.reward.low, self.reward.reward.high
        clip, scale, fallback = self.options.transform.clip, self.options.transform.rescale_to, self.options.fallback
        least = low if clip is None else max(low, clip[0])
        if self.options.transform.power != 1.0 and least < 0.0:
            raise UserError(f"term {self.name!r}: a power of values from {least:g} is not defined; set transform.clip")
        if self._clip_and_curve(high) <= self._clip_and_curve(low) or (scale is not None and scale[0] == scale[1]):
            raise UserError(f"term {self.name!r}: its transform makes all values from {low:g} to {high:g} equal")
        if fallback is not None and not low <= fallback <= high:
            raise UserError(f"term {self.name!r}: fallback {fallback:g} is outside the range {low:g} to {high:g}")

    @property
    def fallback(self) -> float:
        """What stands in for a value that is not to be had."""
        return self.reward.reward.low if self.options.fallback is None else self.options.fallback

    @property
    def timeout_s(self) -> float | None:
        """Seconds a call may take, where term or reward says so."""
        return self.reward.reward.timeout_s if self.options.timeout_s is None else self.options.timeout_s

    def applies_to(self, sample: Sample, *, evaluation: bool) -> bool:
        """Whether the term has a say about this sample."""
        if evaluation and self.options.training_only:
            return False
        return self.options.applies_to(sample)

    def weight_at(self, step: int | None) -> float:
        """The weight at a step of the stage, or the scheduleless one."""
        return self.options.weight_at(step)

    def transform(self, value: float) -> float:
        """A value of the reward after the term's transform."""
        curved, scale = self._clip_and_curve(value), self.options.transform.rescale_to
        if scale is None:
            return curved
        low, high = self._clip_and_curve(self.reward.reward.low), self._clip_and_curve(self.reward.reward.high)
        return scale[0] + (scale[1] - scale[0]) * (curved - low) / (high - low)

    def _clip_and_curve(self, value: float) -> float:
        transform = self.options.transform
        if transform.clip is not None:
            value = min(max(value, transform.clip[0]), transform.clip[1])
        if transform.threshold is not None:
            value = float(value >= transform.threshold)
        return value if transform.power == 1.0 else value**transform.power


def check_terms(terms: Sequence[BoundTerm], method: CombineMethod) -> None:
    """Raises UserError when two terms share a name, a gate is none, or a range does not suit `combine`."""
    known = {term.name: term for term in terms}
    for term in terms:
        name, gate = term.name, term.options.requires
        if known[name] is not term:
            raise UserError(f"two reward terms are named {name!r}; give one another `name`")
        if gate is not None and (gate not in known or gate == name):
            raise UserError(f"term {name!r}: its gate {gate!r} is no other term; there are {', '.join(known)}")
        if gate is not None and known[gate].options.training_only and not term.options.training_only:
            raise UserError(f"term {name!r} counts in evaluation, but its gate {gate!r} is training_only")
        ends = sorted(map(term.transform, (term.reward.reward.low, term.reward.reward.high)))
        if method != "sum" and ends[0] < 0.0:
            raise UserError(
                f"combine {method}: values of term {name!r} start at {ends[0]:g}; give it transform.rescale_to"
            )
    for name, term in known.items():
        if name in (gates := list(_iter_required_terms(term, known))):
            raise UserError(f"term {name!r}: its gates lead in a circle: {' -> '.join([name, *gates])}")


def combine_terms(
    terms: Sequence[BoundTerm], values_by_term: Mapping[str, float], method: CombineMethod, *, step: int | None
) -> float:
    """The total of a response from the values of the terms that apply; what a closed gate shuts out counts 0.

    sum: Σ w v. product: Π v^w. min: min v. lexicographic: Σ_k q_k / 102^k over Σ_k 1 / 102^k, where q_k is v_k over the
    high end of its range, rounded down to hundredths but for the last term. As 1/100 > Σ_{k>0} 1 / 102^k, a term
    outweighs all that follow it.

    Raises:
        UserError: a gate has no value, as it does not apply to this sample.
    """
    known = {term.name: term for term in terms}
    counted = [
        (term, term.transform(values_by_term[term.name]) if _requirements_met(term, known, values_by_term) else 0.0)
        for term in terms
    ]
    match method:
        case "sum":
            return float(sum(term.weight_at(step) * value for term, value in counted))
        case "product":
            return float(prod(value ** term.weight_at(step) for term, value in counted))
        case "min":
            return min(value for _, value in counted)
        case "lexicographic":
            return _combine_lexicographic([value / _max_value(term) for term, value in counted])


def _iter_required_terms(term: BoundTerm, terms_by_name: Mapping[str, BoundTerm]) -> Iterator[str]:
    """A term's gate, the gate of that one, and so on; a circle is gone round once."""
    seen = set[str]()
    while (gate := term.options.requires) is not None and gate not in seen:
        seen.add(gate)
        yield gate
        term = terms_by_name[gate]


def _requirements_met(
    term: BoundTerm, terms_by_name: Mapping[str, BoundTerm], values_by_term: Mapping[str, float]
) -> bool:
    """Whether a term's gate is open, and those of its gate, in turn."""
    while (gate := term.options.requires) is not None:
        if gate not in values_by_term:
            raise UserError(f"term {term.name!r}: its gate {gate!r} does not apply to the same samples: see `when`")
        if values_by_term[gate] <= term.options.requires_above:
            return False
        term = terms_by_name[gate]
    return True


def _max_value(term: BoundTerm) -> float:
    return max(map(term.transform, (term.reward.reward.low, term.reward.reward.high)))


def _combine_lexicographic(fractions: Sequence[float]) -> float:
    *first, last = fractions
    # What rounding took from a level is given back before rounding down.
    levels = [*(int(share * _LEXICOGRAPHIC_LEVELS + 1e-9) / _LEXICOGRAPHIC_LEVELS for share in first), last]
    places = [(_LEXICOGRAPHIC_LEVELS + 2.0) ** -k for k in range(len(levels))]
    return sum(level * place for level, place in zip(levels, places, strict=True)) / sum(places)
