"""Log a metric, and stop a stage early: a callback that ends it when the best answers of its groups stop improving.

Use it in a config with

    callbacks: [{fn: ./callback.py:stop_without_progress, args: {patience: 20}}]
"""

from statistics import fmean

from mmrl import Metric, RunComponents, TrainingState, TrainStepResult


class EarlyStopping:
    """Ends the stage after `patience` steps in a row without a new high of `my/best_of_group`."""

    metrics = (Metric("my/best_of_group", "Mean over groups of the largest total reward.", label="best", form=".3f"),)

    def __init__(self, patience: int, run: RunComponents) -> None:
        self.patience, self.console = patience, run.console

    def on_step_end(self, state: TrainingState, result: TrainStepResult) -> dict[str, float] | None:
        """Return the step's metric, and compare it with the best so far. Steps without rewards (sft) have none."""
        if "reward/mean" not in result.metrics:
            return None
        best = fmean(max(group.totals) for group in result.selected.groups if group.totals)
        # The state is part of checkpoints: a resumed run remembers the high, where an attribute would be forgotten.
        high, high_step = state.callback_values.get("my/best_of_group", (float("-inf"), 0))
        if best > high:
            state.callback_values["my/best_of_group"] = (best, state.step)
        elif state.step - high_step >= self.patience:
            self.console.info(f"step {state.step}: nothing better than {high:.3f} since step {high_step}")
            state.stage_done = True
        return {"my/best_of_group": best}


def stop_without_progress(run: RunComponents, *, patience: int = 50) -> EarlyStopping:
    """Make the callback; mmrl calls this once, when the run starts."""
    return EarlyStopping(patience, run)
