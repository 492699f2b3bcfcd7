"""What a stage trains on: its samples, the order in which they come, and the processes that prepare them ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

from mmrl.algo.seeds import derive_seed
from mmrl.config import Config, schema
from mmrl.config.schema import RlStage, SftStage
from mmrl.data.curriculum import CurriculumOrder, PriorityOrder
from mmrl.data.load import DataSplits, check_stage_has_samples, max_prompts_per_step, passes_row_filter, read_source
from mmrl.data.mixture import fixed_mixture, scheduled_mixture
from mmrl.data.order import CachedOrder, DataOrder, DataRow, SequentialOrder, ShuffledOrder, sort_by_column
from mmrl.data.prefetch import Prefetcher
from mmrl.data.stage_tables import read_selected_samples
from mmrl.data.streaming import StreamingOrder
from mmrl.distributed.ranks import Ranks, RankShard
from mmrl.log.console import Console
from mmrl.media.media_workers import start_media_workers
from mmrl.policy.encoder import PromptEncoder
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import SampleSource
from mmrl.types import DatasetContext, RejectedRow, Sample, TrainingState, UserError


class StageData:
    """The training samples of a run; what stages made of them lies in `outputs`."""

    def __init__(
        self, config: Config, place: DatasetContext, samples: DataSplits, processor: QwenProcessor, outputs: Path
    ) -> None:
        self._config, self._place, self._samples, self._processor = config, place, samples, processor
        self._outputs = outputs

    @contextmanager
    def open_source(
        self,
        stage: SftStage | RlStage,
        state: TrainingState,
        worker_encoder: PromptEncoder,
        console: Console,
        ranks: Ranks,
    ) -> Iterator[SampleSource]:
        """What a stage takes from, this rank's part of it.

        `data.workers` processes work ahead, with `afresh`, until the block ends; not where what is next depends on how
        the step before went, which `state` says too late.
        """
        data = self._config.data
        with ExitStack() as stack:
            workers = None
            if data.media_workers:
                workers = stack.enter_context(
                    closing(start_media_workers(worker_encoder.encode, data.media_workers, name=_describe_sample))
                )
            yield Prefetcher(
                RankShard(CachedOrder(self.build_order(stage, state)), ranks, stage.max_prompts_in_flight),
                self._processor,
                workers,
                skip_unusable=data.on_bad_sample == "skip",
                drop_too_long=data.on_too_long == "skip",
                can_prefetch=not stage.order_depends_on_rewards,
                warn=console.warn,
            )

    def stage_samples(self, stage: SftStage | RlStage | schema.SampleStage) -> tuple[Sample, ...]:
        """The training samples, or those that the stage's `source` chose, as far as the stage takes them."""
        train = self._samples.train
        samples = (
            train
            if stage.from_stage is None
            else read_selected_samples(self._outputs / f"{stage.from_stage}.jsonl", train)
        )
        return tuple(sample for sample in samples if stage.accepts(sample))

    def build_order(self, stage: SftStage | RlStage, state: TrainingState) -> DataOrder:
        """The order that a stage asks for, over its own samples.

        Raises:
            UserError: there are too few samples, or they lack what the order goes by.
        """
        order, seed = stage.data_order, self._config.run.seed
        apart = (
            max_prompts_per_step(stage) if isinstance(stage, RlStage) else 0
        )  # a sample's rollouts are the same all through a step
        if isinstance(order, schema.MixtureOrderConfig):
            sources = [self._build_source_order(origin, apart) for origin in range(len(self._config.data.train))]
            return scheduled_mixture(sources, order, per_step=stage.samples_per_step, seed=seed)
        if (
            isinstance(order, schema.ShuffledOrderConfig)
            and stage.from_stage is None
            and stage.repeat_samples_to is None
        ):
            return self._build_shuffled_order(stage, apart)
        samples = repeat_samples(self.stage_samples(stage), stage.repeat_samples_to)
        check_stage_has_samples(stage, len(samples))
        match order:
            case schema.ShuffledOrderConfig():
                return ShuffledOrder(samples, seed, min_gap=apart)
            case schema.SortedOrderConfig(column=column):
                return SequentialOrder(
                    samples if column is None else sort_by_column(samples, column, descending=order.descending)
                )
            case schema.PriorityOrderConfig():
                return PriorityOrder(samples, order, state, seed)
            case schema.CurriculumOrderConfig(phases=phases):
                parts = [_select_phase_samples(stage, k, phase, samples) for k, phase in enumerate(phases)]
                orders = [
                    ShuffledOrder(part, derive_seed(seed, "phase", k), min_gap=apart) for k, part in enumerate(parts)
                ]
                return CurriculumOrder(orders, phases, state)

    def _build_shuffled_order(self, stage: SftStage | RlStage, min_gap: int) -> DataOrder:
        """Every sample once per epoch; with weights, sources in their shares; streams as they come."""
        data, seed = self._config.data, self._config.run.seed
        weights = [origin.weight for origin in data.train if origin.weight is not None]
        if not data.streaming and not weights:
            return ShuffledOrder(self.stage_samples(stage), seed, min_gap=min_gap)
        orders = [self._build_source_order(origin, min_gap) for origin in range(len(data.train))]
        return fixed_mixture(orders, weights, seed) if weights else orders[0]

    def _build_source_order(self, source_index: int, min_gap: int) -> DataOrder:
        data, seed = self._config.data, derive_seed(self._config.run.seed, "source", source_index)
        if data.streaming:
            return StreamingOrder(
                partial(self._read_rows, source_index), buffer=data.streaming.shuffle_buffer_size, seed=seed
            )
        samples = [sample for sample in self._samples.train if self._samples.source_indices[sample.id] == source_index]
        if not samples:
            raise UserError(
                f"data.train: source {data.train[source_index].fn!r} has a weight and not one usable sample"
            )
        return ShuffledOrder(samples, seed, min_gap=min_gap)

    def _read_rows(self, source_index: int) -> Iterator[DataRow]:
        """A new pass over a training source."""
        held_out = {sample.id for sample in (*self._samples.validation, *self._samples.test)}
        source = self._config.data.train[source_index]
        for row in read_source(source, self._place):
            if passes_row_filter(row, source):
                yield RejectedRow(row.id, "it is in the held-out data too") if row.id in held_out else row


def repeat_samples(samples: Sequence[Sample], size: int | None) -> tuple[Sample, ...]:
    """Samples again and again until there are `size`: their first time as they are, then as `<id>#2`, `<id>#3`, ...

    Random numbers derive from ids, so that each has rollouts of its own.
    """
    turns = ceil((size or 0) / len(samples)) if samples else 0
    copies = [replace(sample, id=f"{sample.id}#{turn}") for turn in range(2, turns + 1) for sample in samples]
    return (*samples, *copies[: max(0, (size or 0) - len(samples))])


def _select_phase_samples(
    stage: SftStage | RlStage, number: int, phase: schema.CurriculumPhaseConfig, samples: Sequence[Sample]
) -> list[Sample]:
    """The samples of a phase of the stage's curriculum."""
    own = [sample for sample in samples if phase.matches(sample)]
    if len(own) < stage.max_prompts_in_flight:
        raise UserError(
            f"stage {stage.name!r} asks {stage.max_prompts_in_flight} samples a step and phase {number} of its order has "
            f"{len(own)}: see its `when`"
        )
    return own


def _describe_sample(sample: Sample) -> str:
    return f"sample {sample.id}"
