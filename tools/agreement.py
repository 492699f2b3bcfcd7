"""Measure how our verdicts agree with published ones.

    python tools/agreement.py --data DIR

DIR is one of these folders, which are not part of mmrl:

- A checkout of github.com/mathllm/MATH-V, with data/test.jsonl, and in outputs/ responses with `correct`; or one of
  github.com/MMMU-Benchmark/MMMU, with responses in mmmu/example_outputs/ and mmmu-pro/output/. Our official verdicts
  must equal theirs, but MMMU-Pro draws some letters at random without a seed, which nobody can repeat.
- MathVista's published responses, GPT-4's extractions and the official verdicts: items.jsonl.gz,
  scores_official.json.gz, and public/ with truth.jsonl.gz and responses_RUN.jsonl.gz. Each row of a run has the
  response, GPT-4's extraction of it, and the official verdict, once as stored in 2023 (`true_false`) and once by the
  code at 53d52587 (`true_false_head`). Their licence forbids training on them, and asks to share alike. Two things are
  compared: the official metric on the stored extractions, which must agree to the last verdict; and our rules on the
  raw responses, without any model, on rows where the official extraction is an answer at all (`clean`).
- A checkout of github.com/huggingface/Math-Verify. The pairs of formulas in its tests are compared by `maths:equal`;
  pairs of text from which its parser would extract a formula are left out. Our case table is measured too.

Exit code 1: a threshold is missed. 2: DIR holds none of them.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from mmrl.benchmarks.grading import grade_response, score_responses
from mmrl.benchmarks.items import Item, ItemResponse, parse_canonical_item
from mmrl.benchmarks.official_metrics.mathvista import SUBSET_COLUMNS, normalize_extraction, parse_mathvista_item
from mmrl.benchmarks.registry import BENCHMARKS
from mmrl.benchmarks.verdict import Verdict, read_rows
from mmrl.types import UserError
from mmrl_rewards.cases import Case, load_case_table
from mmrl_rewards.contract import BoundReward
from mmrl_rewards.maths import equal

EXCLUDED_RUNS: Final = ("_code", "instruct_blip2")
"""Runs in which GPT-4 did not extract: it simulated programs, or answered in place of an empty response."""
_BRACKETED_LETTER: Final = re.compile(r"\(([a-zA-Z])\)")
_FORMER_GRADE_NAME: Final = "daily life"

PUBLISHED_BOUNDS: Final[Mapping[str, float]] = {"mathvision": 0.99, "mmmu": 0.998, "mmmu_pro": 0.998}
"""Least share of published verdicts that the official rule must repeat, by benchmark."""

FORMULA_BOUND: Final = 0.95
"""Least share of verdicts on pairs of formulas that `maths:equal` must repeat."""
_MAX_WORDS: Final = 3  # words of an answer; more are text with a formula in it
_WORD: Final = re.compile(r"[A-Za-z]{2,}")
_COMMAND: Final = re.compile(r"\\[A-Za-z]+")

Count = tuple[int, int]
"""Equal cases, and all cases."""


class AgreementThreshold(NamedTuple):
    """Holds a measured share and the bound that it must keep."""

    name: str
    value: float
    bound: float
    is_upper_bound: bool = False

    @property
    def is_met(self) -> bool:
        """True when the value respects the bound."""
        return self.value <= self.bound if self.is_upper_bound else self.value >= self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgreement:
    """Agreement on the responses of one published run."""

    run: str  # name of the run
    excluded: bool  # True when GPT-4's extractions are unfit to judge the rules
    metric_2023: Count  # verdicts of 2023 that the metric reproduces on stored extractions
    metric_head: Count  # verdicts of the code at head that the metric reproduces on stored extractions
    table_cells: Count  # cells of the published score table that the stored verdicts reproduce
    clean_rows: Count  # equal verdicts of rules and GPT-4 where the extraction is an answer
    free_form_rows: Count  # equal verdicts of rules and GPT-4 on questions without options
    adjudicated_rows: Count  # strict verdicts that equal those of a person
    false_positives: int  # responses that the rules call correct and a person does not
    our_accuracy: float  # by our official rule, in [0, 1]
    published_accuracy: float  # by the official code at head, in [0, 1]


class PublishedRow(NamedTuple):
    """Holds a response with its authors' verdict."""

    item: Mapping[str, Any]  # the question in columns of canonical JSONL
    response: str
    correct: bool


class FileAgreement(NamedTuple):
    """Holds the agreement on one published file."""

    name: str
    benchmark: str
    official: Count  # verdicts of our official rule that equal the published ones
    strict: Count  # verdicts of the strict rule that equal the published ones; they need not
    malformed: Sequence[str]  # ids of rows that cannot be read
    accuracies: Sequence[float]  # by our official rule, by the strict one, and as published, in [0, 1]


class _GradedRow(NamedTuple):
    row: Mapping[str, Any]
    item: Item
    verdict: Verdict


class FormulaAgreement(NamedTuple):
    """Holds how `maths:equal` agrees with verdicts on pairs of formulas."""

    name: str  # of the file
    num_pairs: int
    equal: Count  # verdicts that equal the file's, and pairs of one formula each
    differing: Sequence[str]  # target, answer and verdict of the file, for each other pair


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the agreement of every run, and whether each threshold is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of published responses")
    options = parser.parse_args(arguments)
    thresholds = []
    try:
        files = measure_published(options.data)
        for file in files:
            _print_file(file)
        for name in dict.fromkeys(file.benchmark for file in files):
            share = _equal_share(file.official for file in files if file.benchmark == name)
            thresholds.append(AgreementThreshold(f"official rule of {name}", share, PUBLISHED_BOUNDS[name]))
        formulas = measure_formulas(options.data)
        if formulas:
            _print_formulas(formulas)
            share = _equal_share(file.equal for file in formulas)
            thresholds.append(AgreementThreshold("maths:equal on pairs of formulas", share, FORMULA_BOUND))
        if (options.data / "items.jsonl.gz").exists() or not (files or formulas):
            runs = measure_agreement(options.data)
            _print_runs(runs)
            thresholds += agreement_thresholds(runs)
    except UserError as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    for threshold in thresholds:
        verdict = "holds " if threshold.is_met else "MISSED"
        relation = "at most" if threshold.is_upper_bound else "at least"
        print(f"{verdict}  {100 * threshold.value:6.2f} %  {relation} {100 * threshold.bound:5.1f} %  {threshold.name}")
    return int(not all(threshold.is_met for threshold in thresholds))


def measure_agreement(folder: Path) -> list[RunAgreement]:
    """Return the agreement on every run of a folder, in alphabetical order.

    Raises:
        UserError: the folder lacks a file.
    """
    if not (folder / "items.jsonl.gz").exists():
        raise UserError(
            f"{folder}: there is no items.jsonl.gz of MathVista's published responses, no outputs/ of MATH-V, and "
            "neither mmmu/example_outputs/ nor mmmu-pro/output/ of MMMU; --data is a folder with one of them"
        )
    item_rows = {row["pid"]: row for _, row in read_rows(folder / "items.jsonl.gz")}
    items = {pid: parse_mathvista_item(row) for pid, row in item_rows.items()}
    with gzip.open(folder / "scores_official.json.gz", "rt", encoding="utf-8") as file:
        tables = json.load(file)
    truth: dict[str, dict[str, bool]] = {}
    for _, row in read_rows(folder / "public" / "truth.jsonl.gz"):
        if row["truth"] is not None:
            truth.setdefault(row["run"], {})[row["pid"]] = row["truth"]
    agreements = []
    for path in sorted((folder / "public").glob("responses_*.jsonl.gz")):
        run = path.name.removeprefix("responses_").removesuffix(".jsonl.gz")
        responses = [row for _, row in read_rows(path)]
        table_cells = _count_table_cells(tables[run], responses, item_rows)
        agreements.append(_compare_run(run, responses, items, truth.get(run, {}), table_cells))
    return agreements


def agreement_thresholds(runs: Sequence[RunAgreement]) -> list[AgreementThreshold]:
    """Return the shares of all runs together with the bounds that they must respect."""
    fair = [run for run in runs if not run.excluded]
    false_positive_share = sum(run.false_positives for run in fair) / max(
        1, sum(run.adjudicated_rows[1] for run in fair)
    )
    worst_run = min(_equal_share([run.clean_rows]) for run in fair)
    return [
        AgreementThreshold("metric of 2023 on stored extractions", _equal_share(run.metric_2023 for run in runs), 1.0),
        AgreementThreshold("metric at head on stored extractions", _equal_share(run.metric_head for run in runs), 1.0),
        AgreementThreshold("cells of published score tables", _equal_share(run.table_cells for run in runs), 1.0),
        AgreementThreshold("rules, clean rows of all runs", _equal_share(run.clean_rows for run in fair), 0.97),
        AgreementThreshold("rules, clean rows of the worst run", worst_run, 0.95),
        AgreementThreshold("rules, free-form rows", _equal_share(run.free_form_rows for run in fair), 0.985),
        AgreementThreshold("rules against the truth by hand", _equal_share(run.adjudicated_rows for run in fair), 0.99),
        AgreementThreshold("right by rule, wrong in truth", false_positive_share, 0.005, is_upper_bound=True),
    ]


def measure_published(folder: Path) -> list[FileAgreement]:
    """Return the agreement on every file of responses in a checkout of MATH-V or MMMU; none in another folder."""
    agreements = []
    test_file = folder / "data" / "test.jsonl"
    if test_file.exists():
        questions = {row["id"]: row for _, row in read_rows(test_file)}
        for path in sorted(folder.glob("outputs/**/*.jsonl")):
            rows = []
            for _, row in read_rows(path):
                item = _canonical_row(questions[row["id"]], questions[row["id"]]["options"])
                rows.append(PublishedRow(item, row["response"], row["correct"]))
            agreements.append(_compare_file(path.stem, "mathvision", rows))
    for path in sorted(folder.glob("mmmu-pro/output/*.jsonl")):
        rows = []
        for _, row in read_rows(path):
            # A response that was refused by the server is an object.
            text = row["response"] if isinstance(row["response"], str) else ""
            options = ast.literal_eval(str(row["options"]))
            rows.append(PublishedRow(_canonical_row(row, options), text, row["if_right"]))
        agreements.append(_compare_file(path.stem, "mmmu_pro", rows))
    for path in sorted(folder.glob("mmmu/example_outputs/*/total_val_output.json")):
        letters = json.loads(path.read_text(encoding="utf-8"))
        rows = []
        for file in sorted(path.parent.glob("*/output.json")):
            for row in json.loads(file.read_text(encoding="utf-8")):
                # No verdicts are published for open questions.
                if row["question_type"] == "multiple-choice":
                    item = _canonical_row(row, list(row["index2ans"].values()))
                    rows.append(PublishedRow(item, row["response"], letters[row["id"]] == row["answer"]))
        agreements.append(_compare_file(path.parent.name, "mmmu", rows))
    return agreements


def measure_formulas(folder: Path) -> list[FormulaAgreement]:
    """Return the agreement on the test files of a checkout of Math-Verify and on our table; none in another folder."""
    if not (folder / "src" / "math_verify").exists():
        return []
    pairs: dict[str, list[tuple[str, str, bool]]] = {}
    for path in sorted(folder.glob("tests/test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # The rows of @pytest.mark.parametrize("gold,pred,expected", [..]) that hold nothing but constants.
            if isinstance(node, ast.Tuple) and len(node.elts) == 3 and isinstance(node.elts[2], ast.Constant):
                values = [element.value for element in node.elts if isinstance(element, ast.Constant)]
                if list(map(type, values)) in ([str, str, int], [str, str, bool]):
                    pairs.setdefault(path.name, []).append((values[0], values[1], bool(values[2])))
    for case in load_case_table(Path(__file__).parents[1] / "rewards" / "cases" / "maths.json"):
        answer = case.build()[0].answer.text
        is_plain = case.sample.answer_type == "latex" and not case.args and case.repeat == 1
        if answer and is_plain and case.expected in (0, 1):
            pairs.setdefault("cases/maths.json", []).append((case.sample.value, answer, case.expected == 1))
    return [_compare_formulas(name, rows) for name, rows in pairs.items()]


def _compare_formulas(name: str, rows: Sequence[tuple[str, str, bool]]) -> FormulaAgreement:
    num_compared, differing = 0, []
    for target, answer, expected in rows:
        words = [_WORD.findall(_COMMAND.sub("", text)) for text in (target, answer)]
        if max(map(len, words)) > _MAX_WORDS:
            continue
        row = {"sample": {"answer_type": "latex", "value": target}, "response": f"<answer>{answer}</answer>"}
        case = Case.model_validate({"fn": "maths", **row, "expected": expected, "source": name})
        result = case.score(BoundReward(reward=equal))
        if result.value == "unscorable" or "not one formula" in result.reason:
            continue
        num_compared += 1
        if not result.passed:
            differing.append(f"{target!r}, {answer!r}: {expected}")
    return FormulaAgreement(name, len(rows), (num_compared - len(differing), num_compared), differing)


def _print_formulas(files: Sequence[FormulaAgreement]) -> None:
    print(f"{'maths:equal':28}{'pairs':>8}{'formulas':>10}{'agree':>8}")
    for file in files:
        print(f"{file.name:28}{file.num_pairs:8}{file.equal[1]:10}{file.equal[0]:8}")
    for file in files:
        for pair in file.differing:
            print(f"differs  {file.name}: {pair}")


def _canonical_row(row: Mapping[str, Any], options: Sequence[str]) -> dict[str, Any]:
    answer_type = "choice" if options else "text"
    return {"id": row["id"], "answer": row["answer"], "options": options, "answer_type": answer_type}


def _compare_file(name: str, benchmark: str, rows: Sequence[PublishedRow]) -> FileAgreement:
    items, responses, published, malformed = {}, [], {}, []
    for row in rows:
        try:
            item = parse_canonical_item(row.item)
        except ValueError:
            malformed.append(row.item["id"])
            continue
        items[item.id] = item
        responses.append(ItemResponse(id=item.id, text=row.response))
        published[item.id] = row.correct
    verdicts = score_responses(BENCHMARKS[benchmark], items, responses, {}).verdicts
    official, strict = [verdict.official for verdict in verdicts], [verdict.strict for verdict in verdicts]
    return FileAgreement(
        name,
        benchmark,
        official=_count_equal(map(operator.eq, official, published.values())),
        strict=_count_equal(map(operator.eq, strict, published.values())),
        malformed=malformed,
        accuracies=[sum(column) / max(1, len(verdicts)) for column in (official, strict, published.values())],
    )


def _print_file(file: FileAgreement) -> None:
    official, strict = 100 * _equal_share([file.official]), 100 * _equal_share([file.strict])
    accuracies = ", ".join(f"{100 * accuracy:.2f}" for accuracy in file.accuracies)
    print(
        f"{file.benchmark} {file.name}: {file.official[1]} rows, agreement official {official:.2f} %, strict "
        f"{strict:.2f} %; accuracy official, strict, published {accuracies}"
        + (f"; malformed: {', '.join(file.malformed)}" if file.malformed else "")
    )


def _print_runs(runs: Sequence[RunAgreement]) -> None:
    print("MathVista testmini: ours against published verdicts")
    heads = ("metric 2023", "metric head", "cells", "clean", "free-form", "truth", "false right", "ours", "published")
    print(f"{'run':40}" + "".join(f"{head:>13}" for head in heads))
    for run in runs:
        name = f"{run.run} (no threshold)" if run.excluded else run.run
        counts = (
            *(run.metric_2023, run.metric_head, run.table_cells),
            *(run.clean_rows, run.free_form_rows, run.adjudicated_rows),
        )
        cells = [f"{equal}/{total}" for equal, total in counts]
        cells += [str(run.false_positives), f"{100 * run.our_accuracy:.1f}", f"{100 * run.published_accuracy:.1f}"]
        print(f"{name:40}" + "".join(f"{cell:>13}" for cell in cells))


def _compare_run(
    run: str,
    rows: Sequence[Mapping[str, Any]],
    items: Mapping[str, Item],
    truth: Mapping[str, bool],
    table_cells: Count,
) -> RunAgreement:
    graded = []
    for row in rows:
        if row.get("true_false") is not None:
            item = items[row["pid"]]
            response = ItemResponse(id=item.id, text=row["response"] or "")
            graded.append(_GradedRow(row, item, grade_response(BENCHMARKS["mathvista"], item, response)))
    clean = [entry for entry in graded if _has_clean_extraction(entry.row, entry.item)]
    free_form = [entry for entry in graded if not entry.item.options]
    adjudicated = [(entry.verdict, truth[entry.verdict.id]) for entry in graded if entry.verdict.id in truth]
    return RunAgreement(
        run=run,
        excluded=any(part in run for part in EXCLUDED_RUNS),
        # The authors' code changed between runs, never within one.
        metric_2023=max(_count_metric_2023(graded, digits_only=digits_only) for digits_only in (True, False)),
        metric_head=_count_equal(
            _score_stored_extraction(entry, digits_only=False)
            == (entry.row["prediction_head"], entry.row["true_false_head"])
            for entry in graded
        ),
        table_cells=table_cells,
        clean_rows=_count_equal(entry.verdict.official == entry.row["true_false_head"] for entry in clean),
        free_form_rows=_count_equal(entry.verdict.official == entry.row["true_false_head"] for entry in free_form),
        adjudicated_rows=_count_equal(verdict.strict == correct for verdict, correct in adjudicated),
        false_positives=sum(verdict.strict and not correct for verdict, correct in adjudicated),
        our_accuracy=sum(entry.verdict.official for entry in graded) / max(1, len(graded)),
        published_accuracy=sum(entry.row["true_false_head"] for entry in graded) / max(1, len(graded)),
    )


def _count_metric_2023(graded: Sequence[_GradedRow], *, digits_only: bool) -> Count:
    return _count_equal(
        _score_stored_extraction(entry, digits_only=digits_only) == (entry.row["prediction"], entry.row["true_false"])
        for entry in graded
    )


def _score_stored_extraction(entry: _GradedRow, *, digits_only: bool) -> tuple[str | None, bool]:
    """Return the metric's prediction and verdict on GPT-4's extraction."""
    prediction = normalize_extraction(entry.row["extraction"], entry.item, digits_only=digits_only)
    return prediction, prediction == entry.item.answer_text


def _has_clean_extraction(row: Mapping[str, Any], item: Item) -> bool:
    """Return True when there is a response, and GPT-4's extraction from it is an answer of the expected type."""
    extraction = str(row["extraction"]).strip()
    if not row["response"].strip():
        return False
    if item.options:
        letters = [chr(ord("A") + index) for index in range(len(item.options))]
        bracketed = _BRACKETED_LETTER.search(extraction)
        return extraction in (*letters, *item.options) or (bracketed is not None and bracketed[1].upper() in letters)
    if item.answer_type == "list":
        return extraction.startswith("[")
    return normalize_extraction(extraction, item) is not None


def _count_table_cells(table: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], items: Mapping[str, Any]) -> Count:
    """Return the cells of a published table that the stored verdicts reproduce, with the annotation of its time."""
    correct = {row["pid"]: bool(row.get("true_false")) for row in rows}
    best = (0, 0)
    # The annotation of skills changed over time, as did the name of a grade.
    for skills in ("", "set1", "set2", "set3"):
        counts = _count_correct(correct, items, skills)
        best = max(best, _count_equal(cell == counts.get(key) for key, cell in _flatten_table(table)))
    return best


def _count_correct(correct: Mapping[str, bool], items: Mapping[str, Any], skills: str) -> dict[tuple[str, str], Count]:
    """Return correct answers and questions by subset column and value."""
    num_questions: Counter[tuple[str, str]] = Counter()
    num_correct: Counter[tuple[str, str]] = Counter()
    for pid, row in items.items():
        for key in _table_keys(row, skills):
            num_questions[key] += 1
            num_correct[key] += correct.get(pid, False)
    return {key: (num_correct[key], num_questions[key]) for key in num_questions}


def _table_keys(row: Mapping[str, Any], skills: str) -> Iterator[tuple[str, str]]:
    """Yield the cells of a score table that a question counts in."""
    yield "average", ""
    for name in ("question_type", "answer_type"):
        yield name, row[name]
    metadata = row["metadata"] | ({"skills": row["skills_old"][skills]} if skills else {})
    for name in SUBSET_COLUMNS:
        values = metadata[name] if isinstance(metadata[name], list) else [metadata[name]]
        for value in values:
            yield name, value


def _flatten_table(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Count]]:
    for name, values in table.items():
        cells = {"": values} if name == "average" else values
        for value, cell in cells.items():
            renamed = "not applicable" if value == _FORMER_GRADE_NAME else value
            yield (name, renamed), (cell["correct"], cell["total"])


def _count_equal(comparisons: Iterable[bool]) -> Count:
    equal = list(comparisons)
    return sum(equal), len(equal)


def _equal_share(counts: Iterable[Count]) -> float:
    pairs = list(counts)
    return sum(equal for equal, _ in pairs) / max(1, sum(total for _, total in pairs))


if __name__ == "__main__":
    sys.exit(main())
