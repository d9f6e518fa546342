"""Jobs whose steps are made again: loaders of every kind, and what their ranks had."""

import random
from itertools import islice

import numpy as np
import torch
from torch.testing import assert_close

from odb_nodes import Ledger, ODBDataLoader, Skipped, TokenBudget, pop_step_info

SIZE = 260
BUDGET = TokenBudget(200, oversize="drop")


def augmented(index):
    """A sample with random numbers of every kind; some are skipped, some exceed the budget."""
    if index % 31 == 5:
        return Skipped("thirty-first")
    length = 300 if index in (40, 41) else 3 + index * 7919 % 60
    drawn = [index + random.random(), np.random.random(), torch.rand(()).item()]
    ids = torch.randint(0, 1000, (length,))
    return {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids), "drawn": drawn}


def masked(samples):
    """A collate function that draws."""
    width = max(len(one["input_ids"]) for one in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    for row, one in zip(ids, samples, strict=True):
        row[: len(one["input_ids"])] = one["input_ids"]
    drawn = torch.tensor([one["drawn"] for one in samples], dtype=torch.float64)
    return {"input_ids": ids * (torch.rand(ids.shape) > 0.15), "labels": ids, "drawn": drawn}


def text_loader(group, layout="padded", collate=None, data=None, **options):
    budget = TokenBudget(200, oversize="drop", layout=layout)
    return ODBDataLoader(
        range(SIZE) if data is None else data,
        token_budget=budget,
        window=16,
        process_group=group,
        collate_fn=collate,
        process_fn=augmented,
        round_size=8,
        **options,
    )


def padded(group):
    return text_loader(group, collate=masked, accumulate=3)


def packed(group):
    return text_loader(group, layout="packed")


def mixed(group):
    return text_loader(group, data={"a": range(200), "b": range(90)}, accumulate=2)


def uneven(group):
    """Ranks with data of their own, of which one has few, so that it fills."""
    size = 30 if group.rank == 0 else 200
    own = range(1000 * group.rank, 1000 * group.rank + size)
    return text_loader(group, data=Shelf(own), sharded=True)


class Shelf:
    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return self.indices[index]


def with_images(group):
    from pictures import asked, noise, processor

    from odb_nodes.vision import VisionLanguageCollate

    def process_fn(index):
        rng = random.Random(index)
        images = [
            noise(rng.randrange(20, 90), rng.randrange(20, 90)) for _ in range(index % 5 == 0)
        ]
        return processor()(asked(*images, answer="red " * rng.randrange(1, 40), id=index))

    return ODBDataLoader(
        range(80),
        token_budget=256,
        window=12,
        process_group=group,
        process_fn=process_fn,
        collate_fn=VisionLanguageCollate(dummy=processor().dummy_image()),
        round_size=4,
    )


JOBS = [(4, padded), (1, packed), (2, mixed), (2, uneven), (2, with_images)]


def recorded(make_loader, folder, epochs=1, steps=None, only=None):
    """What each rank had at each step, and its state after it; recorded in a ledger.

    Args:
        make_loader: exchange -> loader.
        folder: of the ledger.
        epochs: how many are taken.
        steps: how many of an epoch, which has no end then.
        only: the steps that are recorded; None: all.
    """

    def run(exchange):
        ledger = Ledger(folder, rank=exchange.rank, world_size=exchange.world_size)
        found = {}
        with make_loader(exchange) as loader:
            for epoch in range(epochs):
                for batch in islice(loader, steps):
                    info = pop_step_info(batch)
                    found[epoch, info.step] = info, batch, loader.state_dict()
                    if only is None or info.step in only:
                        ledger.record(info)
        ledger.close(ended=steps is None)
        return found

    return run


def check(remade, info, batch):
    assert remade.info == info
    assert len(remade.tokens) == len(remade.targets) == info.local_samples
    assert sum(remade.targets) == info.local_targets
    assert remade.batch.keys() == batch.keys()
    for name, value in batch.items():
        again = remade.batch[name]
        if isinstance(value, torch.Tensor):
            assert_close(again, value, rtol=0, atol=0)
        else:
            assert again == value
