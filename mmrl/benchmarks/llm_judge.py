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

from mmrl.benchmarks.extraction.text import answering
from mmrl.benchmarks.items import FRAMED, Item
from mmrl.benchmarks.report.report import Judging, Run
from mmrl.benchmarks.verdict import MISSING, Outcome, Verdict
from mmrl.types import Unscorable, UserError
from mmrl_datasets.readers.row_to_sample import listed
from mmrl_rewards.services.endpoint import Rejected
from mmrl_rewards.services.judge import JudgeService

_RUBRIC: Final = (
    "1 if the final answer of `response` means the same as `reference`, in whatever words, and 0 otherwise; 0 too if "
    "it declines, gives several answers, or leaves the answer open."
)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the judge says of a response, or why it said nothing."""

    right: bool | None
    failure: str = ""


def judged(run: Run, service: JudgeService, *, at_once: int) -> Run:
    """The same run with the judge's verdicts, `at_once` questions under way at a time.

    Raises:
        UserError: not one of its verdicts could be had.
    """
    texts = {(response.id, response.sample): response.text for response in run.responses}
    unread = [verdict for verdict in run.verdicts if _is_unread(verdict, run.items[verdict.id])]
    with ThreadPoolExecutor(at_once) as pool:
        said = [*pool.map(lambda one: _ask(service, run.items[one.id], texts[one.id, one.sample]), unread)]
    failures = [one.failure for one in said if one.right is None]
    if unread and len(failures) == len(unread):
        raise UserError(
            f"the judge said nothing of {len(unread)} responses: {failures[0]}; the rest is kept, try again"
        )
    verdicts = _with(run.verdicts, {(v.id, v.sample): one.right for v, one in zip(unread, said, strict=True)})
    return replace(
        run, verdicts=verdicts, judging=Judging(model=service.model, asked=len(unread), failures=tuple(failures))
    )


def _is_unread(verdict: Verdict, item: Item) -> bool:
    """Whether there is something to read and no rule could: coordinates are for rules alone."""
    has_text = verdict.outcome is Outcome.NO_ANSWER and verdict.rule not in (MISSING, "empty")
    return has_text and item.kind not in FRAMED


def _ask(service: JudgeService, item: Item, text: str) -> _Said:
    part = answering(text)
    shown = text[part.start : part.end] if part else text
    if len(shown) > service.max_chars:
        return _Said(None, f"{item.id} has {len(shown)} characters, the judge reads {service.max_chars}")
    reference = f"{item.answer} {item.unit or ''}".strip()
    question = item.question + (listed(item.options) if item.options else "")
    try:
        grades = service.grades({"question": question, "reference": reference, "response": shown}, _RUBRIC, 1)
    except (Unscorable, Rejected) as error:
        return _Said(None, str(error))
    return _Said(median(grades) == 1)


def _with(verdicts: Sequence[Verdict], said: dict[tuple[str, int], bool | None]) -> list[Verdict]:
    return [replace(verdict, judged=said.get((verdict.id, verdict.sample))) for verdict in verdicts]
