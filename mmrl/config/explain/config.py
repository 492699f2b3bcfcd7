"""A config in words: every value with its origin, then what each stage optimises, in formulas."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from mmrl.config.explain import data, objective, rollout
from mmrl.config.load import DEFAULT_ORIGIN, LoadedConfig, flatten_settings
from mmrl.config.schema import (
    COMPONENTS,
    BaseRewardConfig,
    Config,
    DynamicSamplingConfig,
    LoraConfig,
    ReplayConfig,
    RewardTermConfig,
    RlStage,
    SampleStage,
    SamplingConfig,
    SelectStage,
    SftStage,
    TrainingStage,
)


def explain(loaded: LoadedConfig) -> str:
    """Every resolved value with its origin, then the objective of each stage."""
    read = "\n".join([f"# {loaded.files[0]}", *(f"# builds on {file}" for file in loaded.files[1:])])
    stages = [_explain_stage(loaded.config, index) for index in range(len(loaded.config.stages))]
    return "\n\n".join([read, _explain_values(loaded), *stages]) + "\n"


def _explain_values(loaded: LoadedConfig) -> str:
    """One line per setting, grouped by section; `·` marks a default."""
    shown = {
        path: _format_value(value) for path, value in flatten_settings(loaded.config.model_dump(mode="json")).items()
    }
    widths = max(map(len, shown)), min(40, max(map(len, shown.values())))
    lines: list[str] = []
    section = ""
    for path, value in shown.items():
        if lines and path.split(".")[0] != section:
            lines.append("")
        section = path.split(".")[0]
        origin = loaded.origins[path]
        mark = "·" if origin == DEFAULT_ORIGIN else origin
        lines.append(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {mark}")
    return "\n".join([*lines, "", "· is the schema's default"])


def _format_value(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_format_value, value))}]"
        case _:
            return str(value) or "''"


def _explain_stage(config: Config, index: int) -> str:
    stage = config.stages[index]
    what: str
    match stage:
        case RlStage():
            what, facts = stage.algorithm, _explain_rl(config, stage)
        case SftStage():
            what, facts = "imitation", _explain_sft(stage)
        case SampleStage():
            what, facts = "rollouts, written down", [*_explain_rollouts(stage), *data.explain_sample_stage(stage)]
        case SelectStage():
            what, facts = "a choice of samples", data.explain_select_stage(stage)
    if isinstance(stage, SftStage | RlStage):
        facts += [*data.explain_training_data(stage), ("trains", _explain_trained(config))]
        facts += [("optimizer", _explain_optimizer(stage)), ("ends", _explain_stage_end(stage))]
        facts += data.explain_benchmarks(config, stage)
    title = f"Stage {index + 1} of {len(config.stages)}, {stage.name}: {what}"
    lines = [title]
    for label, text in facts:
        first, *more = text.split("\n")
        lines += [f"  {label:<11}{first}", *(f"  {'':<11}{line}" for line in more)]
    return "\n".join(lines)


def _explain_sft(stage: SftStage) -> list[tuple[str, str]]:
    taught = {
        "label": "the annotator's label written as a response",
        "target": "the exact target written as a response",
        "response": "the sample's response as it stands",
    }[stage.target_field]
    rare = f", without its thinking {stage.drop_thinking_prob:.0%} of the time" if stage.drop_thinking_prob else ""
    counted = "response token" if stage.loss_on == "response" else "token of the answer, which alone is learned,"
    return [
        ("each step", f"{stage.batch_size} samples, one optimizer step"),
        (
            "objective",
            f"L = -(1/N) Σ_t log π(y_t | image, question, y_<t), y {taught}{rare}\n"
            f"N counts every {counted} of the whole step",
        ),
        *(("program", rollout.explain_demonstration_tools(step)) for step in stage.rollout_steps),
        ("rewards", "none in the loss; they only measure held-out answers"),
    ]


def _count_updates(stage: RlStage) -> str:
    steps = _pluralize(stage.ppo_epochs * stage.num_mini_batches, "optimizer step")
    return steps if stage.num_mini_batches == 1 else f"{steps}, each with 1/{stage.num_mini_batches} of the prompts,"


def _explain_sampling(law: SamplingConfig) -> str:
    return (
        f"temperature {law.temperature:g}, {_format_cutoff('top-p', law.top_p, law.top_p < 1)}, "
        f"{_format_cutoff('top-k', law.top_k, law.top_k > 0)}, at most {law.max_new_tokens} tokens each"
    )


_ASYNC_TEXT = (
    "from the second step on, rollouts are drawn while the step before is learned\n"
    "so the policy that drew them is one version older than the one that learns from them"
)


def _explain_rollouts(stage: RlStage | SampleStage) -> list[tuple[str, str]]:
    """The law of first responses, and what follows them."""
    then = rollout.explain_rollout_steps(stage.rollout_steps, stage.sampling.temperature)
    return [("sampling", _explain_sampling(stage.sampling)), *([("program", then)] if then else [])]


def _explain_rl(config: Config, stage: RlStage) -> list[tuple[str, str]]:
    count = stage.prompts_per_step * stage.group_size
    return [
        (
            "each step",
            f"{stage.prompts_per_step} prompts x {stage.group_size} rollouts = {count} rollouts, "
            f"then {_count_updates(stage)} on them",
        ),
        *_explain_rollouts(stage),
        *([("overlap", _ASYNC_TEXT)] if stage.async_rollouts else []),
        ("reward", _explain_rewards(config)),
        *(
            [("filter", _explain_dynamic_sampling(stage.dynamic_sampling, stage.prompts_per_step))]
            if stage.dynamic_sampling
            else []
        ),
        ("advantage", objective.explain_advantage(stage)),
        *([("replay", _explain_replay(stage.replay, count))] if stage.replay else []),
        ("objective", objective.explain_objective(stage)),
        ("KL", objective.explain_kl(stage)),
    ]


def _explain_dynamic_sampling(options: DynamicSamplingConfig, prompts: int) -> str:
    """Which groups are learned, a line a condition."""
    lines = [
        f"a group's mean of {band.term} is in {_format_interval((band.low, band.high))}"
        + (", and its values differ" if band.require_mixed else "")
        for band in options.ranges
    ]
    if options.max_truncated_frac < 1.0:
        lines.append(f"at most {options.max_truncated_frac:.0%} of a group's rollouts are truncated")
    if options.max_rounds > 1:
        surplus = "are learned in the next step" if options.extra == "carry" else "are not learned"
        lines.append(
            f"up to {_pluralize(options.max_rounds, 'round')} of prompts until {prompts} groups pass; more {surplus}"
        )
    return "\n".join(lines)


def _explain_replay(options: ReplayConfig, size: int) -> str:
    """What is learned again."""
    target = round(options.target_fraction * size)
    capacity, law = options.capacity or target, f"p ∝ |A_i|^{options.priority_exponent:g}"
    if options.positive_advantage_weight != 1.0:
        law += f", times {options.positive_advantage_weight:g} where A_i > 0"
    fill = f"up to {target} a step" if options.fill == "size" else f"{options.target_fraction:.0%} of what is learned"
    aged = (
        f"at most {_pluralize(options.max_staleness, 'version')} of the policy old"
        if options.max_staleness
        else "of any age"
    )
    again = "each at most once a step" if options.without_replacement else "with replacement"
    old = "as recorded when they were sampled" if options.old_logprobs == "recorded" else "computed by the learner"
    lines = [
        f"{fill}, from the last {capacity:,} rollouts with A_i ≠ 0, {aged}",
        f"drawn with {law}, {again}",
        f"their A_i stay; their π_old is {old}",
    ]
    if options.drop_zero_advantage:
        lines.append("rollouts with A_i = 0 are left out of L and of what it divides by")
    if options.resample_fresh:
        lines.append(f"the step's own are drawn in the same way, at most {target}")
    return "\n".join(lines)


_COMBINE_TEXT = MappingProxyType(
    {
        "sum": "the sum of weight · value over",
        "product": "the product of value^weight over",
        "min": "the least value of",
        "lexicographic": "the values, the earlier ones outweighing all later ones, of",
    }
)


def _explain_rewards(config: Config) -> str:
    rewards = config.rewards
    lines = [f"R_i = {_COMBINE_TEXT[rewards.combine]}"]
    for term in rewards.terms:
        name = term.name or term.fn.rpartition(":")[2]
        lines.append(f"{term.weight:+g} · {name} ({', '.join([term.fn, *_list_term_conditions(term)])})")
    for group_term in rewards.group_rewards:
        name = group_term.name or group_term.fn.rpartition(":")[2]
        conditions = [
            *_list_when_conditions(group_term),
            "beside its siblings",
            "only in training",
            *_list_schedule_conditions(group_term),
        ]
        lines.append(f"{group_term.weight:+g} · {name} ({', '.join([group_term.fn, *conditions])})")
    lines.append(f"what cannot be judged: {rewards.on_unscorable}; a reward that raises: {rewards.on_error}")
    return "\n".join(lines)


def _list_term_conditions(term: RewardTermConfig) -> Iterator[str]:
    """How a term departs from its plain value."""
    yield from _list_when_conditions(term)
    if term.training_only:
        yield "only in training"
    if term.requires is not None:
        yield f"0 unless {term.requires} > {term.requires_above:g}"
    shaping = term.transform
    if shaping.clip is not None:
        yield f"cut to {_format_interval(shaping.clip)}"
    if shaping.threshold is not None:
        yield f"1 from {shaping.threshold:g} up, else 0"
    if shaping.power != 1.0:
        yield f"to the power of {shaping.power:g}"
    if shaping.rescale_to is not None:
        yield f"stretched to {_format_interval(shaping.rescale_to)}"
    yield from _list_schedule_conditions(term)


def _list_when_conditions(term: BaseRewardConfig) -> Iterator[str]:
    for column, allowed in term.when.items():
        yield f"only where {column} is {' or '.join(allowed)}"


def _list_schedule_conditions(term: BaseRewardConfig) -> Iterator[str]:
    if term.schedule is not None:
        points = ", ".join(f"{factor:g} at step {step}" for step, factor in term.schedule.points)
        yield f"its weight times {points}, {'in steps' if term.schedule.interpolation == 'steps' else 'linear between'}"


def _format_interval(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:g}, {ends[1]:g}]"


def _explain_trained(config: Config) -> str:
    if config.model.lora:
        return _explain_lora(config.model.lora)
    trained = config.model.trainable_components
    frozen = [role for role in COMPONENTS if role not in trained]
    return f"{', '.join(trained)}; " + (f"frozen: {', '.join(frozen)}" if frozen else "nothing is frozen")


def _explain_lora(lora: LoraConfig) -> str:
    below = f"sqrt({lora.rank})" if lora.use_rslora else f"{lora.rank}"
    updated = f"W + {lora.alpha} / {below} · B A"
    law = f"m · V / |V|, row by row, with V = {updated} and m learned" if lora.use_dora else updated
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    return f"an adapter of rank {lora.rank}{dropout}, on {', '.join(lora.targets)}; all weights are frozen\nW' = {law}"


def _explain_optimizer(stage: TrainingStage) -> str:
    adam = stage.optimizer
    warmup = f", rising over {_pluralize(adam.warmup_steps, 'step')}" if adam.warmup_steps else ""
    decay = (
        f", then {adam.lr_schedule} to {adam.lr * adam.final_lr_frac:g}"
        if adam.lr_schedule != "constant"
        else ", constant"
    )
    rates = [f", {role} {rate:g}" for role, rate in adam.lr_by_component.model_dump(exclude_none=True).items()]
    spared = " of matrices" if adam.weight_decay_on == "matrices" else ""
    return (
        f"AdamW, lr {adam.lr:g}{''.join(rates)}{warmup}{decay}; betas {adam.betas[0]:g}, {adam.betas[1]:g}; "
        f"weight decay{spared} {adam.weight_decay:g}; gradient norm at most {adam.max_grad_norm:g}"
    )


def _explain_stage_end(stage: TrainingStage) -> str:
    most = f"after {_pluralize(stage.steps, 'step')}"
    looks = stage.validation
    if looks is None or looks.stop_at_mean_reward is None:
        return most
    each = f" and every task's reaches {looks.stop_at_task_reward:g}" if looks.stop_at_task_reward is not None else ""
    often = f"looked at every {_pluralize(looks.every, 'step')}"
    return f"once the held-out reward reaches {looks.stop_at_mean_reward:g}{each} ({often}), at the latest {most}"


def _pluralize(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _format_cutoff(name: str, value: float, active: bool) -> str:
    return f"{name} {value:g}" if active else f"no {name}"
