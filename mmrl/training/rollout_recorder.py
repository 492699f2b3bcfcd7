"""Records the rollouts of some steps and of held-out samples. Imports without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmrl.config.schema import RolloutRecordsConfig
from mmrl.distributed.exchanges import gather_token_values
from mmrl.distributed.ranks import Ranks
from mmrl.log.logger import MetricsLogger
from mmrl.log.rollout_records import list_scored_records, list_step_records
from mmrl.protocols import Learner
from mmrl.types import Group, SelectedExperiences, TokenValues, TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecorder:
    """Writes the rollouts of a stage's steps that are due, with what the learner computed for their tokens."""

    options: RolloutRecordsConfig
    logger: MetricsLogger
    learner: Learner
    ranks: Ranks
    stage: str  # name of the stage

    def record_step(self, state: TrainingState, selected: SelectedExperiences, *, force: bool) -> str | None:
        """Write the step's rollouts if they are due, or all of them with `force`; return the file. Collective."""
        self.logger.count_tokens(selected.groups)
        if not (force or state.step == 1 or state.step % self.options.every == 0):
            return None
        max_groups = len(selected.groups) if force else self.options.max_groups
        # The step has advanced the version already.
        version = state.version - 1
        records = list_step_records(selected, max_groups=max_groups, version=version)
        values: dict[int, TokenValues] | None = None
        if self.options.tokens:
            indices = [record.experience for record in records if record.experience is not None]
            values = gather_token_values(self.learner.token_values(indices), self.ranks)
        name = f"{self.stage}-{state.step:06d}"
        path = self.logger.write_rollouts(state, name, records, version=version, token_values=values)
        return None if path is None else str(path)

    def record_validation(self, state: TrainingState, groups: Sequence[Group]) -> None:
        """Write the answers of a validation."""
        name = f"{self.stage}-{state.step:06d}-validation"
        self.logger.write_rollouts(state, name, list_scored_records(groups), version=state.version)
