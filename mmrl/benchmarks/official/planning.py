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
class Action:
    """What can be done with objects that take the place of `parameters`."""

    parameters: tuple[str, ...]
    needs: tuple[Fact, ...]
    removes: tuple[Fact, ...]
    adds: tuple[Fact, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Actions by name, the facts that hold at first, and those that shall hold."""

    actions: Mapping[str, Action]
    begin: frozenset[Fact]
    goal: tuple[Fact, ...]

    def solved_by(self, plan: Sequence[str]) -> bool:
        """Whether every action of a plan, such as `(move a b)`, can be done, and the goal holds after the last."""
        facts = set(self.begin)
        for step in plan:
            name, *objects = step[1:-1].split(" ")
            action = self.actions.get(name)
            if action is None or len(objects) != len(action.parameters):
                return False
            named = dict(zip(action.parameters, objects, strict=True))
            if not facts.issuperset(_of(action.needs, named)):
                return False
            facts.difference_update(_of(action.removes, named))
            facts.update(_of(action.adds, named))
        return facts.issuperset(self.goal)


def problem_of(context: Mapping[str, Any]) -> Problem:
    """The problem of an `eval_context`, in `domain_pddl` and `task_pddl`.

    Raises:
        ValueError: it is none.
    """
    domain, task = (_parsed(str(context.get(name, ""))) for name in ("domain_pddl", "task_pddl"))
    sections = {part[0]: part[1:] for part in task if isinstance(part, tuple) and part}
    actions = {str(part[1]): _action(part) for part in domain if isinstance(part, tuple) and part[:1] == (":action",)}
    if not actions or ":init" not in sections or len(sections.get(":goal", ())) != 1:
        raise ValueError("eval_context has no domain_pddl with actions, or no task_pddl with :init and :goal")
    return Problem(
        actions=actions, begin=frozenset(sections[":init"]), goal=tuple(_held(sections[":goal"][0], negated=False))
    )


def achieved(said: object, due: object) -> float:
    """1 where the plan said, one action a line or in a list, solves the problem of the context `due`.

    Raises:
        UserError: that is no problem.
    """
    lines = said.split("\n") if isinstance(said, str) else said
    if not isinstance(lines, list | tuple) or not isinstance(due, Mapping):
        return 0.0
    plan = [line.strip() for line in map(str, lines) if line.startswith("(")]
    try:
        return float(problem_of(due).solved_by(plan))
    except ValueError as error:
        raise UserError(f"symbolic_planning_test: {error}; correct the item's `extra.context`") from error


def _parsed(text: str) -> Fact:
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


def _action(written: Fact) -> Action:
    """An action from `(:action name :parameters (..) :precondition (..) :effect (..))`."""
    parts = dict(zip(written[2::2], written[3::2], strict=False))
    effect = parts.get(":effect", ())
    return Action(
        parameters=tuple(name for name in parts.get(":parameters", ()) if str(name).startswith("?")),
        needs=tuple(_held(parts.get(":precondition", ()), negated=False)),
        removes=tuple(_held(effect, negated=True)),
        adds=tuple(_held(effect, negated=False)),
    )


def _held(condition: Fact, *, negated: bool) -> Iterator[Fact]:
    """The facts of a conjunction, or of one fact: those that hold, or those that do not."""
    for fact in condition[1:] if condition[:1] == ("and",) else (condition,):
        if fact and (fact[0] == "not") is negated:
            yield fact[1] if negated else fact


def _of(facts: Sequence[Fact], named: Mapping[str, str]) -> set[Fact]:
    """Facts about objects, which take the place of parameters."""
    return {tuple(named.get(part, part) if isinstance(part, str) else part for part in fact) for fact in facts}
