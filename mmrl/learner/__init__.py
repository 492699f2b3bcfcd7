"""From experiences to new weights: loss, micro-batches, optimizers and the reference."""
