"""Stages that build on each other, on the data and on the model: what each of them needs must be there before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.schema.data_order import Mixture, Shuffled
from mmrl.config.schema.data_stages import Sample, Select
from mmrl.config.schema.stages import Rl, Sft

AnyStage = Sft | Rl | Sample | Select


def check_chain(stages: Sequence[AnyStage], sections: Mapping[str, Any]) -> None:
    """Hold each stage against those before it and the config's `sections`, as far as these are valid.

    Raises:
        ValueError: something a stage needs is not there.
    """
    for index, stage in enumerate(stages):
        if stage.source is not None:
            _check_source(stage, stages[:index], stages[index:])
        if isinstance(stage, Sample) and stage.source is None and "data" in sections and sections["data"].stream:
            raise ValueError(f"stage {stage.name!r} asks every sample once, and `data.stream` has no end of them")
        if isinstance(stage, Sft | Rl):
            _check_order(stage, sections.get("data"))
        if isinstance(stage, Sft) and "answer" in sections:
            _check_thoughts(stage, sections["answer"])
        if isinstance(stage, Rl) and stage.reference.start == "base" and "model" in sections:
            if sections["model"].lora is None:
                raise ValueError(
                    f"stage {stage.name!r}: `reference.start: base` is an adapter's base: set `model.lora`"
                )
            if not stage.loss.kl.coef:
                raise ValueError(f"stage {stage.name!r}: reference.start has no effect without `loss.kl.coef`")


def _check_source(stage: AnyStage, before: Sequence[AnyStage], after: Sequence[AnyStage]) -> None:
    who = f"stage {stage.name!r} has `source: {stage.source}`"
    if any(other.name == stage.source for other in after):
        raise ValueError(f"{who}, which is no earlier stage; move that one before it")
    found = next((other for other in before if other.name == stage.source), None)
    if found is None:
        earlier = ", ".join(other.name for other in before) or "none"
        raise ValueError(f"{who}, and no stage is called that; the earlier ones: {earlier}")
    if not isinstance(stage, Select):
        if not isinstance(found, Select):
            raise ValueError(f"{who}, which is of kind {found.kind}; only a `select` stage has samples for others")
        if isinstance(stage, Rl | Sample) and found.keep == "responses":
            raise ValueError(f"{who}, which keeps responses; they are for an sft stage with `imitate: response`")
        if isinstance(stage, Sft) and stage.imitate == "response" and found.keep == "prompts":
            raise ValueError(
                f"stage {stage.name!r} has `imitate: response` and `source: {stage.source}`, which keeps prompts; set "
                "`keep: responses` there"
            )
    elif stage.reads_rollouts and not isinstance(found, Sample):
        raise ValueError(f"{who} and goes by {stage.by}, which a stage of kind `sample` finds out, not {found.kind}")
    elif not stage.reads_rollouts and not (isinstance(found, Rl) and found.history):
        raise ValueError(f"{who} and goes by {stage.by}, which an `rl` stage finds out that has `history`")


def _check_when(stage: Sft | Rl, data: Any) -> None:  # noqa: ANN401
    """Shares of sources, and streams of them, are of all that they hold."""
    shares = isinstance(stage.order, Mixture) or any(origin.weight is not None for origin in data.train)
    if shares or data.stream:
        raise ValueError(
            f"stage {stage.name!r} has `when`, and {'sources have weights' if shares else 'data.stream is set'}: "
            "choose its sources by `order: {kind: mixture, points: ...}`, with a weight of 0 for the others"
        )


def _check_order(stage: Sft | Rl, data: Any) -> None:  # noqa: ANN401
    order = stage.order
    if isinstance(order, Mixture) and stage.source is not None:
        raise ValueError(
            f"stage {stage.name!r}: a mixture is of the sources of data.train, and `source` is none of them"
        )
    if data is None:
        return
    if stage.when and stage.source is None:
        _check_when(stage, data)
    if isinstance(order, Mixture):
        for step, weights in order.points:
            if len(weights) != len(data.train):
                raise ValueError(
                    f"stage {stage.name!r}: order.points has {len(weights)} weights at step {step}, and data.train "
                    f"{len(data.train)} sources"
                )
    elif data.stream and stage.source is None and not isinstance(order, Shuffled):
        raise ValueError(
            f"stage {stage.name!r}: order {order.kind!r} has to know all samples, which `data.stream` forbids"
        )
    if stage.repeat_to is None or stage.source is not None:
        return
    if any(origin.weight is not None for origin in data.train):
        raise ValueError(f"stage {stage.name!r}: repeat_to does not go with the weights of data.train; take out one")
    if data.stream:
        raise ValueError(f"stage {stage.name!r}: repeat_to has to know all samples, which `data.stream` forbids")


def _check_thoughts(stage: Sft, answer: Any) -> None:  # noqa: ANN401
    if stage.thought_dropout and (answer.think != "optional" or answer.style == "json"):
        raise ValueError(
            f"stage {stage.name!r}: thought_dropout makes responses without thinking, which `answer.think: optional` "
            "(in tags or boxed style) allows"
        )
