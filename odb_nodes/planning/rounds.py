"""The number of steps that ranks settle in one exchange."""

from __future__ import annotations

from odb_nodes.planning.budget import round_up

FIRST_ROUND_STEPS = 4
"""Steps of an epoch's first round: few, so the first batch does not wait for a full round."""


def round_steps(number: int, world_size: int, round_size: int, accumulate: int) -> int:
    """Return the number of steps of a round in which no data ends: 4, 8, 16, ... `round_size`.

    Args:
        number: the round's number in its epoch, from 0.
        world_size: number of ranks; a single rank has nobody to settle a round with.
        round_size: steps of a full round.
        accumulate: steps of an optimizer step; a round is rounded up to a multiple of it.
    """
    if world_size == 1:
        return accumulate
    ramp = FIRST_ROUND_STEPS << min(number, 16)
    return round_up(min(round_size, ramp), accumulate)
