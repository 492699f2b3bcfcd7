"""The command line: exit codes, messages, and a start that imports nothing heavy."""

import gc
import json
import os
import re
import subprocess
import sys

import pytest

import mmrl
from mmrl.cli import main
from mmrl.cli.common import pause_gc_for_imports

CONFIG = """\
run: {name: demo}
model: {from_scratch: {}}
data: {train: [{fn: "mmrl_datasets.generators.scenes:counting", args: {split: train, size: 4}}]}
rewards: {terms: [{fn: "format:tags"}]}
stages:
  - {kind: rl, name: rl, steps: 20}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return str(path)


def mmrl_command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "mmrl", *words], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["explain", "--help"], ["config", "--help"], []),
        *(["data", "--help"], ["data", "check", "--help"], ["data", "show", "--help"], ["data", "make", "--help"]),
    ],
)
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\nfrom mmrl.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'pydantic', 'rich', 'ruamel.yaml', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def thawed():
    """Garbage is looked for as before, whatever a test did."""
    yield
    gc.enable()
    gc.unfreeze()


def test_no_garbage_is_looked_for_while_torch_is_imported_nor_among_what_stays(thawed, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = gc.get_freeze_count()
    with pause_gc_for_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before + 1000


def test_an_import_that_fails_leaves_the_collector_on(thawed, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = gc.get_freeze_count()
    with pytest.raises(ImportError, match="no_such_library"), pause_gc_for_imports():
        import no_such_library  # noqa: F401
    assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_a_process_that_has_torch_keeps_its_garbage_collector_as_it_is(thawed, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = gc.get_freeze_count()
    with pause_gc_for_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_help_shows_the_commands_and_an_example():
    done = mmrl_command("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("train", "explain", "config", "mmrl train configs/quickstart.yaml"))


def test_version():
    assert mmrl_command("--version").stdout == f"mmrl {mmrl.__version__}\n"


def test_without_a_command_help_goes_to_stderr():
    done = mmrl_command()
    assert (done.returncode, done.stdout) == (2, "")
    assert "commands:" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["trian", "x"],
        ["explain"],
        ["data"],
        ["data", "check"],
        ["config", "yaml"],
        ["config", "schema", "a=b"],
        ["--verison"],
    ],
)
def test_a_wrong_command_line_exits_2(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["0", "-1", "two", "1.5", ""])
def test_steps_must_be_a_positive_number(config, steps, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", config, "--steps", steps])
    assert caught.value.code == 2
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["train"], ["explain"], ["data", "check"], ["data", "show"]])
def test_a_user_error_exits_2_with_every_line_and_no_traceback(command, config):
    done = mmrl_command(*command, config, "run.sed=1", "stages.rl.steps=x")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "mmrl: error: command line: run.sed: unknown key; did you mean `seed`?",
        "mmrl: error: command line: stages.0.steps: must be a whole number, got the text 'x'",
    ]


def test_a_wrong_config_is_refused_before_torch_is_imported(tmp_path):
    code = f"import sys, mmrl.cli\nmmrl.cli.main(['train', '{tmp_path}/no.yaml'])\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_overrides_may_stand_anywhere(config, capsys):
    assert main(["explain", config, "run.seed=7"]) == 0
    assert "command line" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["explain", config, "run.seed=7", "--seed", "3"])
    assert "unrecognized arguments: --seed" in capsys.readouterr().err


def test_overrides_after_options_reach_the_config(config, tmp_path, capsys):
    assert main(["train", config, "--run-dir", str(tmp_path / "r"), "run.sed=1", "--steps", "2", "run.sad=1"]) == 2
    said = capsys.readouterr().err
    assert "run.sed: unknown key" in said and "run.sad: unknown key" in said


def test_explain_prints_values_and_objective(config):
    done = mmrl_command("explain", config)
    assert done.returncode == 0
    assert f"{config}:6" in done.stdout and "A_i = (R_i - mean(R))" in done.stdout


def test_explain_keeps_a_value_with_line_breaks_in_its_row(config):
    done = mmrl_command("explain", config, 'response_format.stop_strings=["one\\n\\ntwo"]')
    [row] = [line for line in done.stdout.splitlines() if line.startswith("response_format.stop_strings ")]
    assert re.split("  +", row)[1:] == [r"['one\n\ntwo']", "command line"]


def test_config_schema_is_json():
    done = mmrl_command("config", "schema")
    assert done.returncode == 0
    assert json.loads(done.stdout)["properties"]["run"]


def test_a_closed_pipe_is_no_traceback(config):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "mmrl", "explain", config], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
