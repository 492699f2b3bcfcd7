"""A tool of your own: a calculator for the four operations.

    rollout_steps: [{kind: generate}, {kind: tools, tools: [{fn: ./tool.py:calculate, args: {digits: 6}}]}]

The model calls it with <tool_call>{"name": "calculate", "arguments": {"expression": "2 * (3 + 4)"}}</tool_call>
"""

import ast
import operator
from collections.abc import Mapping
from typing import Any

from mmrl import Sample

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(call: Mapping[str, Any], sample: Sample, *, digits: int = 6) -> str:
    """Return the value of `expression`. A ValueError goes back to the model as the tool's answer.

    Args:
        call: {"expression": text}, as the model wrote it.
        sample: the question; not needed here.
        digits: significant digits of the result.
    """
    try:
        tree = ast.parse(str(call["expression"])[:200], mode="eval")
        return f"{evaluate(tree.body):.{digits}g}"
    except (KeyError, SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f'write {{"expression": "2 * (3 + 4)"}}; {error}') from error


def evaluate(node: ast.expr) -> float:
    """Return the value of a parsed expression."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.BinOp() if type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("numbers, + - * / and brackets are allowed")
