"""The reward of held-out samples: `validation` during a stage, `test` before and after training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from functools import partial
from statistics import fmean

from mmrl.config import Config, load_eval_config
from mmrl.distributed.exchanges import measure_on_all_ranks
from mmrl.evaluation.eval_settings import inherit_settings
from mmrl.evaluation.session import build_eval_pipeline
from mmrl.log.logger import MetricsLogger
from mmrl.log.rollout_records import list_scored_records
from mmrl.training.build import RunComponents
from mmrl.types import EvalRewards, Group, Sample, TrainingState


class HeldOutEvaluation:
    """Answers held-out samples with the current weights and scores the answers. Every call is collective."""

    def __init__(self, run: RunComponents, logger: MetricsLogger) -> None:
        """Build the pipeline of the config's `evaluation`, the same as that of `mmrl eval` on the run's own data."""
        self._run, self._logger = run, logger
        self._pipeline = build_eval_pipeline(
            load_eval_config(inherit_settings(run.config, by_rule=False), "the config", ()),
            run.scorer,
            engine=run.engine,
            processor=run.processor,
            tool_runner=run.tool_runner,
            custom_steps=run.functions.evaluation_steps,
        )

    def measure(self, samples: tuple[Sample, ...], state: TrainingState) -> EvalRewards:
        """Return the reward of each sample under the weights of `state.version`, and warn of terms that failed."""
        engine, ranks = self._run.engine, self._run.ranks
        engine.sync_weights(state.version)
        with engine.gather_for_sampling():
            # Recorded samples are evenly spaced, because samples of one task may follow each other.
            stride = -(-len(samples) // self._run.config.logging.rollouts.max_groups)
            recorded_ids = frozenset(sample.id for sample in samples[::stride])
            measure = partial(self._measure_own, recorded_ids=recorded_ids)
            held_out = measure_on_all_ranks(measure, samples, ranks)
        for (term, kind), count in held_out.failures.items():
            self._run.console.warn(
                f"evaluation: reward {term!r} failed on {count} of {len(samples)} ({kind}); its fallback counts"
            )
        return held_out

    def _measure_own(self, samples: Sequence[Sample], *, recorded_ids: Container[str]) -> EvalRewards:
        """Answer samples with one rollout each. The console shows progress."""
        run, size = self._run, self._run.config.evaluation.batch_size
        recorded: list[Group] = []
        rewards: dict[str, dict[str, float]] = {}
        metrics: Counter[str] = Counter()
        failures: Counter[tuple[str, str]] = Counter()
        batches = [samples[start : start + size] for start in range(0, len(samples), size)]
        for batch in run.console.track("answering held-out samples, batches", batches, len(batches)):
            # Step 0 throughout, as in `mmrl eval`, which draws the same random numbers then.
            answers = self._pipeline.run(list(map(run.processor.build, batch)), step=0)
            metrics.update(answers.metrics)
            rollouts = [rollout for (rollout,) in answers.groups]
            # One call for all of them: rewards with worker processes score in parallel.
            for rollout, score in zip(rollouts, run.scorer.score_eval(rollouts), strict=True):
                sample = rollout.prompt.sample
                rewards.setdefault(sample.task, {})[sample.id] = score.total
                if sample.id in recorded_ids:
                    recorded.append(Group(prompt=rollout.prompt, rollouts=(rollout,), scores=(score,)))
                for term, failure in score.failures.items():
                    failures[term, failure.kind] += 1
        return EvalRewards(rewards, metrics, tuple(recorded), failures)

    def measure_test_samples(self, state: TrainingState, moment: str) -> None:
        """Measure the test samples `before` or `after` training, unless the state has the rewards; store them there."""
        if moment in state.eval_rewards or not self._run.samples.test:
            return
        held_out = self.measure(self._run.samples.test, state)
        records = list_scored_records(held_out.groups)
        self._logger.write_rollouts(state, f"test-{moment}", records, version=state.version)
        kept, values = {}, {}
        for task, by_sample in held_out.rewards.items():
            kept[task], values[task] = dict(by_sample), fmean(by_sample.values())
        state.eval_rewards[moment] = kept
        values |= held_out.rollout_metrics
        self._logger.log_metrics(state, {f"test/{name}": value for name, value in values.items()})


def first_compared_stage(config: Config) -> int:
    """Return the stage before which the test samples are measured: the first RL stage, else the last SFT stage."""
    kinds = [stage.kind for stage in config.stages]
    return kinds.index("rl") if "rl" in kinds else len(kinds) - 1 - kinds[::-1].index("sft")
