"""Was the response written as asked?"""

from __future__ import annotations

from mmrl.types import Response, Sample, Term
from mmrl_rewards.contract import reward

_CONTENT = ("question echo", "all options", "number dump", "box dump", "whole picture", "repetition", "judge injection")


@reward(name="format", attack_tolerance=dict.fromkeys((*_CONTENT, "1 MB of text"), 1.0))
def tags(response: Response, sample: Sample) -> Term:
    """1 if the response meets the answer grammar exactly, else 0 with the first problem as the reason.

    Source: the format reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Departures: the content of the answer must also
    read as the asked-for kind, and every departure from the grammar counts, not only a failed regular expression.
    """
    problems = response.answer.problems
    return Term(0.0, problems[0]) if problems else Term(1.0, "as asked")
