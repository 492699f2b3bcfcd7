"""From experiences to new weights: loss, micro-batches, optimizer engines and the reference."""
