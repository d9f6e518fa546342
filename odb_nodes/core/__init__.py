"""The heart: data are read, processed, grouped under a budget, aligned over ranks and loaded."""
