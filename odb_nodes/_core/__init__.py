"""Private: checks, hashing, random numbers, fingerprints. Knows nothing of nodes."""
