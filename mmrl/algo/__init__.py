"""The formulas of RL, a file for each idea: group rewards, filters, advantages, replay, losses.

What a later step needs (replay, carried-over groups, curriculum, rewards of a sample) is kept in `TrainingState`.
`losses` is the only module that needs torch.
"""
