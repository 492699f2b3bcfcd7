"""Rollouts and rewards to scored groups; the only caller of reward functions."""

from mmrl.score.judge import Judge
from mmrl.score.outcome import RewardError
from mmrl.score.terms import BoundTerm

__all__ = ["BoundTerm", "Judge", "RewardError"]
