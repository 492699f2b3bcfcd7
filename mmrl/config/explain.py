"""`mmrl explain`: every setting with its origin, the meaning of the set ones, and each stage's objective.

In formulas, i counts the responses of a step, t the tokens of one response.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from mmrl.config import schema
from mmrl.config.load import DEFAULT_ORIGIN, LoadedConfig, flatten_settings
from mmrl.config.schema import Config, RlStage, SftStage
from mmrl.config.schema.base import StrictModel
from mmrl.config.schema.rewards import RewardsConfig

_WIDTH = 120
_SELF_EVIDENT = ("name", "kind", "fn", "args")  # keys whose values speak for themselves
_MAX_VALUE_WIDTH = 40  # a longer value pushes only its own origin to the right
_BASELINES = {
    "group_mean": "R_i - mean(R)",
    "leave_one_out": "R_i - mean(R without R_i)",
    "batch_mean": "R_i - mean(R of the step)",
    "none": "R_i",
}
_SCALES = {"group_std": "std(R)", "batch_std": "std(R of the step)"}
_DIFFICULTY_CURVES = {
    "uncertain": "4 p (1 - p)",
    "easy": "{sin(π p) to p = 1/2, then 1}",
    "medium": "sin(π p)",
    "hard": "{1/4 at p = 0, 1 to p = 1/2, then sin(π p)}",
}
_KL_ESTIMATES = {"k1": "-d", "k2": "d²/2", "k3": "exp(d) - d - 1"}


def explain(loaded: LoadedConfig) -> str:
    """Return every resolved setting with its origin, what the set ones mean, and the objective of each stage."""
    files = [f"# {loaded.files[0]}"]
    files += [f"# builds on {file}" for file in loaded.files[1:]]
    meanings = "\n".join(_explain_section(loaded.config, ""))
    blocks = ["\n".join(files), _list_settings(loaded), meanings]
    for index in range(len(loaded.config.stages)):
        blocks.append(_explain_stage(loaded.config, index))
    blocks += [f"WARNING: {warning}" for warning in loaded.warnings]
    return "\n\n".join(blocks) + "\n"


def _list_settings(loaded: LoadedConfig) -> str:
    """Return one line per setting, with a blank line between sections."""
    values = {}
    for path, value in flatten_settings(loaded.config.model_dump(mode="json")).items():
        values[path] = _format_value(value)
    path_width = max(map(len, values))
    value_width = min(_MAX_VALUE_WIDTH, max(map(len, values.values())))
    lines: list[str] = []
    section = ""
    for path, value in values.items():
        if lines and path.split(".")[0] != section:
            lines.append("")
        section = path.split(".")[0]
        origin = loaded.origins[path]
        mark = "·" if origin == DEFAULT_ORIGIN else origin
        lines.append(f"{path:<{path_width}}  {value:<{value_width}}  {mark}")
    return "\n".join([*lines, "", "· is the schema's default"])


def _format_value(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{', '.join(map(_format_value, value))}]"
        case dict():
            return "{" + ", ".join(f"{key}: {_format_value(inner)}" for key, inner in value.items()) + "}"
        case str() if not value.isprintable():
            return repr(value)  # line breaks would end a row of the table
        case _:
            return str(value) or "''"


def _explain_section(section: StrictModel, path: str) -> Iterator[str]:
    """Yield a line for each key of a section that differs from its default, with its value and description."""
    values = section.model_dump(mode="json")
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if key in _SELF_EVIDENT or section.has_default(key):
            continue
        key_path = f"{path}.{key}" if path else key
        entries = {key_path: value}
        if isinstance(value, tuple):
            entries = {f"{key_path}.{index}": entry for index, entry in enumerate(value)}
        sections = {name: entry for name, entry in entries.items() if isinstance(entry, StrictModel)}
        for name, entry in sections.items():
            yield from _wrap(f"{name}: {type(entry).__doc__}")
            yield from _explain_section(entry, name)
        if not sections:
            yield from _wrap(f"{key_path} {_format_value(values[key])}: {field.description}")


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), _WIDTH, subsequent_indent="    ")


def _explain_stage(config: Config, index: int) -> str:
    stage = config.stages[index]
    lines = [f"Stage {index + 1} of {len(config.stages)}, {stage.name}: {stage.kind}"]
    match stage:
        case RlStage():
            lines[0] += f", {stage.algorithm}"
            num_rollouts = stage.prompts_per_step * stage.group_size
            num_updates = stage.ppo_epochs * stage.num_mini_batches
            lines.append(
                f"each step: {stage.prompts_per_step} prompts x {stage.group_size} rollouts = {num_rollouts} rollouts, "
                f"updates: {num_updates}"
            )
            lines += [_format_reward(config.rewards), *_format_advantage(stage.advantage), *_format_loss(stage)]
        case SftStage():
            lines.append(f"each step: {stage.prompts_per_step} samples, updates: 1")
            lines += [
                "L = -(1/N) Σ_i Σ_t log π(y_t | image, question, y_<t)",
                f"y: the sample's {stage.target_field}; N: {stage.loss_on} tokens of a step, over which both sums run",
            ]
    steps = () if stage.kind == "select" else stage.rollout_steps
    for step in steps:
        if isinstance(step, schema.RethinkConfig):
            lines += [f"WARNING: {bias}" for bias in step.list_biases()]
    return "\n  ".join(lines)


def _format_reward(rewards: RewardsConfig) -> str:
    stand_ins = {term.fallback for term in rewards.terms}
    terms = []
    for term in rewards.terms:
        name = term.name or term.fn.rpartition(":")[2]
        if name not in stand_ins:
            terms.append((f"({name}, else {term.fallback})" if isinstance(term.fallback, str) else name, term.weight))
    match rewards.combine:
        case "sum":
            total = " + ".join(f"{weight:g} · {name}" for name, weight in terms)
        case "product":
            total = " · ".join(f"{name}^{weight:g}" for name, weight in terms)
        case "min":
            total = f"min({', '.join(name for name, _ in terms)})"
    for reward in rewards.group_rewards:
        total += f" + {reward.weight:g} · {reward.name or reward.fn.rpartition(':')[2]}"
    return f"R_i = {total}"


def _format_advantage(advantage: schema.AdvantageConfig) -> list[str]:
    if advantage.fn is not None:
        lines = [f"A = {advantage.fn}(R, terms{_format_args(advantage.args)})"]
    elif advantage.scale == "none":
        lines = [f"A_i = {_BASELINES[advantage.baseline]}"]
    else:
        lines = [f"A_i = ({_BASELINES[advantage.baseline]}) / ({_SCALES[advantage.scale]} + {advantage.eps:g})"]
    if advantage.combine == "per_term":
        lines.append("A_i ← Σ weight · A_i of each reward term, whose value is its R_i")
    if advantage.batch_normalize:
        lines.append(f"A_i ← (A_i - mean(A)) / (std(A) + {advantage.eps:g}), over the step")
    if advantage.outlier_std is not None:
        lines.append(f"A_i ← 0 where |A_i - mean(A)| > {advantage.outlier_std:g} std(A)")
    if advantage.difficulty_weight is not None:
        weight = advantage.difficulty_weight
        factor = _DIFFICULTY_CURVES[weight.curve]
        lines.append(f"A_i ← {weight.max_weight:g} · {factor} A_i, p = mean({weight.term}) over the group")
    if advantage.credit != "broadcast":
        compared = {"turn": "over turns k of the group", "group": "over the turns of the group"}[advantage.compare]
        if advantage.credit == "gigpo":
            compared = "over turns of the group at an equal state"
        first = f"A_i + {advantage.step_weight:g} · " if advantage.credit == "gigpo" else ""
        lines.append(f"A_i,k = {first}z(R_i,k) {compared}, R_i,k = Σ_u≥k {advantage.discount:g}^(u-k) r_i,u")
    return lines


def _format_loss(stage: RlStage) -> list[str]:
    loss = stage.loss
    batch = "step" if stage.num_mini_batches == 1 else "mini-batch"
    if loss.mask_truncated:
        batch += ", without truncated responses"
    match loss.aggregation:
        case "token":
            sums, counts = "(1/N) Σ_i Σ_t", f"N: sampled tokens of a {batch}"
        case "sequence":
            sums, counts = "(1/S) Σ_i (1/n_i) Σ_t", f"S: responses of a {batch}; n_i: tokens of a response"
        case "fixed":
            length = loss.fixed_length or stage.sampling.max_new_tokens
            divisor = f"({length} S)" if length > 1 else "S"
            sums, counts = f"(1/{divisor}) Σ_i Σ_t", f"S: responses of a {batch}"
    # A function returns a loss; the built-in formulas are objectives, to be maximised.
    sign = "" if isinstance(loss.policy_loss, schema.CustomPolicyLossConfig) else "-"
    weight = "" if loss.rollout_correction.method == "none" else "w_t "
    formula = f"L = {sign}{sums} {weight}{_format_policy_loss(loss)}"
    if loss.kl.coef and loss.kl.apply_to == "loss":
        formula += f" + {_format_coefficient(loss.kl, stage.steps)} · KL"
    if loss.entropy.coef:
        formula += f" - {_format_coefficient(loss.entropy, stage.steps)} · H(π)"
    if loss.sft_loss.coef:
        formula += f" + {_format_coefficient(loss.sft_loss, stage.steps)} · NLL"
    ratio = "r_t = π(y_t) / π_old(y_t)"
    if loss.importance_ratio_level == "sequence":
        ratio = "r_i = geometric mean over t of π(y_t) / π_old(y_t)"
    lines = [formula, counts, f"{ratio}, π_old {loss.old_logprobs}", *_format_old_logprobs(stage)]
    if loss.log_ratio_clip is not None:
        lines.append(f"r uses log π(y_t) - log π_old(y_t) clipped to ±{loss.log_ratio_clip:g}")
    lines += _format_correction(loss.rollout_correction) + _format_kl(loss.kl, stage.steps)
    if loss.sft_loss.coef:
        on_response = loss.sft_loss.on == "response"
        part = "with a positive advantage" if on_response else "after a forced trigger in correct responses"
        lines.append(f"NLL = mean of -log π(y_t) over the policy's tokens {part} of a {batch}")
    return lines


def _format_old_logprobs(stage: RlStage) -> list[str]:
    """Return a line for each kind of rollout of an older policy that the stage trains on: its π_old."""
    # The rule: `TokenTable.old_is_recorded_N` in mmrl/learner/tokens.py.
    sources: dict[str, str] = {}
    if stage.async_rollouts or stage.has_partial_rollouts:
        is_corrected = stage.loss.rollout_correction.method != "none"
        sources["rollouts sampled by older weights"] = "recomputed" if is_corrected else "recorded"
    if stage.carries_groups:
        sources["groups carried over from an earlier step"] = "recorded"
    if stage.replay is not None:
        sources["replayed rollouts"] = stage.replay.old_logprobs
    return [f"π_old of {kind}: {source}" for kind, source in sources.items()]


def _format_policy_loss(loss: schema.LossConfig) -> str:
    ratio = "r_i" if loss.importance_ratio_level == "sequence" else "r_t"
    advantage = "A_t" if loss.kl.coef and loss.kl.apply_to == "reward" else "A_i"
    clipped = f"clip({ratio}, {1 - loss.clip_low:g}, {1 + loss.clip_high:g}) {advantage}"
    match loss.policy_loss:
        case "clip":
            gain = f"min({ratio} {advantage}, {clipped})"
            if loss.dual_clip is None:
                return gain
            return f"max({gain}, {loss.dual_clip:g} {advantage} where {advantage} < 0)"
        case "cispo":
            return f"{clipped} log π(y_t)"
        case schema.CustomPolicyLossConfig(fn=fn, args=args):
            return f"l_t, l = {fn}(log π, log π_old, {advantage}{_format_args(args)})"


def _format_correction(correction: schema.RolloutCorrectionConfig) -> list[str]:
    ratio = "π_old(y_t) / π_sampler(y_t)"
    if correction.level == "sequence":
        ratio = f"Π_t {ratio}"
    match correction.method:
        case "none":
            return []
        case "tis":
            return [f"w_t = min({ratio}, {correction.high:g})"]
        case "mask":
            return [f"w_t = {ratio}, or 0 outside [{correction.low:g}, {correction.high:g}]"]


def _format_kl(kl: schema.KlConfig, stage_steps: int) -> list[str]:
    if not kl.coef:
        return []
    bound = "" if kl.log_ratio_clip is None else f", clipped to ±{kl.log_ratio_clip:g}"
    lines = [f"KL = {_KL_ESTIMATES[kl.estimator]}, d = log π_ref(y_t) - log π(y_t){bound}"]
    if kl.apply_to == "reward":
        lines.append(f"A_t = A_i - {_format_coefficient(kl, stage_steps)} · Σ KL of t and later tokens")
    return lines


def _format_coefficient(term: schema.LossCoefficientConfig, stage_steps: int) -> str:
    if term.schedule == "constant":
        return f"{term.coef:g}"
    last_coef, num_steps = term.coef * term.final_frac, term.decay_steps or stage_steps
    return f"{term.coef:g} ({term.schedule} to {last_coef:g} in {num_steps} steps)"


def _format_args(args: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in args.items())
