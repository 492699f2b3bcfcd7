"""Saves a run in checkpoints, and loads the one that it continues from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from time import time
from typing import Any

from mmrl import checkpoint
from mmrl.config import diff_configs, dump_yaml, read_flat_settings
from mmrl.config.schema import RlStage
from mmrl.log.logger import MetricsLogger
from mmrl.log.run_dir import check_same_run
from mmrl.policy.policy import PolicyModel
from mmrl.rollout.environments.pictures import PICTURES_FOLDER, delete_unused_pictures
from mmrl.training.build import RunComponents, is_zero3
from mmrl.types import TrainingState

OptimizerState = Mapping[str, Mapping[int, Any]]
"""State of the optimizer and of a moving reference: table name (`OPTIMIZER_TABLES`) → parameter index → state."""


class RunCheckpoints:
    """Saves and loads the checkpoints of one run. Saving and loading are collective."""

    def __init__(self, run: RunComponents, logger: MetricsLogger) -> None:
        """Prepare to save. The frozen weights must be the ones that the run begins with."""
        self._run, self._logger = run, logger
        self._config_yaml = dump_yaml(run.config)
        self._frozen_fingerprint = checkpoint.fingerprint_weights(run.policy.frozen.items())
        self._last_save = time()
        self._optimizer: OptimizerState = {}  # that of the loaded checkpoint, until a stage takes it
        self.manager = checkpoint.CheckpointManager(
            run.run_dir.checkpoints, run.config.checkpoints, run.console.warn, run.ranks
        )

    def load(self) -> TrainingState:
        """Load the latest checkpoint, if there is one, and return the state that the run continues from.

        The first stage to run gets the state of its optimizer by `take_optimizer_state`.

        Raises:
            UserError: the checkpoint is damaged or belongs to another config.
        """
        run, ranks = self._run, self._run.ranks
        config, run_dir, console = run.config, run.run_dir, run.console
        # If the config gives a stage more steps, even a finished run continues from that stage's last checkpoint.
        lengthened = ranks.on_rank0(run_dir.find_lengthened_stage)
        folder = checkpoint.find_latest(run_dir.checkpoints, console.warn, ranks, until=lengthened)
        if folder is None:
            return TrainingState()
        check_same_run(folder, diff_configs(read_flat_settings(folder / checkpoint.CONFIG_FILE), config))
        state, self._optimizer = checkpoint.load_checkpoint(
            folder,
            weights=self.checkpoint_weights(run.policy),
            # ZeRO-3 copies the weights when it shards them, so they need not be read into memory before.
            mmap=is_zero3(config),
        )
        # `RunDir.reopen` writes the new config later: a run killed before that resumes with the old or the new one.
        if lengthened is not None:
            ranks.on_rank0(partial(checkpoint.remove_later_stages, run_dir.checkpoints, lengthened))
            stage = config.stages[lengthened]
            message = "The stage will end like one that had so many steps from the start."
            # The last step of a stage generates nothing ahead.
            if isinstance(stage, RlStage) and stage.async_rollouts and state.step and state.next_batch is None:
                message = (
                    f"Stage {stage.name} will end with other bytes than one that had {stage.steps} steps from the "
                    f"start: step {state.step}, which was its last, generated no rollouts for the next step."
                )
            console.info(message)
        aside = ranks.on_rank0(partial(checkpoint.set_aside_later, run_dir.checkpoints, folder))
        if aside is not None:
            console.warn(f"Damaged checkpoints were moved to {aside}; no run reads them, and you may delete them.")
        if any(ranks.all_gather(bool(run.data_record.differences))):
            # Their prompts may have changed. Replayed and carried-over groups are checked at selection instead.
            state.unfinished, state.next_batch = (), None
        if state.stage_index < len(config.stages):
            console.info(f"Resuming from {folder}: stage {config.stages[state.stage_index].name}, step {state.step}.")
        return state

    def take_optimizer_state(self) -> OptimizerState:
        """Return the optimizer state of the loaded checkpoint, and forget it.

        It is empty if nothing was loaded, if the checkpoint was saved between stages, and at every later call.
        """
        taken, self._optimizer = self._optimizer, {}
        return taken

    def save(self, state: TrainingState, optimizer: OptimizerState) -> None:
        """Save the run; every rank writes its own share."""
        self._delete_pictures()
        state.metrics_bytes = self._logger.metrics.position()
        best, policy = self._run.config.checkpoints.best, self._run.policy
        trained = policy.runner.local_shard(policy.trainable, self._run.ranks)
        snapshot = checkpoint.Snapshot(
            weights=checkpoint.CheckpointWeights(trainable=trained, frozen_fingerprint=self._frozen_fingerprint),
            optimizer=optimizer,
            rng=checkpoint.read_rng_states(),
            state=state,
            config_yaml=self._config_yaml,
            ranking_metric=self._logger.last_value(best.metric) if best else None,
        )
        self.manager.save(snapshot, before_write=self._logger.metrics.sync)

    def _delete_pictures(self) -> None:
        """Delete pictures from before the last save, drawn by environments, if no checkpoint or record names them."""
        run_dir = self._run.run_dir
        pictures = run_dir.data / PICTURES_FOLDER
        # Rank 0 looks for all: the calls below are collective, and a shared disk may show other ranks an older folder.
        if self._run.ranks.on_rank0(pictures.is_dir):
            # The last checkpoint names the older pictures that are still in use, and must be complete to be read.
            self.manager.wait()
            texts = [*run_dir.checkpoints.glob(f"*/{checkpoint.STATE_FILE}"), *run_dir.rollouts.glob("*.jsonl")]
            delete = partial(delete_unused_pictures, pictures, texts, older_than=self._last_save)
            self._run.ranks.on_rank0(delete)
        self._last_save = time()

    def checkpoint_weights(self, policy: PolicyModel) -> checkpoint.CheckpointWeights:
        """Return the weights of this run's policy, or of a reference, in the layout of a checkpoint."""
        return checkpoint.CheckpointWeights(trainable=policy.trainable, frozen_fingerprint=self._frozen_fingerprint)
