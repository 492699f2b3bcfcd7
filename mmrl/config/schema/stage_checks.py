"""Checks that concern several sections of a config: stages against each other, the data, the rewards and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.config.schema.base import check_unique
from mmrl.config.schema.data import DataConfig, MixtureOrderConfig, ShuffledOrderConfig
from mmrl.config.schema.data_stages import SampleStage, SelectStage
from mmrl.config.schema.model import ModelConfig
from mmrl.config.schema.response_format import ResponseFormatConfig
from mmrl.config.schema.rewards import RewardsConfig, RewardTransformConfig
from mmrl.config.schema.rollout_steps import LOOKED_PROBE, BlindProbeConfig, step_name
from mmrl.config.schema.stages import RlStage, SftStage

AnyStage = SftStage | RlStage | SampleStage | SelectStage


def check_stages(stages: Sequence[AnyStage], sections: Mapping[str, Any]) -> None:
    """Raise ValueError unless the stages fit each other and the other `sections`, which lack invalid ones."""
    # Only the first error is reported, so checks of a single stage come before those of combinations.
    check_unique([stage.name for stage in stages], "stages")
    training = [stage for stage in stages if isinstance(stage, SftStage | RlStage)]
    if not training:
        raise ValueError("no stage trains; a run needs one of kind sft or rl")
    non_additive_part = _find_non_additive_part(sections["rewards"]) if "rewards" in sections else ""
    for stage in training:
        if "model" in sections and stage.shared_prefix == "on" and sections["model"].attn_implementation == "eager":
            raise ValueError(
                f"stage {stage.name!r} has `shared_prefix: on`, which eager `model.attn_implementation` cannot do"
            )
        if isinstance(stage, RlStage) and stage.advantage.combine == "per_term" and non_additive_part:
            raise ValueError(
                f"stage {stage.name!r}: advantage.combine per_term sums terms by weight; {non_additive_part}"
            )
    for index in range(len(stages)):
        _check_stage(stages[index], stages[:index], stages[index:], sections)
    if "rollout" in sections:
        _check_engine(training, sections["rollout"].engine)
    if "model" in sections:
        _check_trained_components(training, sections["model"])


def _find_non_additive_part(rewards: RewardsConfig) -> str:
    """Return what makes the total more than a constant weighted sum of terms, as a clause; empty if nothing does."""
    if rewards.combine != "sum":
        return f"rewards.combine {rewards.combine!r} does not"
    for term in rewards.terms:
        if term.requires is not None or term.transform != RewardTransformConfig():
            return f"term {term.fn} has `requires` or a transform, which that would ignore"
    for reward in (*rewards.terms, *rewards.group_rewards):
        if reward.schedule is not None:
            return f"term {reward.fn} has a schedule, which that would ignore"
    return ""


def _check_stage(
    stage: AnyStage, before: Sequence[AnyStage], after: Sequence[AnyStage], sections: Mapping[str, Any]
) -> None:
    if isinstance(stage, SelectStage):
        source = _find_earlier_stage(stage, "results_of", stage.results_of, before, after)
        draws_from_data = isinstance(source, RlStage) and source.samples_of is None
        if draws_from_data and "data" in sections and sections["data"].streaming:
            raise ValueError(
                f"stage {stage.name!r} has `results_of: {stage.results_of}`, whose samples come from a stream: the "
                "table that it writes can only hold samples that are known at the start; leave out `data.streaming`"
            )
        return
    if stage.samples_of is not None:
        _find_earlier_stage(stage, "samples_of", stage.samples_of, before, after)
    if isinstance(stage, SftStage | RlStage) and isinstance(stage.data_order, MixtureOrderConfig) and stage.samples_of:
        raise ValueError(
            f"stage {stage.name!r}: a mixture weights the sources of data.train, but `samples_of` replaces them"
        )
    if "data" in sections and stage.samples_of is None:
        _check_data(stage, sections["data"])
    if isinstance(stage, SftStage) and "response_format" in sections:
        _check_thinking(stage, sections["response_format"])
    if isinstance(stage, RlStage) and "rewards" in sections:
        _check_greedy_baseline(stage, sections["rewards"])
        _check_probes(stage, sections["rewards"])
    if isinstance(stage, RlStage) and "model" in sections:
        _check_reference(stage, sections["model"])


def _check_thinking(stage: SftStage, response_format: ResponseFormatConfig) -> None:
    """Raise ValueError if the stage drops thinking that the format requires."""
    allows_none = response_format.thinking == "optional" and response_format.style != "json"
    if stage.drop_thinking_prob and not allows_none:
        raise ValueError(
            f"stage {stage.name!r}: drop_thinking_prob makes responses without thinking, which "
            "`response_format.thinking: optional` (in tags or boxed style) allows"
        )


def _check_reference(stage: RlStage, model: ModelConfig) -> None:
    """Raise ValueError if the stage's reference is the base of an adapter that is not there, or has no use."""
    if stage.reference.init_from != "base":
        return
    if model.lora is None:
        raise ValueError(
            f"stage {stage.name!r}: `reference.init_from: base` is the base of an adapter: set `model.lora`"
        )
    if not stage.loss.kl.coef:
        raise ValueError(f"stage {stage.name!r}: reference.init_from has no effect without `loss.kl.coef`")


def _check_greedy_baseline(stage: RlStage, rewards: RewardsConfig) -> None:
    """Raise ValueError if `greedy_baseline` has no greedy responses to subtract, or the advantage cancels it."""
    if not any(reward.fn == "mmrl.algo.group_rewards:greedy_baseline" for reward in rewards.group_rewards):
        return
    if not any(step.kind == "greedy" for step in stage.rollout_steps):
        raise ValueError(
            f"stage {stage.name!r}: the group reward greedy_baseline needs {{kind: greedy}} in rollout_steps"
        )
    if stage.advantage.fn is None and stage.advantage.baseline in ("group_mean", "leave_one_out"):
        raise ValueError(
            f"stage {stage.name!r}: the group reward greedy_baseline is the same for all rollouts of a group, so "
            f"advantage.baseline {stage.advantage.baseline} takes it out again; set `baseline: none` or `batch_mean`"
        )
    if stage.advantage.combine == "per_term" and stage.advantage.scale != "none":
        raise ValueError(
            f"stage {stage.name!r}: with combine per_term, advantage.scale {stage.advantage.scale} divides the group "
            "reward greedy_baseline and the rewards that it is subtracted from by different numbers; set `combine: "
            "total` or `scale: none`"
        )


def _check_probes(stage: RlStage, rewards: RewardsConfig) -> None:
    """Raise ValueError if a group reward reads a probe that the stage does not make in every step."""
    probes = [step for step in stage.rollout_steps if isinstance(step, BlindProbeConfig)]
    made = [step_name(probe) for probe in probes if probe.every == 1]
    for reward in rewards.group_rewards:
        needed = {
            "mmrl.algo.group_rewards:blind_contrast": reward.args.get("probe"),
            "mmrl.algo.group_rewards:sufficient_parts": LOOKED_PROBE,
        }.get(reward.fn)
        if needed is not None and needed not in made:
            raise ValueError(
                f"stage {stage.name!r}: the group reward {reward.fn.rpartition(':')[2]} needs the probe {needed!r} in "
                f"every step; add it to rollout_steps with `every: 1` (there is {', '.join(made) or 'none'})"
            )


def _find_earlier_stage(
    stage: AnyStage, key: str, name: str, before: Sequence[AnyStage], after: Sequence[AnyStage]
) -> AnyStage:
    """Return the earlier stage that `key: name` refers to; raise ValueError if this stage cannot use its results."""
    setting = f"stage {stage.name!r} has `{key}: {name}`"
    if any(other.name == name for other in after):
        raise ValueError(f"{setting}, which is not an earlier stage; move that one before it")
    source = next((other for other in before if other.name == name), None)
    if source is None:
        earlier = ", ".join(other.name for other in before) or "none"
        raise ValueError(f"{setting}, and no stage is called that; the earlier ones: {earlier}")
    if isinstance(stage, SelectStage):
        needed = f"{setting} and `metric: {stage.metric}`, which needs"
        if stage.reads_rollouts and not isinstance(source, SampleStage):
            raise ValueError(f"{needed} a stage of kind `sample`, not {source.kind}")
        if not stage.reads_rollouts and not (isinstance(source, RlStage) and source.track_rewards):
            raise ValueError(f"{needed} an `rl` stage with `track_rewards`")
        return source
    if not isinstance(source, SelectStage):
        raise ValueError(f"{setting}, which is of kind {source.kind}; only a `select` stage has samples for others")
    if isinstance(stage, SftStage) and stage.target_field == "response" and source.output == "prompts":
        raise ValueError(
            f"{setting} and `target_field: response`, but that stage keeps prompts; set `output: responses` there"
        )
    if not isinstance(stage, SftStage) and source.output == "responses":
        raise ValueError(f"{setting}, which keeps responses; they are for an sft stage with `target_field: response`")
    return source


def _check_data(stage: SftStage | RlStage | SampleStage, data: DataConfig) -> None:
    """Raise ValueError if a stage without `samples_of` cannot draw its samples from the sources of `data`."""
    label = f"stage {stage.name!r}"
    if isinstance(stage, SampleStage):
        if data.streaming:
            raise ValueError(f"{label} uses every sample once, but `data.streaming` has no end")
        return
    order = stage.data_order
    # Weights are shares of all samples of a source, and a stream is read as it comes: neither can be filtered.
    has_shares = isinstance(order, MixtureOrderConfig) or data.has_weights
    if stage.when and (has_shares or data.streaming):
        reason = "sources have weights" if has_shares else "data.streaming is set"
        raise ValueError(
            f"{label} has `when`, and {reason}: "
            "choose its sources by `data_order: {kind: mixture, points: ...}`, with a weight of 0 for the others"
        )
    if isinstance(order, MixtureOrderConfig):
        counts = f"and data.train {len(data.train)} sources"
        for step, weights in order.points:
            if len(weights) != len(data.train):
                raise ValueError(f"{label}: data_order.points has {len(weights)} weights at step {step}, {counts}")
    elif not isinstance(order, ShuffledOrderConfig):
        setting = f"{label}: data_order {order.kind!r}"
        if data.streaming:
            raise ValueError(f"{setting} has to know all samples, which `data.streaming` forbids")
        if data.has_weights:
            raise ValueError(f"{setting} draws all samples equally, without the weights of data.train; take out one")
    if stage.repeat_samples_to is not None:
        setting = f"{label}: repeat_samples_to"
        if data.has_weights:
            raise ValueError(f"{setting} cannot be combined with the weights of data.train; take out one")
        if data.streaming:
            raise ValueError(f"{setting} has to know all samples, which `data.streaming` forbids")


def _check_engine(stages: Sequence[SftStage | RlStage], engine: object) -> None:
    """Raise ValueError if the engine does not support the `sampling` or `async_rollouts` of a stage."""
    for stage in stages:
        if not isinstance(stage, RlStage):
            continue
        if engine in ("vllm", "vllm_server") and (stage.sampling.top_k or stage.sampling.top_p < 1.0):
            raise ValueError(
                f"stage {stage.name!r} has `sampling.top_p` or `top_k`, whose log-probabilities vLLM renormalises "
                "and the learner does not; leave them out, or use `rollout.engine: hf`"
            )
        if stage.async_rollouts and engine == "vllm":
            raise ValueError(
                f"stage {stage.name!r} has `async_rollouts`, and rollout.engine vllm takes turns with the learner; use "
                "vllm_server, or leave out `async_rollouts`"
            )


def _check_trained_components(stages: Sequence[SftStage | RlStage], model: ModelConfig) -> None:
    for stage in stages:
        trained = model.with_freeze(stage.freeze).trainable_components
        if not trained:
            raise ValueError(f"stage {stage.name!r}: `freeze` holds all that is trained; leave a component out of it")
        if stage.freeze is not None and model.lora:
            raise ValueError(f"stage {stage.name!r} has `freeze`, and `model.lora` freezes all weights; leave one out")
        components = stage.optimizer.lr_by_component.model_dump(exclude_none=True).keys()
        idle = sorted(components - set(trained))
        if idle:
            raise ValueError(
                f"stage {stage.name!r} has `optimizer.lr_by_component.{idle[0]}`, but {idle[0]} is not trained"
            )
