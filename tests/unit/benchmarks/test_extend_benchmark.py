"""examples/benchmark.py: a user's benchmark scores files, reads its own layout, and is checked like a shipped one."""

import json
from pathlib import Path

import pytest
from benchmark_rows import place, shown
from config_samples import SMALL, refused, write
from factories import png_bytes

from mmrl.benchmarks.readers.questions import read_questions
from mmrl.benchmarks.registry import get_benchmark, load_benchmark
from mmrl.cli import main
from mmrl.config import load_config
from mmrl.evaluation.eval_settings import load_configured_benchmark
from mmrl.training.benchmarks import read_benchmark_questions
from mmrl.types import UserError

EXAMPLE = Path(__file__).parents[3] / "examples" / "benchmark.py"
FN = f"{EXAMPLE}:make_benchmark"
ROWS = [{"file": "a.png", "kind": "wall", "time": "3:40"}, {"file": "a.png", "kind": "pocket", "time": "12:05"}]


@pytest.fixture
def clocks(tmp_path):
    (tmp_path / "a.png").write_bytes(png_bytes())
    (tmp_path / "clocks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_responses_are_scored_by_its_rule(tmp_path, capsys, monkeypatch):
    answers = {"1": ("3:40", "The answer is 15:40."), "2": ("12:05", "<answer>11:35</answer>"), "3": ("9:00", "Dunno.")}
    items = [{"id": id, "answer": time, "answer_type": "text"} for id, (time, _) in answers.items()]
    responses = [{"pid": id, "response": text} for id, (_, text) in answers.items()]
    for name, rows in (("items", items), ("responses", responses)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(EXAMPLE.parents[1])
    files = ("--items", str(tmp_path / "items.jsonl"), "--responses", str(tmp_path / "responses.jsonl"))
    out = tmp_path / "out"
    assert (
        main(["eval", "score", "--benchmark", "./examples/benchmark.py:make_benchmark", *files, "--out", str(out)]) == 0
    )
    verdicts = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]
    assert [row["score"] for row in verdicts] == [1.0, 0.5, 0.0]
    assert [row["official"] for row in verdicts] == [True, False, False]
    assert json.loads((out / "report.json").read_text())["benchmark"] == "clocks"


def test_its_own_layout_is_read(clocks):
    benchmark = get_benchmark(FN)
    first, second = read_questions(benchmark, ["clocks.jsonl"], place(clocks), split="test", media_root=None).entries
    assert shown(first) == "*What time does this wall clock show?"
    assert (second.item.answer, second.item.subsets) == ("12:05", {"kind": ("pocket",)})
    assert second.sample.task == "clocks"


def test_a_config_names_it_with_arguments(clocks):
    entry = f"{{name: mine, fn: '{FN}', args: {{tolerance: 30}}, data: [clocks.jsonl], subsets: [kind]}}"
    path = write(clocks, SMALL + f"\nevaluation:\n  benchmarks: [{entry}]\n")
    config = load_config(path).config
    [options] = config.evaluation.benchmarks
    benchmark = load_configured_benchmark(options, clocks)
    questions = read_benchmark_questions(options, benchmark, config, clocks, clocks / "work")
    assert len(questions.samples) == 2
    assert "leave out one" in refused(path, "evaluation.benchmarks.mine.benchmark=mmmu")


def test_loading_something_else_than_a_benchmark_is_refused(clocks):
    with pytest.raises(UserError, match="has no option 'tolerence'; did you mean 'tolerance'"):
        load_benchmark(FN, args={"tolerence": 3})
    with pytest.raises(UserError, match="has no 'make_benchmrk'; did you mean 'make_benchmark'"):
        get_benchmark(f"{EXAMPLE}:make_benchmrk")
    (clocks / "other.py").write_text("def make():\n    return 3\n")
    with pytest.raises(UserError, match="returned int, not a mmrl.Benchmark"):
        get_benchmark("./other.py:make", clocks)
    with pytest.raises(UserError, match="there is no file"):
        get_benchmark("./gone.py:make", clocks)


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
def test_a_rule_with_other_parameters_is_refused_as_it_is_loaded(tmp_path, field, message):
    text = f"""from mmrl.benchmarks.benchmark import Benchmark, OverallMetric
class Rows:
    def parse_row(self, cells): ...
def make(): return Benchmark(name="mine", {field})
"""
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        load_benchmark("./mine.py:make", tmp_path)
    assert f"{tmp_path}/mine.py:" in str(refusal.value) or "parse_item=3" in field
