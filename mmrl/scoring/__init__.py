"""Rollouts and rewards to scored groups; the only caller of reward functions."""

from mmrl.scoring.call import RewardError
from mmrl.scoring.combine import BoundTerm
from mmrl.scoring.scorer import Judge

__all__ = ["BoundTerm", "Judge", "RewardError"]
