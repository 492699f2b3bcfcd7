"""mmrl installed from its wheel has its recipes and the cases of its rewards, trains a recipe and shows the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published_rows import make_small, write_data

from mmrl.config import load_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = ["tar", "--null", "--files-from=-", "--create", f"--file={folder}/source.tar"]
    subprocess.run(archive, cwd=ROOT, input=files, check=True)
    (folder / "source").mkdir()
    subprocess.run(["tar", "--extract", f"--file={folder}/source.tar", f"--directory={folder}/source"], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}/out", str(folder / "source")], check=True)
    (wheel,) = (folder / "out").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", f"--target={folder}/site", str(wheel)], check=True)
    return folder / "site"


def test_it_lists_explains_tests_rewards_trains_and_shows_a_run(site: Path, tiny_model: Path, tmp_path: Path) -> None:
    def mmrl(*arguments: object) -> str:
        command = [sys.executable, "-m", "mmrl", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "r1_v" in mmrl("recipe", "list", "counting")
    assert str(site) in mmrl("explain", "r1_v").splitlines()[0]
    assert "0 of" not in mmrl("reward", "test", "number:exact")
    words = [f"{key}={json.dumps(value)}" for key, value in make_small(load_config("r1_v").config).items()]
    folders = ("--model", tiny_model, "--data", write_data("r1_v", tmp_path / "data"))
    mmrl("train", "r1_v", *folders, *words, "--steps", 1, "--run-dir", "run")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    mmrl("view", "run", "--out", "page")
    assert "learner/grad_norm" in (tmp_path / "page" / "data" / "r0" / "metrics.js").read_text()
    assert (tmp_path / "page" / "index.html").exists() and (tmp_path / "page" / "curves.js").exists()
