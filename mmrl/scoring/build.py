"""From a config to what scores rollouts: rewards, and what siblings earn beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from mmrl.algo.group_rewards import BoundGroupTerm
from mmrl.config import Config
from mmrl.config.schema import GroupTerm, Term
from mmrl.scoring import BoundTerm, Judge, registry
from mmrl.types import Sample, UserError
from mmrl.utils.plugin_args import options_of, settle
from mmrl.utils.plugins import resolve


def judge_of(config: Config, base: Path) -> Judge:
    """The rewards; functions in files are relative to `base`."""
    return Judge([_bound_term(term, base) for term in config.rewards.terms], config.rewards)


def group_terms_of(config: Config, base: Path) -> tuple[BoundGroupTerm, ...]:
    """What rollouts earn beside their siblings; functions in files are relative to `base`.

    Raises:
        UserError: a function or option is unknown, a name is taken, or `correct` names no reward term.
    """
    taken = [term.name or registry.find(term.fn, base, term.args).reward.name for term in config.rewards.terms]
    bound = [_bound_group_term(term, base) for term in config.rewards.group_terms]
    for name in (names := [*taken, *(term.name for term in bound)]):
        if names.count(name) > 1:
            raise UserError(f"two reward terms are named {name!r}; give one another `name`")
    for options in config.rewards.group_terms:
        if unknown := [name for name in options.args.get("correct", ()) if name not in taken]:
            raise UserError(
                f"group term {options.fn}: correct: there is no term {unknown[0]!r}, but {', '.join(taken)}"
            )
    return tuple(bound)


def weights_of(judge: Judge, group_terms: Sequence[BoundGroupTerm]) -> dict[str, float]:
    """The weight of every reward and group term, without schedules."""
    return {**judge.weights, **{term.name: term.options.weight for term in group_terms}}


def check_group_terms(terms: Sequence[BoundGroupTerm], judge: Judge, samples: Iterable[Sample]) -> None:
    """Raises UserError when a group term concerns a sample, and a reward term that it reads does not."""
    for term in terms:
        for sample in filter(term.options.concerns, samples):
            known = judge.names(sample)
            if missing := [name for name in term.options.args.get("correct", ()) if name not in known]:
                raise UserError(
                    f"group term {term.name!r} reads the term {missing[0]!r}, which does not apply to sample "
                    f"{sample.id!r} of task {sample.task!r}: give both the same `when`"
                )


def _bound_term(term: Term, base: Path) -> BoundTerm:
    load = partial(registry.find, term.fn, base, term.args)
    reward = load()
    return BoundTerm(name=term.name or reward.reward.name, reward=reward, load=load, options=term)


def _bound_group_term(term: GroupTerm, base: Path) -> BoundGroupTerm:
    fn = resolve(term.fn, base)
    if not callable(fn):
        raise UserError(f"{term.fn!r} is no function of a group")
    args = settle(f"group term {term.fn}", options_of(fn, after=1), term.args)
    name = term.name or term.fn.rpartition(":")[2]
    return BoundGroupTerm(name=name, values=partial(fn, **args), options=term)
