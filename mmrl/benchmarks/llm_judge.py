"""What a language model says of responses in which no rule finds an answer. It is asked about these alone, never
overrules a rule, and its verdicts stand in a column of their own.

Source: judges fill in where rules cannot read, as in the official pipelines of MathVista and EMMA. Departures: rules go
first and are final, nobody is asked by default, and the report has the accuracy with and without.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from mmrl.benchmarks.extraction.text import answer_span
from mmrl.benchmarks.items import COORDINATE_TYPES, Item
from mmrl.benchmarks.report.report import JudgeSummary, ScoredRun
from mmrl.benchmarks.verdict import MISSING_RULE, ResponseOutcome, Verdict
from mmrl.types import Unscorable, UserError
from mmrl_datasets.choices import format_choices
from mmrl_rewards.services.endpoint import RequestRejected
from mmrl_rewards.services.judge import JudgeService

_JUDGE_RUBRIC: Final = (
    "1 if the final answer of `response` means the same as `reference`, in whatever words, and 0 otherwise; 0 too if "
    "it declines, gives several answers, or leaves the answer open."
)


@dataclass(frozen=True, slots=True)
class _JudgeReply:
    """What the judge says of a response, or why it said nothing."""

    correct: bool | None
    failure: str = ""


def add_judge_verdicts(run: ScoredRun, service: JudgeService, *, max_concurrent: int) -> ScoredRun:
    """The same run with the judge's verdicts, `at_once` questions under way at a time.

    Raises:
        UserError: not one of its verdicts could be had.
    """
    texts = {(response.id, response.response_index): response.text for response in run.responses}
    unread = [verdict for verdict in run.verdicts if _needs_judge(verdict, run.items[verdict.id])]
    with ThreadPoolExecutor(max_concurrent) as pool:
        said = [*pool.map(lambda one: _ask_judge(service, run.items[one.id], texts[one.id, one.sample]), unread)]
    failures = [one.failure for one in said if one.correct is None]
    if unread and len(failures) == len(unread):
        raise UserError(
            f"the judge said nothing of {len(unread)} responses: {failures[0]}; the rest is kept, try again"
        )
    verdicts = _with_judge_replies(
        run.verdicts, {(v.id, v.response_index): one.correct for v, one in zip(unread, said, strict=True)}
    )
    return replace(
        run,
        verdicts=verdicts,
        judge_summary=JudgeSummary(model=service.model, num_asked=len(unread), failures=tuple(failures)),
    )


def _needs_judge(verdict: Verdict, item: Item) -> bool:
    """Whether there is something to read and no rule could: coordinates are for rules alone."""
    has_text = verdict.outcome is ResponseOutcome.NO_ANSWER and verdict.rule not in (MISSING_RULE, "empty")
    return has_text and item.answer_type not in COORDINATE_TYPES


def _ask_judge(service: JudgeService, item: Item, text: str) -> _JudgeReply:
    part = answer_span(text)
    shown = text[part.start : part.end] if part else text
    if len(shown) > service.max_chars:
        return _JudgeReply(None, f"{item.id} has {len(shown)} characters, the judge reads {service.max_chars}")
    reference = f"{item.answer} {item.unit or ''}".strip()
    question = item.question + (format_choices(item.options) if item.options else "")
    try:
        grades = service.grade({"question": question, "reference": reference, "response": shown}, _JUDGE_RUBRIC, 1)
    except (Unscorable, RequestRejected) as error:
        return _JudgeReply(None, str(error))
    return _JudgeReply(median(grades) == 1)


def _with_judge_replies(verdicts: Sequence[Verdict], replies: dict[tuple[str, int], bool | None]) -> list[Verdict]:
    return [replace(verdict, judge_correct=replies.get((verdict.id, verdict.response_index))) for verdict in verdicts]
