"""Check of plans in MEGA-Bench's planning tasks: do the actions lead from the initial facts to the goal?

Source: megabench/metrics/scoring/symbolic_planning.py of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563), for
PDDL of conjunctions. As there, negative preconditions are ignored, objects may be of any type, and an action deletes
facts before it adds others. Departure: a goal of a single fact counts, too, not only one that begins with `and`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mmrl.types import UserError

_TOKEN: Final = re.compile(r"[()]|[^\s()]+")
_COMMENT: Final = re.compile(r";[^\n]*")

Fact = tuple[Any, ...]
"""A PDDL expression, such as `("on", "a", "b")`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningAction:
    """An action of a PDDL domain; its facts name parameters, which a plan replaces by objects."""

    parameters: tuple[str, ...]  # names such as `?x`, in the order in which a plan gives objects
    preconditions: tuple[Fact, ...]  # facts that must hold before
    delete_effects: tuple[Fact, ...]  # facts that no longer hold after
    add_effects: tuple[Fact, ...]  # facts that hold after


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """A PDDL domain with one task in it."""

    actions: Mapping[str, PlanningAction]  # actions by name
    initial_facts: frozenset[Fact]  # facts that hold at first
    goal_facts: tuple[Fact, ...]  # facts that must hold in the end

    def is_solved_by(self, plan: Sequence[str]) -> bool:
        """Return True when every step of a plan, such as `(move a b)`, can be done and the goal holds afterwards."""
        facts = set(self.initial_facts)
        for step in plan:
            name, *objects = step[1:-1].split(" ")
            action = self.actions.get(name)
            if action is None or len(objects) != len(action.parameters):
                return False
            bindings = dict(zip(action.parameters, objects, strict=True))
            if not facts.issuperset(_bind_objects(action.preconditions, bindings)):
                return False
            facts.difference_update(_bind_objects(action.delete_effects, bindings))
            facts.update(_bind_objects(action.add_effects, bindings))
        return facts.issuperset(self.goal_facts)


def parse_problem(context: Mapping[str, Any]) -> PlanningProblem:
    """Return the problem in the `domain_pddl` and `task_pddl` of an `eval_context`.

    Raises:
        ValueError: one of them is missing or no PDDL.
    """
    domain = _parse_pddl(str(context.get("domain_pddl", "")))
    task = _parse_pddl(str(context.get("task_pddl", "")))
    sections = {part[0]: part[1:] for part in task if isinstance(part, tuple) and part}
    actions = {}
    for part in domain:
        if isinstance(part, tuple) and part[:1] == (":action",):
            if len(part) == 1:
                raise ValueError("an action of PDDL has no name: (:action)")
            actions[str(part[1])] = _parse_action(part)
    if not actions or ":init" not in sections or len(sections.get(":goal", ())) != 1:
        raise ValueError("eval_context has no domain_pddl with actions, or no task_pddl with :init and :goal")
    return PlanningProblem(
        actions=actions,
        initial_facts=frozenset(sections[":init"]),
        goal_facts=tuple(_select_facts(sections[":goal"][0], negated=False)),
    )


def score_plan(prediction: object, reference: object) -> float:
    """Return 1 when the predicted plan, a list or one action a line, solves the problem of the context `reference`.

    Raises:
        UserError: the context holds no problem.
    """
    lines = prediction.split("\n") if isinstance(prediction, str) else prediction
    if not isinstance(lines, list | tuple) or not isinstance(reference, Mapping):
        return 0.0
    plan = [line.strip() for line in map(str, lines) if line.startswith("(")]
    try:
        return float(parse_problem(reference).is_solved_by(plan))
    except ValueError as error:
        raise UserError(f"symbolic_planning_test: {error}; correct the item's `meta.context`") from error


def _parse_pddl(text: str) -> Fact:
    """Return the one expression of a text as nested tuples; raise ValueError unless it is exactly one."""
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text)):
        if token == "(":
            stack.append([])
        elif token == ")" and len(stack) > 1:
            inner = tuple(stack.pop())
            stack[-1].append(inner)
        elif token == ")":
            raise ValueError("PDDL has one closing parenthesis too many")
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], tuple):
        raise ValueError("PDDL must be one expression in parentheses")
    return stack[0][0]


def _parse_action(expression: Fact) -> PlanningAction:
    """Return the action of `(:action name :parameters (..) :precondition (..) :effect (..))`."""
    parts = dict(zip(expression[2::2], expression[3::2], strict=False))
    effect = parts.get(":effect", ())
    return PlanningAction(
        # Typed parameters read `?x - block`; only the names begin with a question mark.
        parameters=tuple(name for name in parts.get(":parameters", ()) if str(name).startswith("?")),
        preconditions=tuple(_select_facts(parts.get(":precondition", ()), negated=False)),
        delete_effects=tuple(_select_facts(effect, negated=True)),
        add_effects=tuple(_select_facts(effect, negated=False)),
    )


def _select_facts(condition: Fact, *, negated: bool) -> Iterator[Fact]:
    """Yield the positive, or the negated, facts of a conjunction or of a single fact."""
    for fact in condition[1:] if condition[:1] == ("and",) else (condition,):
        if fact == ("not",):
            raise ValueError("(not) in PDDL has no fact to negate")
        if fact and (fact[0] == "not") is negated:
            yield fact[1] if negated else fact


def _bind_objects(facts: Sequence[Fact], bindings: Mapping[str, str]) -> Iterator[Fact]:
    """Yield the facts with objects in place of parameters."""
    for fact in facts:
        yield tuple(bindings.get(part, part) if isinstance(part, str) else part for part in fact)
