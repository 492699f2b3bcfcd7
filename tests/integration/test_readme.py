"""The commands that the documents show are run, or checked as far as they can be without a GPU and a model hub."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

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
