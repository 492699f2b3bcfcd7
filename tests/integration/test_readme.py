"""The commands that the documents show are run, or checked as far as they can be without a GPU and a model hub."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.cli.main import main
from mmrl.config import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def commands() -> list[str]:
    """Every line that starts with `$ ` in a console block, with those that continue it, without its comment."""
    texts = [path.read_text().replace("\\\n", "") for path in DOCUMENTS]
    blocks = [block for text in texts for block in re.findall(r"```console\n(.*?)```", text, re.S)]
    lines = [line[2:].split("  #")[0].strip() for block in blocks for line in block.splitlines() if line[:2] == "$ "]
    return sorted(set(lines))


def starting(prefix: str) -> list[str]:
    return [command for command in commands() if command.startswith(prefix)]


def test_the_documents_show_commands():
    assert starting("make quickstart") and starting("make test") and starting("mmrl train") and starting("mmrl explain")


@pytest.mark.parametrize("command", starting("make "))
def test_make_knows_its_targets(command):
    done = subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", starting("mmrl explain configs/"))
def test_explain_runs(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert "L = " in capsys.readouterr().out


@pytest.mark.parametrize("command", starting("mmrl train configs/"))
def test_configs_and_overrides_of_train_commands_are_good(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, *overrides = shlex.split(command)[2:]
    assert load_config(config, [text for text in overrides if "=" in text]).config.stages


def test_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.slow
def test_config_of_the_page_about_own_data_passes_the_check_of_data(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "train_on_my_data.md").read_text()
    [row], [config] = (re.findall(rf"```{language}\n(.*?)```", page, re.S) for language in ("json", "yaml"))
    (tmp_path / "bottles.yaml").write_text(config)
    (tmp_path / "shelf").mkdir()
    noise = np.random.default_rng(0)
    for split, size in {"train": 16, "held_out": 4}.items():
        lines = []
        for index in range(size):
            image = f"shelf/{split}-{index}.jpg"
            Image.fromarray(noise.integers(0, 255, (56, 56, 3), dtype=np.uint8)).save(tmp_path / image)
            lines.append(json.dumps(json.loads(row) | {"image": image, "count": index % 4}))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code = main(["data", "check", "bottles.yaml", "model.path=null", "model.from_scratch={}"])
    text = capsys.readouterr().out
    assert code == 0, text
    assert "bottles: 0 errors" in text
