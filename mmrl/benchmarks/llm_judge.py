"""Verdicts of a language model on responses in which no rule finds an answer.

The judge sees no other response, never overrules a rule, and has its own column in verdicts and reports.

Source: judges complete the rules in the official pipelines of MathVista (arXiv:2310.02255) and EMMA (arXiv:2501.05444).
Departures: rules come first and are final, no judge is asked by default, and reports give the accuracy with and
without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any, Final

from mmrl.benchmarks.extraction.text import answer_span
from mmrl.benchmarks.items import COORDINATE_TYPES, Item
from mmrl.benchmarks.report import JudgeSummary, ScoredRun
from mmrl.benchmarks.verdict import MISSING_RULE, ResponseOutcome, Verdict
from mmrl.types import Unscorable, UserError
from mmrl_datasets.choices import format_choices
from mmrl_rewards.services.endpoint import RequestRejected
from mmrl_rewards.services.judge import JudgeService

_JUDGE_RUBRIC: Final = (
    "1 if the final answer of `response` means the same as `reference`, in whatever words, and 0 otherwise; 0 too if "
    "it declines, gives several answers, or leaves the answer open."
)


def add_judge_verdicts(
    run: ScoredRun, service: JudgeService, *, max_concurrent: int, warn: Callable[[str], None]
) -> ScoredRun:
    """Return the run with a judge's verdicts on every response in which no rule found an answer, and their summary.

    `service` keeps replies, so that nothing is asked twice; `max_concurrent` requests are under way at a time. `warn`
    receives a line if there are responses without a verdict.

    Raises:
        UserError: the judge gave no verdict at all.
    """
    texts = {(response.id, response.response_index): response.text for response in run.responses}
    unread = []
    for verdict in run.verdicts:
        # Coordinates are only for rules, and a judge has nothing to read in an empty or missing response.
        has_text = verdict.outcome is ResponseOutcome.NO_ANSWER and verdict.rule not in (MISSING_RULE, "empty")
        if has_text and run.items[verdict.id].answer_type not in COORDINATE_TYPES:
            unread.append(verdict)

    def ask(verdict: Verdict) -> bool | str:
        return _ask_judge(service, run.items[verdict.id], texts[verdict.id, verdict.response_index])

    # Requests wait for a server, so threads suffice.
    with ThreadPoolExecutor(max_concurrent) as pool:
        replies = list(pool.map(ask, unread))
    failures = [reply for reply in replies if isinstance(reply, str)]
    if unread and len(failures) == len(unread):
        raise UserError(
            f"the judge has no verdict on {len(unread)} responses: {failures[0]}; the rest is kept, try again"
        )
    if failures:
        warn(f"the judge has no verdict on {len(failures)} responses: {failures[0]}")
    judged = {}
    for verdict, reply in zip(unread, replies, strict=True):
        judged[verdict.id, verdict.response_index] = None if isinstance(reply, str) else reply
    summary = JudgeSummary(model=service.model, num_asked=len(unread), num_failed=len(failures))
    return _with_judge(run, judged, summary)


def keep_judge_verdicts(run: ScoredRun, before: Sequence[Verdict], section: Mapping[str, Any]) -> ScoredRun:
    """Return the run with a judge's verdicts of an earlier grading, whose report has this section `judge`."""
    judged = {(verdict.id, verdict.response_index): verdict.judge_correct for verdict in before}
    summary = JudgeSummary(model=section["model"], num_asked=section["asked"], num_failed=section["failed"])
    return _with_judge(run, judged, summary)


def _with_judge(run: ScoredRun, judged: Mapping[tuple[str, int], bool | None], summary: JudgeSummary) -> ScoredRun:
    verdicts = [replace(each, judge_correct=judged.get((each.id, each.response_index))) for each in run.verdicts]
    return replace(run, verdicts=verdicts, judge_summary=summary)


def _ask_judge(service: JudgeService, item: Item, text: str) -> bool | str:
    """Return the judge's verdict, or the reason why there is none."""
    answer = answer_span(text)
    shown = text[answer.start : answer.end] if answer else text
    if len(shown) > service.max_chars:
        return f"{item.id} has {len(shown)} characters, the judge reads {service.max_chars}"
    material = {
        "question": item.question + (format_choices(item.options) if item.options else ""),
        "reference": f"{item.answer_text} {item.unit or ''}".strip(),
        "response": shown,
    }
    try:
        grades = service.grade(material, _JUDGE_RUBRIC, 1)
    except (Unscorable, RequestRejected) as error:
        return str(error)
    return median(grades) == 1
