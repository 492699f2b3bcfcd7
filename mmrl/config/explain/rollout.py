"""What is done with a prompt after its first responses, in words."""

from __future__ import annotations

from types import MappingProxyType

from mmrl.config.schema import BlindProbeConfig, GenerateConfig, RethinkConfig, RolloutStepConfigs, ToolsConfig
from mmrl.config.schema.rollout_steps import step_name

_CORRUPTION_TEXT = MappingProxyType(
    {
        "left_out": "without its pictures and videos",
        "grey": "with its pictures and videos painted grey",
        "noise": "with noise in place of its pictures and videos",
        "swapped": "with the pictures and videos of another sample",
        "shuffled": "with the frames of its videos in another order",
        "cropped": "with a part of each picture alone",
    }
)


def explain_rollout_steps(steps: RolloutStepConfigs, temperature: float) -> str:
    """What is more than plain generation, a line or more for each step; `temperature` is that of first responses."""
    lines: list[str] = []
    for step in steps:
        match step:
            case RethinkConfig():
                lines += _explain_rethink(step, temperature)
            case GenerateConfig() if step.partial_rollout_tokens is not None:
                lines.append(_explain_partial_rollouts(step))
            case ToolsConfig():
                lines.append(_explain_tools(step))
            case BlindProbeConfig():
                lines.append(_explain_probe(step))
    return "\n".join(lines)


def _explain_rethink(step: RethinkConfig, temperature: float) -> list[str]:
    share = "all" if step.fraction == 1.0 else f"{step.fraction:.0%}"
    which = "" if step.only == "any" else f" that are {step.only}"
    low, high = step.accuracy_range
    band = "" if (low, high) == (0.0, 1.0) else f", of groups with {low:g} to {high:g} right"
    most = "" if step.max_attempts_per_group is None else f", at most {step.max_attempts_per_group} of a group"
    room = f" and leave room for {step.min_free_tokens} tokens" if step.min_free_tokens else ""
    cut = f"; in {step.cut_answer_fraction:.0%} the last answer is cut off first" if step.cut_answer_fraction else ""
    kept = {"all": "every attempt counts", "correct": "those that end right count", "improved": "wrong to right counts"}
    per_group = "" if step.max_kept_per_group is None else f", at most {step.max_kept_per_group} of a group"
    short = f", not those of fewer than {step.min_new_tokens} tokens" if step.min_new_tokens else ""
    place = "in place of its draft" if step.mode == "replace" else "beside its draft"
    warmth = temperature if step.temperature is None else step.temperature
    lines = [
        f"{step.name}: {share} of the responses{which} that end themselves{room}{band}{most} go on behind words they "
        f"did not choose, at temperature {warmth:g}, with at most {step.max_new_tokens} tokens{cut}",
        f"{kept[step.keep]}{per_group}{short}, {place}; right is {' and '.join(step.correct)} >= {step.threshold:g}",
    ]
    if any(trigger.only != "any" for trigger in step.triggers):
        lines.append("WARNING: some words are for right or for wrong drafts alone, and tell the model which it wrote")
    if step.keep != "all" or step.max_kept_per_group:
        lines.append("WARNING: attempts are dropped by what came of them, so group means are above the policy's own")
    return lines


def _explain_partial_rollouts(step: GenerateConfig) -> str:
    spent = "" if step.max_tokens_per_step is None else f", or {step.max_tokens_per_step} tokens are drawn"
    return (
        f"generate: {step.oversampling:g} times as many prompts at once, {step.partial_rollout_tokens} tokens at a time, until as many "
        f"groups as a step has are complete{spent}; the others go on in the next step"
    )


def _explain_tools(step: ToolsConfig) -> str:
    shown = f", and is shown {step.max_media} pictures or videos at most" if step.max_media else ""
    wrong = "it is told" if step.on_error == "feedback" else "the run ends"
    return (
        f"{step.name}: a response may call {_list_tools(step)}, {step.max_turns} times at most and up to {step.max_total_tokens} "
        f"tokens; it never learns what a tool says{shown}; where a tool fails or takes more than {step.timeout_s:g} "
        f"s, {wrong}"
    )


def explain_demonstration_tools(step: ToolsConfig) -> str:
    """What answers the calls of demonstrations."""
    return (
        f"{step.name}: calls in responses are answered by {_list_tools(step)} itself; what a tool says is never learned"
    )


def _list_tools(step: ToolsConfig) -> str:
    return ", ".join(f"{tool.call_name} ({tool.fn})" for tool in step.tools)


def _explain_probe(step: BlindProbeConfig) -> str:
    often = "every step" if step.every == 1 else f"every {step.every} steps"
    return (
        f"probe {step_name(step)}: {often}, {step.rollouts_per_prompt} more of each prompt {_CORRUPTION_TEXT[step.corruption]}; they are judged "
        "and never train"
    )
