"""Checks reward terms before any is called: they fit together, and read parts that responses have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.answer import ResponseFormat
from mmrl.scoring.terms import BoundTerm, CombineMethod, find_counted_terms
from mmrl.types import UserError
from mmrl_rewards.contract import Of

_VERBS = {"requires": "requires", "fallback": "falls back on"}
_NOUNS = {"requires": "requirements", "fallback": "fallbacks"}


def check_terms(terms: Sequence[BoundTerm], method: CombineMethod) -> None:
    """Raise UserError unless terms fit together.

    Names are unique; `requires` and `fallback` name other terms without cycles; ranges suit the method; and the range
    and options of a fallback suit its term.
    """
    terms_by_name = {term.name: term for term in terms}
    counted = {term.name: term for term in find_counted_terms(terms)}
    for index, term in enumerate(terms):
        name, required, place = term.name, term.options.requires, f"rewards.terms.{index}"
        if any(earlier.name == name for earlier in terms[:index]):
            raise UserError(f"two reward terms are named {name!r}; give one another `name`", key=f"{place}.fn")
        known = ", ".join(terms_by_name)
        for key, other_name in (("requires", required), ("fallback", term.fallback_term)):
            if other_name is not None and (other_name not in terms_by_name or other_name == name):
                problem = f"it {_VERBS[key]} {other_name!r}, which is not another term; there are {known}"
                raise UserError(f"term {name!r}: {problem}", key=f"{place}.{key}")
            cycle = _find_cycle(term, terms_by_name, key)
            if cycle:
                problem = f"term {name!r}: its {_NOUNS[key]} form a cycle: {' -> '.join(cycle)}"
                raise UserError(problem, key=f"{place}.{key}")
        if required is not None and required not in counted:
            problem = f"term {name!r}: it requires {required!r}, which is a fallback and has no value of its own"
            raise UserError(problem, key=f"{place}.requires")
        if required is not None and terms_by_name[required].options.training_only and not term.options.training_only:
            problem = f"term {name!r} counts in evaluation, but requires {required!r}, which is training_only"
            raise UserError(problem, key=f"{place}.requires")
        if term.fallback_term is not None:
            _check_fallback(term, terms_by_name[term.fallback_term], f"{place}.fallback")
        if method != "sum" and name in counted and term.range[0] < 0.0:
            problem = f"values of term {name!r} start at {term.range[0]:g}; give it transform.rescale_to"
            raise UserError(f"combine {method}: {problem}", key=f"{place}.transform")


def _find_cycle(term: BoundTerm, terms_by_name: Mapping[str, BoundTerm], key: str) -> list[str]:
    """Return the names along a cycle of `requires` or `fallback` through a term; empty if there is none."""
    names = [term.name]
    # `check_terms` reports an unknown name for the term that has it.
    while names[-1] in terms_by_name and len(names) <= len(terms_by_name):
        last = terms_by_name[names[-1]]
        names.append((last.options.requires if key == "requires" else last.fallback_term) or "")
        if names[-1] == term.name:
            return names
    return []


def _check_fallback(term: BoundTerm, stand_in: BoundTerm, key: str) -> None:
    """Raise UserError if values of `stand_in` can leave the term's range, or it sets an option that has no effect."""
    low, high = term.declaration.low, term.declaration.high
    if stand_in.range[0] < low or stand_in.range[1] > high:
        problem = f"its values from {stand_in.range[0]:g} to {stand_in.range[1]:g} do not fit into {low:g} to {high:g}"
        raise UserError(f"term {term.name!r}: fallback {stand_in.name!r}: {problem}; give it a `transform`", key=key)
    options = stand_in.options
    if options.weight != 1.0 or options.schedule or options.requires or options.training_only:
        problem = f"{stand_in.name!r} is the fallback of {term.name!r} and counts in its place: leave out its `weight`"
        raise UserError(f"term {problem}, `schedule`, `requires` and `training_only`", key=key)


def check_parts(terms: Sequence[BoundTerm], response_format: ResponseFormat) -> None:
    """Raise UserError if a term reads a part, by an option of the type `Of`, that the response format does not have."""
    known = response_format.part_names
    for term in terms:
        for name, option in term.declaration.options.items():
            part = term.reward.args.get(name, option.default)
            if option.type_hint == Of and part not in known:
                there_are = f"the response format has no {part!r}; its parts are {', '.join(known)}"
                raise UserError(f"term {term.name!r}, option {name!r}: {there_are}")
