"""Published verdicts on MathVista, replayed. Their licence keeps them out of this repository: skipped without them."""

from pathlib import Path

import pytest

from mmrl.benchmarks.report.mathvista_agreement import agreement_thresholds, measure_agreement

DATA = Path(__file__).parents[2].resolve().parent / "shared" / "eval" / "mathvista"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason=f"MathVista's published verdicts are not in {DATA}")


@pytest.fixture(scope="module")
def runs():
    return measure_agreement(DATA)


def test_the_metric_agrees_to_the_last_verdict(runs):
    for run in runs:
        assert run.metric_2023[0] == run.metric_2023[1] >= 998, run.run
        assert run.metric_head[0] == run.metric_head[1] >= 998, run.run


def test_every_cell_of_the_published_tables_is_reproduced(runs):
    assert {run.run: run.table_cells for run in runs} == {run.run: (75, 75) for run in runs}


def test_the_rules_reach_every_bar(runs):
    missed = [bar for bar in agreement_thresholds(runs) if not bar.is_met]
    assert not missed


def test_guesses_are_scored_exactly(runs):
    (guess,) = (run for run in runs if run.run == "frequent_guess")
    assert guess.clean_rows == (1000, 1000)
    assert guess.our_accuracy == guess.published_accuracy == 0.263
