"""What processing overwrites, or changes in the dataset, is an error at the first samples."""

import random

import numpy as np
import pytest
import torch

from odb_nodes import (
    IterableSource,
    ODBDataLoader,
    PaddingCollate,
    SampleError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.processing import first_samples

KINDS = {
    "inline": {"num_workers": 0},
    "threads": {"num_workers": 2, "method": "thread"},
    "processes": {"num_workers": 2, "start_method": "fork"},
}


def rows():
    """Dicts that a list holds, so whatever is changed in them stays changed."""
    return [
        {"input_ids": [n] * (n % 6 + 2), "label": n % 2, "meta": {"seen": 0}} for n in range(40)
    ]


def epochs(dataset, process_fn=None, kind="inline", count=2, **options):
    """The tokens of each sample, in the order of epochs and samples."""
    workers = WorkerOptions(**KINDS[kind])
    arguments = {"token_budget": 24, "window": 8, "process_fn": process_fn, "workers": workers}
    with ODBDataLoader(dataset, **arguments, **options) as loader:
        batches = [batch for _ in range(count) for batch in loader]
    rows = []
    for batch in batches:
        keys = pop_step_info(batch).keys
        lengths = batch["attention_mask"].sum(1).tolist()
        ids = batch["input_ids"].tolist()
        rows += [(key, row[:n]) for key, row, n in zip(keys, ids, lengths, strict=True)]
    return rows


class Buffer:
    """Fills one buffer again for each sample; a dataset, or a function of its items."""

    def __init__(self, buffer, like=list):
        self.buffer, self.like = buffer, like

    def __call__(self, sample):
        count = len(sample["input_ids"])
        self.buffer[:count] = self.like(sample["input_ids"])
        return {"input_ids": self.buffer[:count]}

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self(rows()[index])


class OneList(Buffer):
    def __call__(self, sample):
        self.buffer[:] = sample["input_ids"]
        return {"input_ids": self.buffer}


def collate(samples):
    return PaddingCollate()(samples)


BUFFERS = {
    "tensor": Buffer(torch.zeros(8, dtype=torch.int64), torch.tensor),
    "array": Buffer(np.zeros(8, np.int64), np.array),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("array", "inline"),
        ("tensor", "inline"),
        ("tensor", "threads"),
        pytest.param("tensor", "processes", marks=pytest.mark.slow),
    ],
)
def test_a_result_that_a_later_sample_overwrites_is_an_error(name, kind):
    buffer = BUFFERS[name]
    message = r"(?s)item .*, sample 0 of epoch 0.*its result was changed .*buffer\[:n\].clone\(\)"
    with pytest.raises(SampleError, match=message):
        epochs(rows(), buffer, kind)
    with pytest.raises(SampleError, match=message):
        epochs(buffer, kind=kind)
    with pytest.raises(SampleError, match=message):
        epochs(IterableSource(rows(), 0, 1), buffer, kind)


class LateBuffer(Buffer):
    """Makes new results first, then fills its buffer again."""

    calls = 0

    def __call__(self, sample):
        self.calls += 1
        return super().__call__(sample) if self.calls > 30 else {"input_ids": sample["input_ids"]}


@pytest.mark.parametrize("kind", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_buffer_that_is_used_later_only_is_an_error_within_some_hundred_samples(kind):
    with pytest.raises(SampleError, match="its result was changed while later items"):
        epochs(rows() * 16, LateBuffer(np.zeros(8, np.int64), np.array), kind, count=1)


def test_a_list_that_is_filled_again_is_an_error_unless_it_is_copied_at_once():
    """As the collate functions for text do, for each sample."""
    buffer = OneList([])
    assert sorted(ids for _, ids in epochs(rows(), buffer, count=1)) == [
        row["input_ids"] for row in rows()
    ]
    with pytest.raises(SampleError, match="its result was changed"):
        epochs(rows(), buffer, collate_fn=collate)


def grow(sample):
    sample["input_ids"].append(9)
    return sample


def pop(sample):
    sample["labels"] = [sample.pop("label")] * len(sample["input_ids"])
    return sample


def count_in_place(sample):
    sample["meta"]["seen"] += 1
    return sample


class GrowsAtRandom:
    """Adds a token that it draws from a generator of its own."""

    def __init__(self):
        self.generator = random.Random(0)

    def __call__(self, sample):
        sample["input_ids"].append(self.generator.randrange(100))
        return sample


class Shallow:
    """A dataset whose items are new dicts of the same lists."""

    def __init__(self):
        self.rows = rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {**self.rows[index]}


@pytest.mark.parametrize(
    ("dataset", "process_fn", "how", "kind"),
    [
        (rows, grow, "another sample", "inline"),
        (rows, grow, "another sample", "threads"),
        pytest.param(rows, grow, "another sample", "processes", marks=pytest.mark.slow),
        (Shallow, grow, "another sample", "inline"),
        (rows, GrowsAtRandom(), "another sample", "inline"),
        (rows, count_in_place, "another sample", "inline"),
        (rows, pop, r"none \(KeyError: 'label'\)", "inline"),
        (lambda: {"a": rows(), "b": rows()}, grow, "another sample", "inline"),
    ],
)
def test_an_item_that_would_make_another_sample_later_is_an_error(dataset, process_fn, how, kind):
    message = f"(?s)changes the dataset's item in place.* would make {how}.*copy.deepcopy"
    with pytest.raises(SampleError, match=message):
        epochs(dataset(), process_fn, kind)


def add_field(sample):
    sample["labels"] = sample["input_ids"]
    return sample


def cut(sample):
    sample["input_ids"] = sample["input_ids"][:2]
    return sample


def crop(sample):
    """Draws, and writes what it draws into the item that the list holds."""
    sample["crop"] = torch.rand(2)
    sample["labels"] = [random.randrange(9) for _ in sample["input_ids"]]
    return sample


class Draws:
    """The same, with a generator of its own."""

    def __init__(self):
        self.generator = random.Random(0)

    def __call__(self, sample):
        sample["crop"] = self.generator.random()
        return sample


class Fresh(Shallow):
    """A dataset that makes each item anew, in part at random."""

    def __getitem__(self, index):
        return {"input_ids": [index] * 3, "drawn": np.random.random(2), "label": 0}


SHARED = torch.arange(9)


def views(sample):
    return {"input_ids": SHARED[: len(sample["input_ids"])]}


class ReadsMany(Shallow):
    """A dataset that makes each item anew, and reads several at once."""

    draws_random_numbers = False

    def __getitem__(self, index):
        return rows()[index]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class PopsAndMakesGenerator:
    """Changes its item in its first call, which also makes a generator, and so is repeated."""

    def __init__(self):
        self.generator = None

    def __call__(self, sample):
        self.generator = self.generator or random.Random(0)
        sample["labels"] = [sample.pop("label")] * len(sample["input_ids"])
        sample["labels"][0] = self.generator.randrange(1000)
        return sample


@pytest.mark.parametrize("dataset", [ReadsMany, lambda: IterableSource(rows(), 0, 1)])
def test_an_item_is_as_it_was_where_its_processing_is_repeated(dataset):
    with ODBDataLoader(dataset(), token_budget=24, process_fn=PopsAndMakesGenerator()) as loader:
        labels = [batch["labels"][:, 0].tolist() for batch in loader]
    drawn = [label for row in labels for label in row]
    assert len(drawn) == 40
    assert len({*drawn}) > 30


@pytest.mark.parametrize(
    ("dataset", "process_fn"),
    [
        (rows, None),
        (rows, add_field),
        (rows, cut),
        (rows, crop),
        (rows, Draws()),
        (rows, views),
        (Shallow, pop),
        (Fresh, grow),
        (Fresh, pop),
    ],
)
def test_what_changes_no_sample_passes_and_is_not_disturbed(dataset, process_fn, monkeypatch):
    checked = epochs(dataset(), process_fn)
    monkeypatch.setattr(first_samples.FirstSamples, "take", lambda self, count: 0)
    assert checked == epochs(dataset(), process_fn)
    assert len(checked) == 80


def test_a_function_that_changes_nothing_is_called_once_for_each_sample():
    calls = []

    def process(sample):
        calls.append(sample["input_ids"][0])
        return {**sample, "labels": sample["input_ids"]}

    epochs(rows(), process, count=1)
    assert sorted(calls) == [*range(40)]
