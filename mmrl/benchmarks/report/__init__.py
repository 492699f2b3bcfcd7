"""Reports on scored runs, and comparisons of two of them."""
