"""`mmrl.train`, `mmrl.evaluate` and `mmrl.Policy`: whole runs from Python, with functions and samples from memory."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fork_server import run_forked
from harness import counting, experiment, questions, rl_stage, write
from json_lines import read_json_lines
from PIL import Image

import mmrl
from mmrl import AnswerType, Group, Response, RewardValue, Sample, Target, UserError, reward
from mmrl.config import load_config
from mmrl_datasets import save_png

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 4


def counting_rows(folder: Path, split: str, count: int) -> list[Sample]:
    """Samples whose answer is 0, 1 or 2, each with a picture of its own in `folder`."""
    samples = []
    for number in range(count):
        picture = save_png(Image.new("RGB", (32, 32), (8 * number, 99, 99)), folder, "picture")
        target = Target(answer_type=AnswerType.NUMBER, value=number % 3)
        samples.append(Sample(id=f"{split}-{number}", task="count", parts=(picture, "How many?"), target=target))
    return samples


def settings(folder: Path, name: str = "run") -> dict[str, Any]:
    """The settings of a tiny RL run that has neither data nor rewards."""
    config = experiment(folder / name, stages=[rl_stage(steps=STEPS)], checkpoints={"every": 1})
    config["data"] = {"media_roots": [str(folder)]}
    del config["rewards"]
    return config


def make_reward(bonus: float) -> Any:
    """Return a reward that no process can import. It says which process it ran in."""

    @reward(name="spread", high=9.0)
    def spread(response: Response, sample: Sample) -> RewardValue:
        return RewardValue(len(response.text) % 3 + bonus, f"process {os.getpid()}")

    return spread


def rare(siblings: Group) -> tuple[RewardValue, ...]:
    return tuple(RewardValue(0.5 if rollout.index else 0.0, "") for rollout in siblings.rollouts)


class Steps:
    """A callback that remembers the steps it saw, and may interrupt the run after one of them."""

    def __init__(self, interrupt_after: int = 0) -> None:
        self.seen: list[int] = []
        self.interrupt_after = interrupt_after

    def on_step_end(self, state: Any, result: Any) -> dict[str, float]:
        self.seen.append(state.step)
        if state.step == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)
        return {"my/step": float(state.step)}


def given(folder: Path, *, bonus: float = 1.0, interrupt_after: int = 0) -> dict[str, Any]:
    """Everything that a run takes from memory."""
    return {
        "rewards": [make_reward(bonus), {"fn": rare, "weight": 0.5}, {"fn": "mmrl_rewards.format:tags"}],
        "dataset": {"train": counting_rows(folder, "train", 12), "test": counting_rows(folder, "test", 4)},
        "callbacks": [Steps(interrupt_after)],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def finished(folder) -> tuple[mmrl.TrainResult, dict[str, Any]]:
    """A run that nothing disturbed, and what it was given."""
    arguments = given(folder)
    return mmrl.train(settings(folder), **arguments), arguments


def test_a_run_trains_with_functions_and_samples_from_memory(finished, folder):
    result, arguments = finished
    assert result.run_dir == folder / "run"
    assert (result.model_dir / "model.safetensors").is_file()
    assert [row["my/step"] for row in result.metrics if "learner/lr" in row] == [1.0, 2.0, 3.0, 4.0]
    assert arguments["callbacks"][0].seen == [1, 2, 3, 4]
    assert [(row["task"], row["n"]) for row in result.held_out] == [("count", 4)]
    steps = [row for row in result.metrics if "reward/mean" in row]
    assert all(row["reward/term/rare"] > 0.0 for row in steps)


def test_a_reward_of_a_test_function_runs_in_a_worker_process(finished):
    result, _ = finished
    text = "".join(file.read_text() for file in (result.run_dir / "rollouts").glob("*.jsonl"))
    assert "process " in text
    assert f"process {os.getpid()}" not in text


def test_a_finished_run_is_returned_without_training_and_refused_without_resume(finished, folder):
    result, arguments = finished
    before = (result.model_dir / "model.safetensors").stat().st_mtime_ns
    assert mmrl.train(settings(folder), **arguments) == result
    assert (result.model_dir / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="holds a run; resume=True continues it"):
        mmrl.train(settings(folder), **arguments, resume=False)


def test_an_interrupted_run_continues_like_one_that_was_not(finished, folder):
    result, _ = finished
    with pytest.raises(KeyboardInterrupt, match="the same call continues"):
        mmrl.train(settings(folder, "interrupted"), **given(folder, interrupt_after=2))
    arguments = given(folder)
    continued = mmrl.train(settings(folder, "interrupted"), **arguments)
    assert arguments["callbacks"][0].seen == [3, 4]
    assert continued.metrics == result.metrics
    weights = "model/model.safetensors"
    assert (continued.run_dir / weights).read_bytes() == (result.run_dir / weights).read_bytes()


def interrupted(folder: Path, name: str) -> dict[str, Any]:
    with pytest.raises(KeyboardInterrupt):
        mmrl.train(settings(folder, name), **given(folder, interrupt_after=1))
    return settings(folder, name)


def test_other_samples_are_refused_by_name(folder):
    config = interrupted(folder, "other-data")
    arguments = given(folder)
    changed = arguments["dataset"]["train"]
    changed[5] = replace(changed[5], target=Target(answer_type=AnswerType.NUMBER, value=7))
    with pytest.raises(UserError, match=r"data.train.0 .*: sample train-5: target changed"):
        mmrl.train(config, **arguments)
    # As the settings say for files, too.
    assert mmrl.train(config, ["data.on_changed_data=warn"], **arguments).held_out


def test_another_reward_is_refused_by_name(folder):
    config = interrupted(folder, "other-reward")
    with pytest.raises(UserError, match=r"rewards.terms.0.fn: \"mmrl_in_memory.spread_\w+:spread\" -> "):
        mmrl.train(config, **given(folder, bonus=2.0))


def test_training_in_a_thread(folder):
    results: list[mmrl.TrainResult] = []

    def work():
        results.append(mmrl.train(settings(folder, "thread"), [f"stages.rl.steps={STEPS - 2}"], **given(folder)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results) == 1 and results[0].model_dir.is_dir()


def test_a_config_may_be_a_file_a_mapping_with_functions_or_loaded(folder):
    def rows(context: object) -> Any:
        yield from counting_rows(folder, "train", 12)

    mapping = settings(folder, "forms")
    mapping["data"]["train"] = [{"fn": rows}]
    mapping["rewards"] = {"terms": [{"fn": make_reward(1.0)}]}
    overrides = [f"stages.rl.steps={STEPS - 2}"]
    first = mmrl.train(mapping, overrides)
    del mapping["data"]["train"], mapping["rewards"]
    arguments = {"rewards": [make_reward(1.0)], "dataset": rows}
    # Neither trains again: all three are the same run.
    assert mmrl.train(write(mapping, folder / "forms.yaml"), overrides, **arguments) == first
    complete = load_config(first.run_dir / "config.yaml")
    assert mmrl.train(complete) == first
    assert mmrl.train(complete, overrides) == first


def test_a_reward_that_cannot_be_copied_says_what_to_do(folder):
    lock = threading.Lock()

    @reward(name="locked")
    def locked(response: Response, sample: Sample) -> float:
        with lock:
            return 0.0

    arguments = given(folder) | {"rewards": [locked]}
    with pytest.raises(UserError, match=r"locked cannot be copied to a worker process .*custom_rewards=main_process"):
        mmrl.train(settings(folder, "locked"), **arguments)
    assert not (folder / "locked").exists()
    config = settings(folder, "locked") | {"rewards": {"custom_rewards": "main_process"}}
    assert mmrl.train(config, [f"stages.rl.steps={STEPS - 2}"], **arguments).held_out


def test_evaluation_of_a_run_on_its_own_data_and_on_a_benchmark(finished, folder):
    result, _ = finished
    own = mmrl.evaluate(result.run_dir, "run:test", out_dir=folder / "own")
    assert len(own.verdicts) == len(own.predictions) == 4
    assert own.report["rewards"]["count"] == pytest.approx(result.held_out[0]["after"])
    benchmark = mmrl.Benchmark(name="mine", official_score=lambda item, response, extraction: 0.25)
    done = mmrl.evaluate(result.model_dir, benchmark, questions(folder / "ten"), out_dir=folder / "ten-results")
    assert [verdict.score for verdict in done.verdicts] == [0.25] * 10
    assert [prediction.id for prediction in done.predictions] == [f"q{number}" for number in range(10)]


def test_changed_rules_of_a_finished_evaluation_are_refused_until_rescored(finished, folder):
    result, _ = finished

    def evaluate(score: float, **options: Any) -> mmrl.Evaluation:
        benchmark = mmrl.Benchmark(name="mine", official_score=lambda item, response, extraction: score)
        return mmrl.evaluate(
            result.model_dir, benchmark, questions(folder / "rules"), out_dir=folder / "out", **options
        )

    assert evaluate(0.25).report["score"] == 0.25
    assert evaluate(0.25).report["score"] == 0.25
    with pytest.raises(UserError, match="10 verdicts of earlier rules differ, .*rescore=True. replaces them"):
        evaluate(0.5)
    assert evaluate(0.5, rescore=True).report["score"] == 0.5


def test_changed_rules_are_noticed_beside_a_judge_whose_verdicts_stay(finished, folder):
    result, _ = finished
    out_dir = folder / "judged"

    def evaluate(score: float) -> mmrl.Evaluation:
        benchmark = mmrl.Benchmark(name="mine", official_score=lambda item, response, extraction: score)
        return mmrl.evaluate(result.model_dir, benchmark, questions(folder / "rules"), out_dir=out_dir)

    evaluate(0.25)
    # As a judge leaves them; it would be asked about no response of this model, as all are truncated.
    rows = [row | {"judge_correct": True} for row in read_json_lines(out_dir / "verdicts.jsonl")]
    (out_dir / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = json.loads((out_dir / "report.json").read_text()) | {"judge": {"model": "m", "asked": 10, "failed": 0}}
    (out_dir / "report.json").write_text(json.dumps(report))
    again = evaluate(0.25)
    assert [verdict.judge_correct for verdict in again.verdicts] == [True] * 10
    judge = again.report["judge"]
    assert (judge["model"], judge["asked"], judge["correct"], judge["failed"]) == ("m", 10, 10, 0)
    with pytest.raises(UserError, match="10 verdicts of earlier rules differ"):
        evaluate(0.5)


def test_an_evaluation_that_fails_before_the_first_response_leaves_nothing(finished, folder):
    result, _ = finished
    benchmark = mmrl.Benchmark(name="mine", answer_types=("box",))
    with pytest.raises(UserError, match="not scored by mine"):
        mmrl.evaluate(result.model_dir, benchmark, questions(folder / "boxes"), out_dir=folder / "evals" / "mine")
    assert not (folder / "evals").exists()
    for place in (result.run_dir, result.model_dir):
        before = sorted(place.iterdir())
        with pytest.raises(UserError, match="but is not an evaluation; choose another folder"):
            mmrl.evaluate(result.model_dir, "counting", questions(folder / "boxes"), out_dir=place)
        assert sorted(place.iterdir()) == before


def test_a_policy_answers_about_pictures_and_files(finished, folder):
    result, _ = finished
    picture = folder / "street.png"
    Image.new("RGB", (64, 48), (9, 99, 9)).save(picture)
    with mmrl.Policy.from_run(result.run_dir) as policy:
        from_file = policy.generate(picture, "How many?", answer_type="number")
        from_memory = policy.generate([Image.open(picture)], "How many?", answer_type="number")
        policy.generate([], "How many?")
    # Evaluation is greedy, so the same picture gets the same answer.
    assert from_file.text == from_memory.text != ""
    assert from_file.response.resize_maps[0].original == (64, 48)
    checkpoint = sorted((result.run_dir / "checkpoints").iterdir())[-1]
    for place in (checkpoint, result.model_dir):
        with mmrl.Policy.from_run(place) as policy:
            assert policy.generate(str(picture), "How many?", answer_type="number").text == from_file.text


def test_the_example_of_the_docs_runs_as_a_script(tmp_path):
    example = ROOT / "examples" / "train.py"
    body = example.read_text().partition('"""\n\n')[2]
    assert body.strip() in (ROOT / "docs" / "python.md").read_text()
    assert len(list(filter(str.strip, body.splitlines()))) == 12
    (tmp_path / "configs").mkdir()
    data = {part: [counting(part, size)] for part, size in (("train", 40), ("validation", 8), ("test", 8))}
    small = {"extends": str(ROOT / "configs" / "quickstart.yaml"), "data": data}
    write(small, tmp_path / "configs" / "quickstart.yaml")
    done = run_forked(example, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'task': 'count'" in done.stdout
    assert (tmp_path / "runs" / "quickstart" / "model" / "model.safetensors").is_file()
