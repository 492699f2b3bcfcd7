"""The explanation of a config in words and formulas."""
