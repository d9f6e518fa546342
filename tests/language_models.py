"""A tiny language model, texts with masked labels, and the gradient that a step should have."""

import json
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, HIDDEN = 29, 8
LR = 0.05


def sample_of(index):
    """2 to 24 tokens; 0 to 90% of the labels masked, and all of them in every ninth."""
    rng = np.random.default_rng(index)
    tokens = rng.integers(1, VOCABULARY, size=rng.integers(2, 25))
    share = 1.0 if index % 9 == 0 else rng.uniform(0, 0.9)
    labels = np.where(rng.random(len(tokens)) < share, -100, tokens)
    return {"input_ids": tokens, "labels": labels, "id": index}


class Texts:
    """A map-style dataset of these."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [sample_of(number) for number in range(self.size)[index]]
        return sample_of(index)


class Decoder(nn.Module):
    """Each position sees the mean of those before it; tells of the ids of its samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.float64)
        self.hidden = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.head = nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)
        self.seen = []

    def features(self, input_ids):
        positions = torch.arange(1, input_ids.shape[1] + 1)[:, None]
        mean = self.embedding(input_ids).cumsum(1) / positions
        return torch.tanh(self.hidden(mean))

    def logits(self, input_ids):
        return self.head(self.features(input_ids))

    def sum_loss(self, input_ids, labels):
        logits = self.logits(input_ids)[:, :-1]
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    def note(self, ids):
        if self.training:
            self.seen.append(ids.tolist())


class Normalizing(Decoder):
    """Divides by `num_items_in_batch`, as models of transformers do."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None, **kwargs):
        self.note(id)
        items = kwargs.get("num_items_in_batch")
        if items is None:
            items = (labels[:, 1:] != -100).sum()
        return {"loss": self.sum_loss(input_ids, labels) / items}


class Averaging(Decoder):
    """Returns the mean, as torch's loss does: NaN without targets."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None):
        self.note(id)
        loss = self.sum_loss(input_ids, labels) / (labels[:, 1:] != -100).sum()
        return {"loss": loss}


class Mean(Decoder):
    """Returns the mean; 0 without targets."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None):
        self.note(id)
        return {"loss": self.sum_loss(input_ids, labels) / max(1, targets_of(labels))}


class Ignoring(Decoder):
    """Accepts all arguments and ignores them: takes the mean."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None, **kwargs):
        return Averaging.forward(self, input_ids, labels=labels, id=id)


class Plain(Decoder):
    """Leaves the loss to `compute_loss_func`."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None):
        self.note(id)
        return {"logits": self.logits(input_ids)}


class Unlabelled(Decoder):
    """Predicts its input; takes the mean."""

    def forward(self, input_ids, attention_mask):
        labels = input_ids.masked_fill(attention_mask == 0, -100)
        items = int((labels[:, 1:] != -100).sum())
        return {"loss": self.sum_loss(input_ids, labels) / items, "items": items}


class Rows(nn.Module):
    """Takes the mean over its samples; the gradient of each is the first of its `input_ids`.

    It tells of the gradients of each batch.
    """

    def __init__(self, **labels):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen = []

    def forward(self, input_ids, labels=None, goal=None, start_positions=None):
        self.seen.append(input_ids[:, 0].tolist())
        return {"loss": self.weight * input_ids[:, 0].double().mean()}


class Twice(Decoder):
    """Divides a mean by the number of items again."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None, **kwargs):
        loss = Averaging.forward(self, input_ids, labels=labels, id=id)["loss"]
        items = kwargs.get("num_items_in_batch")
        return {"loss": loss if items is None else loss / items}


class Undivided(Twice):
    """Returns a sum."""

    def forward(self, input_ids, attention_mask=None, labels=None, id=None, **kwargs):
        self.note(id)
        return {"loss": self.sum_loss(input_ids, labels)}


def sum_over_items(outputs, labels, num_items_in_batch=None):
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return loss / num_items_in_batch


def mean_over_batch(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient_of(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def expected_gradient(weights, ids):
    """That of the mean over all supervised tokens of these samples, computed one by one."""
    return _expected(weights, ids)[1]


def expected_loss(weights, ids):
    """That mean."""
    return _expected(weights, ids)[0]


def _expected(weights, ids):
    if not ids:
        return 0.0, torch.zeros_like(weights)
    model = Decoder()
    nn.utils.vector_to_parameters(weights, model.parameters())
    total, items = 0.0, 0
    for sample in map(sample_of, ids):
        labels = torch.tensor(sample["labels"])[None]
        total = total + model.sum_loss(torch.tensor(sample["input_ids"])[None], labels)
        items += int((labels[:, 1:] != -100).sum())
    mean = total / max(items, 1)
    mean.backward()
    return mean.item(), gradient_of(model)


def append(path, entry):
    with open(path, "a") as file:
        file.write(json.dumps(entry) + "\n")


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rank_and_size():
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def targets_of(labels):
    """How many tokens of these labels are predicted."""
    return int((torch.as_tensor(labels)[..., 1:] != -100).sum())


def ids_of(entries):
    """The ids of a step, of all its ranks, without fillers."""
    batches = [
        batch for entry in entries for batch in zip(entry["ids"], entry["fillers"], strict=True)
    ]
    return [index for ids, is_filler in batches if not is_filler for index in ids]


def check_steps(all_entries, size, left_out=frozenset()):
    """Check that every sample comes once per epoch, with the same steps and gradients on all ranks.

    Args:
        all_entries: the entries of each rank, of whole epochs.
        size: of the dataset.
        left_out: ids of samples that no step has.

    Returns:
        The largest error of a gradient, relative to that of the mean over all targets.
    """
    worst, seen = 0.0, {}
    for step in zip(*all_entries, strict=True):
        first, ids = step[0], ids_of(step)
        for key in ("step", "epoch", "gradient"):
            assert all(entry[key] == first[key] for entry in step)
        assert len({len(entry["ids"]) for entry in step}) == 1
        before, gradient = (
            torch.tensor(first[key], dtype=torch.float64) for key in ("before", "gradient")
        )
        expected = expected_gradient(before, ids)
        if (difference := (gradient - expected).norm().item()) > 0:
            worst = max(worst, difference / expected.norm().item())
        seen.setdefault(first["epoch"], []).extend(ids)
    assert [sorted(ids) for ids in seen.values()] == [sorted({*range(size)} - left_out)] * len(seen)
    return worst
