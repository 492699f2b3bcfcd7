"""The command line: exit codes, messages, and a start that imports nothing heavy."""

import gc
import json
import os
import re
import subprocess
import sys

import pytest

import mmrl
from mmrl.benchmarks.registry import BENCHMARKS
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


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["train", "--help"], ["explain", "--help"], ["config", "--help"], ["reward", "--help"], []),
        *(["data", "--help"], ["data", "check", "--help"], ["data", "show", "--help"], ["data", "make", "--help"]),
    ],
)
def test_help_imports_nothing_heavy(words):
    code = (
        "import sys\nfrom mmrl.cli import main\n"
        f"try: main({words!r})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'pydantic', 'rich', 'ruamel.yaml', 'transformers', 'numpy', 'mmrl_rewards'}\n"
        "sys.exit(' '.join(heavy & set(sys.modules)) or 0)"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def thawed():
    """Restore the garbage collector after a test."""
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("import_fails", [False, True])
def test_garbage_collection_pauses_while_torch_is_imported(thawed, monkeypatch, import_fails):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = gc.get_freeze_count()
    try:
        with pause_gc_for_imports():
            assert not gc.isenabled()
            if import_fails:
                raise ImportError
    except ImportError:
        assert gc.get_freeze_count() == before
    else:
        assert gc.get_freeze_count() > before + 1000
    assert gc.isenabled()


def test_garbage_collection_stays_as_it_is_once_torch_is_imported(thawed, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    before = gc.get_freeze_count()
    with pause_gc_for_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before


def test_help_of_eval_lists_every_benchmark(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "run", "--help"])
    listed = capsys.readouterr().out.partition("Benchmarks: ")[2].partition(";")[0]
    assert re.split(r",\s+", listed) == list(BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], ["train", "explain", "config", "mmrl train configs/quickstart.yaml"]),
        (["reward", "--help"], ["mmrl reward lint ./my_rewards.py:close"]),
        (["--version"], [f"mmrl {mmrl.__version__}\n"]),
    ],
)
def test_help_and_version_go_to_stdout(words, shown, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    output = capsys.readouterr().out
    assert all(text in output for text in shown)


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        (">&-", 0, ""),
        ("> /dev/full", 2, "mmrl: error: the output cannot be written: No space left on device; free space\n"),
    ],
)
def test_a_closed_stdout_is_fine_and_a_full_disk_is_named(place, code, said):
    command = f"exec '{sys.executable}' -m mmrl config schema {place}"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_half_of_a_surrogate_pair_is_printed_as_its_escape():
    done = run_python("from mmrl.cli.common import echo\necho('id \\ud800')")
    assert (done.stdout, done.stderr) == ("id \\ud800\n", "")


def test_without_a_command_help_goes_to_stderr(capsys):
    assert main([]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "commands:" in output.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "x"], "invalid choice: 'trian'"),
        (["explain"], "CONFIG"),
        (["data"], "COMMAND"),
        (["data", "check"], "CONFIG"),
        (["config", "yaml"], "invalid choice: 'yaml'"),
        (["config", "schema", "a=b"], "unrecognized arguments: a=b"),
        (["--verison"], "unrecognized arguments: --verison"),
        (["explain", "c.yaml", "run.seed=7", "--seed", "3"], "unrecognized arguments: --seed"),
        (["train", "c.yaml", "--steps", "0"], "--steps: must be a whole number from 1 up, got '0'"),
        (["train", "c.yaml", "--steps", "1.5"], "got '1.5'"),
    ],
)
def test_a_wrong_command_line_exits_2(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "error:" in error and said in error


@pytest.mark.parametrize("command", [["train"], ["explain"], ["data", "check"], ["data", "show"]])
def test_a_user_error_exits_2_with_a_line_for_each_problem(command, config, capsys):
    assert main([*command, config, "run.sed=1", "stages.rl.steps=x"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "mmrl: error: command line: run.sed: unknown key; did you mean `seed`?",
        "mmrl: error: command line: stages.0.steps: must be a whole number, got the text 'x'",
    ]


def test_overrides_may_follow_options(config, tmp_path, capsys):
    assert main(["train", config, "--run-dir", str(tmp_path / "r"), "run.sed=1", "--steps", "2", "run.sad=1"]) == 2
    error = capsys.readouterr().err
    assert "run.sed: unknown key" in error and "run.sad: unknown key" in error


def test_explain_prints_values_and_objective(config, capsys):
    assert main(["explain", config, "run.seed=7"]) == 0
    output = capsys.readouterr().out
    assert f"{config}:6" in output and "command line" in output and "A_i = (R_i - mean(R))" in output


JUDGE = """\
rewards:
  terms:
    - fn: judge:pointwise
      name: judge
      args:
        judge:
          url: http://localhost:9/v1
          model: m
    - {fn: "number:exact", name: rule}
"""


def write_judged(folder, old, new):
    """Write a config with the rewards of JUDGE, in which `new` replaces `old`."""
    rest = "\n".join(text for text in CONFIG.splitlines() if not text.startswith("rewards"))
    (folder / "c.yaml").write_text(JUDGE.replace(old, new) + rest)
    return folder / "c.yaml"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("model: m", "modle: m", 8, "args.judge.modle"),
        ("url: http://localhost:9/v1", "url: localhost", 7, "args.judge.url"),
        ("url: http://localhost:9/v1", "timeout_s: -1", 7, "args.judge"),
        ("name: rule", "name: rule, fallback: jugde", 9, "rewards.terms.1.fallback: term 'rule': it falls back"),
        ("name: rule", "name: rule, requires: fmt", 9, "rewards.terms.1.requires: .*not another term"),
        ("name: rule", "name: rule, fallback: 2.0", 9, "rewards.terms.1.fallback: .*outside the range 0 to 1"),
        ("name: rule", "name: rule, transform: {threshold: 2.0}", 9, "rewards.terms.1.transform: .*all values"),
        ("name: rule", "name: judge", 9, "rewards.terms.1.fn: two reward terms are named 'judge'"),
        ("name: rule", "name: rule, args: {tolerance: near}", 9, "rewards.terms.1.args.tolerance: .*valid number"),
        ("name: rule", "when: {rollout.turn: 2}", 9, "rewards.terms.1.when: a rollout has no 'turn'"),
        ("name: rule", "fallback_on: bad_answer", 1, "fallback_on bad_answer needs a `fallback`"),
    ],
)
def test_explain_names_the_line_of_a_wrong_option_of_a_reward(tmp_path, capsys, old, new, line, words):
    path = write_judged(tmp_path, old, new)
    assert main(["explain", str(path)]) == 2
    assert re.search(rf"{path}:{line}: .*{words}", capsys.readouterr().err)


def test_explain_says_who_decides(tmp_path, capsys):
    path = write_judged(tmp_path, "name: rule", "name: rule, fallback: judge")
    assert main(["explain", str(path)]) == 0
    assert "R_i = 1 · (rule, else judge)" in capsys.readouterr().out


def test_config_schema_is_json(capsys):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["properties"]["run"]


INTERRUPTED_IMPORT = """
import sys
class Finder:
    def find_spec(name, *rest):
        if name == "mmrl.cli.train":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
import mmrl.cli
"""


def test_ctrl_c_during_the_first_imports_prints_nothing():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_exits_141_without_a_traceback(config):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mmrl", "explain", config]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
