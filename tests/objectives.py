"""Every objective that the tests go through: the published bundles, and each setting by itself."""

from mmrl.config.schema import AdvantageConfig, LossConfig
from mmrl.config.schema.presets import ALGORITHM_PRESETS

KL = {"coef": 0.3}
WEIGHTS = {"kind": "truncate", "high": 1.1}
SETTINGS = {
    "sequence ratio": {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    "sequence token ratio": {"ratio": "sequence_token", "clip_low": 0.05, "clip_high": 0.05},
    "dual clip": {"dual_clip": 1.1},
    "log-ratio clamp": {"log_ratio_clamp": 0.1},
    "sum over tokens": {"aggregate": "fixed", "fixed_length": 1},
    "learner's old": {"old": "learner"},
    "truncated weights": {"old": "learner", "correction": WEIGHTS},
    "truncated sequence weights": {"old": "learner", "correction": {**WEIGHTS, "level": "sequence"}},
    "masked weights": {"old": "learner", "correction": {"kind": "mask", "low": 0.8, "high": 1.2}},
    "k2": {"kl": {**KL, "estimator": "k2"}},
    "k3 clamped, falling": {"kl": {**KL, "clamp": 0.4, "decay": "linear", "final_frac": 0.1}},
    "k1 in reward": {"kl": {**KL, "estimator": "k1", "place": "reward"}},
    "k3 in reward of sequences": {"ratio": "sequence", "aggregate": "sequence", "kl": {**KL, "place": "reward"}},
    "entropy, falling": {"entropy": {"coef": 0.2, "decay": "cosine"}},
    "nll after a trigger": {"nll": {"coef": 0.5}},
    "nll": {"nll": {"coef": 0.5, "on": "response"}, "aggregate": "sequence"},
}
BUNDLES = {f"algorithm {name}": bundle.get("loss", {}) for name, bundle in ALGORITHM_PRESETS.items()}
LOSSES = {
    **{name: LossConfig(**bundle) for name, bundle in BUNDLES.items()},
    **{
        f"{name}, KL": LossConfig(**{**bundle, "kl": {**KL, **bundle.get("kl", {})}})
        for name, bundle in BUNDLES.items()
    },
    **{name: LossConfig(**settings) for name, settings in SETTINGS.items()},
}
ADVANTAGES = {name: AdvantageConfig(**bundle.get("advantage", {})) for name, bundle in ALGORITHM_PRESETS.items()}
