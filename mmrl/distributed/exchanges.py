"""Exchanges between ranks, which gather or sum values over all processes of the run.

All but `own_share` are collective: a call waits until every rank has made it, so all ranks make the same calls in the
same order, even a rank that has nothing to give. In a single process they exchange nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from mmrl.distributed.ranks import Ranks, own_slice
from mmrl.types import EvalRewards, Group, Rollout, RolloutBatch, Sample, TokenValues, UserError

ItemT = TypeVar("ItemT")


def raise_on_all_ranks(work: Callable[[], object], ranks: Ranks) -> None:
    """Run `work` on every rank. A UserError of one rank is raised on all, so that none reports a lost rank instead."""
    failure: UserError | None = None
    try:
        work()
    except UserError as error:
        failure = error
    for rank_failure in ranks.all_gather(failure):
        if rank_failure is not None:
            raise rank_failure


def sum_metrics(metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
    """Return the sum of each named count over all ranks."""
    total: Counter[str] = Counter()
    for rank_metrics in ranks.all_gather(dict(metrics)):
        total.update(rank_metrics)
    return dict(total)


def gather_items(items: Sequence[ItemT], ranks: Ranks) -> tuple[ItemT, ...]:
    """Return the items of all ranks, in rank order."""
    return tuple(chain.from_iterable(ranks.all_gather(tuple(items))))


def gather_groups(groups: Iterable[Group], ranks: Ranks) -> list[Group]:
    """Return the groups of all ranks, in the order of the samples. Adds their prompts to `ranks.media_ranks`."""
    groups_by_rank = ranks.all_gather(tuple(groups))
    for rank, own_groups in enumerate(groups_by_rank):
        ranks.media_ranks.update((group.prompt.digest, rank) for group in own_groups)
    return list(chain.from_iterable(groups_by_rank))


def gather_token_values(values: Mapping[int, TokenValues], ranks: Ranks) -> dict[int, TokenValues]:
    """Return the token values of the learners of all ranks, by index of the experience."""
    gathered: dict[int, TokenValues] = {}
    for own_values in ranks.all_gather(dict(values)):
        gathered.update(own_values)
    return gathered


def gather_batch(batch: RolloutBatch, ranks: Ranks) -> RolloutBatch:
    """Return the batch with the groups and probes of all ranks, in the order of the samples."""
    groups: list[tuple[Rollout, ...]] = []
    probes: list[Mapping[str, tuple[Rollout, ...]]] = []
    # Together, so that the prompts that both refer to are sent once.
    for rank_groups, rank_probes in ranks.all_gather((batch.groups, batch.probes)):
        groups += rank_groups
        probes += rank_probes
    return replace(batch, groups=tuple(groups), probes=tuple(probes))


def own_share(batch: RolloutBatch, ranks: Ranks) -> RolloutBatch:
    """Return this rank's groups and probes of a gathered batch, without its metrics. Exchanges nothing."""
    share = own_slice(len(batch.groups), ranks)
    return RolloutBatch(groups=batch.groups[share], probes=batch.probes[share])


def count_dropped_samples(
    num_requested: int, num_usable: int, ranks: Ranks, *, may_be_all: bool = False
) -> dict[str, float]:
    """Return the metric `data/dropped`: samples of a round that no rank could use.

    All ranks together asked for `num_requested` samples; this rank could use `num_usable`.

    Raises:
        UserError: no rank has a usable sample. With `may_be_all` this is allowed: the round has unfinished rollouts.
    """
    total = sum(ranks.all_gather(num_usable))
    if not total and not may_be_all:
        raise UserError(f"data.train: none of the {num_requested} samples of this round can be used on any rank")
    return {"data/dropped": float(num_requested - total)}


def measure_on_all_ranks(
    measure: Callable[[Sequence[Sample]], EvalRewards], samples: Sequence[Sample], ranks: Ranks
) -> EvalRewards:
    """Measure held-out rewards, each sample on one rank. The result has the order of `samples` for any rank count."""
    # Every n-th sample, not a contiguous share, so that a long task whose samples are neighbors is spread over ranks.
    measured: dict[str, dict[str, float]] = {}
    counts: Counter[str] = Counter()
    failures: Counter[tuple[str, str]] = Counter()
    groups: dict[str, Group] = {}
    for rank_result in ranks.all_gather(measure(samples[ranks.rank :: ranks.size])):
        counts.update(rank_result.rollout_metrics)
        failures.update(rank_result.failures)
        groups.update((group.prompt.sample.id, group) for group in rank_result.groups)
        for task, rewards in rank_result.rewards.items():
            measured.setdefault(task, {}).update(rewards)
    # Dictionaries keep their order, and metrics are written in it: it must not depend on the number of ranks.
    ordered: dict[str, dict[str, float]] = {}
    for sample in samples:
        ordered.setdefault(sample.task, {})[sample.id] = measured[sample.task][sample.id]
    in_order = tuple(groups[sample.id] for sample in samples if sample.id in groups)
    return EvalRewards(ordered, counts, in_order, failures)
