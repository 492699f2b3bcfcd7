"""Every objective that the tests go through: the published bundles, and each setting by itself."""

from mmrl.config.schema import AdvantageConfig, LossConfig
from mmrl.config.schema.presets import ALGORITHM_PRESETS

KL = {"coef": 0.3}
WEIGHTS = {"method": "tis", "high": 1.1}
SETTINGS = {
    "sequence ratio": {"importance_ratio_level": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "dual clip": {"dual_clip": 1.1},
    "log-ratio clamp": {"log_ratio_clip": 0.1},
    "sum over tokens": {"aggregation": "fixed", "fixed_length": 1},
    "learner's old": {"old_logprobs": "recomputed"},
    "truncated weights": {"old_logprobs": "recomputed", "rollout_correction": WEIGHTS},
    "truncated sequence weights": {
        "old_logprobs": "recomputed",
        "rollout_correction": {**WEIGHTS, "level": "sequence"},
    },
    "masked weights": {"old_logprobs": "recomputed", "rollout_correction": {"method": "mask", "low": 0.8, "high": 1.2}},
    "k2": {"kl": {**KL, "estimator": "k2"}},
    "k3 clamped, falling": {"kl": {**KL, "log_ratio_clip": 0.4, "schedule": "linear", "final_frac": 0.1}},
    "k1 in reward": {"kl": {**KL, "estimator": "k1", "apply_to": "reward"}},
    "k3 in reward of sequences": {
        "importance_ratio_level": "sequence",
        "aggregation": "sequence",
        "kl": {**KL, "apply_to": "reward"},
    },
    "entropy, falling": {"entropy": {"coef": 0.2, "schedule": "cosine"}},
    "nll after a trigger": {"sft_loss": {"coef": 0.5}},
    "nll": {"sft_loss": {"coef": 0.5, "on": "response"}, "aggregation": "sequence"},
}
BUNDLES = {f"algorithm {name}": bundle.get("loss", {}) for name, bundle in ALGORITHM_PRESETS.items()}
LOSSES = {
    **{name: LossConfig(**bundle) for name, bundle in BUNDLES.items()},
    **{f"{name}, KL": LossConfig(**{**own, "kl": {**KL, **own.get("kl", {})}}) for name, own in BUNDLES.items()},
    **{name: LossConfig(**settings) for name, settings in SETTINGS.items()},
}
ADVANTAGES = {name: AdvantageConfig(**bundle.get("advantage", {})) for name, bundle in ALGORITHM_PRESETS.items()}
