"""Count what one RL step of the quickstart touches: functions, modules, and the depth of our own call stack.

    python tools/dev/trace_step.py            # three numbers and the deepest stack
    python tools/dev/trace_step.py --json     # only the numbers
    python tools/dev/trace_step.py --list     # every function, by module

The quickstart runs two steps of each stage on few samples, with a KL penalty, so that a reference is in the step too.
Calls are counted while `training.rl.train_rl` runs, in this process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "rewards"), str(ROOT / "datasets")]
SIZES = {"train": 64, "validation": 8, "test": 8}


@cache
def find_own_function(code: CodeType) -> tuple[str, str] | None:
    """Return file and qualified name of a function that is defined in this checkout; None for any other."""
    file = Path(code.co_filename)
    if not file.is_relative_to(ROOT) or ".venv" in file.parts:
        return None
    return (str(file.relative_to(ROOT)), code.co_qualname)


class CallTracer:
    """Counts the calls of our own functions; install its `trace` with `sys.setprofile`."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.stack: list[tuple[str, str]] = []
        self.deepest: list[tuple[str, str]] = []

    def trace(self, frame: FrameType, event: str, _argument: object) -> None:
        """Follow one call or return of a function that is defined in this checkout."""
        call = find_own_function(frame.f_code)
        if call is None:
            return
        if event == "call":
            self.stack.append(call)
            if call[1].endswith(">"):  # a comprehension or a lambda, which is part of the function around it
                return
            self.functions.add(call)
            if len(self.stack) > len(self.deepest):
                functions = [called for called in self.stack if not called[1].endswith(">")]
                self.deepest = max(self.deepest, functions, key=len)
        elif event == "return" and self.stack and self.stack[-1] == call:
            self.stack.pop()

    def summary(self) -> dict[str, int]:
        """Return the three numbers."""
        modules = {module for module, _ in self.functions}
        return {"functions": len(self.functions), "modules": len(modules), "stack_depth": len(self.deepest)}


def run_quickstart(tracer: CallTracer) -> None:
    """Run the quickstart in this process, traced inside its RL stage."""
    import mmrl.training.rl_stage as rl_stage_module
    from mmrl.cli import main
    from mmrl.training.rl import train_rl

    def traced(*arguments: Any, **keywords: Any) -> object:
        sys.setprofile(tracer.trace)
        try:
            return train_rl(*arguments, **keywords)
        finally:
            sys.setprofile(None)

    rl_stage_module.train_rl = traced
    sizes = [f"data.{part}.{index}.args.size={size}" for part, size in SIZES.items() for index in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = str(Path(folder) / "run")
        config = str(ROOT / "configs" / "quickstart.yaml")
        options = ["--steps", "2", "stages.rl.loss.kl.coef=0.01", "--run-dir", run_dir]
        sys.argv = ["mmrl", "train", config, *options, *sizes]
        silently(main)


def silently(function: Callable[[], object]) -> None:
    """Call a function with its standard output sent to standard error, so that ours stays clean."""
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        function()
    except SystemExit as stopped:
        if stopped.code:
            raise
    finally:
        sys.stdout = output


def main() -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--list", action="store_true", help="print every function that was called, by module")
    options = parser.parse_args()
    tracer = CallTracer()
    run_quickstart(tracer)
    if options.json:
        print(json.dumps(tracer.summary()))
        return
    for name, value in tracer.summary().items():
        print(f"{name:<12} {value}")
    if options.list:
        for module, function in sorted(tracer.functions):
            print(f"  {module}: {function}")
    print("the deepest stack:")
    for module, function in tracer.deepest:
        print(f"  {module}: {function}")


if __name__ == "__main__":
    main()
