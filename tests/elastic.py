"""Jobs that go on with other numbers of ranks: in one process, a thread for each rank."""

import random
from functools import cache

from aligned_ranks import TIMEOUT_S, on_ranks

from odb_nodes import ODBDataLoader, Skipped, TokenBudget, pop_step_info, reshard

SAMPLES = 230
EXCLUDED = [7, 8, 90]
OF_SAMPLES = ("is skipped", "exceeds", "samples read for this epoch")
ENDED_EARLY = "ignore:.uneven=.stop.*another rank has ended"
LEFT_OUT = [f"ignore:(sample|of the) .* {words}" for words in OF_SAMPLES]
"""What a job warns of."""


def sample(index):
    """A sample whose length comes from its number; three are long, and two kinds are skipped."""
    if index % 31 == 5:
        return Skipped("thirty-first" if index % 2 else "other")
    length = 90 if index in (40, 41, 150) else random.Random(index).randint(2, 40)
    labels = [index if place % 3 else -100 for place in range(length)]
    return {"input_ids": [index] * length, "labels": labels, "id": index}


def trained_on():
    """The samples that come in steps: neither skipped, nor too long, nor excluded."""
    gone = {*range(5, SAMPLES, 31), 40, 41, 150, *EXCLUDED}
    return [index for index in range(SAMPLES) if index not in gone]


def make(exchange, **options):
    keywords = {
        "process_fn": sample,
        "token_budget": TokenBudget(80, oversize="drop"),
        "window": 16,
        "round_size": 8,
        "seed": 3,
        "exclude": EXCLUDED,
        "timeout_s": TIMEOUT_S,
    }
    return ODBDataLoader(range(SAMPLES), process_group=exchange, **keywords | options)


def job(world_size, states=None, steps=None, make=make, epochs=1, **options):
    """Of each rank: its steps, as (info, ids), and the states around them.

    Args:
        world_size: number of ranks.
        states: a state of each; None begins.
        steps: where to stop; None: after the last epoch.
        epochs: how many epochs, or rests of one, to take.
    """

    def run(exchange):
        loader = make(exchange, **options)
        if states is not None:
            loader.load_state_dict(states[exchange.rank])
        recorded, saved = [], [loader.state_dict()] if states is None else []
        for _ in range(epochs):
            batches = iter(loader)
            saved = saved or [loader.state_dict()]
            while steps is None or len(recorded) < steps:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                info = pop_step_info(batch)
                recorded.append((info, [] if info.is_filler else batch["id"].tolist()))
                saved.append(loader.state_dict())
        return recorded, saved

    return on_ranks(world_size, run)


def ids_of(ranks, steps=None):
    """What became of samples: those in steps, and those that are left out, by their keys."""
    trained = [index for recorded, _ in ranks for _, ids in recorded[:steps] for index in ids]
    infos = [info for recorded, _ in ranks for info, _ in recorded[:steps]]
    left_out = [sample.key for info in infos for sample in info.left_out]
    return sorted(trained), sorted(left_out)


def states_at(ranks, step):
    """The state of each rank after so many steps."""
    return [saved[step] for _, saved in ranks]


def resharded(ranks, step, world_size):
    return reshard(states_at(ranks, step), world_size)


@cache
def whole(world_size):
    """An epoch of so many ranks."""
    return job(world_size)
