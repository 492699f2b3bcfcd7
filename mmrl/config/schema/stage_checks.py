"""Checks of a stage against earlier stages, the data and the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mmrl.config.schema.data import DataConfig
from mmrl.config.schema.data_order import MixtureOrderConfig, ShuffledOrderConfig
from mmrl.config.schema.data_stages import SampleStage, SelectStage
from mmrl.config.schema.response import ResponseFormatConfig
from mmrl.config.schema.stages import RlStage, SftStage
from mmrl.types import UserError

AnyStage = SftStage | RlStage | SampleStage | SelectStage


def check_stage_dependencies(stages: Sequence[AnyStage], sections: Mapping[str, Any]) -> None:
    """Check each stage against those before it and against the config's `sections`, as far as these are valid.

    Raises:
        ValueError: something that a stage needs is missing.
    """
    for index, stage in enumerate(stages):
        if stage.from_stage is not None:
            _check_from_stage(stage, stages[:index], stages[index:])
        if "data" in sections:
            _check_data(stage, sections["data"])
        elif isinstance(stage, SftStage | RlStage):
            _check_mixture_source(stage)
        if isinstance(stage, SftStage) and "response_format" in sections:
            _check_drop_thinking(stage, sections["response_format"])
        if isinstance(stage, RlStage) and "model" in sections:
            _check_base_reference(stage, has_adapter=sections["model"].lora is not None)


def _check_from_stage(stage: AnyStage, before: Sequence[AnyStage], after: Sequence[AnyStage]) -> None:
    setting = f"stage {stage.name!r} has `from_stage: {stage.from_stage}`"
    if any(other.name == stage.from_stage for other in after):
        raise ValueError(f"{setting}, which is no earlier stage; move that one before it")
    source = next((other for other in before if other.name == stage.from_stage), None)
    if source is None:
        earlier = ", ".join(other.name for other in before) or "none"
        raise ValueError(f"{setting}, and no stage is called that; the earlier ones: {earlier}")
    if isinstance(stage, SelectStage):
        _check_select_source(stage, source, setting)
    else:
        _check_sample_source(stage, source, setting)


def _check_select_source(stage: SelectStage, source: AnyStage, setting: str) -> None:
    if stage.reads_rollouts and not isinstance(source, SampleStage):
        raise ValueError(
            f"{setting} and `metric: {stage.metric}`, which needs a stage of kind `sample`, not {source.kind}"
        )
    if not stage.reads_rollouts and not (isinstance(source, RlStage) and source.track_rewards):
        raise ValueError(f"{setting} and `metric: {stage.metric}`, which needs an `rl` stage with `track_rewards`")


def _check_sample_source(stage: SftStage | RlStage | SampleStage, source: AnyStage, setting: str) -> None:
    if not isinstance(source, SelectStage):
        raise ValueError(f"{setting}, which is of kind {source.kind}; only a `select` stage has samples for others")
    if isinstance(stage, SftStage):
        if stage.target_field == "response" and source.output == "prompts":
            raise ValueError(
                f"{setting} and `target_field: response`, but that stage keeps prompts; set `output: responses` there"
            )
    elif source.output == "responses":
        raise ValueError(f"{setting}, which keeps responses; they are for an sft stage with `target_field: response`")


def _check_data(stage: AnyStage, data: DataConfig) -> None:
    match stage:
        case SelectStage():
            return
        case SampleStage():
            if stage.from_stage is None and data.streaming:
                raise ValueError(f"stage {stage.name!r} uses every sample once, but `data.streaming` has no end")
        case SftStage() | RlStage():
            _check_mixture_source(stage)
            if stage.when and stage.from_stage is None:
                _check_conditions(stage, data)
            _check_data_order(stage, data)
            if stage.repeat_samples_to is not None and stage.from_stage is None:
                _check_repeats(stage, data)


def _check_mixture_source(stage: SftStage | RlStage) -> None:
    if isinstance(stage.data_order, MixtureOrderConfig) and stage.from_stage is not None:
        raise ValueError(
            f"stage {stage.name!r}: a mixture is of the sources of data.train, and `from_stage` is none of them"
        )


def _check_conditions(stage: SftStage | RlStage, data: DataConfig) -> None:
    """Refuse `when` beside weights, which are shares of all samples of a source, and beside streams."""
    has_shares = isinstance(stage.data_order, MixtureOrderConfig) or data.has_weights
    if has_shares or data.streaming:
        reason = "sources have weights" if has_shares else "data.streaming is set"
        raise ValueError(
            f"stage {stage.name!r} has `when`, and {reason}: "
            "choose its sources by `data_order: {kind: mixture, points: ...}`, with a weight of 0 for the others"
        )


def _check_data_order(stage: SftStage | RlStage, data: DataConfig) -> None:
    order = stage.data_order
    if isinstance(order, MixtureOrderConfig):
        for step, weights in order.points:
            if len(weights) != len(data.train):
                raise ValueError(
                    f"stage {stage.name!r}: data_order.points has {len(weights)} weights at step {step}, and "
                    f"data.train {len(data.train)} sources"
                )
    elif data.streaming and stage.from_stage is None and not isinstance(order, ShuffledOrderConfig):
        raise ValueError(
            f"stage {stage.name!r}: data_order {order.kind!r} has to know all samples, which `data.streaming` forbids"
        )


def _check_repeats(stage: SftStage | RlStage, data: DataConfig) -> None:
    if data.has_weights:
        raise ValueError(
            f"stage {stage.name!r}: repeat_samples_to cannot be combined with the weights of data.train; take out one"
        )
    if data.streaming:
        raise ValueError(
            f"stage {stage.name!r}: repeat_samples_to has to know all samples, which `data.streaming` forbids"
        )


def _check_drop_thinking(stage: SftStage, response_format: ResponseFormatConfig) -> None:
    allowed = response_format.thinking == "optional" and response_format.style != "json"
    if stage.drop_thinking_prob and not allowed:
        raise ValueError(
            f"stage {stage.name!r}: drop_thinking_prob makes responses without thinking, which "
            "`response_format.thinking: optional` (in tags or boxed style) allows"
        )


def _check_base_reference(stage: RlStage, *, has_adapter: bool) -> None:
    if stage.reference.init_from != "base":
        return
    if not has_adapter:
        raise ValueError(
            f"stage {stage.name!r}: `reference.init_from: base` is the base of an adapter: set `model.lora`"
        )
    if not stage.loss.kl.coef:
        raise ValueError(f"stage {stage.name!r}: reference.init_from has no effect without `loss.kl.coef`")


def check_reward_names(
    stages: Sequence[AnyStage], reward_names: Collection[str], group_reward_names: Collection[str]
) -> None:
    """Check that every reward term and group reward that a stage names exists.

    Raises:
        UserError: one does not.
    """
    training_names = [*reward_names, *group_reward_names]
    for stage in stages:
        if isinstance(stage, RlStage):
            for term in stage.track_rewards:
                _check_reward_name(term, training_names, f"stage {stage.name!r}: track_rewards")
            for entry in stage.dynamic_sampling.ranges if stage.dynamic_sampling else ():
                _check_reward_name(entry.term, training_names, f"stage {stage.name!r}: dynamic_sampling.ranges")
        if isinstance(stage, SelectStage):
            for term in stage.correct:
                _check_reward_name(term, reward_names, f"stage {stage.name!r}: correct")


def _check_reward_name(term: str, known: Collection[str], place: str) -> None:
    if term not in known:
        raise UserError(f"{place}: there is no reward term {term!r}, but {', '.join(known)}")
