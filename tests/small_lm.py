"""A small language model with eager attention, and all that its training changes."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

VOCABULARY = 61


class Attention(nn.Module):
    """Eager attention of two heads: it saves the scores, (n, heads, L, L)."""

    def __init__(self, size, dropout):
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = self.dropout((q @ k.transpose(-1, -2)).softmax(-1))
        return self.out((scores @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self, size, dropout):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(size) for _ in range(2))
        self.attention = Attention(size, dropout)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class SmallLM(nn.Module):
    """Returns the loss of token ids, and of image patches where there are some."""

    def __init__(self, size=16, layers=2, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size)
        self.patches = nn.Sequential(nn.Linear(12, 4 * size), nn.GELU(), nn.Linear(4 * size, 1))
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(layers))
        self.head = nn.Linear(size, VOCABULARY)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, pixels=None):
        self.steps += 1
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss if pixels is None else loss + self.patches(pixels).mean()


def make_batch(rows, width, patches=0):
    """Return random ids, (rows, width), and pixels of patches, (patches, 12), if any."""
    ids = torch.randint(VOCABULARY, (rows, width))
    return (ids, torch.rand(patches, 12)) if patches else (ids,)


def make_training(optimizer=torch.optim.AdamW, **options):
    """Return a model and its optimizer, both in the middle of a run, and the step of training."""
    torch.manual_seed(0)
    model = SmallLM(**options)
    optimizer = optimizer(model.parameters(), lr=1e-3)

    def train_step(batch):
        def loss():  # which some optimizers compute again
            optimizer.zero_grad()
            value = model(*batch)
            value.backward()
            return value

        optimizer.step(loss)

    return SimpleNamespace(model=model, optimizer=optimizer, train_step=train_step)


def snapshot(training):
    """Everything that a step changes, copied."""
    model, optimizer = training.model, training.optimizer
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return {
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "buffers": [buffer.clone() for buffer in model.buffers()],
        "gradients": gradients,
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "python": random.getstate(),
        "numpy": [np.asarray(part).tolist() for part in np.random.get_state()[1:]],
        "torch": torch.get_rng_state(),
    }


def assert_same(before, after):
    """Compare bitwise, tensors in any nesting."""
    assert type(before) is type(after)
    if isinstance(before, torch.Tensor):
        assert before.dtype == after.dtype
        assert before.numpy().tobytes() == after.numpy().tobytes()
    elif isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, (list, tuple)):
        assert len(before) == len(after)
        for earlier, later in zip(before, after, strict=True):
            assert_same(earlier, later)
    else:
        assert before == after
