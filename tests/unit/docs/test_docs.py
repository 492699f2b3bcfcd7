"""The docs name files, headings, functions and settings that exist, and commands that can be called."""

import ast
import json
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from config_samples import has_key
from pydantic import ValidationError
from ruamel.yaml import YAML

from mmrl.cli import eval as eval_command
from mmrl.cli import main
from mmrl.cli.main import _parse_arguments, build_parser
from mmrl.config import load_config
from mmrl.config.errors import read_synonyms
from mmrl.config.schema import Config

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "datasets/README.md", "rewards/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"`((?:mmrl|rewards|datasets|tools|tests|examples)/[\w/]+\.py)(?::([\w.]+))?`")


def defined_names(file):
    """Return the functions and classes of a file, methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))
    return names


def without_code_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(text):
    """Return the anchors that GitHub gives the headings of a page."""
    found, counts = set(), Counter()
    for heading in re.findall(r"^#+ (.+)$", without_code_blocks(text), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(f"{anchor}-{counts[anchor]}" if counts[anchor] else anchor)
        counts[anchor] += 1
    return found


def broken_references(page, text):
    """Return the links and code references of a page that lead nowhere."""
    broken = []
    for target, anchor in LINK.findall(without_code_blocks(text)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        file = page.parent / target if target else page
        if not file.exists():
            broken.append(target)
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            broken.append(f"{target}#{anchor}")
    for path, name in CODE.findall(text):
        file = ROOT / path
        if not file.is_file() or (name and name not in defined_names(file)):
            broken.append(f"{path}:{name}" if name else path)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names_exist(page):
    assert broken_references(page, page.read_text()) == []


def test_a_wrong_link_and_a_wrong_name_are_found():
    links = (
        "[gone](gone.md) [here](glossary.md) [heading](design.md#which-calls-are-collective) [gone](glossary.md#word)"
    )
    text = f"{links} `mmrl/nothing.py` `mmrl/training/rl.py:run_nothing` `mmrl/protocols.py:Sampler.sync`"
    broken = broken_references(ROOT / "docs" / "design.md", text)
    assert broken == ["gone.md", "glossary.md#word", "mmrl/nothing.py", "mmrl/training/rl.py:run_nothing"]


def test_examples_of_all_kinds_have_at_most_40_lines():
    kinds = (ROOT / "CONTRIBUTING.md").read_text().partition("## Twelve things to add")[2].partition("\n## ")[0]
    longer = {path.name for path in (ROOT / "examples").glob("*.py") if len(path.read_text().splitlines()) > 40}
    assert longer == {"internvl.py", "miniwob_env.py"}
    assert len(set(re.findall(r"examples/(\w+\.py)", kinds)) - longer) == 12


# Commands


def shell_commands(prefix):
    """Return the lines of console blocks that begin so, with those that continue them, without their comments."""
    commands = set()
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", page.read_text().replace("\\\n", ""), re.S):
            lines = [line[2:].split("  #")[0].strip() for line in block.splitlines() if line.startswith("$ ")]
            commands.update(line.split(" > ")[0].split(" | ")[0] for line in lines if line.startswith(prefix))
    return sorted(commands)


def test_the_pages_show_commands():
    assert all(map(shell_commands, ("make quickstart", "make test", "mmrl train", "mmrl explain")))


@pytest.mark.parametrize("command", shell_commands("make "))
def test_make_knows_the_targets_of_the_docs(command):
    done = subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", shell_commands("mmrl explain configs/"))
def test_explain_commands_of_the_docs_run(command, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(command)[1:]) == 0
    assert "L = " in capsys.readouterr().out


@pytest.mark.parametrize("command", shell_commands("mmrl train configs/"))
def test_train_commands_of_the_docs_have_configs_and_overrides_that_load(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    config, *overrides = shlex.split(command)[2:]
    assert load_config(config, [text for text in overrides if "=" in text]).config.stages


def test_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_scripts_that_the_docs_call_exist_and_do_something():
    scripts = set()
    for page in PAGES:
        scripts |= set(re.findall(r"python ((?:tools|examples|tests)/\S+\.py)", page.read_text()))
    assert "tools/tiny_internvl.py" in scripts
    for script in scripts:
        assert 'if __name__ == "__main__":' in (ROOT / script).read_text(), script


@pytest.mark.parametrize("command", shell_commands("mmrl "))
def test_command_line_accepts_the_commands_of_the_docs(command):
    words = eval_command.insert_default_command(shlex.split(command)[1:])
    assert _parse_arguments(build_parser(), words).command == words[0]


def test_command_line_refuses_an_option_that_does_not_exist(capsys):
    with pytest.raises(SystemExit):
        _parse_arguments(build_parser(), ["train", "my.yaml", "--stepz", "2"])
    assert "--stepz" in capsys.readouterr().err


# Configs


def yaml_fragments():
    """Return the configs and parts of configs that pages show. `---` separates alternatives within a block."""
    fragments = []
    for page in PAGES:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S), 1):
            name = f"{page.relative_to(ROOT)}:{number}"
            fragments += [pytest.param(settings, id=name) for settings in YAML(typ="safe").load_all(block)]
    return fragments


def config_problems(settings):
    """Return what is wrong with a part of a config, other than that the rest is missing."""
    if "extends" in settings:
        # Entries that are changed by name are parts of what the base says.
        settings = {key: value for key, value in settings.items() if key not in ("extends", "stages", "rewards")}
    if not settings.keys() <= Config.model_fields.keys():
        settings = {"stages": [{"kind": "rl", "name": "rl", **settings}]}
    try:
        Config.model_validate_json(json.dumps(settings))
    except ValidationError as error:
        # A rule about several settings cannot hold if some of them are left out.
        lacking = ("missing", "too_short", "value_error")
        return [f"{each['loc']}: {each['msg']}" for each in error.errors() if each["type"] not in lacking]
    return []


@pytest.mark.parametrize("settings", yaml_fragments())
def test_yaml_fragment_fits_the_schema(settings):
    assert config_problems(settings) == []


def test_wrong_key_and_wrong_value_in_a_fragment_are_found():
    assert len(config_problems({"stages": [{"kind": "rl", "name": "rl", "lr": 1}], "model": {"dtype": "int8"}})) == 2
    assert len(config_problems({"group_sizes": 4})) == 1


# Other frameworks


def rows_of_other_frameworks():
    rows = []
    for line in (ROOT / "docs" / "coming_from.md").read_text().splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) == 6 and has_key(cells[1].replace("[]", "[0]")):
            rows.append((cells[1], [cell for cell in cells[2:] if cell != "–"]))
    return rows


def test_table_of_other_frameworks_names_keys_that_exist():
    text = (ROOT / "docs" / "coming_from.md").read_text()
    table = [line for line in text.splitlines() if line.count("|") == 7]
    assert len(rows_of_other_frameworks()) == len(table) - 2  # without its head
    assert len(table) > 40


def test_table_of_other_frameworks_agrees_with_the_errors_about_unknown_keys():
    ours_of = {theirs: entry["ours"] for entry in read_synonyms()["other_frameworks"] for theirs in entry["theirs"]}
    compared = 0
    for ours, names in rows_of_other_frameworks():
        for name in names:
            words = name.split(".")
            known = ours_of.get(".".join(words[-2:])) or ours_of.get(words[-1])
            # A word of several meanings has one in the errors.
            if known and words[-1] not in ("loss_type", "loss_mode", "steps_per_generation"):
                assert known == ours, name
                compared += 1
    assert compared > 80
