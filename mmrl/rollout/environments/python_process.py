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
import platform
import random
import resource
import struct
import sys
import traceback
from functools import partial

_CLONE_NEWNET, _CLONE_NEWUSER, _CLONE_THREAD = 0x40000000, 0x10000000, 0x00010000
_CLONE3, _X32_CALL = 435, 0x40000000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_MIB = 2**20
_REFUSED_EVENTS = {
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"),
    *("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"),
    *("os.kill", "os.killpg", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "subprocess.Popen"),
}
# By machine: its number in filters, that of clone, and those of socket, fork and vfork (x86-64 alone), execve,
# execveat, kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal, ptrace, process_vm_writev, and
# of io_uring_setup, which reaches sockets without these calls.
_SYSCALLS = {
    "x86_64": (0xC000003E, 56, (41, 57, 58, 59, 322, 62, 200, 234, 129, 297, 424, 101, 311, 425)),
    "aarch64": (0xC00000B7, 220, (198, 221, 281, 129, 130, 131, 138, 240, 424, 117, 271, 425)),
}


def main() -> None:
    """Give up rights, then answer until standard input ends."""
    limits = json.loads(sys.argv[1])
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Code that reads or prints in other ways than by `sys` must not be taken for a request or an answer.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    weakness = _give_up_rights()
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


def _give_up_rights() -> str:
    """Leave the network and lose the system calls for sockets and processes; return "", or what the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = []
    # In a user namespace of its own it cannot read the memory or variables of other processes either.
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        refused.append(f"no namespaces here ({os.strerror(ctypes.get_errno())})")
    program = _filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(_PR_SET_SECCOMP, 2, header, 0, 0) != 0:
        refused.append(f"no filter of system calls here ({os.strerror(ctypes.get_errno())})")
    return "; ".join(refused)


def _filter_program(machine: str) -> bytes:
    """Return a seccomp filter in classic BPF, which the kernel refuses if it is empty: that of an unknown machine."""
    if machine not in _SYSCALLS:
        return b""
    architecture, clone, calls = _SYSCALLS[machine]
    load, equal, at_least, has_bit = (partial(struct.pack, "HBBI", code) for code in (0x20, 0x15, 0x35, 0x45))
    allow, refuse, unknown = (struct.pack("HBBI", 0x06, 0, 0, value) for value in (0x7FFF0000, 0x50001, 0x50026))
    # Jumps pass over one instruction. 0 is the number of the call, 4 the machine, 16 the first argument.
    program = [load(0, 0, 4), equal(1, 0, architecture), refuse, load(0, 0, 0), at_least(0, 1, _X32_CALL), refuse]
    # The arguments of clone3 lie in memory, which a filter cannot read; without it, clone is taken.
    program += [equal(0, 1, _CLONE3), unknown]
    for number in calls:
        program += [equal(0, 1, number), refuse]
    program += [equal(1, 0, clone), allow, load(0, 0, 16), has_bit(1, 0, _CLONE_THREAD), refuse, allow]
    return b"".join(program)


def _refuse(event: str, _: object) -> None:
    if event in _REFUSED_EVENTS:
        raise PermissionError(f"no {'network' if event.startswith('socket') else 'other processes'} here")


if __name__ == "__main__":
    main()
