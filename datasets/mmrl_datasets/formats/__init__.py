"""File formats: each module yields the rows of one format. `readers` give the rows a meaning."""
