"""Everything that a run writes for people: console, metrics, rollouts, and the run directory that holds them."""

from mmrl.log.console import Console
from mmrl.log.logger import MetricsFile, RunLogger, write_rollouts
from mmrl.log.run_dir import RunDir

__all__ = ["Console", "MetricsFile", "RunDir", "RunLogger", "write_rollouts"]
