"""Stages that build on each other, on the data and on the model: what each of them needs must be there before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.schema.data_order import MixtureOrderConfig, ShuffledOrderConfig
from mmrl.config.schema.data_stages import SampleStage, SelectStage
from mmrl.config.schema.stages import RlStage, SftStage

AnyStage = SftStage | RlStage | SampleStage | SelectStage


def check_stage_dependencies(stages: Sequence[AnyStage], sections: Mapping[str, Any]) -> None:
    """Hold each stage against those before it and the config's `sections`, as far as these are valid.

    Raises:
        ValueError: something a stage needs is not there.
    """
    for index, stage in enumerate(stages):
        if stage.from_stage is not None:
            _check_from_stage(stage, stages[:index], stages[index:])
        if (
            isinstance(stage, SampleStage)
            and stage.from_stage is None
            and "data" in sections
            and sections["data"].streaming
        ):
            raise ValueError(f"stage {stage.name!r} asks every sample once, and `data.stream` has no end of them")
        if isinstance(stage, SftStage | RlStage):
            _check_data_order(stage, sections.get("data"))
        if isinstance(stage, SftStage) and "response_format" in sections:
            _check_drop_thinking(stage, sections["response_format"])
        if isinstance(stage, RlStage) and stage.reference.init_from == "base" and "model" in sections:
            if sections["model"].lora is None:
                raise ValueError(
                    f"stage {stage.name!r}: `reference.start: base` is an adapter's base: set `model.lora`"
                )
            if not stage.loss.kl.coef:
                raise ValueError(f"stage {stage.name!r}: reference.start has no effect without `loss.kl.coef`")


def _check_from_stage(stage: AnyStage, before: Sequence[AnyStage], after: Sequence[AnyStage]) -> None:
    who = f"stage {stage.name!r} has `source: {stage.from_stage}`"
    if any(other.name == stage.from_stage for other in after):
        raise ValueError(f"{who}, which is no earlier stage; move that one before it")
    found = next((other for other in before if other.name == stage.from_stage), None)
    if found is None:
        earlier = ", ".join(other.name for other in before) or "none"
        raise ValueError(f"{who}, and no stage is called that; the earlier ones: {earlier}")
    if not isinstance(stage, SelectStage):
        if not isinstance(found, SelectStage):
            raise ValueError(f"{who}, which is of kind {found.kind}; only a `select` stage has samples for others")
        if isinstance(stage, RlStage | SampleStage) and found.output == "responses":
            raise ValueError(f"{who}, which keeps responses; they are for an sft stage with `imitate: response`")
        if isinstance(stage, SftStage) and stage.target_field == "response" and found.output == "prompts":
            raise ValueError(
                f"stage {stage.name!r} has `imitate: response` and `source: {stage.from_stage}`, which keeps prompts; set "
                "`keep: responses` there"
            )
    elif stage.reads_rollouts and not isinstance(found, SampleStage):
        raise ValueError(
            f"{who} and goes by {stage.metric}, which a stage of kind `sample` finds out, not {found.kind}"
        )
    elif not stage.reads_rollouts and not (isinstance(found, RlStage) and found.track_rewards):
        raise ValueError(f"{who} and goes by {stage.metric}, which an `rl` stage finds out that has `history`")


def _check_when_sources(stage: SftStage | RlStage, data: Any) -> None:  # noqa: ANN401
    """Shares of sources, and streams of them, are of all that they hold."""
    shares = isinstance(stage.data_order, MixtureOrderConfig) or any(origin.weight is not None for origin in data.train)
    if shares or data.streaming:
        raise ValueError(
            f"stage {stage.name!r} has `when`, and {'sources have weights' if shares else 'data.stream is set'}: "
            "choose its sources by `order: {kind: mixture, points: ...}`, with a weight of 0 for the others"
        )


def _check_data_order(stage: SftStage | RlStage, data: Any) -> None:  # noqa: ANN401
    order = stage.data_order
    if isinstance(order, MixtureOrderConfig) and stage.from_stage is not None:
        raise ValueError(
            f"stage {stage.name!r}: a mixture is of the sources of data.train, and `source` is none of them"
        )
    if data is None:
        return
    if stage.when and stage.from_stage is None:
        _check_when_sources(stage, data)
    if isinstance(order, MixtureOrderConfig):
        for step, weights in order.points:
            if len(weights) != len(data.train):
                raise ValueError(
                    f"stage {stage.name!r}: order.points has {len(weights)} weights at step {step}, and data.train "
                    f"{len(data.train)} sources"
                )
    elif data.streaming and stage.from_stage is None and not isinstance(order, ShuffledOrderConfig):
        raise ValueError(
            f"stage {stage.name!r}: order {order.kind!r} has to know all samples, which `data.stream` forbids"
        )
    if stage.repeat_samples_to is None or stage.from_stage is not None:
        return
    if any(origin.weight is not None for origin in data.train):
        raise ValueError(f"stage {stage.name!r}: repeat_to does not go with the weights of data.train; take out one")
    if data.streaming:
        raise ValueError(f"stage {stage.name!r}: repeat_to has to know all samples, which `data.stream` forbids")


def _check_drop_thinking(stage: SftStage, answer: Any) -> None:  # noqa: ANN401
    if stage.drop_thinking_prob and (answer.think != "optional" or answer.style == "json"):
        raise ValueError(
            f"stage {stage.name!r}: thought_dropout makes responses without thinking, which `answer.think: optional` "
            "(in tags or boxed style) allows"
        )
