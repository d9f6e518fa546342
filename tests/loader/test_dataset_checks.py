"""What is given as a dataset by mistake, and mixtures that few people mean."""

import warnings
from collections import UserDict

import numpy as np
import pytest
import torch
import torchdata.nodes
from torchdata.nodes import IterableWrapper, Mapper, Unbatcher

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    PaddingCollate,
    WindowBucketer,
    pop_step_info,
)

SAMPLES = [{"input_ids": [1] * (n % 5 + 1)} for n in range(20)]


def make_loader(dataset, **options):
    return ODBDataLoader(dataset, **{"token_budget": 16, **options})


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1, 2], [3]], "labels": [[1, 2], [3]]},
        {"text": ["a", "b"], "label": [0, 1]},
        {"input_ids": np.ones((3, 2), int)},
        {"input_ids": torch.ones(3, 2), "attention_mask": torch.ones(3, 2)},
        {"input_ids": [torch.ones(2), torch.ones(3)]},
        UserDict(input_ids=[[1, 2]]),  # as a tokenizer returns
    ],
)
def test_a_dict_of_columns_is_no_mixture(columns):
    with pytest.raises(TypeError, match=r"with the columns \['.*Pass `datasets.Dataset.from_dict"):
        make_loader(columns)


@pytest.mark.parametrize(
    "mixture",
    [
        {"chat": SAMPLES, "captions": SAMPLES},
        {"labels": SAMPLES},
        {"text": [[1, 2], [3]], "ids": range(3)},  # with a `process_fn`
        {"input_ids": IterableWrapper(SAMPLES)},
    ],
)
def test_a_mixture_is_none_of_columns(mixture):
    loader = make_loader(mixture, process_fn=lambda item: SAMPLES[0])
    assert {name for batch in loader for name in pop_step_info(batch).row_sources} == set(mixture)


def frame():
    return pytest.importorskip("pandas").DataFrame({"input_ids": [[1], [2]]})


def test_mixtures_do_not_nest():
    with pytest.raises(TypeError, match="source 'a': .* Mixtures do not nest"):
        make_loader({"a": {"x": SAMPLES}, "b": SAMPLES})


@pytest.mark.parametrize("name", ["collate_fn", "process_fn"])
def test_a_class_whose_instances_are_called_is_no_function(name):
    with pytest.raises(TypeError, match=rf"`{name}` must be .* pass `PaddingCollate\(...\)`"):
        make_loader(SAMPLES, **{name: PaddingCollate})


def grouping_node():
    return GroupCollator(WindowBucketer(LengthObserver(IterableWrapper(SAMPLES)), 16, 4))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: make_loader(SAMPLES), "an `ODBDataLoader` instead, which yields batches already"),
        (lambda: Loader(IterableWrapper(SAMPLES)), "`Loader` instead, .*its node, `loader.root`"),
        (lambda: torchdata.nodes.Loader(IterableWrapper(SAMPLES)), "`loader.root`, if that yields"),
        (
            frame,
            "`DataFrame` instead, which yields its columns. Pass `datasets.Dataset.from_pandas",
        ),
        (grouping_node, "`GroupCollator` instead, which yields groups or batches"),
        (lambda: grouping_node().source, "`WindowBucketer` instead, .*or pass one of samples"),
    ],
)
def test_what_forms_batches_already_is_no_dataset(make, what):
    with pytest.raises(TypeError, match=f"^`dataset` must be a dataset, but is .*{what}"):
        make_loader(make())
    with pytest.raises(TypeError, match=f"^of source 'a': `dataset` must be .*{what}"):
        make_loader({"a": make()})


class KeepsLoader(torch.utils.data.IterableDataset):
    def __init__(self):
        self._loader = Loader(IterableWrapper(SAMPLES))

    def __iter__(self):
        return iter(self._loader)


def ungrouped_node():
    groups = WindowBucketer(LengthObserver(IterableWrapper(SAMPLES)), 16, 4)
    return Mapper(Unbatcher(groups), lambda sample: sample.data)


@pytest.mark.parametrize("make", [KeepsLoader, ungrouped_node])
def test_what_forms_no_batches_itself_is_a_dataset(make):
    assert sum(len(one["input_ids"]) for one in make_loader(make())) == 20


def test_a_node_of_samples_is_a_dataset():
    assert sum(len(one["input_ids"]) for one in make_loader(IterableWrapper(SAMPLES))) == 20


@pytest.mark.parametrize(
    ("stop", "fate"),
    [
        ("all_exhausted", "'small' is read up after 18.2% of the epoch, and is missing from the"),
        ("first_exhausted", "'small' ends the epoch when it is read up, after 18.2% of all"),
        ("cycle", "'small' is read 10 times for each time that 'large' is"),
    ],
)
def test_equal_shares_of_very_unequal_datasets_are_warned_of_where_nobody_chose_them(stop, fate):
    data = {"large": SAMPLES * 10, "small": SAMPLES}
    with pytest.warns(UserWarning, match=f"`weights` are not given, .*{fate}") as caught:
        make_loader(data, weights=Mixing(stop=stop))
    assert caught[0].filename == __file__


class LengthNotKnown(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)

    def __len__(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    "options",
    [
        {"weights": {"large": 1, "small": 1}},
        {"weights": "proportional"},
        {"dataset": {"large": SAMPLES * 9, "small": SAMPLES}},
        {"dataset": {"large": SAMPLES * 10, "unknown": IterableWrapper(SAMPLES)}},
        {"dataset": {"large": SAMPLES * 10, "unknown": LengthNotKnown()}},
        {"sharded": True},  # These are the sizes of one rank.
    ],
)
def test_shares_that_were_chosen_and_sizes_that_are_not_far_apart_are_not_warned_of(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_loader(**{"dataset": {"large": SAMPLES * 10, "small": SAMPLES}, **options})


def test_a_loader_of_a_mixture_shows_the_shares():
    mixing = Mixing(weights={"a": 1, "b": 3}, by="tokens", stop="cycle")
    shown = repr(make_loader({"a": SAMPLES, "b": SAMPLES}, weights=mixing))
    assert 'SourceMixer(shares of tokens: a 0.25, b 0.75; stop="cycle")' in shown
    assert "(list, TokenBudget(" in repr(make_loader(SAMPLES))
