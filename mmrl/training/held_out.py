"""The reward of held-out samples: `validation` during a stage, `test` before and after training."""

from __future__ import annotations

from functools import partial
from statistics import fmean

from mmrl.config import Config
from mmrl.distributed.exchanges import measure_on_all_ranks
from mmrl.log.logger import MetricsLogger
from mmrl.rollout.pipeline import build_pipeline
from mmrl.rollout.steps.base import RolloutContext
from mmrl.training.build import RunComponents
from mmrl.training.callbacks import evaluate_samples
from mmrl.types import EvalRewards, Sample, TrainingState
from mmrl.utils.seeds import derive_seed


class HeldOutEvaluation:
    """Answers held-out samples with the current weights and scores the answers. Every call is collective."""

    def __init__(self, run: RunComponents, logger: MetricsLogger) -> None:
        """Build the pipeline of the config's `evaluation`."""
        self._run, self._logger = run, logger
        options, seed = run.config.evaluation, run.config.run.seed
        rollout_context = RolloutContext(
            sampler=run.samplers.make_sampler(seed, "evaluation"),
            scorer=run.scorer,
            processor=run.processor,
            sampling_params=run.build_sampling_params(options),
            group_size=1,
            groups_per_step=options.batch_size,
            seed=derive_seed(seed, "evaluation"),
            tool_runner=run.tool_runner,
            custom_steps=run.functions.evaluation_steps,
        )
        self._pipeline = build_pipeline(options.rollout_steps, rollout_context)

    def measure(self, samples: tuple[Sample, ...], state: TrainingState) -> EvalRewards:
        """Return the reward of each sample under the weights of `state.version`."""
        run = self._run
        measure = partial(
            evaluate_samples,
            processor=run.processor,
            rollout_pipeline=self._pipeline,
            scorer=run.scorer,
            batch_size=run.config.evaluation.batch_size,
            console=run.console,
            step=state.step,
        )
        run.samplers.sync_weights(state.version)
        with run.samplers.gather_for_sampling():
            return measure_on_all_ranks(measure, samples, run.ranks)

    def measure_test_samples(self, state: TrainingState, moment: str) -> None:
        """Measure the test samples `before` or `after`, unless that was done, and keep the rewards in the state."""
        if moment in state.eval_rewards or not self._run.samples.test:
            return
        rewards, rollout_metrics = self.measure(self._run.samples.test, state)
        kept, values = {}, {}
        for task, by_sample in rewards.items():
            kept[task], values[task] = dict(by_sample), fmean(by_sample.values())
        state.eval_rewards[moment] = kept
        values |= rollout_metrics
        self._logger.log_metrics(state, {f"test/{name}": value for name, value in values.items()})


def first_compared_stage(config: Config) -> int:
    """Return the stage before which the test samples are measured: the first RL stage, or else the last SFT stage."""
    kinds = [stage.kind for stage in config.stages]
    return kinds.index("rl") if "rl" in kinds else len(kinds) - 1 - kinds[::-1].index("sft")
