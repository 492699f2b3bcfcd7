"""The formulas of RL, a file for each idea: group rewards, filters, advantages, replay, losses.

`TrainingState` keeps everything that a later step needs: replay, carried-over groups, curriculum, rewards of a sample.
Only `losses` needs torch.
"""
