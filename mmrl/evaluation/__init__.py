"""A model sits an exam: benchmarks asked, answered and scored as in training, with every file to audit it by."""
