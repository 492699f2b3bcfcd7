"""Plans in MEGA-Bench's planning tasks: whether actions, one a line, lead from where a problem begins to its goal.

Source: megabench/metrics/scoring/symbolic_planning.py of github.com/TIGER-AI-Lab/MEGA-Bench (arXiv:2410.10563), for
PDDL of conjunctions. As there, what must not hold is not looked at, objects may be of any type, and what an action
takes away goes before what it adds. Departure: a goal of one fact counts too, not only one that begins with `and`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningAction:
    """What can be done with objects that take the place of `parameters`."""

    parameters: tuple[str, ...]
    preconditions: tuple[Fact, ...]
    delete_effects: tuple[Fact, ...]
    add_effects: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningProblem:
    """Actions by name, the facts that hold at first, and those that shall hold."""

    actions: Mapping[str, PlanningAction]
    initial_facts: frozenset[Fact]
    goal_facts: tuple[Fact, ...]

    def is_solved_by(self, plan: Sequence[str]) -> bool:
        """Whether every action of a plan, such as `(move a b)`, can be done, and the goal holds after the last."""
        facts = set(self.initial_facts)
        for step in plan:
            name, *objects = step[1:-1].split(" ")
            action = self.actions.get(name)
            if action is None or len(objects) != len(action.parameters):
                return False
            named = dict(zip(action.parameters, objects, strict=True))
            if not facts.issuperset(_bind_objects(action.preconditions, named)):
                return False
            facts.difference_update(_bind_objects(action.delete_effects, named))
            facts.update(_bind_objects(action.add_effects, named))
        return facts.issuperset(self.goal_facts)


def parse_problem(context: Mapping[str, Any]) -> PlanningProblem:
    """The problem of an `eval_context`, in `domain_pddl` and `task_pddl`.

    Raises:
        ValueError: it is none.
    """
    domain, task = (_parse_pddl(str(context.get(name, ""))) for name in ("domain_pddl", "task_pddl"))
    sections = {part[0]: part[1:] for part in task if isinstance(part, tuple) and part}
    actions = {
        str(part[1]): _parse_action(part) for part in domain if isinstance(part, tuple) and part[:1] == (":action",)
    }
    if not actions or ":init" not in sections or len(sections.get(":goal", ())) != 1:
        raise ValueError("eval_context has no domain_pddl with actions, or no task_pddl with :init and :goal")
    return PlanningProblem(
        actions=actions,
        initial_facts=frozenset(sections[":init"]),
        goal_facts=tuple(_select_facts(sections[":goal"][0], negated=False)),
    )


def score_plan(prediction: object, reference: object) -> float:
    """1 where the plan said, one action a line or in a list, solves the problem of the context `due`.

    Raises:
        UserError: that is no problem.
    """
    lines = prediction.split("\n") if isinstance(prediction, str) else prediction
    if not isinstance(lines, list | tuple) or not isinstance(reference, Mapping):
        return 0.0
    plan = [line.strip() for line in map(str, lines) if line.startswith("(")]
    try:
        return float(parse_problem(reference).is_solved_by(plan))
    except ValueError as error:
        raise UserError(f"symbolic_planning_test: {error}; correct the item's `extra.context`") from error


def _parse_pddl(text: str) -> Fact:
    """Nested parentheses as nested tuples: the one expression of a text. Raises ValueError."""
    stack: list[list[Any]] = [[]]
    for token in _TOKEN.findall(_COMMENT.sub("", text)):
        if token == "(":
            stack.append([])
        elif token == ")" and len(stack) > 1:
            inner = tuple(stack.pop())
            stack[-1].append(inner)
        elif token == ")":
            raise ValueError("a parenthesis too many in PDDL")
        else:
            stack[-1].append(token)
    if len(stack) != 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], tuple):
        raise ValueError("PDDL must be one expression in parentheses")
    return stack[0][0]


def _parse_action(expression: Fact) -> PlanningAction:
    """An action from `(:action name :parameters (..) :precondition (..) :effect (..))`."""
    parts = dict(zip(expression[2::2], expression[3::2], strict=False))
    effect = parts.get(":effect", ())
    return PlanningAction(
        parameters=tuple(name for name in parts.get(":parameters", ()) if str(name).startswith("?")),
        preconditions=tuple(_select_facts(parts.get(":precondition", ()), negated=False)),
        delete_effects=tuple(_select_facts(effect, negated=True)),
        add_effects=tuple(_select_facts(effect, negated=False)),
    )


def _select_facts(condition: Fact, *, negated: bool) -> Iterator[Fact]:
    """The facts of a conjunction, or of one fact: those that hold, or those that do not."""
    for fact in condition[1:] if condition[:1] == ("and",) else (condition,):
        if fact and (fact[0] == "not") is negated:
            yield fact[1] if negated else fact


def _bind_objects(facts: Sequence[Fact], bindings: Mapping[str, str]) -> set[Fact]:
    """Facts about objects, which take the place of parameters."""
    return {tuple(bindings.get(part, part) if isinstance(part, str) else part for part in fact) for fact in facts}
