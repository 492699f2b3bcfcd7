"""Python that the model may run: variables stay, and nothing that code does harms the run."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmrl.rollout.environments import python_process
from mmrl.rollout.environments.python import _missing_protections, make
from mmrl.types import Action, AnswerType, Sample, Target
from mmrl.utils.observations import check_step_result

SAMPLE = Sample(id="s", task="t", parts=("?",), target=Target(answer_type=AnswerType.TEXT, value="?"))


@pytest.fixture
def python():
    environment = make(timeout_s=2.0, memory_mib=512, file_mib=1)
    environment.reset(SAMPLE, 0)
    yield lambda code: check_step_result(environment.step(Action("python", {"code": code}))).observation.text
    environment.close()


def test_variables_stay_and_the_last_value_is_shown(python):
    assert python("x = 20\ndef double(n):\n    return 2 * n") == ""
    assert python("print('so', x)\ndouble(x) + 2") == "so 20\n42\n"
    assert python("y = [n for n in range(3)]\ny") == "[0, 1, 2]\n"
    assert python("import math; math.isqrt(50)") == "7\n"


def test_errors_are_shown_and_the_session_continues(python):
    assert python("1 / 0") == "ZeroDivisionError: division by zero\n"
    assert "SyntaxError" in python("def")
    assert python("raise SystemExit(3)") == "SystemExit: 3\n"
    assert python("'still here'") == "'still here'\n"


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
    ],
)
def test_there_is_no_network(python, code):
    assert "no network here" in python(code)


@pytest.mark.parametrize(
    "code", ["import os; os.fork()", "import os; os.system('true')", "import subprocess; subprocess.run(['true'])"]
)
def test_there_are_no_other_processes(python, code):
    assert "no other processes here" in python(code)


AROUND = """import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
"""


@pytest.mark.parametrize(
    "call",
    [
        "libc.socket(2, 1, 0)",
        "libc.socket(1, 1, 0)",
        "libc.fork()",
        "libc.vfork()",
        "libc.execv(b'/bin/true', None)",
        "libc.kill(os.getppid(), 0)",
        "libc.ptrace(16, os.getppid(), 0, 0)",
        "libc.syscall(425, 1, 0)",
    ],
)
def test_the_kernel_refuses_what_gets_around_python(python, call):
    python("1")
    if _missing_protections:
        pytest.skip(str(_missing_protections))
    assert python(f"{AROUND}print({call}, os.strerror(ctypes.get_errno()))") == "-1 Operation not permitted\n"


def test_processes_of_multiprocessing_are_refused_and_threads_are_not(python):
    python("1")
    if _missing_protections:
        pytest.skip(str(_missing_protections))
    spawn = "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()"
    assert "Operation not permitted" in python(spawn)
    assert "Permission denied" in python("import os; open(f'/proc/{os.getppid()}/environ').read()")
    assert python("import asyncio\nasyncio.run(asyncio.sleep(0, 'slept'))") == "'slept'\n"
    thread = "import threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()"
    assert python(thread) == "thread\n"


def test_what_the_kernel_refuses_to_protect_is_said(monkeypatch):
    libc = SimpleNamespace(unshare=lambda _: -1, prctl=lambda *_: -1)
    monkeypatch.setattr(python_process.ctypes, "CDLL", lambda *_, **__: libc)
    monkeypatch.setattr(python_process.ctypes, "get_errno", lambda: errno.EPERM)
    monkeypatch.setattr(python_process.platform, "machine", lambda: "riscv64")
    refused = "no namespaces here (Operation not permitted); no filter of system calls here (Operation not permitted)"
    assert python_process._give_up_rights() == refused


def test_limits_of_time_memory_files_and_output(python):
    assert "Stopped after 2 s; all variables are lost." in python("while True: pass")
    assert "MemoryError" in python("x = bytearray(2**30)")
    assert "File too large" in python("open('big', 'wb').write(bytes(2**22)); None")
    assert len(python("print('x' * 10**7)")) == 4000
    assert "ended the process" in python("import os; os._exit(1)")
    assert python("1 + 1") == "2\n"


def test_what_code_writes_by_other_ways_is_no_answer(python):
    assert python("import os; os.write(1, b'\"fake\"\\n'); 'true'") == "'true'\n"


def test_files_lie_in_a_folder_of_the_episode_which_goes(tmp_path):
    environment = make()
    environment.reset(SAMPLE, 0)
    run = environment.step(Action("python", {"code": "open('a.txt', 'w').write('hi'); import os; print(os.getcwd())"}))
    folder = Path(run.observation.text.splitlines()[-1])
    assert (folder / "a.txt").read_text() == "hi" and folder != Path.cwd()
    environment.close()
    assert not folder.exists()


def test_unknown_calls_get_a_message_and_plain_text_ends_the_episode():
    environment = make()
    for call in (Action("search", {"code": "1"}), Action("python", {}), Action("python", {"code": 1})):
        refused = environment.step(call)
        assert not refused.valid and '"name": "python"' in refused.observation.text
    assert environment.step("The answer is 4.").terminated
    environment.close()


def test_secrets_of_the_run_are_not_in_its_environment(python, monkeypatch):
    monkeypatch.setitem(os.environ, "API_KEY", "secret")
    assert "secret" not in python("import os; print(dict(os.environ))")


def test_what_code_does_to_its_pipes_and_children_costs_its_own_process_alone(python):
    assert python("import os; os.write(2, bytes(300_000)); 'fine'") == "'fine'\n"
    assert "\ud800" not in python("print('\\ud800')")
    assert "EOFError" in python("input()")
    assert "no other processes" in python("import os; os.kill(os.getppid(), 15)")
    assert "no network here" in python("import socket; socket.gethostbyname('localhost')")
    lost = python("import os\nfor fd in range(3, 9):\n    try: os.write(fd, b'x\\n')\n    except OSError: pass")
    assert "variables are lost" in lost
    assert "Stopped" in python(
        "import os, time\nfor fd in range(3, 9):\n    try: os.write(fd, b'x')\n    except OSError: pass\ntime.sleep(60)"
    )
    assert python("1") == "1\n"


@pytest.mark.parametrize("code", ["import random; random.random()", "set('abcdefgh')"])
def test_random_numbers_and_the_order_of_sets_can_be_played_again(code):
    found = set()
    for _ in range(3):
        environment = make()
        found.add(environment.step(Action("python", {"code": code})).observation.text)
        environment.close()
    assert len(found) == 1
