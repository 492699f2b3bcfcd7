"""`mmrl doctor`: builds that do not fit are named with the remedy, and a config's functions are loaded."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.utils.libraries import describe_import_error, installed_build

ROOT = Path(__file__).parents[3]


@pytest.fixture
def misfit(tmp_path):
    """A torchvision for a CUDA that nobody has, before the installed one on the path."""
    package = tmp_path / "site" / "torchvision"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '0.99.0+cu999'\n")
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")])}


def run(code, *words, **options):
    return subprocess.run(
        [sys.executable, *code, *map(str, words)], capture_output=True, text=True, check=False, cwd=ROOT, **options
    )


def test_doctor_names_both_builds_the_error_and_the_remedy(misfit):
    done = run(["-m", "mmrl"], "doctor", "--quiet", env=misfit)
    assert done.returncode == 1, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("problem: torchvision")]
    assert f"torchvision 0.99.0+cu999 does not fit torch {installed_build('torch')}" in line
    assert "RuntimeError: operator torchvision::nms does not exist" in line
    assert "torchvision==0.99.0 --index-url https://download.pytorch.org/whl/" in line


@pytest.mark.slow
def test_a_model_is_not_loaded_with_a_torchvision_that_does_not_fit(misfit):
    code = "from mmrl.policy.families import FAMILIES; FAMILIES['qwen2_vl']"
    done = run(["-c", code], env=misfit)
    assert "mmrl.types.errors.UserError: torchvision 0.99.0+cu999 does not fit torch" in done.stderr


def test_the_build_is_that_of_torch():
    message = describe_import_error("torchvision", "OSError: x")
    build = installed_build("torch").partition("+")[2]
    assert f"whl/{build or 'BUILD'}" in message
    assert "pip uninstall torchaudio" in describe_import_error("torchaudio", "OSError: x")


def test_doctor_loads_the_functions_of_a_config_and_reports_all_problems(tmp_path):
    (tmp_path / "mine.py").write_text("def callback():\n    pass\n")
    (tmp_path / "c.yaml").write_text(
        "run: {name: demo}\nmodel: {path: ./gone}\ndata: {train: [{fn: 'mmrl_datasets.readers.table:rows'}]}\n"
        "rewards: {terms: [{fn: 'mmrl_rewards.format:tags'}]}\nstages: [{kind: rl, name: rl, steps: 20}]\n"
        "callbacks: [{fn: './mine.py:callback'}]\n"
    )
    done = run(["-m", "mmrl"], "doctor", tmp_path / "c.yaml")
    assert done.returncode == 1, done.stderr
    assert f" torch {installed_build('torch')} " in " ".join(done.stdout.split())
    assert "problem: model.path: there is no folder './gone'" in done.stdout
    assert "problem: " in done.stdout and "mine.py:1: callback: a callback is called with (run)" in done.stdout
