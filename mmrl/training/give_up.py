"""When a run gives up: too many steps in a row that cannot teach. The counts are the run's and outlive a stop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mmrl.types import TrainingState, UserError


def count_nonfinite_steps(state: TrainingState, learner_metrics: Mapping[str, float]) -> None:
    """A step that left out an update is one more, one that made all ends the row; one that tried none does neither."""
    left_out = learner_metrics.get("learner/nonfinite_updates")
    if left_out is not None:
        state.nonfinite_steps = state.nonfinite_steps + 1 if left_out else 0


def check_nonfinite_steps(state: TrainingState, limit: int, rollouts_file: str | None) -> None:
    """End a run that cannot learn; `kept` is where the last step's samples are.

    Raises:
        UserError: `limit` steps in a row left out an update.
    """
    if state.nonfinite_steps >= limit:
        raise UserError(
            f"{state.nonfinite_steps} steps in a row had a gradient that is not finite, and changed no weight. The samples "
            f"of the last are in {rollouts_file}: look for what is odd in them, or try model.dtype=float32 or a lower rate"
        )


def check_steps_without_signal(state: TrainingState, limit: int, advantages: Sequence[Sequence[float]]) -> None:
    """Count, and end a run that has nothing to learn from.

    Raises:
        UserError: `limit` steps in a row had no group with an advantage.
    """
    state.steps_without_signal = 0 if any(any(row) for row in advantages) else state.steps_without_signal + 1
    if state.steps_without_signal >= limit:
        raise UserError(
            f"{state.steps_without_signal} steps in a row had no group to learn from: in each, all rollouts of a group earned "
            "the same, or could not be judged, or `filter` left it out. The task is solved or out of reach, "
            "temperature is too low, the filter too narrow, or a reward fails; look at rollouts/"
        )
