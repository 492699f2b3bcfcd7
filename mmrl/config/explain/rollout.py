"""What is done with a prompt after its first responses, in words."""

from __future__ import annotations

from types import MappingProxyType

from mmrl.config.schema import ContinueWith, Generate, Probe, Steps, UseTools
from mmrl.config.schema.rollout_steps import step_name

_HIDDEN = MappingProxyType(
    {
        "left_out": "without its pictures and videos",
        "grey": "with its pictures and videos painted grey",
        "noise": "with noise in place of its pictures and videos",
        "swapped": "with the pictures and videos of another sample",
        "shuffled": "with the frames of its videos in another order",
        "cropped": "with a part of each picture alone",
    }
)


def program(steps: Steps, temperature: float) -> str:
    """What is more than plain generation, a line or more for each step; `temperature` is that of first responses."""
    lines: list[str] = []
    for step in steps:
        match step:
            case ContinueWith():
                lines += _rethinking(step, temperature)
            case Generate() if step.chunk is not None:
                lines.append(_chunks(step))
            case UseTools():
                lines.append(_tools(step))
            case Probe():
                lines.append(_probe(step))
    return "\n".join(lines)


def _rethinking(step: ContinueWith, temperature: float) -> list[str]:
    share = "all" if step.fraction == 1.0 else f"{step.fraction:.0%}"
    which = "" if step.which == "any" else f" that are {step.which}"
    low, high = step.band
    band = "" if (low, high) == (0.0, 1.0) else f", of groups with {low:g} to {high:g} right"
    most = "" if step.attempts_per_group is None else f", at most {step.attempts_per_group} of a group"
    room = f" and leave room for {step.room} tokens" if step.room else ""
    cut = f"; in {step.cut_fraction:.0%} the last answer is cut off first" if step.cut_fraction else ""
    kept = {"all": "every attempt counts", "correct": "those that end right count", "improved": "wrong to right counts"}
    per_group = "" if step.kept_per_group is None else f", at most {step.kept_per_group} of a group"
    short = f", not those of fewer than {step.min_new_tokens} tokens" if step.min_new_tokens else ""
    place = "in place of its draft" if step.place == "replace" else "beside its draft"
    warmth = temperature if step.temperature is None else step.temperature
    lines = [
        f"{step.name}: {share} of the responses{which} that end themselves{room}{band}{most} go on behind words they "
        f"did not choose, at temperature {warmth:g}, with at most {step.max_new_tokens} tokens{cut}",
        f"{kept[step.keep]}{per_group}{short}, {place}; right is {' and '.join(step.correct)} >= {step.threshold:g}",
    ]
    if any(trigger.verdict != "any" for trigger in step.triggers):
        lines.append("WARNING: some words are for right or for wrong drafts alone, and tell the model which it wrote")
    if step.keep != "all" or step.kept_per_group:
        lines.append("WARNING: attempts are dropped by what came of them, so group means are above the policy's own")
    return lines


def _chunks(step: Generate) -> str:
    spent = "" if step.token_budget is None else f", or {step.token_budget} tokens are drawn"
    return (
        f"generate: {step.over_sample:g} times as many prompts at once, {step.chunk} tokens at a time, until as many "
        f"groups as a step has are complete{spent}; the others go on in the next step"
    )


def _tools(step: UseTools) -> str:
    shown = f", and is shown {step.max_views} pictures or videos at most" if step.max_views else ""
    wrong = "it is told" if step.on_error == "feedback" else "the run ends"
    return (
        f"{step.name}: a response may call {_named(step)}, {step.turns} times at most and up to {step.max_tokens} "
        f"tokens; it never learns what a tool says{shown}; where a tool fails or takes more than {step.deadline_s:g} "
        f"s, {wrong}"
    )


def answered(step: UseTools) -> str:
    """What answers the calls of demonstrations."""
    return f"{step.name}: calls in responses are answered by {_named(step)} itself; what a tool says is never learned"


def _named(step: UseTools) -> str:
    return ", ".join(f"{tool.called} ({tool.fn})" for tool in step.tools)


def _probe(step: Probe) -> str:
    often = "every step" if step.every == 1 else f"every {step.every} steps"
    return (
        f"probe {step_name(step)}: {often}, {step.rollouts} more of each prompt {_HIDDEN[step.what]}; they are judged "
        "and never train"
    )
