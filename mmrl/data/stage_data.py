"""The training data of a stage: its samples, their order, and the processes that encode them ahead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Final

from mmrl.config import Config, schema
from mmrl.config.schema import RlStage, SftStage
from mmrl.data.load import DataSplits, check_stage_has_samples, max_prompts_per_step
from mmrl.data.order import (
    CachedOrder,
    CurriculumOrder,
    DataOrder,
    DataRow,
    DistinctOrder,
    PriorityOrder,
    SequentialOrder,
    ShuffledOrder,
    StreamingOrder,
    fixed_mixture,
    scheduled_mixture,
    sort_by_column,
)
from mmrl.data.prefetch import Prefetcher
from mmrl.data.rows import DatasetFunction, passes_row_filter, read_source
from mmrl.data.stage_tables import read_selected_samples
from mmrl.distributed.ranks import Ranks, own_rows
from mmrl.log.console import Console
from mmrl.media.cache import MediaCache
from mmrl.media.media_workers import start_media_workers
from mmrl.policy.processor import PromptProcessor
from mmrl.types import DatasetContext, RejectedRow, Sample, SampleStats, TrainingState, UserError
from mmrl.utils.seeds import derive_seed

_WORKER_CACHE_BYTES: Final = 64 * 2**20  # a worker opens an image twice: to measure it and to encode it


class StageData:
    """Makes the sample source of each stage from the run's training samples."""

    def __init__(
        self,
        config: Config,
        context: DatasetContext,
        samples: DataSplits,
        *,
        train_functions: Sequence[DatasetFunction],
        processor: PromptProcessor,
        outputs: Path,
    ) -> None:
        """Keep what all stages share.

        `train_functions` are the functions of `data.train`, for streaming. `outputs` is the folder with the tables that
        earlier stages wrote.
        """
        self._config, self._context, self._samples, self._processor = config, context, samples, processor
        self._train_functions, self._outputs = train_functions, outputs

    @contextmanager
    def open_source(
        self, stage: SftStage | RlStage, state: TrainingState, console: Console, ranks: Ranks
    ) -> Iterator[Prefetcher]:
        """Yield this rank's share of the stage's samples.

        `data.media_workers` processes encode ahead while the block is open, except where the next samples depend on
        the rewards of the step that is still running.
        """
        data = self._config.data
        with ExitStack() as stack:
            workers = None
            if data.media_workers:
                cache = MediaCache(self._context.media_policy, data.media_limits, max_bytes=_WORKER_CACHE_BYTES)
                worker_encoder = self._processor.encoder.with_media_cache(cache)
                pool = start_media_workers(
                    worker_encoder.encode,
                    data.media_workers,
                    timeout_s=data.media_timeout_s,
                    name=lambda row: f"sample {row.id}",
                )
                workers = stack.enter_context(closing(pool))
            order = self.build_order(stage, state)
            ahead = None
            if not stage.order_depends_on_rewards:
                ahead = order = CachedOrder(order)
            # Only orders of RL stages: a demonstration that a step has twice does no harm.
            if isinstance(stage, RlStage):
                order = DistinctOrder(order, state)
            yield Prefetcher(
                order,
                self._processor,
                workers,
                own_rows=partial(own_rows, prompts_per_round=stage.prompts_per_round, ranks=ranks),
                current_step=lambda: state.step,
                options=data,
                ahead=ahead,
                warn=console.warn,
            )

    def stage_samples(self, stage: SftStage | RlStage | schema.SampleStage) -> tuple[Sample, ...]:
        """Return the samples that meet the stage's `when`, out of all training samples or the table of `samples_of`.

        Raises:
            UserError: the table of `samples_of` cannot be read.
        """
        samples = self._samples.train
        if stage.samples_of is not None:
            samples = read_selected_samples(self._outputs / f"{stage.samples_of}.jsonl", samples)
        return tuple(sample for sample in samples if schema.matches_conditions(stage.when, sample))

    def build_order(self, stage: SftStage | RlStage, state: TrainingState) -> DataOrder:
        """Return the order of a stage's samples that `data_order` asks for.

        Raises:
            UserError: there are too few samples, or they lack the column that the order sorts by.
        """
        order, seed = stage.data_order, self._config.run.seed
        # No RL step gets a sample twice, and with this gap `DistinctOrder` seldom has to move one.
        min_gap = max_prompts_per_step(stage) if isinstance(stage, RlStage) else 0
        if isinstance(order, schema.MixtureOrderConfig):
            sources, per_step = self._build_source_orders(min_gap), stage.prompts_per_step
            return scheduled_mixture(sources, order, per_step=per_step, seed=seed)
        is_plain = stage.samples_of is None and stage.repeat_samples_to is None
        if isinstance(order, schema.ShuffledOrderConfig) and is_plain:
            return self._build_shuffled_order(stage, min_gap)

        # Checked here again: how many samples an earlier stage selected is known only now.
        samples = self.stage_samples(stage)
        check_stage_has_samples(stage, len(samples))
        samples = repeat_samples(samples, stage.repeat_samples_to)
        match order:
            case schema.ShuffledOrderConfig():
                return ShuffledOrder(samples, seed, min_gap=min_gap)
            case schema.SortedOrderConfig(column=column, descending=descending):
                ordered = samples if column is None else sort_by_column(samples, column, descending=descending)
                return SequentialOrder(ordered)
            case schema.PriorityOrderConfig():
                return PriorityOrder(samples, order, state, seed)
            case schema.CurriculumOrderConfig(phases=phases):
                orders = []
                for index, phase in enumerate(phases):
                    phase_samples = _select_phase_samples(stage, index, phase, samples)
                    phase_seed = derive_seed(seed, "phase", index)
                    orders.append(ShuffledOrder(phase_samples, phase_seed, min_gap=min_gap))
                return CurriculumOrder(orders, phases, state)

    def _build_shuffled_order(self, stage: SftStage | RlStage, min_gap: int) -> DataOrder:
        """Return the order of all training data: streamed, in the shares of its sources, or plainly shuffled."""
        data, seed = self._config.data, self._config.run.seed
        weights = [source.weight for source in data.train if source.weight is not None]
        if not data.streaming and not weights:
            return ShuffledOrder(self.stage_samples(stage), seed, min_gap=min_gap)
        orders = self._build_source_orders(min_gap)
        # The config allows a single streamed source without a weight, and several only with one each.
        return fixed_mixture(orders, weights, seed) if weights else orders[0]

    def _build_source_orders(self, min_gap: int) -> list[DataOrder]:
        data = self._config.data
        orders: list[DataOrder] = []
        for source_index, source in enumerate(data.train):
            seed = derive_seed(self._config.run.seed, "source", source_index)
            if data.streaming:
                open_rows = partial(self._read_rows, source_index)
                orders.append(StreamingOrder(open_rows, buffer=data.streaming.shuffle_buffer_size, seed=seed))
                continue
            source_of = self._samples.source_indices
            samples = [sample for sample in self._samples.train if source_of[sample.id] == source_index]
            if not samples:
                raise UserError(f"data.train: source {source.fn!r} has a weight but no usable sample")
            orders.append(ShuffledOrder(samples, seed, min_gap=min_gap))
        return orders

    def _read_rows(self, source_index: int) -> Iterator[DataRow]:
        """Start a new pass over a streamed source; its held-out samples come as rejected rows."""
        held_out = {sample.id for sample in (*self._samples.validation, *self._samples.test)}
        source = self._config.data.train[source_index]
        for row in read_source(source, self._train_functions[source_index], self._context, "train"):
            if not passes_row_filter(row, source):
                continue
            if row.id in held_out:
                yield RejectedRow(row.id, "it is in the held-out data too")
            else:
                yield row


def repeat_samples(samples: Sequence[Sample], size: int | None) -> tuple[Sample, ...]:
    """Repeat samples until there are at least `size`.

    The first copy keeps its id, the others are called `<id>#2`, `<id>#3` and so on: random draws derive from ids, so
    each copy gets different rollouts.
    """
    missing = (size or 0) - len(samples)
    if not samples or missing <= 0:
        return tuple(samples)
    copies = []
    for number in range(missing):
        turn, index = divmod(number, len(samples))
        copies.append(replace(samples[index], id=f"{samples[index].id}#{turn + 2}"))
    return (*samples, *copies)


def merge_visits_of_copies(
    samples: Sequence[Sample], size: int | None, history: Mapping[str, Sequence[SampleStats]]
) -> dict[str, list[SampleStats]]:
    """Return the visits of each sample that a stage drew, itself or as one of its copies by `repeat_samples`.

    The history does not say when a visit was. Most orders draw each copy once in a pass, so the first visits of all
    copies come first, in the order of the copies, and then the second ones.
    """
    visits_by_copy: dict[str, list[Sequence[SampleStats]]] = {}
    for number, copy in enumerate(repeat_samples(samples, size)):
        if copy.id in history:
            visits_by_copy.setdefault(samples[number % len(samples)].id, []).append(history[copy.id])
    merged = {}
    for sample_id, visits in visits_by_copy.items():
        in_order = chain.from_iterable(zip_longest(*visits))
        # `zip_longest` gives None for copies that were drawn less often.
        merged[sample_id] = [visit for visit in in_order if visit is not None]
    return merged


def _select_phase_samples(
    stage: SftStage | RlStage, phase_index: int, phase: schema.CurriculumPhaseConfig, samples: Sequence[Sample]
) -> list[Sample]:
    """Return the samples of a curriculum's phase; raise a UserError if a step needs more."""
    selected = [sample for sample in samples if schema.matches_conditions(phase.when, sample)]
    needed = stage.prompts_per_round
    if isinstance(stage, RlStage):
        max_prompts = max_prompts_per_step(stage)
        # A phase that ends within a step gives it no more than `max_samples`.
        needed = max(needed, min(max_prompts, phase.max_samples or max_prompts))
    if len(selected) < needed:
        raise UserError(
            f"stage {stage.name!r} needs {needed} samples a step and phase {phase_index} of its data_order has "
            f"{len(selected)}: see its `when`"
        )
    return selected
