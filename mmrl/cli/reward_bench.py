"""What the sub-commands of `mmrl reward` do; imports the rewards."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mmrl.scoring.lint import LintReport, filter_scorable, lint_reward, make_samples
from mmrl.scoring.registry import (
    builtin_case_tables,
    builtin_rewards,
    find_cases,
    load_bound_reward,
    load_reward,
    qualified_name,
)
from mmrl.types import AnswerType, Sample, UserError
from mmrl_rewards.cases import Case, first_error_message, load_case_table, load_sample
from mmrl_rewards.contract import BoundReward, bind


def print_rewards() -> int:
    """Print every reward."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("reward", "kinds", "range", "what it pays"):
        table.add_column(heading, no_wrap=heading == "reward")
    for name, reward in builtin_rewards().items():
        kinds = ", ".join(reward.answer_types) or "any"
        formula = " ".join(reward.doc.partition("\n\n")[0].split())
        table.add_row(name.removeprefix("mmrl_rewards."), kinds, f"{reward.low:g} to {reward.high:g}", Text(formula))
    Console().print(table)
    return 0


def print_reward(name: str) -> int:
    """Print a reward's docstring, options and place."""
    reward = load_reward(name, Path())
    kinds = ", ".join(reward.answer_types) or "any kind of answer"
    print(f"{qualified_name(name)}  (`{reward.name}`, {reward.low:g} to {reward.high:g}, {kinds})\n\n{reward.doc}\n")
    for option, parameter in inspect.signature(reward.fn).parameters.items():
        if option in reward.options:
            print(f"option {parameter}")
    print(f"source {inspect.getsourcefile(reward.fn)}:{inspect.getsourcelines(reward.fn)[1]}")
    return 0


def run_case_tables(names: Sequence[str], *, verbose: bool) -> int:
    """Run case tables, or the rows about single rewards; 1 when one fails."""
    failures = 0
    for title, base, cases in _select_cases(names):
        failed = 0
        for index, case in enumerate(cases):
            outcome = case.score(load_bound_reward(case.fn, base, case.args))
            failed += not outcome.passed
            if verbose or not outcome.passed:
                verdict = "pass" if outcome.passed else "FAIL"
                print(f"{verdict} {title} row {index} {case.fn}: expected {case.expected}, got {outcome.value}")
                print(
                    f"     reason: {outcome.reason}\n     source: {case.source}\n     response: {case.response!r:.120}"
                )
        print(f"{title}: {len(cases) - failed} of {len(cases)} rows pass")
        failures += failed
    return int(failures > 0)


def lint_rewards(names: Sequence[str], args: Mapping[str, Any], table: Path | None) -> int:
    """Lint rewards, all that come with mmrl if none is named; 1 when one is not fit."""
    unfit = 0
    for name in names or builtin_rewards():
        reward, samples = _reward_and_samples(name, args, table)
        report = lint_reward(reward, samples)
        _print_lint_report(name, report)
        unfit += not report.ok
    return int(unfit > 0)


def try_reward(row: Mapping[str, Any], sample: Path, response: str) -> int:
    """Score one response and print value and reason as JSON; the value may be "unscorable"."""
    fields = {"expected": 0, "source": "", "sample": load_sample(sample), "response": _read_response(response)}
    try:
        case = Case.model_validate({**fields, **row})
    except ValidationError as error:
        raise UserError(f"--case: {first_error_message(error)}") from error
    outcome = case.score(load_bound_reward(case.fn, Path(), case.args))
    print(json.dumps({"value": outcome.value, "reason": outcome.reason}, ensure_ascii=False))
    return int(outcome.value is None)


def _read_response(response: str) -> str:
    """The text itself, or that of the file it names."""
    if not response.startswith("@"):
        return response
    try:
        return Path(response[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--response {response}: cannot be read: {error}") from error


def _select_cases(names: Sequence[str]) -> list[tuple[str, Path, tuple[Case, ...]]]:
    """What to run: a title, where relative files start from, and the rows."""
    chosen = []
    for word in names or map(str, builtin_case_tables()):
        path = Path(word)
        if path.suffix == ".json":
            chosen.append((path.name, path.parent, load_case_table(path)))
        else:
            cases, base = find_cases(word, Path())
            chosen.append((word, base, cases))
    return chosen


def _reward_and_samples(
    name: str, args: Mapping[str, Any], table: Path | None
) -> tuple[BoundReward, tuple[Sample, ...]]:
    """A reward with its options, and what to try it on: one plain sample per kind, or, where it wants more than
    that, the samples of its case table.
    """
    reward = load_reward(name, Path())
    needed = [option for option, (_, _, required) in reward.options.items() if required and option not in args]
    if table is None and not needed:
        plain = filter_scorable(bound := bind(reward, args), make_samples(reward.answer_types or tuple(AnswerType)))
        if plain:
            return bound, plain
    cases = [
        case
        for case in (load_case_table(table) if table else find_cases(name, Path())[0])
        if case.expected != "unscorable"
    ]
    if not cases:
        raise UserError(f"no row of the case table of reward {reward.name!r} expects a value: there is nothing to try")
    bound = bind(reward, args or cases[0].args)
    samples = {case.sample.model_dump_json(): case.sample.build() for case in cases}
    if found := filter_scorable(bound, tuple(samples.values())):
        return bound, found
    raise UserError(f"reward {reward.name!r} can judge no sample of its case table with the options {dict(bound.args)}")


def _print_lint_report(name: str, report: LintReport) -> None:
    print(f"{name}: {'fit' if report.ok else 'NOT FIT'}")
    for finding in report.findings:
        print(f"  {'pass' if finding.ok else 'FAIL'}  {finding.check}: {finding.detail}")
    for earned in report.attacks:
        verdict, allowed = ("pass", "") if earned.ok else ("FAIL", f", at most {earned.max_allowed:.3g} is tolerated")
        print(
            f"  {verdict}  {earned.attack} earns {earned.value:.3g}{allowed} ({earned.answer_type}: {earned.reason:.80})"
        )
