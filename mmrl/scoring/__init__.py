"""Rollouts and rewards to scored groups; the only caller of reward functions."""

from mmrl.scoring.build.call import RewardError
from mmrl.scoring.build.combine import BoundTerm
from mmrl.scoring.build.scorer import Judge

__all__ = ["BoundTerm", "Judge", "RewardError"]
