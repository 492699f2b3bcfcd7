"""What rollouts say of their own tokens, in the order in which a batch scores them."""

from collections.abc import Sequence

import torch

from mmrl.policy.batch import group_by_prompt
from mmrl.types import Author, Experience


def recorded(experiences: Sequence[Experience]) -> torch.Tensor:
    """Log-probs as sampled, of every learned token, [N]."""
    segments = [segment for group in group_by_prompt(experiences) for e in group for segment in e.rollout.segments]
    learned = [segment for segment in segments if segment.author in (Author.POLICY, Author.DEMONSTRATION)]
    return torch.tensor([logp for segment in learned for logp in segment.logprobs])
