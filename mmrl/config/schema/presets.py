"""Published settings that a name stands for: `algorithm: NAME` of a stage, `preset: NAME` of rethinking or replay.

They replace the schema's defaults, and what the config sets itself wins over them. The weight of the KL penalty is
never among them: papers vary it by model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import log
from typing import Literal, TypeAlias

AlgorithmName = Literal[
    "grpo",
    "grpo_published",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "stable_reinforce",
    "gdpo",
]

RethinkPreset = Literal["unbiased", "paper"]

ReplayPreset = Literal["default", "paper", "code"]

PresetValue: TypeAlias = "PresetSettings | Sequence[PresetValue] | str | float | None"
PresetSettings: TypeAlias = "Mapping[str, PresetValue]"

ALGORITHM_PRESETS: Mapping[AlgorithmName, Mapping[str, PresetSettings]] = {
    # DeepSeekMath, arXiv:2402.03300, aggregated over tokens as in TRL and verl today: the schema's own defaults.
    "grpo": {},
    # The same with the mean over responses of their token means, as published (eq. 3), which favours short ones.
    "grpo_published": {"loss": {"aggregation": "sequence"}},
    # arXiv:2503.20783: without the two biases, of length and of difficulty.
    "dr_grpo": {"advantage": {"scale": "none"}, "loss": {"aggregation": "fixed"}},
    # arXiv:2503.14476, eq. 8, 3.1, 3.4. Its soft punishment of length is a reward; resampling belongs to the batch.
    "dapo": {"loss": {"clip_high": 0.28, "aggregation": "token", "mask_truncated": True}},
    # arXiv:2507.18071, eq. 5 and 5.1. Old log-probs are the learner's own: rounding in a bfloat16 engine moves a
    # response's ratio by more than these bounds. `replay` is for stages that have it.
    "gspo": {
        "loss": {
            "importance_ratio_level": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence",
            "old_logprobs": "recomputed",
        },
        "replay": {"old_logprobs": "recomputed"},
    },
    # MiniMax-M1, arXiv:2506.13585, eq. 4 and 5; the bound of 5 is ScaleRL's, arXiv:2510.13786.
    "cispo": {"loss": {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregation": "token"}},
    # arXiv:2402.14740: REINFORCE on whole responses, hence sums over tokens.
    "rloo": {
        "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "loss": {"aggregation": "fixed", "fixed_length": 1, "old_logprobs": "recomputed"},
    },
    # arXiv:2501.03262, REINFORCE++-baseline: group mean, then the whole batch's deviation; k2 for the penalty.
    "reinforce_plus_plus_baseline": {
        "advantage": {"scale": "none", "batch_normalize": True},
        "loss": {"kl": {"estimator": "k2"}},
    },
    # R1-Reward, arXiv:2505.02835: pre-clip with 1e-3 and 1e3, advantage filter at 3 standard deviations.
    "stable_reinforce": {
        "advantage": {"baseline": "none", "scale": "none", "batch_normalize": True, "outlier_std": 3.0},
        "loss": {"log_ratio_clip": log(1e3)},
    },
    # arXiv:2601.05242: every reward normalised in its group, the sum over the batch.
    "gdpo": {"advantage": {"combine": "per_term", "batch_normalize": True}},
}

RETHINK_PRESETS: Mapping[RethinkPreset, PresetSettings] = {
    # The schema's own defaults: every continuation counts, whatever its outcome.
    "unbiased": {},
    # VL-Rethinker, arXiv:2504.08837, as its code has it. Departures: only the answer is cut off; incorrect first
    # responses are continued in groups with more than 0.7 correct too; responses that say "wait" five times are kept.
    "paper": {
        "min_free_tokens": 1024,
        "fraction": 0.65,
        "cut_answer_fraction": 0.5,
        "triggers": [
            {"text": "\n\nWait", "weight": 0.2},
            {"text": "\n\nWait, does it seem right?", "weight": 0.3},
            {"text": "\n\nWait, let's double check", "weight": 0.5, "only": "correct"},
            {"text": "\n\nWait, there might be a mistake", "weight": 0.5, "only": "incorrect"},
        ],
        "temperature": 0.9,
        "min_new_tokens": 31,
        "max_new_tokens": 1023,
        "keep": "correct",
        "max_kept_per_group": 2,
    },
}

REPLAY_PRESETS: Mapping[ReplayPreset, PresetSettings] = {
    # The schema's own defaults: a rollout is replayed for a few steps at most, and once a step.
    "default": {},
    # VL-Rethinker, arXiv:2504.08837 v1, 3.2: rollouts with an advantage stay for the whole episode, here the stage,
    # and fill up the step by |A|^alpha. The paper sets no capacity; this one bounds the memory of a machine.
    "paper": {"capacity": 65536, "max_staleness": None, "without_replacement": False},
    # `active_sampling(do_filter=True, do_ssr=True)` of its repository since commit 1474fd5: half a step, drawn by |A|
    # with replacement from the fresh rollouts, filled up from a buffer of that size. Its extra positives have weight 0
    # there: they are never drawn. The trainer of that commit never passes `do_filter`, which switches replay off; the
    # commit before, 4afedcd, does replay, and fills up a whole step with a buffer of half of one.
    "code": {
        "capacity": None,
        "max_staleness": None,
        "without_replacement": False,
        "resample_fresh": True,
        "target_fraction": 0.5,
    },
}


def check_preset_applied(preset: str, settings: PresetSettings, given: Collection[str], section: str = "") -> None:
    """Raise ValueError unless every setting of a preset is among the keys that are given.

    `preset` ("algorithm 'dapo'") and `section` ("loss.") name the preset and the place of its keys in the message.
    """
    # Loading a config file fills presets in; a model built in Python from the name alone would keep the defaults.
    missing = settings.keys() - given
    if missing:
        raise ValueError(
            f"{preset} stands for {section}{min(missing)} too, which only loading a config file fills in; set it"
        )
