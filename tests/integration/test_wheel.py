"""mmrl installed from its wheel has its recipes and the cases of its rewards, trains a recipe and shows the run."""

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
def site(tmp_path_factory) -> Path:
    """A folder with nothing but what the wheel holds, which is built from the sdist."""
    folder = tmp_path_factory.mktemp("wheel")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    archive = ["tar", "--null", "--files-from=-", "--create", f"--file={folder}/source.tar"]
    subprocess.run(archive, cwd=ROOT, input=files, check=True)
    (folder / "source").mkdir()
    subprocess.run(["tar", "--extract", f"--file={folder}/source.tar", f"--directory={folder}/source"], check=True)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, f"{folder}/out"], cwd=folder / "source", check=True)
    (sdist,) = (folder / "out").glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", f"--wheel-dir={folder}/out", str(sdist)], check=True)
    (wheel,) = (folder / "out").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", f"--target={folder}/site", str(wheel)], check=True)
    return folder / "site"


@pytest.mark.parametrize(("folder", "package"), [("configs", "mmrl_configs"), ("rewards/cases", "mmrl_cases")])
def test_sdist_and_wheel_hold_all_recipes_overlays_and_cases(site, folder, package):
    def names(top):
        return {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}

    assert names(site / package) == names(ROOT / folder)


def test_a_new_user_gets_from_the_download_line_to_the_curves_of_a_trained_model(site, tiny_model, tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "mmrl", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    def run_mmrl(*arguments):
        done = run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "r1_v" in run_mmrl("recipe", "list", "counting")
    assert str(site) in run_mmrl("explain", "r1_v").splitlines()[0]
    assert "0 of" not in run_mmrl("reward", "test", "number:exact")

    # Without the data, both commands tell how to fetch them.
    (tmp_path / "data").mkdir()
    folders = ("--model", tiny_model, "--data", "data")
    download = "hf download leonardPKU/clevr_cogen_a_train --repo-type dataset --local-dir clevr_cogen_a_train"
    shown = run_mmrl("recipe", "show", "r1_v", "--data", "data")
    assert "missing  clevr_cogen_a_train" in shown and download in shown
    refused = run("train", "r1_v", *folders)
    assert refused.returncode == 2 and download in refused.stderr

    write_data("r1_v", tmp_path / "data")
    words = [f"{key}={json.dumps(value)}" for key, value in make_small(load_config("r1_v").config).items()]
    run_mmrl("train", "r1_v", *folders, *words, "--steps", 2, "--run-dir", "run")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()

    run_mmrl("view", "run", "--out", "page")
    assert (tmp_path / "page" / "index.html").exists() and (tmp_path / "page" / "curves.js").exists()
    script = (tmp_path / "page" / "data" / "r0" / "metrics.js").read_text()
    curves = json.loads(script.partition(", ")[2].rpartition(")")[0])["columns"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "learner/grad_norm" in record]
    assert len(steps) == 2
    for name in ("reward/mean", "reward/term/accuracy", "learner/grad_norm", "policy/entropy_nats"):
        drawn = [value for value in curves[name] if value is not None]
        assert drawn == pytest.approx([record[name] for record in steps], rel=1e-5), name
    run_mmrl("view", "run", "--single", "page.html")
    assert '"learner/grad_norm":[' in (tmp_path / "page.html").read_text()
