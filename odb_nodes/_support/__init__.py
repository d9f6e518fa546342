"""Private: checks, hashing, random numbers, fingerprints, ranks. Needs no node."""
