"""A config in words: every value with its origin, then what each stage optimises, in formulas."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType

from mmrl.config.explain import data, objective, rollout
from mmrl.config.load import DEFAULT, Loaded, settings
from mmrl.config.schema import (
    ROLES,
    Config,
    Earned,
    Filter,
    Lora,
    Replay,
    Rl,
    Sample,
    Sampling,
    Select,
    Sft,
    Stage,
    Term,
)


def explain(loaded: Loaded) -> str:
    """Every resolved value with its origin, then the objective of each stage."""
    read = "\n".join([f"# {loaded.files[0]}", *(f"# builds on {file}" for file in loaded.files[1:])])
    stages = [_stage(loaded.config, index) for index in range(len(loaded.config.stages))]
    return "\n\n".join([read, _values(loaded), *stages]) + "\n"


def _values(loaded: Loaded) -> str:
    """One line per setting, grouped by section; `·` marks a default."""
    shown = {path: _shown(value) for path, value in settings(loaded.config.model_dump(mode="json")).items()}
    widths = max(map(len, shown)), min(40, max(map(len, shown.values())))
    lines: list[str] = []
    section = ""
    for path, value in shown.items():
        if lines and path.split(".")[0] != section:
            lines.append("")
        section = path.split(".")[0]
        origin = loaded.origins[path]
        mark = "·" if origin == DEFAULT else origin
        lines.append(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {mark}")
    return "\n".join([*lines, "", "· is the schema's default"])


def _shown(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            return str(value) or "''"


def _stage(config: Config, index: int) -> str:
    stage = config.stages[index]
    what: str
    match stage:
        case Rl():
            what, facts = stage.algorithm, _rl(config, stage)
        case Sft():
            what, facts = "imitation", _sft(stage)
        case Sample():
            what, facts = "rollouts, written down", [*_drawn(stage), *data.sample(stage)]
        case Select():
            what, facts = "a choice of samples", data.select(stage)
    if isinstance(stage, Sft | Rl):
        facts += [*data.training(stage), ("trains", _trained(config))]
        facts += [("optimizer", _optimizer(stage)), ("ends", _end(stage))]
        facts += data.benchmarks(config, stage)
    title = f"Stage {index + 1} of {len(config.stages)}, {stage.name}: {what}"
    lines = [title]
    for label, text in facts:
        first, *more = text.split("\n")
        lines += [f"  {label:<11}{first}", *(f"  {'':<11}{line}" for line in more)]
    return "\n".join(lines)


def _sft(stage: Sft) -> list[tuple[str, str]]:
    taught = {
        "label": "the annotator's label written as a response",
        "target": "the exact target written as a response",
        "response": "the sample's response as it stands",
    }[stage.imitate]
    rare = f", without its thinking {stage.thought_dropout:.0%} of the time" if stage.thought_dropout else ""
    counted = "response token" if stage.learn == "response" else "token of the answer, which alone is learned,"
    return [
        ("each step", f"{stage.batch_size} samples, one optimizer step"),
        (
            "objective",
            f"L = -(1/N) Σ_t log π(y_t | image, question, y_<t), y {taught}{rare}\n"
            f"N counts every {counted} of the whole step",
        ),
        *(("program", rollout.answered(step)) for step in stage.program),
        ("rewards", "none in the loss; they only measure held-out answers"),
    ]


def _updates(stage: Rl) -> str:
    steps = _plural(stage.epochs * stage.mini_batches, "optimizer step")
    return steps if stage.mini_batches == 1 else f"{steps}, each with 1/{stage.mini_batches} of the prompts,"


def _law(law: Sampling) -> str:
    return (
        f"temperature {law.temperature:g}, {_cut('top-p', law.top_p, law.top_p < 1)}, "
        f"{_cut('top-k', law.top_k, law.top_k > 0)}, at most {law.max_new_tokens} tokens each"
    )


_OVERLAP = (
    "from the second step on, rollouts are drawn while the step before is learned\n"
    "so the policy that drew them is one version older than the one that learns from them"
)


def _drawn(stage: Rl | Sample) -> list[tuple[str, str]]:
    """The law of first responses, and what follows them."""
    then = rollout.program(stage.program, stage.sampling.temperature)
    return [("sampling", _law(stage.sampling)), *([("program", then)] if then else [])]


def _rl(config: Config, stage: Rl) -> list[tuple[str, str]]:
    count = stage.prompts_per_step * stage.group_size
    return [
        (
            "each step",
            f"{stage.prompts_per_step} prompts x {stage.group_size} rollouts = {count} rollouts, "
            f"then {_updates(stage)} on them",
        ),
        *_drawn(stage),
        *([("overlap", _OVERLAP)] if stage.overlap else []),
        ("reward", _reward(config)),
        *([("filter", _filter(stage.filter, stage.prompts_per_step))] if stage.filter else []),
        ("advantage", objective.advantage(stage)),
        *([("replay", _replay(stage.replay, count))] if stage.replay else []),
        ("objective", objective.objective(stage)),
        ("KL", objective.penalty(stage)),
    ]


def _filter(options: Filter, prompts: int) -> str:
    """Which groups are learned, a line a condition."""
    lines = [
        f"a group's mean of {band.term} is in {_ends((band.low, band.high))}"
        + (", and its values differ" if band.mixed else "")
        for band in options.bands
    ]
    if options.max_truncated < 1.0:
        lines.append(f"at most {options.max_truncated:.0%} of a group's rollouts are truncated")
    if options.rounds > 1:
        surplus = "are learned in the next step" if options.surplus == "carry" else "are not learned"
        lines.append(f"up to {_plural(options.rounds, 'round')} of prompts until {prompts} groups pass; more {surplus}")
    return "\n".join(lines)


def _replay(options: Replay, size: int) -> str:
    """What is learned again."""
    target = round(options.share * size)
    capacity, law = options.capacity or target, f"p ∝ |A_i|^{options.alpha:g}"
    if options.positives_boost != 1.0:
        law += f", times {options.positives_boost:g} where A_i > 0"
    fill = f"up to {target} a step" if options.refill == "size" else f"{options.share:.0%} of what is learned"
    aged = f"at most {_plural(options.max_age, 'version')} of the policy old" if options.max_age else "of any age"
    again = "each at most once a step" if options.unique else "with replacement"
    old = "as recorded when they were sampled" if options.ratio == "kept" else "computed by the learner"
    lines = [
        f"{fill}, from the last {capacity:,} rollouts with A_i ≠ 0, {aged}",
        f"drawn with {law}, {again}",
        f"their A_i stay; their π_old is {old}",
    ]
    if options.drop_zero:
        lines.append("rollouts with A_i = 0 are left out of L and of what it divides by")
    if options.resample:
        lines.append(f"the step's own are drawn in the same way, at most {target}")
    return "\n".join(lines)


_COMBINED = MappingProxyType(
    {
        "sum": "the sum of weight · value over",
        "product": "the product of value^weight over",
        "min": "the least value of",
        "lexicographic": "the values, the earlier ones outweighing all later ones, of",
    }
)


def _reward(config: Config) -> str:
    rewards = config.rewards
    lines = [f"R_i = {_COMBINED[rewards.combine]}"]
    for term in rewards.terms:
        name = term.name or term.fn.rpartition(":")[2]
        lines.append(f"{term.weight:+g} · {name} ({', '.join([term.fn, *_conditions(term)])})")
    for group_term in rewards.group_terms:
        name = group_term.name or group_term.fn.rpartition(":")[2]
        conditions = [*_whenever(group_term), "beside its siblings", "only in training", *_scheduled(group_term)]
        lines.append(f"{group_term.weight:+g} · {name} ({', '.join([group_term.fn, *conditions])})")
    lines.append(f"what cannot be judged: {rewards.on_unscorable}; a reward that raises: {rewards.on_error}")
    return "\n".join(lines)


def _conditions(term: Term) -> Iterator[str]:
    """How a term departs from its plain value."""
    yield from _whenever(term)
    if term.train_only:
        yield "only in training"
    if term.gate is not None:
        yield f"0 unless {term.gate} > {term.gate_above:g}"
    shaping = term.transform
    if shaping.clip is not None:
        yield f"cut to {_ends(shaping.clip)}"
    if shaping.threshold is not None:
        yield f"1 from {shaping.threshold:g} up, else 0"
    if shaping.power != 1.0:
        yield f"to the power of {shaping.power:g}"
    if shaping.scale is not None:
        yield f"stretched to {_ends(shaping.scale)}"
    yield from _scheduled(term)


def _whenever(term: Earned) -> Iterator[str]:
    for column, allowed in term.when.items():
        yield f"only where {column} is {' or '.join(allowed)}"


def _scheduled(term: Earned) -> Iterator[str]:
    if term.schedule is not None:
        points = ", ".join(f"{factor:g} at step {step}" for step, factor in term.schedule.points)
        yield f"its weight times {points}, {'in steps' if term.schedule.shape == 'steps' else 'linear between'}"


def _ends(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:g}, {ends[1]:g}]"


def _trained(config: Config) -> str:
    if config.model.lora:
        return _adapter(config.model.lora)
    trained = config.model.trained
    frozen = [role for role in ROLES if role not in trained]
    return f"{', '.join(trained)}; " + (f"frozen: {', '.join(frozen)}" if frozen else "nothing is frozen")


def _adapter(lora: Lora) -> str:
    below = f"sqrt({lora.rank})" if lora.rslora else f"{lora.rank}"
    updated = f"W + {lora.alpha} / {below} · B A"
    law = f"m · V / |V|, row by row, with V = {updated} and m learned" if lora.dora else updated
    dropout = f", dropout {lora.dropout:g}" if lora.dropout else ""
    return f"an adapter of rank {lora.rank}{dropout}, on {', '.join(lora.targets)}; all weights are frozen\nW' = {law}"


def _optimizer(stage: Stage) -> str:
    adam = stage.optimizer
    warmup = f", rising over {_plural(adam.warmup_steps, 'step')}" if adam.warmup_steps else ""
    decay = f", then {adam.decay} to {adam.lr * adam.final_lr_frac:g}" if adam.decay != "constant" else ", constant"
    rates = [f", {role} {rate:g}" for role, rate in adam.lr_by_role.model_dump(exclude_none=True).items()]
    spared = " of matrices" if adam.decayed == "matrices" else ""
    return (
        f"AdamW, lr {adam.lr:g}{''.join(rates)}{warmup}{decay}; betas {adam.betas[0]:g}, {adam.betas[1]:g}; "
        f"weight decay{spared} {adam.weight_decay:g}; gradient norm at most {adam.max_grad_norm:g}"
    )


def _end(stage: Stage) -> str:
    most = f"after {_plural(stage.steps, 'step')}"
    looks = stage.validation
    if looks is None or looks.until is None:
        return most
    each = f" and every task's reaches {looks.until_each:g}" if looks.until_each is not None else ""
    often = f"looked at every {_plural(looks.every, 'step')}"
    return f"once the held-out reward reaches {looks.until:g}{each} ({often}), at the latest {most}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _cut(name: str, value: float, active: bool) -> str:
    return f"{name} {value:g}" if active else f"no {name}"
