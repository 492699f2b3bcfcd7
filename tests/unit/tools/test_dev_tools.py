"""tools/dev/golden_runs.py and tools/dev/mutate.py notice what they are for."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tool_modules import load_tool

golden_runs, mutate = load_tool("dev/golden_runs"), load_tool("dev/mutate")


def write_run(run_dir: Path, *, loss_name: str = "learner/loss", loss: float = 0.5, weight: float = 1.0) -> Path:
    """Write the files of a run of one step that golden_runs reads, and return its folder."""
    checkpoint = run_dir / "checkpoints" / "00-000001"
    for folder in (checkpoint, run_dir / "rollouts", run_dir / "model"):
        folder.mkdir(parents=True)
    line = json.dumps({"stage": "rl", "step": 1, loss_name: loss})
    (run_dir / "metrics.jsonl").write_text(line + "\n")
    (run_dir / "rollouts" / "rl-000001.jsonl").write_text(json.dumps({"media": f"{run_dir}/data/a.png"}) + "\n")
    for folder in (checkpoint, run_dir / "model"):
        save_file({"w": torch.tensor([weight], dtype=torch.bfloat16)}, folder / "model.safetensors")
    torch.save({"moments": {0: {"step": torch.tensor(1.0)}}}, checkpoint / "optimizer.pt")
    state = {"step": 1, "metrics_bytes": len(line), "phase_ends": {"$tuple": [{"$ref": 0}]}}
    objects = [{"$Size": {"width": 3}}, {"$TrainingState": state}]
    (checkpoint / "state.json").write_text(json.dumps({"$objects": objects, "$value": {"$ref": 1}}))
    return run_dir


def differences(folder: Path, **changes: object) -> list[str]:
    base = golden_runs.digest_run(write_run(folder / "base"))
    lines: list[str] = golden_runs.compare(base, golden_runs.digest_run(write_run(folder / "new", **changes)))
    return lines


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, []),
        ({"loss_name": "loss"}, ["renamed metrics learner/loss to metrics loss", "renamed keys in metrics"]),
        ({"loss": 0.6}, ["changed metrics", "changed metrics learner/loss"]),
        ({"weight": 1.5}, ["changed model weights", "changed checkpoint 00-000001 weights"]),
    ],
)
def test_two_folders_differ_in_what_was_changed_alone(tmp_path, changes, found):
    assert differences(tmp_path, **changes) == found


def test_golden_runs_name_configs_that_exist():
    for config, *_ in golden_runs.RUNS.values():
        assert (golden_runs.ROOT / config).is_file()


def test_there_are_ten_mutations_of_each_area():
    mutations = mutate.load_mutations()
    assert len({mutation.id for mutation in mutations}) == 80
    areas = Counter(mutation.id.partition("/")[0] for mutation in mutations)
    assert set(areas.values()) == {10}
    assert all(mutation.old != mutation.new for mutation in mutations)


@pytest.mark.parametrize("mutation", mutate.load_mutations(), ids=lambda mutation: mutation.id)
def test_mutation_applies_to_the_code_as_it_is(mutation):
    assert mutate.find_file(mutate.ROOT, mutation), "its old text is gone, or stands in several places"
    assert (mutate.ROOT / mutation.test.partition("::")[0]).is_file()


CODE = "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n"
TEST = "from mmrl.moved import double\n\n\ndef test_double():\n    assert double(3) == 6\n"


@pytest.mark.parametrize(
    ("old", "new", "test", "outcome"),
    [
        ("return 2 * x", "return 3 * x", "test_double.py", "found"),
        ("return x / 2", "return x / 3", "test_double.py", "survived"),
        ("return", "pass", "test_double.py", "no longer applies"),
        ("return 2 * x", "return 3 * x", "test_gone.py", "broken test"),
    ],
)
def test_outcome_of_a_mutation(tmp_path, monkeypatch, old, new, test, outcome):
    """The function that is mutated has moved to another file since the mutation was written."""
    checkout, copy = tmp_path / "checkout", tmp_path / "copy"
    (checkout / "mmrl").mkdir(parents=True)
    for name, text in {"mmrl/__init__.py": "", "mmrl/moved.py": CODE, "test_double.py": TEST}.items():
        (checkout / name).write_text(text)
    shutil.copytree(checkout, copy)
    monkeypatch.setattr(mutate, "ROOT", checkout)
    mutation = mutate.Mutation(id="a", file="mmrl/gone.py", old=old, new=new, test=test)
    assert mutate.try_mutation(copy, mutation) == outcome
    assert (copy / "mmrl" / "moved.py").read_text() == CODE
