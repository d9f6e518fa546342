"""What a rank takes of an epoch, and how the rest of it is dealt to other ranks."""

import random

from odb_nodes.sources.sharded_sampler import Share, dealt


def test_what_is_left_of_a_share_is_dealt_once():
    rng = random.Random(0)
    for _ in range(100):
        size, ranks = rng.randrange(1, 200), rng.randrange(1, 6)
        shares, seen = [Share(rank, ranks) for rank in range(ranks)], []
        for _ in range(3):
            left = []
            for share in shares:
                out = rng.randint(share.done, share.count(size))
                seen += share.at(share.done, out).tolist()
                left.append(share.after(out))
            ranks = rng.randrange(1, 6)
            states = dealt(left, ranks, size)
            for state in states:
                state.done = rng.randrange(5)
            shares = [Share(rank, ranks, state) for rank, state in enumerate(states)]
        for share in shares:
            numbers = share.at(share.done, share.count(size))
            seen += numbers.tolist()
        assert sorted(seen) == [*range(size)]
