"""The formulas: pure functions, one small file per idea. Only `loss` and `kl` know tensors."""
