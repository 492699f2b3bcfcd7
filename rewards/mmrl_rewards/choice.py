"""Rewards for multiple choice."""

from __future__ import annotations

from mmrl.types import Kind, Response, Sample, Term
from mmrl_rewards.contract import gold, reward


@reward(name="choice", kinds=(Kind.CHOICE,))
def exact(response: Response, sample: Sample) -> Term:
    """1 if the answer's letter is the target's, case aside, else 0.

    Source: the accuracy reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Departures: none; the text of an option is no
    answer, only its letter is.

    Raises:
        Unscorable: the target is not one letter from A to Z.
    """
    target = gold(sample, Kind.CHOICE)
    value = response.answer.value
    if value is None:
        return Term(0.0, response.answer.problems[0])
    return Term(float(value == target), f"{value}, expected {target}")
