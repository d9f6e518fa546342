"""How many steps the ranks settle at a time."""

from __future__ import annotations

from odb_nodes.planning.budget import round_up

FIRST_ROUND_STEPS = 4
"""Steps of an epoch's first round: few, so that the first batch does not wait for a whole round."""


def round_steps(number: int, *, world_size: int, round_size: int, accumulate: int) -> int:
    """Return how many steps a round has, unless the data ends in it: 4, 8, 16, ... `round_size`.

    Args:
        number: of the round in its epoch, from 0.
        world_size: ranks; one rank alone has nobody to settle a round with.
        round_size: steps of a full round.
        accumulate: steps of an optimizer step; every round is rounded up to a multiple of it.
    """
    if world_size == 1:
        return accumulate
    ramp = FIRST_ROUND_STEPS << min(number, 16)
    return round_up(min(round_size, ramp), accumulate)
