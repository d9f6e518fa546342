"""Private: what we rely on inside of other libraries, a file for each."""
