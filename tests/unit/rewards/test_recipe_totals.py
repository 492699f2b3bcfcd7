"""Totals of recipes: published numbers by the terms that their files list, and mixtures that a tool prints for them."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from factories import make_sample
from scoring import constant, make_scorer, rollout, scored

from mmrl.config import load_config
from mmrl.config.schema import Config
from mmrl.policy.build import build_response_format
from mmrl.scoring.build import load_reward_terms
from mmrl.types import AnswerType, CoordinateSystem, ImageRef, Turn
from mmrl_datasets.environments.frames import make
from mmrl_rewards.contract import bind

ROOT = Path(__file__).parents[3]
BOX = [0, 0, 10, 10]


@pytest.fixture
def read_recipe(tmp_path):
    """Read a recipe, with overrides; its data are in a folder that is empty."""

    def read(name: str, *overrides: str) -> Config:
        return load_config(name, [f"data.dir={tmp_path}", *overrides]).config

    return read


def total(config, text, sample, values=None, **fields):
    """The total of a response by the terms of a config; those that `values` names have these values."""
    terms = {term.name: term for term in load_reward_terms(config, Path())}
    for name, value in (values or {}).items():
        terms[name] = replace(terms[name], reward=bind(constant(value, name=name, low=-1.0), {}))
    response = replace(rollout(text, sample, grammar=build_response_format(config)), **fields)
    return scored(make_scorer(*terms.values()), response).total


@pytest.mark.parametrize(
    ("look", "structure", "expected"), [(0.61, 0.89, 1.0), (0.61, 0.91, 2.0), (0.59, 0.91, 1.0), (0.5, 0.5, 0.0)]
)
def test_table2latex(read_recipe, look, structure, expected):
    values = {"look": look, "structure": structure}
    target = make_sample("x", AnswerType.TEXT)
    assert total(read_recipe("table2latex"), "<answer>x</answer>", target, values) == expected


def test_table2latex_on_tables(read_recipe):
    config = read_recipe("table2latex")
    table = r"\begin{tabular}{lc} A & 1 \\ B & 2 \\ C & 3 \\ D & 4 \end{tabular}"
    sample = make_sample(table, AnswerType.TEXT)
    assert total(config, f"<answer>{table}</answer>", sample) == 2.0
    assert total(config, f"<answer>{table.replace('4', '7')}</answer>", sample) == 2.0  # texts are not structure
    assert total(config, r"<answer>\begin{tabular}{l} A \end{tabular}</answer>", sample) == 0.0
    assert total(config, "<answer>no table</answer>", sample) == 0.0


FRAME_TURNS = {
    "time": "<think>When?</think><action>get frame number at time 00:30</action>",
    "look": "<think>From 250 to 350.</think><action>choose frames between 250 and 350</action>",
    "vague": "<think>Closer.</think><action>choose frames between 250 and 350</action>",
    "right": "<think>So.</think><action>output answer: B</action>",
    "wrong": "<think>So.</think><action>output answer: A</action>",
}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("time look right", 1.52),  # correct, with frames and a time that the question names
        ("time look wrong", 0.0),
        ("time vague right", 0.0),  # a broken rule
        ("time right", 0.0),
        ("look look right", 0.0),
        ("look right", 1.02),
        ("right", 1.0),
    ],
)
def test_frame_thinker(read_recipe, turns, expected):
    meta = {"extra_info": {"fps": 10, "total_frames": 2000, "question": "What happens at 0:30?"}}
    sample = replace(make_sample("B", AnswerType.CHOICE), meta=meta)
    episode, taken = make(), []
    episode.reset(sample, 0)
    for name in turns.split():
        result = episode.step(FRAME_TURNS[name])
        taken.append(
            Turn(action="", state="", terminated=result.terminated, valid=result.valid, info=dict(result.info))
        )
        if result.terminated:
            break
    text = "".join(FRAME_TURNS[name] for name in turns.split())
    assert total(read_recipe("frame_thinker"), text, sample, turns=tuple(taken)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("label", "grade", "expected"),
    [("Desktop", 0.8, 1.4), ("desktop", 0.0, 1.0), ("Laptop", 1.0, 0.1), (None, 1.0, 0.0)],
)
def test_time_master(read_recipe, label, grade, expected):
    """0.9 accuracy + 0.1 format, and where it is correct 0.5 of the judge's grade."""
    text = "<think>Flat.</think>" + (f"<class>{label}</class>" if label else "") + "<extension>Check it.</extension>"
    sample = make_sample("Desktop", AnswerType.TEXT)
    assert total(read_recipe("time_master"), text, sample, {"extension": grade}) == pytest.approx(expected)


def tube(*times, box=BOX):
    return json.dumps([{"time": time, "bbox_2d": box} for time in times])


@pytest.mark.parametrize(
    ("time", "thought", "answer", "expected"),
    [
        ([1, 4], tube(1, 2, 3, 4), tube(1, 2, 3, 4), 5.0),
        ([1, 4], tube(1, 2, 3, 4, box=[0, 0, 5, 10]), tube(1, 2, 3, 4), 4.5),  # the thought's IoU is a half
        ([1, 2], tube(1, 2), tube(1, 2), 0.5 + 0.5 + 0.5 + 1 + 1),
        ([1, 4], tube(1, 2, 3, 4), tube(1, 2), 1 + 0.5 + 1 + 0 + 1),  # two seconds have no box in the answer
        ([8, 9], tube(8, 9), tube(8, 9), 0 + 0 + 0 + 1 + 1),
    ],
)
def test_stvg_o1(read_recipe, time, thought, answer, expected):
    """Temporal, spatial, think, consistency and format rewards, each with weight 1."""
    sample = make_sample(
        json.loads(tube(1, 2, 3, 4)),
        AnswerType.JSON,
        parts=(ImageRef(path="a.png", sha256=""), "Where?"),
        coordinate_system=CoordinateSystem.PX_RESIZED,
    )
    text = f"<time>{time}</time><think_bbox>{thought}</think_bbox><pred_bbox>{answer}</pred_bbox>"
    assert total(read_recipe("stvg_o1"), text, sample) == pytest.approx(expected)


@pytest.mark.parametrize(("correct", "length", "expected"), [(1.0, 0.75, 2.65), (0.0, 0.0, 0.9)])
def test_vlm_r1_math(read_recipe, correct, length, expected):
    """Accuracy, format, length and repetition count the same."""
    values = {"accuracy": correct, "length": length, "repetition": -0.1}
    text = "<think>Half.</think><answer>0.5</answer>"
    assert total(read_recipe("vlm_r1_math"), text, make_sample("0.5", AnswerType.LATEX), values) == expected


def test_a_mixture_that_pilots_predict_is_laid_over_modomodo(read_recipe, tmp_path, capsys):
    """Pilots score 1 - |w - best|^2 and name the recipe's sources; the printed weights become the recipe's."""
    spec = importlib.util.spec_from_file_location("mixture", ROOT / "tools/mixture.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    names = [source.name for source in read_recipe("modomodo").data.train]
    assert [source.weight for source in read_recipe("modomodo").data.train] == [0.2] * 5
    best = dict(zip(names, (0.1, 0.1, 0.3, 0.2, 0.3), strict=True))
    mixtures = [{name: 1.0} for name in names]
    mixtures += [{a: 1.0, b: 1.0} for a, b in combinations(names, 2)]
    mixtures += [{name: 1.0 + (name == other) for name in names} for other in names]
    pilots = []
    for weights in mixtures:
        shares = {name: weights.get(name, 0.0) / sum(weights.values()) for name in names}
        pilots.append({"weights": weights, "score": 1 - sum((shares[name] - best[name]) ** 2 for name in names)})
    (tmp_path / "pilots.jsonl").write_text("\n".join(map(json.dumps, pilots)))
    assert tool.main([str(tmp_path / "pilots.jsonl")]) == 0
    printed = [line.split(": weight ") for line in capsys.readouterr().out.splitlines() if ": weight " in line]
    overrides = [f"data.train.{name.strip()}.weight={share}" for name, share in printed]
    mixed = {source.name: source.weight for source in read_recipe("modomodo", *overrides).data.train}
    assert mixed == pytest.approx(best, abs=0.002)
