"""`mmrl explain`: values with their origins, what the set ones mean, and objectives as formulas."""

import re

import pytest
from config_samples import FULL, SMALL, write

from mmrl.config import explain, load_config
from mmrl.config.schema.presets import ALGORITHM_PRESETS


def explained(tmp_path, *overrides, text=SMALL):
    """Return the explanation of a config with overrides, its white space reduced to single spaces."""
    return " ".join(explain(load_config(write(tmp_path, text), overrides)).split())


def test_each_setting_is_listed_with_value_and_origin(tmp_path):
    path = write(tmp_path, SMALL)
    words = explain(load_config(path, ["stages.rl.loss.kl.coef=0.02", 'response_format.stop_strings=["a\\n\\nb"]']))
    assert re.search(rf"^stages\.0\.steps +10 +{re.escape(str(path))}:13$", words, re.MULTILINE)
    assert re.search(r"^stages\.1\.loss\.kl\.coef +0\.02 +command line$", words, re.MULTILINE)
    assert re.search(r"^run\.seed +0 +·$", words, re.MULTILINE)
    assert re.search(r"^response_format\.stop_strings +\['a\\n\\nb'\] +command line$", words, re.MULTILINE)


@pytest.mark.parametrize(
    "meaning",
    [
        "model.freeze [vision]: Components that are not trained",
        "model.lora: A low-rank adapter; all weights of the model itself are frozen. model.lora.targets ",
        "rewards.terms.0.when {task: [count]}: Samples that it applies to",
        "rewards.terms.1.transform.clip [0.0, 0.9]: Values outside",
        "rewards.terms.2.schedule.points [[0, 1.0], [10, 0.5]]: Pairs of a step",
        "stages.0.optimizer.lr_by_component.language 1e-05: Peak learning rate",
        "stages.1.replay.capacity 64: Rollouts that the buffer holds",
        "stages.1.rollout_steps.1: Forced rethinking: finished responses are continued",
        "stages.1.rollout_steps.1.temperature 0.9: Sampling temperature of continuations",
        "evaluation.benchmarks.0.every 5: The benchmark runs every so many steps",
    ],
)
def test_a_setting_that_is_set_is_shown_with_its_description(tmp_path, meaning):
    assert meaning in explained(tmp_path, text=FULL)


def test_settings_with_their_default_are_not_described(tmp_path):
    assert "Nucleus sampling" not in explained(tmp_path)


def test_the_size_of_a_step_is_shown(tmp_path):
    words = explained(tmp_path, "stages.rl.num_mini_batches=4", "stages.rl.ppo_epochs=2")
    assert "Stage 1 of 2, cold: sft each step: 32 samples, updates: 1" in words
    assert "Stage 2 of 2, rl: rl, grpo each step: 16 prompts x 8 rollouts = 128 rollouts, updates: 8" in words
    assert "N: sampled tokens of a mini-batch" in words


ALGORITHMS = {
    "grpo": "A_i = (R_i - mean(R)) / (std(R) + 0.0001) L = -(1/N) Σ_i Σ_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)",
    "grpo_published": "L = -(1/S) Σ_i (1/n_i) Σ_t min(r_t A_i",
    "dr_grpo": "A_i = R_i - mean(R) L = -(1/(512 S)) Σ_i Σ_t min(r_t A_i",
    "dapo": "clip(r_t, 0.8, 1.28) A_i)",
    "gspo": "min(r_i A_i, clip(r_i, 0.9997, 1.0004) A_i) S: responses of a step; n_i: tokens of a response r_i =",
    "cispo": "Σ_t clip(r_t, 0, 5) A_i log π(y_t)",
    "rloo": "A_i = R_i - mean(R without R_i) L = -(1/S) Σ_i Σ_t min(r_t A_i",
    "reinforce_plus_plus_baseline": "A_i = R_i - mean(R) A_i ← (A_i - mean(A)) / (std(A) + 0.0001), over the step",
    "stable_reinforce": "A_i ← 0 where |A_i - mean(A)| > 3 std(A)",
    "gdpo": "A_i ← Σ weight · A_i of each reward term, whose value is its R_i",
}


@pytest.mark.parametrize("name", ALGORITHM_PRESETS)
def test_each_algorithm_has_its_formula(tmp_path, name):
    assert ALGORITHMS[name] in explained(tmp_path, f"stages.rl.algorithm={name}")


@pytest.mark.parametrize(
    ("override", "formula"),
    [
        ("rewards={terms: [{fn: a:b, weight: 0.5}, {fn: a:c}]}", "R_i = 0.5 · b + 1 · c "),
        ("rewards={combine: product, terms: [{fn: a:b, weight: 2}, {fn: a:c}]}", "R_i = b^2 · c^1 "),
        ("rewards={combine: min, terms: [{fn: a:b}, {fn: a:c, name: d}]}", "R_i = min(b, d) "),
        ("rewards={terms: [{fn: a:b}], group_rewards: [{fn: a:g, weight: 0.2}]}", "R_i = 1 · b + 0.2 · g "),
        ("stages.rl.advantage={fn: a:rank, args: {tie: x}}", "A = a:rank(R, terms, tie='x')"),
        ("stages.rl.advantage={baseline: batch_mean, scale: batch_std}", "(R_i - mean(R of the step)) / (std(R of the"),
        ("stages.rl.advantage.difficulty_weight={term: b, max_weight: 1.8}", "1.8 · 4 p (1 - p) A_i, p = mean(b)"),
        ("stages.rl.loss.policy_loss={fn: a:loss, args: {eps: 0.1}}", "L = (1/N) Σ_i Σ_t l_t, l = a:loss(log π, log"),
        ("stages.rl.loss={old_logprobs: recomputed, rollout_correction: {method: tis}}", "w_t = min(π_old(y_t) / π_s"),
        (
            "stages.rl.loss={old_logprobs: recomputed, rollout_correction: {method: mask, level: sequence, high: 5}}",
            "Σ_t w_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i) N: sampled tokens of a step r_t = π(y_t) / π_old(y_t), "
            "π_old recomputed w_t = Π_t π_old(y_t) / π_sampler(y_t), or 0 outside [0.5, 5]",
        ),
        ("stages.rl.loss.kl={coef: 0.1, estimator: k2}", "KL = d²/2, d = log π_ref(y_t) - log π(y_t)"),
        ("stages.rl.loss.kl.coef=0.1", "A_i) + 0.1 · KL"),
        ("stages.rl.loss.kl={coef: 0.1, apply_to: reward}", "A_t = A_i - 0.1 · Σ KL of t and later tokens"),
        ("stages.rl.loss.kl={coef: 0.1, log_ratio_clip: 10}", "d = log π_ref(y_t) - log π(y_t), clipped to ±10"),
        ("stages.rl.loss.entropy.coef=0.01", "A_i) - 0.01 · H(π)"),
        ("stages.rl.loss.kl={coef: 0.1, schedule: linear}", "A_i) + 0.1 (linear to 0 in 20 steps) · KL"),
        (
            "stages.rl.loss.kl={coef: 0.1, schedule: cosine, final_frac: 0.5, decay_steps: 9, apply_to: reward}",
            "A_t = A_i - 0.1 (cosine to 0.05 in 9 steps) · Σ KL",
        ),
        (
            "stages.rl.loss.entropy={coef: 0.01, schedule: cosine, decay_steps: 9}",
            "A_i) - 0.01 (cosine to 0 in 9 steps) · H(π)",
        ),
        ("stages.rl.loss.sft_loss={coef: 0.05, on: response}", "A_i) + 0.05 · NLL"),
        (
            "stages.rl.loss.sft_loss={coef: 0.05, on: response}",
            "NLL = mean of -log π(y_t) over the policy's tokens with a positive advantage of a step",
        ),
        ("stages.rl.loss.dual_clip=3", "Σ_t max(min(r_t A_i, clip(r_t, 0.8, 1.2) A_i), 3 A_i where A_i < 0) N:"),
        ("stages.rl.loss.log_ratio_clip=6.9", "π_old recorded r uses log π(y_t) - log π_old(y_t) clipped to ±6.9"),
        ("stages.rl.loss.mask_truncated=true", "N: sampled tokens of a step, without truncated responses r_t"),
        ("stages.cold.loss_on=answer", "y: the sample's label; N: answer tokens of a step"),
    ],
)
def test_each_option_of_the_objective_is_in_its_formula(tmp_path, override, formula):
    assert formula in explained(tmp_path, override)


def test_the_tokens_of_a_loss_after_rethinking_are_named(tmp_path):
    steps = "stages.rl.rollout_steps=[{kind: generate}, {kind: rethink, correct: [exact]}]"
    words = explained(tmp_path, steps, "stages.rl.sampling.max_new_tokens=2048", "stages.rl.loss.sft_loss.coef=0.05")
    assert "over the policy's tokens after a forced trigger in correct responses of a step" in words


@pytest.mark.parametrize(("preset", "num_warnings"), [("unbiased", 0), ("paper", 2)])
def test_rethinking_that_favours_correct_responses_is_warned_of(tmp_path, preset, num_warnings):
    steps = f"[{{kind: generate}}, {{kind: rethink, correct: [exact], preset: {preset}}}]"
    words = explained(tmp_path, f"stages.rl.rollout_steps={steps}", "stages.rl.sampling.max_new_tokens=2048")
    assert words.count("WARNING: ") == num_warnings


CHUNKS = "stages.rl.rollout_steps=[{kind: generate, partial_rollout_tokens: 64, oversampling: 2.0}]"
CARRIES = "stages.rl.dynamic_sampling={ranges: [{term: exact}], extra: carry}"
CORRECTED = "stages.rl.loss={old_logprobs: recomputed, rollout_correction: {method: tis}}"
OLDER = "π_old of rollouts sampled by older weights"


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        ([], []),
        (["stages.rl.async_rollouts=true"], [f"{OLDER}: recorded"]),
        ([CORRECTED, "stages.rl.async_rollouts=true"], [f"{OLDER}: recomputed"]),
        (
            [CORRECTED, CHUNKS, CARRIES, "stages.rl.replay={}"],
            [
                f"{OLDER}: recomputed",
                "π_old of groups carried over from an earlier step: recorded",
                "π_old of replayed rollouts: recorded",
            ],
        ),
        (["stages.rl.algorithm=gspo", "stages.rl.replay={}"], ["π_old of replayed rollouts: recomputed"]),
    ],
)
def test_old_logprobs_of_rollouts_of_an_older_policy_are_listed(tmp_path, overrides, lines):
    page = explain(load_config(write(tmp_path, SMALL), overrides))
    assert [line.strip() for line in page.splitlines() if "π_old of" in line] == lines
