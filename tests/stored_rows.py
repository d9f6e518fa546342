"""Samples, and a collate function that says who has called it; workers of any kind import them."""

import os

import numpy as np
import torch


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
