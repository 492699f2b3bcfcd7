"""Published verdicts, replayed. Licences keep MathVista's out of this repository: skipped without them."""

import json
from pathlib import Path

import pytest
from tool_modules import load_tool

DATA = Path(__file__).parents[2].resolve().parent / "shared" / "eval" / "mathvista"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"MathVista's published verdicts are not in {DATA}")


@pytest.fixture(scope="module")
def tool():
    return load_tool("agreement")


@pytest.fixture(scope="module")
def runs(tool):
    return tool.measure_agreement(DATA)


@needs_data
def test_the_metric_agrees_to_the_last_verdict(runs):
    for run in runs:
        assert run.metric_2023[0] == run.metric_2023[1] >= 998, run.run
        assert run.metric_head[0] == run.metric_head[1] >= 998, run.run


@needs_data
def test_every_cell_of_the_published_tables_is_reproduced(runs):
    assert {run.run: run.table_cells for run in runs} == {run.run: (75, 75) for run in runs}


@needs_data
def test_the_rules_meet_every_threshold(tool, runs):
    missed = [threshold for threshold in tool.agreement_thresholds(runs) if not threshold.is_met]
    assert not missed


@needs_data
def test_guesses_are_scored_exactly(runs):
    (guess,) = (run for run in runs if run.run == "frequent_guess")
    assert guess.clean_rows == (1000, 1000)
    assert guess.our_accuracy == guess.published_accuracy == 0.263


def test_a_folder_without_the_files_is_named(tool, tmp_path, capsys):
    assert tool.main(["--data", str(tmp_path)]) == 2
    assert "there is no items.jsonl.gz" in capsys.readouterr().err


def test_files_of_a_checkout_are_replayed(tool, tmp_path, capsys):
    """Rows as in data/test.jsonl and outputs/ of MATH-V, and in mmmu-pro/output/ and mmmu/ of MMMU, shortened."""
    lines = {
        "data/test.jsonl": [
            {"id": "87", "options": [r"$4 \mathrm{~kg}$", r"$8 \mathrm{~kg}$"], "answer": "B", "level": 1},
            {"id": "1", "options": [], "answer": "60", "level": 2},
        ],
        "outputs/open-source/a.jsonl": [
            {"id": "87", "model": "a", "response": r"\boxed{8}", "model_answer": "8", "correct": False},
            {"id": "1", "model": "a", "response": "60", "model_answer": "60", "correct": True},
        ],
        "mmmu-pro/output/b.jsonl": [
            {"id": "x", "options": "['B', 'A']", "answer": "A", "response": "Answer: A", "if_right": True},
            {"id": "y", "options": "[['A', 'B']]", "answer": "A", "response": {"error": 1}, "if_right": False},
        ],
    }
    for name, rows in lines.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = {"A": "$6", "B": "$7"}
    row = {"id": "v_1", "question_type": "multiple-choice", "answer": "B", "all_choices": ["A", "B"]}
    subject = tmp_path / "mmmu" / "example_outputs" / "c" / "Accounting"
    subject.mkdir(parents=True)
    (subject / "output.json").write_text(json.dumps([row | {"index2ans": texts, "response": "(B)"}]))
    (subject.parent / "total_val_output.json").write_text(json.dumps({"v_1": "B"}))
    assert tool.main(["--data", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "mathvision a: 2 rows, agreement official 100.00 %, strict 50.00 %" in told
    assert "mmmu_pro b: 1 rows" in told
    assert "malformed: y" in told
    assert "mmmu c: 1 rows" in told
    assert told.count("holds") == 3


def test_formulas_of_a_checkout_are_compared(tool, tmp_path, capsys):
    """Rows as in tests/ of Math-Verify."""
    (tmp_path / "src" / "math_verify").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    rows = ("$1/2$", "0.5", 1), ("$2$", "so the number is 10 which is 2", 1), ("$1$", "$2$", 1), ("$1$", "$2$", False)
    (tmp_path / "tests" / "test_all.py").write_text(f"ROWS = {list(rows)}")
    published, own = tool.measure_formulas(tmp_path)
    assert published == ("test_all.py", 4, (2, 3), ["'$1$', '$2$': True"])
    assert own.equal[0] == own.equal[1] > 150
    assert tool.main(["--data", str(tmp_path)]) == 0
    assert "maths:equal on pairs of formulas" in capsys.readouterr().out
