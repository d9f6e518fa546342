"""How many optimizer steps an epoch will have, from the lengths of some of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from odb_nodes._core.seeds import preserved_rngs
from odb_nodes.planning import TokenBudget, simulate_steps
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import Observe, Skipped

__all__ = ["check_can_estimate", "estimate_steps"]

_MOST_SIMULATED = 20_000


def check_can_estimate(dataset: Any, remedy: str) -> None:
    """Refuse a dataset whose steps cannot be estimated; on all ranks, since one of them estimates.

    Args:
        dataset: to train on.
        remedy: what to do, a sentence.

    Raises:
        TypeError: it is not map-style with a length, but iterable, a node, or a dict of datasets.
    """
    is_map_style = isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, (Mapping, BaseNode, IterableDataset)):
        raise TypeError(
            "the steps of an epoch can be estimated only where the dataset is map-style and has a "
            f"length, but it is `{type(dataset).__name__}`. {remedy}"
        )


def estimate_steps(
    dataset: Any,
    *,
    budget: TokenBudget,
    window: int,
    accumulate: int,
    world_size: int,
    process_fn: Callable[[Any], Any] | None = None,
    observe: Observe | None = None,
    looked_at: int = 512,
    seed: int = 0,
) -> int:
    """Return about how many optimizer steps an epoch has.

    Processes some samples drawn at random, then groups as many lengths as there are, drawn from
    theirs. On lengths with a long tail, 512 samples give the number to within some percent.

    Args:
        dataset: map-style, with a length.
        budget: of a group.
        window: samples in the pool of a rank.
        accumulate: micro-steps of an optimizer step.
        world_size: number of ranks.
        process_fn: item of the dataset -> processed sample.
        observe: see `LengthObserver`.
        looked_at: how many samples to process.
        seed: of what is drawn.
    """
    rng = np.random.default_rng(seed)
    picked = rng.permutation(len(dataset))[:looked_at]
    with preserved_rngs():
        items = [dataset[index] for index in picked.tolist()]
        samples = items if process_fn is None else list(map(process_fn, items))
        observed = [observe_sample(sample, observe) for sample in samples]
    seen = np.array([one.tokens for one in observed if not isinstance(one, Skipped)])
    if not len(seen):
        return 1
    share = math.ceil(len(dataset) / world_size * len(seen) / len(observed))
    simulated = min(share, _MOST_SIMULATED)
    # All of them as they are, where all were looked at: drawing adds an error of its own.
    lengths = seen if simulated == len(seen) else rng.choice(seen, simulated)
    groups = sum(
        1 for _ in simulate_steps(lengths, world_size=1, budget=budget, window=window, seed=seed)
    )
    return max(1, math.ceil(groups * share / simulated / accumulate))
