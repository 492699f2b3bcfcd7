"""A callback that writes the seconds of each step, and on a CUDA device its memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from mmrl import TrainingState, TrainStepResult


class StepMemory:
    """Appends a line of JSON for each step."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> None:
        """Write seconds by activity, and GB at the peak since the step before and now."""
        record: dict[str, Any] = {"seconds": dict(result.seconds)}
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            record["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            record["used_gb"] = (total - free) / 1e9  # including the engine and cached memory of the allocators
            torch.cuda.reset_peak_memory_stats()
        with self._file.open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def record_steps(run: object, *, file: str) -> StepMemory:
    """Make the callback."""
    return StepMemory(Path(file))
