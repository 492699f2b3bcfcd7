"""The metrics of a run, each declared once. The console and docs/reference/metrics.md are made from this table.

A user's callback declares its own metrics in the same way: docs/extending/callback.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Metric:
    """Name and meaning of a number that is logged after a step, and how the console shows it."""

    name: str  # as in metrics.jsonl or timings.jsonl; `<...>` is a name that the config or the data chooses
    meaning: str  # a sentence, with the unit
    label: str = ""  # label on the console; a metric without one is not shown there
    form: str = ".3f"  # format of the value after the label, as Python's `format` takes it

    def __post_init__(self) -> None:
        """Raise a ValueError if `form` is not a format, in the line that declares it rather than after a step."""
        format(0.0, self.form)


# In the order of the console and of docs/reference/metrics.md. A test checks that each metric in the code is here.
METRICS: Final = (
    Metric("step", "Step within the stage, from 1."),
    Metric("stage", "Name of the stage."),
    Metric("accuracy", "Share of correct answers so far. Only `mmrl eval` shows it; no file has it.", label="accuracy"),
    # Rewards
    Metric("reward/mean", "Mean total reward of the step's rollouts.", label="reward"),
    Metric("reward/std", "Population standard deviation of the total reward over the step's rollouts."),
    Metric("reward/min", "Least total reward of the step's rollouts."),
    Metric("reward/max", "Largest total reward of the step's rollouts."),
    Metric("reward/task/<task>", "Mean total reward of the rollouts of one task."),
    Metric(
        "reward/term/<term>", "Mean of a reward term over its samples' rollouts; 0 for rollouts that `when` excludes."
    ),
    Metric("reward/dropped", "Rollouts left out because a reward could not score them."),
    Metric("reward/<term>/<failure>", "Failed calls of one reward term, by kind of failure."),
    Metric("reward/step/<step>/<failure>", "Rollouts left out because a rollout step failed, by kind of failure."),
    Metric("reward/<term>/fallback", "Rollouts that the fallback of a reward term decided."),
    Metric("advantage/min", "Least advantage of a rollout in the step, or of a turn in one."),
    Metric("advantage/max", "Largest advantage of a rollout in the step, or of a turn in one."),
    # Selection
    Metric(
        "groups/nonzero_advantage_frac", "Share of groups with a nonzero advantage.", label="informative", form=".0%"
    ),
    Metric("groups/carried_over", "Surplus groups of earlier steps that this step trains on."),
    Metric(
        "groups/dropped_changed_media", "Groups of earlier steps that were dropped because their media changed on disk."
    ),
    Metric("replay/frac", "Share of trained rollouts that were replayed.", label="replayed", form=".0%"),
    Metric("replay/buffer_size", "Rollouts in the replay buffer."),
    Metric("replay/unique_frac", "Share of trained rollouts that are distinct, replayed ones included."),
    Metric("replay/effective_size", "Effective number of rollouts that replay draws from, given its probabilities."),
    Metric("replay/staleness_mean", "Mean age of replayed rollouts, in policy versions."),
    Metric("replay/staleness_max", "Largest age of a replayed rollout, in policy versions."),
    Metric(
        "replay/dropped_changed_media", "Rollouts dropped from the replay buffer because their media changed on disk."
    ),
    Metric("data/dropped", "Samples left out of the step because they are unreadable or too long."),
    Metric("data/curriculum_phase", "Phase of the curriculum, from 0, that the step's first samples come from."),
    Metric("dynamic_sampling/passed_frac", "Share of the step's groups that passed dynamic sampling."),
    Metric("dynamic_sampling/rejected/<reason>", "Groups that dynamic sampling rejected, by reason."),
    # Rollouts
    Metric("rollout/count", "Rollouts written by a sample stage."),
    Metric("rollout/truncated_frac", "Share of rollouts cut at max_new_tokens.", label="truncated", form=".0%"),
    Metric("rollout/response_tokens_mean", "Mean length of a response, in tokens.", label="tokens", form=".1f"),
    Metric("rollout/response_tokens_min", "Length of the shortest response, in tokens."),
    Metric("rollout/response_tokens_max", "Length of the longest response, in tokens."),
    Metric("rollout/duplicate_frac", "Share of rollouts whose text repeats a sibling's text."),
    Metric("rollout/duplicate_answer_frac", "Share of rollouts whose answer repeats a sibling's answer."),
    Metric("rollout/staleness_mean", "Mean age of the oldest token in each rollout of the step, in policy versions."),
    Metric("rollout/staleness_max", "Largest age of the oldest token in a rollout of the step, in policy versions."),
    Metric("rollout/unfinished_groups", "Groups that a sampling round left to the next one (partial rollouts)."),
    Metric("rollout/resumed_rollouts", "Rollouts that continued from an earlier step (partial rollouts)."),
    Metric(
        "rollout/logprob_diff_mean",
        "Mean |sampler - learner| log-prob of tokens sampled by this policy version, in nats.",
    ),
    Metric(
        "rollout/stale_logprob_diff_mean",
        "Mean |sampler - learner| log-prob of the previous version's tokens, after one step of learning, in nats.",
    ),
    Metric("rollout/logprob_diff_max", "Largest |sampler - learner| log-prob of a token of either version, in nats."),
    Metric(
        "rollout/route_diff_tokens_frac",
        "Share of scored tokens that engine and learner send to different experts in any layer.",
    ),
    Metric("rollout/route_diff_choices_frac", "Share of tokens that both route differently, mean over layers."),
    Metric(
        "rollout/tokens_per_s",
        "Sampled tokens in the step's responses, earlier steps' tokens included, per second of the step's rollouts.",
        label="tokens/s",
        form=".0f",
    ),
    # Rollout steps; <step> is the name of the step
    Metric("rethink/frac", "Share of a sample stage's rollouts that were continued by forced rethinking."),
    Metric("reworded/no_majority", "Groups left out because the answers to the other wording have no majority."),
    Metric("<step>/attempted", "Continuations generated by a rethink step."),
    Metric("<step>/kept", "Continuations that the step kept."),
    Metric("<step>/truncated", "Continuations cut at max_new_tokens, or episodes that a limit ended."),
    Metric("<step>/new_tokens", "Tokens of all continuations, after their triggers."),
    Metric("<step>/correct_to_correct", "Continuations that stayed correct."),
    Metric("<step>/correct_to_incorrect", "Continuations that turned correct into incorrect."),
    Metric("<step>/incorrect_to_correct", "Continuations that turned incorrect into correct."),
    Metric("<step>/incorrect_to_incorrect", "Continuations that stayed incorrect."),
    Metric("<step>/calls", "Tool calls."),
    Metric("<step>/results", "Tool calls that returned a result."),
    Metric("<step>/refused", "Tool calls that the tool refused."),
    Metric("<step>/invalid", "Tool calls, or turns in an environment, that could not be read or used."),
    Metric("<step>/errors", "Tool calls or episodes that ended with an exception."),
    Metric("<step>/timeouts", "Tool calls or episodes whose process was killed at its deadline."),
    Metric("<step>/limits", "Tool calls or episodes whose process was killed for exceeding a memory or process limit."),
    Metric("<step>/media_shown", "Images and videos shown by tools or in episodes."),
    Metric("<step>/episodes", "Episodes in an environment; the metrics below sum over them."),
    Metric("<step>/turns", "Turns of all episodes; each turn is one action."),
    Metric("<step>/replayed", "Turns before which an episode was played again because its process was lost."),
    Metric("<step>/terminated", "Episodes that the environment ended as done."),
    Metric("<step>/reward", "Sum of the rewards that the environment gave."),
    Metric("<step>/crashes", "Episodes whose process died."),
    Metric("<step>/unscorable", "Episodes in which the environment abstained."),
    Metric("<step>/info/<name>", "A number that the environment reports, at the last turn of each episode."),
    Metric("<step>/unanswered", "Tool calls without a result because the response ran out of turns or tokens."),
    Metric("probe/blind_gap/<probe>/<term>", "Mean of a reward term with the media minus its mean without them."),
    # Learning
    Metric("learner/loss", "Loss of the step.", label="loss", form=".4f"),
    Metric("learner/lr", "Learning rate of the step.", label="lr", form=".1e"),
    Metric("learner/lr/<component>", "Learning rate of a component whose rate differs (`lr_by_component`)."),
    Metric("learner/grad_norm", "Global gradient norm before clipping."),
    Metric("learner/grad_norm/<component>", "Gradient norm of the vision tower, the projector or the language model."),
    Metric("learner/no_gradient_frac", "Share of rollouts without a gradient, so no forward pass ran for them."),
    Metric("learner/nonfinite_updates", "Updates skipped because their gradient was not finite."),
    Metric("learner/reference_resets", "1 in a step that reset the reference to the policy, else 0."),
    Metric("learner/sft_loss_nats", "Supervised loss of an rl stage, in nats per token."),
    Metric("policy/approx_kl", "KL divergence from the ratio's old policy, in nats per token (Schulman's k3)."),
    Metric(
        "policy/clip_frac",
        "Share of tokens whose policy loss a bound on the importance ratio changed; with `clip` it gives them no "
        "gradient, with `cispo` it does. With a loss of yours, tokens count that `clip` would change.",
        label="clip_frac",
        form=".1%",
    ),
    Metric("policy/clip_frac_low", "Share of tokens with A < 0 (cispo: A ≠ 0) whose ratio was below the lower bound."),
    Metric("policy/clip_frac_high", "Share of tokens with A > 0 (cispo: A ≠ 0) whose ratio was above the upper bound."),
    Metric("policy/clip_frac_dual", "Share of tokens with A < 0 whose importance ratio was above `loss.dual_clip`."),
    Metric("policy/entropy_nats", "Mean entropy in responses with a gradient, in nats.", label="entropy", form=".2f"),
    Metric("policy/reference_kl_nats", "KL divergence from the reference, in nats per token."),
    Metric("policy/importance_ratio_min", "Least importance ratio of a token."),
    Metric("policy/importance_ratio_max", "Largest importance ratio of a token."),
    Metric("policy/rollout_correction_weight_mean", "Mean weight of the rollout correction."),
    Metric("policy/router_load_entropy", "Entropy of the experts' load, 1 if balanced; mean over layers."),
    Metric("policy/router_margin", "Mean gap in probability between the last expert picked and the first not picked."),
    Metric("logprob_check/diff_mean", "Mean |engine - learner| log-prob in the log-prob check, in nats."),
    Metric(
        "logprob_check/diff_mean/<modality>",
        "Mean |engine - learner| log-prob over the prompts of one modality, in nats.",
    ),
    # Evaluation
    Metric("validation/<task>", "Mean reward of a task's validation samples; `validation/mean` averages tasks."),
    Metric("validation/<step>/<count>", "Count of a rollout step over the validation samples, such as `calls`."),
    Metric("validation/<step>/info/<name>", "A number that the environment reports, over the validation samples."),
    Metric("test/<task>", "Mean reward of one task's test samples, before and after the run."),
    Metric("test/<step>/<count>", "Count of a rollout step over the test samples, such as `calls`."),
    Metric("test/<step>/info/<name>", "A number that the environment reports, over the test samples."),
    Metric("benchmark/<name>/<metric>", "Metric of a benchmark, such as accuracy, official_score or pass@k."),
    Metric("benchmark/<name>/<column>/<value>", "Accuracy on a subset of a benchmark."),
    Metric("select/<name>", "Counts of a select stage: `kept`, `total`, `rows`; and the `median` of its metric."),
    # timings.jsonl
    Metric("time/<activity>_s", "Seconds of the step spent on one activity; `learn` includes the weight sync."),
)


def find_builtin_metric(name: str) -> Metric | None:
    """Return the metric of `METRICS` that has this name, `<...>` filled in; None if mmrl writes no such metric.

    If several have it, the one with the fewest `<...>` is returned; of those, the one whose first `<...>` comes last.
    """
    found = []
    for metric in METRICS:
        if re.fullmatch(re.sub("<[^>]*>", "[^/]+", re.escape(metric.name)), name):
            found.append(metric)
    return min(found, key=lambda metric: (metric.name.count("<"), -metric.name.find("<")), default=None)
