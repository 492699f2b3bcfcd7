"""What a stage trains on: its samples, the order in which they come, and the processes that prepare them ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path

from mmrl.algo.seeds import derive
from mmrl.config import Config, schema
from mmrl.config.schema import Rl, Sft
from mmrl.data.curriculum import Phased, Prioritised
from mmrl.data.load import Samples, most_asked, read, refuse_too_few, worth
from mmrl.data.mixture import fixed, scheduled
from mmrl.data.order import Listed, Order, Remembered, Row, Shuffled, by_column
from mmrl.data.prefetch import Ahead
from mmrl.data.stage_tables import chosen
from mmrl.data.streaming import Streamed
from mmrl.distributed.ranks import Portion, Ranks
from mmrl.log.console import Console
from mmrl.media.media_workers import Workers
from mmrl.policy.encoder import Encoder
from mmrl.policy.processor import QwenProcessor
from mmrl.ports import Source
from mmrl.types import Place, Reject, Sample, State, UserError


class Supply:
    """The training samples of a run; what stages made of them lies in `outputs`."""

    def __init__(self, config: Config, place: Place, samples: Samples, processor: QwenProcessor, outputs: Path) -> None:
        self._config, self._place, self._samples, self._processor = config, place, samples, processor
        self._outputs = outputs

    @contextmanager
    def opened(
        self, stage: Sft | Rl, state: State, afresh: Encoder, console: Console, ranks: Ranks
    ) -> Iterator[Source]:
        """What a stage takes from, this rank's part of it.

        `data.workers` processes work ahead, with `afresh`, until the block ends; not where what is next depends on how
        the step before went, which `state` says too late.
        """
        data = self._config.data
        with ExitStack() as stack:
            workers = None
            if data.workers:
                workers = stack.enter_context(closing(Workers(afresh.encode, data.workers, name=_called)))
            yield Ahead(
                Portion(Remembered(self.order(stage, state)), ranks, stage.places),
                self._processor,
                workers,
                skip=data.bad_sample == "skip",
                drop_long=data.over_long == "drop",
                foresees=not stage.goes_by_rewards,
                warn=console.warn,
            )

    def samples_of(self, stage: Sft | Rl | schema.Sample) -> tuple[Sample, ...]:
        """The training samples, or those that the stage's `source` chose, as far as the stage takes them."""
        train = self._samples.train
        samples = train if stage.source is None else chosen(self._outputs / f"{stage.source}.jsonl", train)
        return tuple(sample for sample in samples if stage.takes(sample))

    def order(self, stage: Sft | Rl, state: State) -> Order:
        """The order that a stage asks for, over its own samples.

        Raises:
            UserError: there are too few samples, or they lack what the order goes by.
        """
        order, seed = stage.order, self._config.run.seed
        apart = most_asked(stage) if isinstance(stage, Rl) else 0  # a sample's rollouts are the same all through a step
        if isinstance(order, schema.Mixture):
            sources = [self._order_of(origin, apart) for origin in range(len(self._config.data.train))]
            return scheduled(sources, order, per_step=stage.asked_per_step, seed=seed)
        if isinstance(order, schema.Shuffled) and stage.source is None and stage.repeat_to is None:
            return self._all_shuffled(stage, apart)
        samples = repeated(self.samples_of(stage), stage.repeat_to)
        refuse_too_few(stage, len(samples))
        match order:
            case schema.Shuffled():
                return Shuffled(samples, seed, apart=apart)
            case schema.Sorted(by=column):
                return Listed(samples if column is None else by_column(samples, column, descending=order.descending))
            case schema.Priority():
                return Prioritised(samples, order, state, seed)
            case schema.Curriculum(phases=phases):
                parts = [_of_phase(stage, k, phase, samples) for k, phase in enumerate(phases)]
                orders = [Shuffled(part, derive(seed, "phase", k), apart=apart) for k, part in enumerate(parts)]
                return Phased(orders, phases, state)

    def _all_shuffled(self, stage: Sft | Rl, apart: int) -> Order:
        """Every sample once per epoch; with weights, sources in their shares; streams as they come."""
        data, seed = self._config.data, self._config.run.seed
        weights = [origin.weight for origin in data.train if origin.weight is not None]
        if not data.stream and not weights:
            return Shuffled(self.samples_of(stage), seed, apart=apart)
        orders = [self._order_of(origin, apart) for origin in range(len(data.train))]
        return fixed(orders, weights, seed) if weights else orders[0]

    def _order_of(self, origin: int, apart: int) -> Order:
        data, seed = self._config.data, derive(self._config.run.seed, "source", origin)
        if data.stream:
            return Streamed(partial(self._rows, origin), buffer=data.stream.buffer, seed=seed)
        samples = [sample for sample in self._samples.train if self._samples.origin[sample.id] == origin]
        if not samples:
            raise UserError(f"data.train: source {data.train[origin].fn!r} has a weight and not one usable sample")
        return Shuffled(samples, seed, apart=apart)

    def _rows(self, origin: int) -> Iterator[Row]:
        """A new pass over a training source."""
        held_out = {sample.id for sample in (*self._samples.validation, *self._samples.test)}
        source = self._config.data.train[origin]
        for row in read(source, self._place):
            if worth(row, source):
                yield Reject(row.id, "it is in the held-out data too") if row.id in held_out else row


def repeated(samples: Sequence[Sample], size: int | None) -> tuple[Sample, ...]:
    """Samples again and again until there are `size`: their first time as they are, then as `<id>#2`, `<id>#3`, ...

    Random numbers derive from ids, so that each has rollouts of its own.
    """
    turns = ceil((size or 0) / len(samples)) if samples else 0
    copies = [replace(sample, id=f"{sample.id}#{turn}") for turn in range(2, turns + 1) for sample in samples]
    return (*samples, *copies[: max(0, (size or 0) - len(samples))])


def _of_phase(stage: Sft | Rl, number: int, phase: schema.Phase, samples: Sequence[Sample]) -> list[Sample]:
    """The samples of a phase of the stage's curriculum."""
    own = [sample for sample in samples if phase.holds(sample)]
    if len(own) < stage.places:
        raise UserError(
            f"stage {stage.name!r} asks {stage.places} samples a step and phase {number} of its order has "
            f"{len(own)}: see its `when`"
        )
    return own


def _called(sample: Sample) -> str:
    return f"sample {sample.id}"
