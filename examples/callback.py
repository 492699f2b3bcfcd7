"""Stop a stage early: a callback that ends it when the mean reward has not improved for some steps.

Use it in a config with

    callbacks: [{fn: ./callback.py:stop_without_progress, args: {patience: 20}}]
"""

from mmrl.training.build import RunContext
from mmrl.training.callbacks import StepResult
from mmrl.types import TrainingState


class EarlyStopping:
    """Ends the stage after `patience` steps in a row without a new best mean reward."""

    def __init__(self, patience: int, context: RunContext) -> None:
        self.patience, self.console = patience, context.console
        self.best, self.best_step = float("-inf"), 0

    def on_step_end(self, state: TrainingState, result: StepResult) -> None:
        """Compare the step's mean reward with the best so far. Steps without rewards (sft) change nothing."""
        reward = result.metrics.get("reward/mean")
        if reward is None:
            return
        if reward > self.best:
            self.best, self.best_step = reward, state.step
        elif state.step - self.best_step >= self.patience:
            self.console.info(f"step {state.step}: no better mean reward than {self.best:.3f} since {self.best_step}")
            state.stage_done = True


def stop_without_progress(context: RunContext, *, patience: int = 50) -> EarlyStopping:
    """Make the callback; mmrl calls this once, when the run starts."""
    return EarlyStopping(patience, context)
