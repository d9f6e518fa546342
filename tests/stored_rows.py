"""Samples, and batches of them that say who has made them; workers of any kind import this."""

import os

import numpy as np
import torch

from odb_nodes import ODBDataLoader, WorkerOptions, pop_step_info


class Rows:
    """Samples of different lengths: arrays and tensors, small and large, and plain data."""

    def __init__(self, size=160, side=0):
        self.size, self.side = size, side

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        length = 5 + index * 37 % 60
        sample = {"input_ids": np.arange(length) + index, "id": f"row {index}"}
        if self.side:
            sample["pixels"] = torch.full((self.side, self.side), index, dtype=torch.int32)
        return sample


def where(samples):
    """A padded batch, and the process that has made it."""
    ids = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    batch = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "attention_mask": torch.tensor([len(row) for row in ids]),
        "ids": [sample.get("id") for sample in samples],
        "made by": os.getpid(),
    }
    if "pixels" in samples[0]:
        batch["pixels"] = torch.stack([sample["pixels"] for sample in samples])
    return batch


SIZE, BUDGET = 160, 512


def options(**given):
    workers = WorkerOptions(num_workers=2, chunk_size=given.pop("chunk_size", 7), **WORKERS)
    defaults = {"token_budget": BUDGET, "window": 24, "collate_in": "workers"}
    return {**defaults, "workers": workers, **given}


WORKERS = {"start_method": "fork"}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    return one == other


def epoch(dataset, collate_in, **given):
    """Batches without who has made them, step infos, and states of an epoch."""
    found = []
    with ODBDataLoader(dataset, **options(collate_in=collate_in, **given)) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            batch = {key: value for key, value in batch.items() if key != "made by"}
            found.append((batch, info, loader.state_dict()))
    return found


def assert_equal(one, other):
    assert len(one) == len(other) > 3
    for (batch, info, state), (batch2, info2, state2) in zip(one, other, strict=True):
        assert batch.keys() == batch2.keys()
        assert all(same(batch[key], batch2[key]) for key in batch)
        assert (info, state) == (info2, state2)
