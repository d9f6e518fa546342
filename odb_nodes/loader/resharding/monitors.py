"""Rule: a `Monitor` begins anew at its step, since its counts are those of the ranks there were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from odb_nodes.contract import copy_state
from odb_nodes.contract.state import ENVELOPE
from odb_nodes.errors import StateError


def monitor_anew(states: Sequence[Any], world_size: int) -> list[Any]:
    """Return states of a `Monitor` that has counted nothing yet, as after `Monitor.reset`.

    Args:
        states: its state on each rank, without digests.
        world_size: number of ranks from now on.

    Raises:
        StateError: they are of different steps.
    """
    steps = [state.get("step") for state in states]
    if len({*steps}) > 1:
        raise StateError(
            f"the states of `Monitor` must be of one step, but are of steps {steps}. Reshard the "
            "states of one checkpoint."
        )
    counts = {name: _empty(one) for name, one in states[0].items() if name not in ENVELOPE}
    at = dict.fromkeys(("step", "written", "epoch_written"), steps[0])
    return [copy_state(states[0] | counts | at) for _ in range(world_size)]


def _empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: type(one)() for name, one in value.items()}
    return type(value)()
