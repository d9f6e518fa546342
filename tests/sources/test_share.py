"""What a rank takes of an epoch, and how the rest of it is dealt to other ranks."""

import random

import numpy as np

from odb_nodes.sources.share import Share, dealt


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
                state.validate()
            shares = [Share(rank, ranks, state) for rank, state in enumerate(states)]
        for share in shares:
            numbers = share.at(share.done, share.count(size))
            assert all(number in share for number in numbers.tolist())
            assert sum(number in share for number in range(size)) == len(numbers)
            seen += numbers.tolist()
        assert sorted(seen) == [*range(size)]


def test_what_is_left_from_a_number_on():
    for start, named in ((0, []), (12, [3, 5, 9])):
        state = dealt([Share(0, 1).after(0)], 1)[0]
        state.start, state.extra = start, np.array(named, "<i8").tobytes() or None
        for rank in range(3):
            share = Share(rank, 3, state)
            own = [number for number in range(60) if number in share]
            for number in range(40):
                rest = [one for one in own if one >= number]
                for read_already in (0, 1, 4):
                    left = share.from_number(number, read_already)
                    found = [*left.named.tolist(), *range(left.start + rank, 60, 3)]
                    assert found == rest[read_already:]
