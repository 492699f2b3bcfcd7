"""Published verdicts on MathVista, replayed. Their licence keeps them out of this repository: skipped without them."""

import importlib.util
import sys
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2].resolve().parent / "shared" / "eval" / "mathvista"
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"MathVista's published verdicts are not in {DATA}")


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).parents[2] / "tools" / "mathvista_agreement.py"
    spec = importlib.util.spec_from_file_location("mathvista_agreement", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


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
