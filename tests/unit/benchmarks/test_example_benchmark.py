"""examples/benchmark.py: a user's benchmark scores files, reads its own layout, and is checked like a shipped one."""

import json
from pathlib import Path

import pytest
from benchmark_rows import as_text, read, write_rows
from config_samples import SMALL, refused, write
from factories import png_bytes
from json_lines import read_json_lines

from mmrl.benchmarks.benchmark import Benchmark
from mmrl.benchmarks.grading import grade_response
from mmrl.benchmarks.items import Item, ItemResponse
from mmrl.benchmarks.registry import get_benchmark, load_benchmark
from mmrl.cli import main
from mmrl.config import load_config
from mmrl.training.benchmarks import read_benchmark_questions
from mmrl.training.functions import load_configured_benchmark
from mmrl.types import UserError

EXAMPLE = Path(__file__).parents[3] / "examples" / "benchmark.py"
FN = f"{EXAMPLE}:make_benchmark"
ROWS = [{"file": "a.png", "kind": "wall", "time": "3:40"}, {"file": "a.png", "kind": "pocket", "time": "12:05"}]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(png_bytes())
    return tmp_path


def test_responses_are_scored_by_its_rule(tmp_path, monkeypatch):
    answers = {"1": ("3:40", "The answer is 15:40."), "2": ("12:05", "<answer>11:35</answer>"), "3": ("9:00", "Dunno.")}
    items = [{"id": id, "answer": time, "answer_type": "text"} for id, (time, _) in answers.items()]
    write_rows(tmp_path / "items.jsonl", items)
    write_rows(tmp_path / "responses.jsonl", [{"pid": id, "response": text} for id, (_, text) in answers.items()])
    monkeypatch.chdir(EXAMPLE.parents[1])
    files = [f"--{name}={tmp_path / name}.jsonl" for name in ("items", "responses")]
    out = tmp_path / "out"
    assert main(["eval", "score", "--benchmark=./examples/benchmark.py:make_benchmark", *files, f"--out={out}"]) == 0
    verdicts = read_json_lines(out / "verdicts.jsonl")
    assert [(row["score"], row["official"]) for row in verdicts] == [(1.0, True), (0.5, False), (0.0, False)]
    assert json.loads((out / "report.json").read_text())["benchmark"] == "clocks"


def test_its_own_layout_is_read(folder):
    first, second = read(folder, FN, *ROWS).entries
    assert as_text(first) == "*What time does this wall clock show?"
    assert (second.item.answer, second.item.subsets) == ("12:05", {"kind": ("pocket",)})
    assert second.sample.task == "clocks"


def test_config_names_it_with_arguments(folder):
    write_rows(folder / "clocks.jsonl", ROWS)
    entry = f"{{name: mine, fn: '{FN}', args: {{tolerance: 30}}, data: [clocks.jsonl], subsets: [kind]}}"
    path = write(folder, SMALL + f"\nevaluation:\n  benchmarks: [{entry}]\n")
    config = load_config(path).config
    [options] = config.evaluation.benchmarks
    benchmark = load_configured_benchmark(options, folder)
    assert len(read_benchmark_questions(options, benchmark, config, folder, folder / "work").samples) == 2
    assert "leave out one" in refused(path, "evaluation.benchmarks.mine.benchmark=mmmu")


def test_function_that_makes_no_benchmark_is_refused(tmp_path):
    (tmp_path / "other.py").write_text("def make():\n    return 3\n")
    with pytest.raises(UserError, match="returned int, not a mmrl.Benchmark"):
        load_benchmark("./other.py:make", tmp_path, {})


def test_unknown_name_is_refused():
    with pytest.raises(UserError, match="there is no benchmark 'mathvist'"):
        get_benchmark("mathvist")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("official_score=lambda item, response: 1.0", r"official_score\(item, response, extraction\), but: too many"),
        ("is_correct=lambda item, response, extraction, *, strict: True", "is_correct.*: missing a required.*'strict'"),
        ("draw_letters=lambda: ()", r"draw_letters\(graded\), but: too many"),
        ("overall_metric=OverallMetric('AP', lambda graded, items: 1.0)", r"overall_metric.compute\(graded\), but"),
        ("parse_item=3", r"parse_item'; it is called as parse_item\(row\)"),
        ("layouts=(Rows(),)", r"parse_row\(cells, files, file\), but: too many"),
    ],
)
def test_rule_with_other_parameters_is_refused_when_it_is_loaded(tmp_path, field, message):
    text = f"""from mmrl.benchmarks.benchmark import Benchmark, OverallMetric
class Rows:
    def parse_row(self, cells): ...
def make(): return Benchmark(name="mine", {field})
"""
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        load_benchmark("./mine.py:make", tmp_path)
    assert f"{tmp_path}/mine.py:" in str(refusal.value) or "parse_item=3" in field


@pytest.mark.parametrize("value", [2.0, -0.1, float("nan"), None, "no"])
def test_a_score_out_of_range_names_benchmark_item_and_value(value):
    item, response = Item(id="q7", answer="3", answer_type="integer"), ItemResponse(id="q7", text="3")
    benchmark = Benchmark(name="mine", official_score=lambda item, response, extraction: value)
    with pytest.raises(UserError, match=f"'mine', item 'q7': official_score returned {value!r}; .* from 0 to 1"):
        grade_response(benchmark, item, response)


@pytest.mark.parametrize("value", ["no", None, 0.5, float("nan")])
def test_a_strict_verdict_that_is_not_a_bool_is_refused(value):
    item, response = Item(id="q7", answer="3", answer_type="integer"), ItemResponse(id="q7", text="3")
    benchmark = Benchmark(name="mine", is_correct=lambda item, response, extraction: value)
    with pytest.raises(UserError, match=f"'mine', item 'q7': is_correct returned {value!r}; .* True or False"):
        grade_response(benchmark, item, response)
