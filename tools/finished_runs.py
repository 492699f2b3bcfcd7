"""The runs behind a table: each is an ordinary `mmrl train`; a finished run is read, not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent.parent / "configs"


def train_unless_finished(config: str, folder: Path, *overrides: str) -> dict[str, Any]:
    """Train `configs/<config>`, or resume it, unless its run is finished; return its summary."""
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "mmrl", "train", str(CONFIGS / config), *overrides, "--run-dir", str(folder)]
        subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
