"""Streams of lengths through a pool, for several tests."""

import numpy as np

from odb_nodes.planning import RollingPool, TokenBudget


def run(lengths, budget, window, patches=None):
    """Stream lengths through a pool; return groups of ordinals and the greatest age seen."""
    pool, groups, age = RollingPool(TokenBudget.of(budget), window), [], 0
    patches = patches or [0] * len(lengths)
    while True:
        while (room := min(pool.room(), len(lengths) - pool.pulled)) > 0:
            new = range(pool.pulled, pool.pulled + room)
            pool.add(new, [lengths[i] for i in new], [patches[i] for i in new], new)
            pool.pulled += room
        if not len(pool):
            return groups, age
        age = max(age, pool.pulled - pool.oldest)
        groups.append(pool.take(draining=pool.pulled == len(lengths)))


def lognormal(count, cv=1.0, seed=0):
    sigma = np.sqrt(np.log(1 + cv**2))
    draws = np.random.default_rng(seed).lognormal(np.log(800) - sigma**2 / 2, sigma, count)
    return np.clip(draws, 16, 8192).astype(int).tolist()
