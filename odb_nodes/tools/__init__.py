"""Look at a run before it runs. Knows planning and samples, and starts no job."""
