"""Rewards for one number."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mmrl.types import Kind, Response, Sample, Term
from mmrl_rewards.contract import gold, reward


@reward(name="number", kinds=(Kind.NUMBER,))
def exact(response: Response, sample: Sample, *, tolerance: Annotated[float, Field(ge=0.0)] = 0.0) -> Term:
    """1 if |answer - target| <= tolerance, else 0; 3 and 3.0 are equal.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Departures: an absolute tolerance.

    Raises:
        Unscorable: the target is not a finite number.
    """
    target = gold(sample, Kind.NUMBER)
    value = response.answer.value
    if value is None:
        return Term(0.0, response.answer.problems[0])
    within = abs(value - target) <= tolerance
    margin = f" within {tolerance:g}" if tolerance else ""
    return Term(float(within), f"{value}, expected {target}{margin}")
