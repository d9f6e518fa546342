"""A hash of integers: random numbers that depend on their arguments alone, on no library."""

_MASK64 = 2**64 - 1


def hash_ints(*values: int) -> int:
    """Return a 64-bit hash of integers: SplitMix64 (Steele et al., 2014), absorbing one by one."""
    state = 0
    for value in values:
        state = (state + (value & _MASK64) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state
