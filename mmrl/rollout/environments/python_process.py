"""The process in which `mmrl.rollout.environments.python` runs code of the model. Needs only the standard library.

It reads a JSON string of code per line and writes a JSON string of what that printed per line. Run as a script, with
the limits as JSON in its first argument; the last line of its standard error before the first answer is empty, or says
what this machine does not protect.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import io
import json
import os
import random
import resource
import sys
import traceback

_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000
_MIB = 2**20
_REFUSED = {
    "socket.connect": "no network here",
    "socket.bind": "no network here",
    "socket.getaddrinfo": "no network here",
    "socket.gethostbyname": "no network here",
    "socket.gethostbyaddr": "no network here",
    "socket.sendto": "no network here",
    "socket.sendmsg": "no network here",
    "os.kill": "no other processes here",
    "os.killpg": "no other processes here",
    "os.fork": "no other processes here",
    "os.forkpty": "no other processes here",
    "os.exec": "no other processes here",
    "os.posix_spawn": "no other processes here",
    "os.system": "no other processes here",
    "subprocess.Popen": "no other processes here",
}


def main() -> None:
    """Give up rights, then answer until standard input ends."""
    limits = json.loads(sys.argv[1])
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Code that reads or prints in other ways than by `sys` must not be taken for a request or an answer.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    weakness = _leave_network()
    memory, size = limits["memory_mib"] * _MIB, limits["file_mib"] * _MIB
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(_refuse)
    print(weakness, file=sys.stderr, flush=True)
    os.dup2(nothing, 2)
    # So that an episode can be played again.
    random.seed(0)
    variables: dict[str, object] = {"__name__": "__main__"}
    for line in requests:
        output = run(json.loads(line), variables)
        print(json.dumps(output[: limits["max_chars"]]), file=answers, flush=True)


def run(code: str, variables: dict[str, object]) -> str:
    """Return what code prints, the value of its last expression included, and its error if it raises one."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            tree = ast.parse(code)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), variables)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "<code>", "eval"), variables)
                if value is not None:
                    print(repr(value))
        except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt too: they end the code alone
            print("".join(traceback.format_exception_only(error)).strip())
    return output.getvalue().encode(errors="replace").decode()


def _leave_network() -> str:
    """Move this process into a network of its own, which has no interfaces; return why not if that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0:
        return ""
    reason = os.strerror(ctypes.get_errno())
    return f"no network namespace here ({reason}): code that gets around Python's own functions can use the network"


def _refuse(event: str, _: object) -> None:
    if event in _REFUSED:
        raise PermissionError(_REFUSED[event])


if __name__ == "__main__":
    main()
