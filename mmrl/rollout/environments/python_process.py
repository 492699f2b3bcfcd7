"""The process in which `mmrl.rollout.environments.python` runs code of the model. Needs only the standard library.

Each line of input is code as a JSON string, and each line of output is what that code printed, as a JSON string. The
first line of output comes before any code: it is empty, or names the protections that this machine lacks. Arguments:
limits of memory and of the size of a file, in MiB, and of characters of output.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import io
import json
import os
import platform
import random
import resource
import struct
import sys
import traceback

_CLONE_NEWNET, _CLONE_NEWUSER, _CLONE_THREAD = 0x40000000, 0x10000000, 0x00010000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_REFUSED_EVENTS = {
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"),
    *("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"),
    *("os.kill", "os.killpg", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "subprocess.Popen"),
}
# From linux/filter.h: load, jump if equal, if greater or equal, if it has a bit, and return.
_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# From linux/seccomp.h: offsets in `seccomp_data`, and values to return. Add its number for an error.
_CALL, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERROR = 0x7FFF0000, 0x50000
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, where 0 is none; number in filters
_CLONE, _CLONE3, _X32_CALL = (56, 220), 435, 0x40000000
_REFUSED_CALLS = {
    **{"socket": (41, 198), "fork": (57, 0), "vfork": (58, 0), "execve": (59, 221), "execveat": (322, 281)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "pidfd_send_signal": (424, 424)},
    **{"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "ptrace": (101, 117)},
    **{"process_vm_writev": (311, 271), "io_uring_setup": (425, 425)},  # io_uring reaches sockets without these calls
}


def main() -> None:
    """Give up rights, then answer until standard input ends."""
    memory_mib, file_mib, max_chars = map(int, sys.argv[1:])
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # The model's code may read or write these descriptors without `sys`: requests and answers use copies of them.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    weakness = _give_up_rights()
    limits = {resource.RLIMIT_AS: memory_mib * 2**20, resource.RLIMIT_FSIZE: file_mib * 2**20, resource.RLIMIT_CORE: 0}
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    sys.addaudithook(_refuse)
    random.seed(0)  # so that an episode can be played again
    print(json.dumps(weakness), file=answers, flush=True)
    variables: dict[str, object] = {"__name__": "__main__"}
    for line in requests:
        print(json.dumps(run(json.loads(line), variables)[:max_chars]), file=answers, flush=True)


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
        except BaseException as error:  # noqa: BLE001  # SystemExit and KeyboardInterrupt too: they end only the code
            print("".join(traceback.format_exception_only(error)).strip())
    return output.getvalue().encode(errors="replace").decode()


def _give_up_rights() -> str:
    """Give up the network and the system calls for sockets and processes; return "", or the steps that failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    refused = []
    # In its own user namespace it cannot read the memory or variables of other processes either.
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        refused.append(f"no namespaces here ({os.strerror(ctypes.get_errno())})")
    program = _filter_program(platform.machine())
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    filter_call = (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or libc.prctl(*filter_call) != 0:
        refused.append(f"no filter of system calls here ({os.strerror(ctypes.get_errno())})")
    return "; ".join(refused)


def _filter_program(machine: str) -> bytes:
    """Return a seccomp filter in classic BPF. It is empty for an unknown machine, and the kernel refuses that."""
    if machine not in _MACHINES:
        return b""
    column, architecture = _MACHINES[machine]
    # An instruction is (code, instructions to skip if its condition holds, instructions to skip if not, value).
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR + errno.EPERM)
    program = [(_LOAD, 0, 0, _MACHINE), (_EQUAL, 1, 0, architecture), refuse]
    program += [(_LOAD, 0, 0, _CALL), (_AT_LEAST, 0, 1, _X32_CALL), refuse]
    # The arguments of clone3 lie in memory, which a filter cannot read; without it, libraries call clone.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR + errno.ENOSYS)]
    for numbers in _REFUSED_CALLS.values():
        if number := numbers[column]:
            program += [(_EQUAL, 0, 1, number), refuse]
    # clone may only start threads.
    program += [(_EQUAL, 1, 0, _CLONE[column]), allow]
    program += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_HAS_BIT, 1, 0, _CLONE_THREAD), refuse, allow]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _refuse(event: str, _: object) -> None:
    if event in _REFUSED_EVENTS:
        raise PermissionError(f"no {'network' if event.startswith('socket') else 'other processes'} here")


if __name__ == "__main__":
    main()
