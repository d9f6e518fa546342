import random
import sys
import types
import warnings
from collections import UserDict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torchdata.nodes
from aligned_ranks import on_ranks
from graphs import LENGTHS, SIZE, Dataset, augment, make_dataloader
from in_process import InProcessHub
from refusals import refuses
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torchdata.nodes import IterableWrapper, Mapper, Unbatcher
from torchdata.stateful_dataloader import StatefulDataLoader

from odb_nodes import (
    GroupCollator,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    PaddingCollate,
    SampleError,
    ShardedSampler,
    SourceMixer,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.loader import pipeline
from odb_nodes.core.sample import data_of


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def groups(**options):
    with make_dataloader(**options) as loader:
        return [ids(loader) for _ in range(2)]


def test_groups_depend_on_data_seed_and_configuration_alone():
    first, second = groups()
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(SIZE))
    assert first != second
    assert groups(state="payload") == [first, second]
    for options in ({"seed": 6}, {"window": 23}, {"token_budget": 250}):
        assert groups(**options)[0] != first
    loader = make_dataloader()
    loader.set_epoch(1)
    assert ids(loader) == second


def tokens(index):
    return [int(index) + 1] * int(LENGTHS[index])


def test_it_claims_no_total_that_levelling_exceeds():
    data = [{"input_ids": [1] * (2 + n * n * 37 % 199)} for n in range(333)]

    def run(exchange):
        loader = ODBDataLoader(data, token_budget=512, window=64, process_group=exchange)
        assert repr(loader).endswith(f": 0 of about {loader.num_samples} samples done)")
        for _ in loader:
            pass
        return loader

    fewer, more = sorted(on_ranks(2, run), key=lambda loader: loader.samples_done)
    assert fewer.samples_done < fewer.num_samples and more.samples_done > more.num_samples
    assert f": {fewer.samples_done} of about {fewer.num_samples} samples" in repr(fewer)
    assert f": {more.samples_done} samples done" in repr(more)


def test_ids_are_converted_before_the_pool_for_a_collate_function_of_ours_alone():
    def listed(index):
        return {"input_ids": tokens(index), "id": index}

    def observe(sample):
        assert type(sample["input_ids"]) is list  # what processing returned
        return len(sample["input_ids"])

    def pooled_as(collate_fn):
        options = {"token_budget": 256, "window": 24, "observe": observe, "collate_fn": collate_fn}
        loader = ODBDataLoader(range(SIZE), process_fn=listed, **options)
        next(iter(loader))
        store = loader._graphs[0].bucketer.store
        pooled = store.look(store.ordinals())
        return {type(data_of(sample)["input_ids"]) for sample in pooled}

    assert pooled_as(None) == pooled_as(PaddingCollate()) == {np.ndarray}
    assert pooled_as(lambda samples: PaddingCollate()(samples)) == {list}


def test_batches_keep_to_the_budget_and_carry_their_counts():
    budget = TokenBudget(256, max_samples=6, pad_to_multiple_of=16)
    loader = make_dataloader(token_budget=budget)
    assert (loader.epoch, loader.step, loader.samples_done) == (0, 0, 0)
    samples = 0
    for step, batch in enumerate(loader):
        info = pop_step_info(batch)
        rows, width = batch["input_ids"].shape
        assert rows * width <= 256 and width % 16 == 0 and rows <= 6
        assert (info.step, info.local_samples) == (step, rows)
        assert info.local_tokens == int(batch["attention_mask"].sum())
        assert info.local_padded_tokens == rows * width
        assert info.local_targets == info.local_tokens - rows
        samples += rows
        assert (loader.epoch, loader.step, loader.samples_done) == (0, step + 1, samples)
    assert samples == loader.num_samples == SIZE
    next(iter(loader))
    resumed = make_dataloader(token_budget=budget)
    resumed.load_state_dict(loader.state_dict())
    assert repr(resumed).startswith("ODBDataLoader(Dataset, TokenBudget(tokens=256")
    done = loader.samples_done
    assert repr(resumed).endswith(f"epoch 1, step 1: {done} of {SIZE} samples done)")
    with pytest.raises(TypeError, match="samples"):
        len(loader)
    batch = next(iter(loader))
    with pytest.raises(AttributeError, match="by `pop_step_info"):  # in a loop of a trainer
        {key: value.to("cpu") for key, value in batch.items()}


def test_the_remaining_epochs_are_those_from_the_epoch_of_the_loader_on():
    def batches_of(loader, epochs=3):
        for _ in range(loader.epoch, epochs):
            yield from loader

    loader = make_dataloader()
    states, taken = [(0, loader.state_dict())], []
    for _ in range(2):
        for batch in loader:
            taken.append(pop_step_info(batch).keys)
            states.append((len(taken), loader.state_dict()))
        states.append((len(taken), loader.state_dict()))  # after the loop
    taken += [pop_step_info(batch).keys for batch in batches_of(loader)]
    for step, state in states[::5] + states[-2:]:
        resumed = make_dataloader()
        resumed.load_state_dict(state)
        assert [pop_step_info(batch).keys for batch in batches_of(resumed)] == taken[step:]
    loader.set_epoch(7)
    assert loader.epoch == 7


class Stream(IterableDataset):
    def __init__(self, size=SIZE):
        self.size = size

    def __iter__(self):
        return map(augment, range(self.size))


# In place of a DataLoader of torch.


def collate(items):
    return {"id": torch.tensor([item["id"] for item in items]), "mine": True}


def taken(kind=DataLoader, *, given=None, dataset=None, **options):
    """The order of the samples of a stock loader that is taken over."""
    stock = kind(dataset or Dataset(), collate_fn=collate, **options)
    given = {"token_budget": TokenBudget(256, max_samples=1), "window": 1, **(given or {})}
    return sum(ids(ODBDataLoader.from_dataloader(stock, **given)), [])


IN_ORDER = list(range(SIZE))
SHUFFLED = sum(
    ids(make_dataloader(window=1, token_budget=TokenBudget(256, max_samples=1), seed=0)), []
)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata
@pytest.mark.parametrize(
    ("options", "order"),
    [
        ({}, IN_ORDER),
        ({"shuffle": True}, SHUFFLED),
        ({"kind": StatefulDataLoader, "shuffle": True}, SHUFFLED),
        ({"kind": StatefulDataLoader}, IN_ORDER),
        ({"sampler": [5, 3, 9]}, [5, 3, 9]),
        ({"sampler": SequentialSampler(range(30))}, list(range(30))),
        (
            {"sampler": DistributedSampler(range(SIZE), 2, 1, shuffle=False)},
            list(range(1, SIZE, 2)),
        ),
        ({"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 4, False)}, SHUFFLED),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(SIZE)), 4, False)}, IN_ORDER),
        ({"dataset": Stream()}, IN_ORDER),
        ({"shuffle": True, "given": {"shuffle": False}}, IN_ORDER),
        ({"shuffle": True, "given": {"sampler": [5, 3]}}, [5, 3]),
    ],
)
def test_the_order_of_an_existing_dataloader_is_kept(options, order):
    assert taken(**options) == order


class Own(BatchSampler):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RandomSampler(range(SIZE), replacement=True)},
        {"sampler": RandomSampler(range(SIZE), num_samples=10)},
        {"sampler": WeightedRandomSampler([1.0] * SIZE, 50)},
        {"batch_sampler": Own(RandomSampler(range(SIZE)), 4, False)},
    ],
)
def test_an_order_that_cannot_be_drawn_again_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`(loader.)?{name}` is a "):
        taken(**options)
    assert taken(**options, given={"shuffle": False}) == IN_ORDER


@pytest.mark.slow
def test_workers_and_collate_function_of_an_existing_dataloader_are_kept():
    stock = DataLoader(Dataset(), batch_size=4, shuffle=True, num_workers=2, collate_fn=collate)
    with ODBDataLoader.from_dataloader(stock, token_budget=256, window=24, seed=5) as loader:
        batches = list(loader)
        assert len(loader.worker_pids) == 2
    assert all(batch["mine"] for batch in batches)
    assert [batch["id"].tolist() for batch in batches] == groups()[0]
    for size in (4, None):  # torch's own function gives way to padding
        stock = DataLoader(Dataset(), batch_size=size)
        batch = next(iter(ODBDataLoader.from_dataloader(stock, token_budget=256)))
        assert batch["input_ids"].ndim == 2


# Refusals.

SAMPLES = [{"input_ids": [1] * (n % 5 + 1)} for n in range(20)]
TWO = {"a": SAMPLES, "b": SAMPLES}


class Splits(dict):
    """As some libraries return the parts of a dataset."""


class Frame(list):
    """Has rows by number, but looks like a table of pandas."""

    __module__ = "pandas.core.frame"


def nodes_of_batches():
    return GroupCollator(WindowBucketer(LengthObserver(IterableWrapper(SAMPLES)), 16, 4))


REFUSALS = [
    ({"dataset": []}, ValueError, "`dataset` must have at least 1 sample"),
    ({"dataset": {}}, ValueError, "`dataset` must have at least 1 sample"),
    ({"dataset": iter([1])}, TypeError, "`dataset` must .* once per epoch"),
    ({"dataset": 5}, TypeError, "`dataset`.*`int`"),
    ({"dataset": DataLoader([1])}, TypeError, "`ODBDataLoader.from_dataloader"),
    ({"dataset": Path("a.jsonl")}, TypeError, r"`JsonlSource\(path\)`"),
    ({"dataset": Splits(TWO)}, TypeError, r"a `Splits` of \['a', 'b'\]"),
    ({"dataset": {"a": [1], "b": []}}, ValueError, "source 'b': .*at least 1"),
    ({"dataset": {"a": [1], "b": "b.jsonl"}}, TypeError, r"'b.jsonl'.*JsonlSource\(path\)"),
    ({"dataset": {"a": TWO, "b": SAMPLES}}, TypeError, "source 'a': .*do not nest"),
    ({"dataset": {"input_ids": [[1, 2]], "labels": [[1]]}}, TypeError, "columns .*from_dict"),
    ({"dataset": {"text": ["a", "b"], "label": [0, 1]}}, TypeError, r"columns \['label'\]"),
    ({"dataset": {"input_ids": torch.ones(3, 2)}}, TypeError, "the columns"),
    ({"dataset": UserDict(input_ids=[np.ones(2)])}, TypeError, "the columns"),
    ({"dataset": Frame(SAMPLES)}, TypeError, "yields columns or scalars, not rows"),
    ({"dataset": ODBDataLoader(SAMPLES, token_budget=9)}, TypeError, "yields batches already"),
    ({"dataset": Loader(IterableWrapper(SAMPLES))}, TypeError, "`loader.root`"),
    ({"dataset": torchdata.nodes.Loader(IterableWrapper([1]))}, TypeError, "`loader.root`"),
    ({"dataset": nodes_of_batches()}, TypeError, "`GroupCollator` instead"),
    ({"dataset": {"a": nodes_of_batches().source}}, TypeError, "source 'a': .*`WindowBucketer`"),
    ({"dataset": Stream(), "shuffle": True}, ValueError, "`shuffle` must not be True for an"),
    ({"dataset": Stream(), "shuffle": 0}, TypeError, "`shuffle` must be True or False"),
    ({"dataset": Stream(), "sampler": [1]}, ValueError, "`sampler`"),
    ({"dataset": SourceMixer({"a": IterableWrapper([1])}), "shuffle": True}, ValueError, "a node"),
    ({"dataset": IterableWrapper([1]), "sampler": [0]}, ValueError, "for a node"),
    ({"sampler": [5], "shuffle": True}, ValueError, "`sampler` must be None where `shuffle`"),
    ({"sampler": WeightedRandomSampler([1.0], 5)}, ValueError, "`sampler` .*drawn again"),
    ({"dataset": TWO, "sampler": [1]}, ValueError, "`sampler` must be None .* dict"),
    ({"collate_fn": PaddingCollate}, TypeError, r"`collate_fn` .* `PaddingCollate\(...\)`"),
    ({"process_fn": PaddingCollate}, TypeError, "`process_fn` must be"),
    ({"dataset": TWO, "process_fn": {"a": len}}, ValueError, "`process_fn` .*names of `dataset`"),
    ({"dataset": TWO, "process_fn": {"a": len, "b": 3}}, TypeError, r"`process_fn\['b'\]`"),
    ({"process_fn": {"a": len}}, TypeError, "`process_fn` must be a func"),
    ({"weights": {"a": 1}}, ValueError, "`weights` must be None, unless"),
    ({"dataset": TWO, "weights": {"a": 1}}, ValueError, "`weights` .*names of `sources`"),
    ({"dataset": TWO, "weights": 3}, TypeError, "`weights` must be a dict by name"),
    ({"dataset": {"a": Stream()}, "weights": "proportional"}, TypeError, "'a': .*no len"),
    ({"dataset": {"a": IterableWrapper([1])}, "weights": "proportional"}, TypeError, "a node does"),
    ({"dataset": TWO, "weights": "proportional", "sharded": True}, ValueError, "`sharded` False"),
    ({"dataset": JsonlSource(__file__, 0, 2), "sharded": True}, ValueError, "one of 2 ranks"),
    (
        {
            "dataset": SourceMixer(
                {"a": JsonlSource(__file__, 0, 2), "b": JsonlSource(__file__, 0, 1)}
            ),
            "sharded": True,
        },
        ValueError,
        "one of 2 ranks.*world_size=1",
    ),
    (
        {
            "dataset": ShardedSampler(60, rank=0, world_size=1),
            "process_group": InProcessHub(2).exchange(0),
        },
        ValueError,
        "each of 2 ranks.*sharded=True",
    ),
    ({"diversity": 0.5, "token_budget": TokenBudget(9, layout="packed")}, ValueError, "packed"),
    ({"num_workers": 2, "workers": WorkerOptions()}, ValueError, "must not both be given"),
    ({"batch_size": 8}, TypeError, "`batch_size` .*`DataLoader`.*token_budget"),
    ({"timeout": 8}, TypeError, "`timeout` .*`DataLoader`.*timeout_s="),
    ({"windw": 8}, TypeError, "unexpected keyword argument 'windw'"),
]


test_arguments_that_are_not_valid_are_named = refuses(
    REFUSALS, lambda options: ODBDataLoader(**{"dataset": SAMPLES, "token_budget": 256, **options})
)


@pytest.mark.slow  # to import
def test_a_table_of_any_library_is_refused_and_its_rows_are_accepted():
    pyarrow, datasets = map(pytest.importorskip, ("pyarrow", "datasets"))
    table = pyarrow.table({name: [[1, 1], [2, 2]] for name in ("input_ids", "labels")})
    frame, rows = table.to_pandas(), datasets.Dataset(table)
    arrow = [table, table.to_batches()[0], table["labels"], table["labels"].chunk(0), rows.data]
    other = type("DataFrame", (list,), {"__module__": "polars.dataframe.frame"})([rows])
    for data in (frame, frame["labels"], frame.iloc, *arrow, Subset(table, [0]), other):
        for dataset in (data, {"a": rows, "b": data}):
            with pytest.raises(TypeError, match="not rows. Pass `datasets.Dataset"):
                ODBDataLoader(dataset, token_budget=16, process_fn=lambda _: {"input_ids": [1]})
    with pytest.raises(TypeError, match=r"of a series, `series.tolist\(\)`"):
        ODBDataLoader(frame["labels"], token_budget=16)
    for data in (rows, table.to_pylist(), frame.to_dict("records"), Subset(rows, [1, 0])):
        loader = ODBDataLoader(data, token_budget=16)
        assert sum(pop_step_info(batch).local_samples for batch in loader) == 2


class KeepsLoader(IterableDataset):
    """An iterable over a loader of its own, as nobody forms batches there."""

    def __iter__(self):
        return iter(Loader(IterableWrapper(SAMPLES)))


def ungrouped_node():
    return Mapper(Unbatcher(nodes_of_batches().source), lambda sample: sample.data)


@pytest.mark.parametrize("make", [KeepsLoader, ungrouped_node, lambda: dict(enumerate(SAMPLES))])
def test_datasets_that_resemble_batches_or_mixtures_are_accepted(make):
    infos = [pop_step_info(batch) for batch in ODBDataLoader(make(), token_budget=16)]
    assert sum(info.local_samples for info in infos) == 20
    assert not any(info.local_sources for info in infos)


@pytest.mark.parametrize(
    "mixture",
    [
        {"labels": SAMPLES},
        {"text": [[1, 2], [3]], "ids": range(3)},  # with a `process_fn`
        {"input_ids": IterableWrapper(SAMPLES)},
    ],
)
def test_a_mixture_is_none_of_columns(mixture):
    loader = ODBDataLoader(mixture, token_budget=16, process_fn=lambda item: SAMPLES[0])
    assert {name for batch in loader for name in pop_step_info(batch).row_sources} == set(mixture)


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_a_graph_with_another_node_names_the_argument(strict):
    def loader_of(options):
        return ODBDataLoader(TWO, token_budget=60, window=8, **options)

    option = {"virtual_ranks": 2}
    for saved, loaded in ((option, {}), ({}, option)):
        began, loader = loader_of(saved), loader_of(loaded)
        next(iter(began))
        loader.load_state_dict(began.state_dict(), strict=strict)
        assert repr(loader).endswith("loaded with a state of another graph)")
        with pytest.raises(StateError, match="of another graph"):
            _ = loader.step
        with pytest.raises(StateError, match="with the `virtual_ranks` that it had when saved"):
            iter(loader)
    assert "2 virtual ranks, epoch 0" in repr(loader_of(option))
    assert "SourceMixer(shares of samples: a 0.5, b 0.5" in repr(loader_of(option))


# What it does not do.


numbers = []


def noted(_item):
    numbers.append(random.random())
    return {"input_ids": [1, 2, 3]}


class Quiet(list):
    draws_random_numbers = False


def quiet(function):
    function.draws_random_numbers = False
    return function


@pytest.mark.parametrize(
    ("dataset", "process_fn", "observe", "seeded"),
    [
        ([*range(12)], lambda n: noted(n), None, True),
        ([*range(12)], quiet(lambda n: noted(n)), None, False),
        ([*range(12)], quiet(lambda n: noted(n)), lambda sample: 3, True),
        (Quiet(range(12)), quiet(lambda n: noted(n)), quiet(lambda sample: 3), False),
        (type("Loud", (Quiet,), {})(range(12)), quiet(lambda n: noted(n)), None, True),
        ({"a": [*range(12)], "b": [*range(9)]}, quiet(lambda n: noted(n)), None, False),
    ],
)
def test_nothing_is_seeded_where_all_say_that_they_draw_nothing(
    dataset, process_fn, observe, seeded
):
    random.seed(7)
    numbers.clear()
    options = {"process_fn": process_fn, "observe": observe, "shuffle": False}
    assert len(list(ODBDataLoader(dataset, token_budget=64, **options))) > 0
    own = random.Random(7)
    assert (numbers != [own.random() for _ in numbers]) is seeded


class Table(list):
    """Reads many rows at once, and notes how."""

    draws_random_numbers = False

    def __init__(self, rows, bad=frozenset()):
        super().__init__(rows)
        self.bad, self.read = bad, []

    def __getitem__(self, index):
        self.read.append(index)
        if index in self.bad:
            raise OSError("unreadable")
        return super().__getitem__(index)

    def __getitems__(self, places):
        self.read.append(places)
        if not self.bad.isdisjoint(places):
            raise OSError("one of them is unreadable")
        return [list.__getitem__(self, index) for index in places]


def together(table, reads):
    """Whether all rows were read, and none of them alone."""
    return sorted(index for places in reads for index in places) == [*range(len(table))]


def test_a_dataset_reads_many_rows_at_once():
    expected = [*ODBDataLoader(SAMPLES, token_budget=64, window=8)]
    table = Table(SAMPLES)
    for dataset in (table, Subset(table, range(len(table)))):
        table.read.clear()
        batches = [*ODBDataLoader(dataset, token_budget=64, window=8)]
        assert [*map(str, batches)] == [*map(str, expected)]
        assert together(table, table.read) and len(table.read) < len(table)
    parts = {"a": Table(SAMPLES), "b": SAMPLES[:5], "c": Table(SAMPLES[5:])}
    mixed = [*ODBDataLoader(parts, token_budget=64, weights="proportional")]
    assert together(parts["a"], parts["a"].read) and together(parts["c"], parts["c"].read)
    alone = {name: [*rows] for name, rows in parts.items()}
    same = [*ODBDataLoader(alone, token_budget=64, weights="proportional")]
    assert [*map(str, mixed)] == [*map(str, same)]


def test_a_module_of_the_user_may_be_called_datasets(monkeypatch):
    class Dataset(Table):
        draws_random_numbers = False

    module = types.ModuleType("datasets")
    Dataset.__module__, Dataset.__qualname__, module.Dataset = "datasets", "Dataset", Dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    table = Dataset(SAMPLES)
    list(ODBDataLoader(table, token_budget=64))
    assert together(table, table.read)


class Together(Table):
    draws_random_numbers = False

    def __getitem__(self, index):
        raise AssertionError("reads one row")


@pytest.mark.parametrize("collate_in", ["main", "workers"])
def test_workers_read_many_rows_at_once(collate_in):
    options = {"token_budget": 64, "window": 8, "num_workers": 1, "collate_in": collate_in}
    with ODBDataLoader({"a": Together(SAMPLES), "b": Together(SAMPLES)}, **options) as loader:
        assert sum(len(batch["input_ids"]) for batch in loader) == 2 * len(SAMPLES)


def test_rows_that_cannot_be_read_together_are_read_alone():
    bad = len(SAMPLES) - 3
    table = Table(SAMPLES, bad={bad})
    loader = ODBDataLoader(table, token_budget=64, window=4, shuffle=False)
    with pytest.raises(SampleError, match=rf"(?s)item {bad}, sample {bad} .*OSError: unreadable"):
        list(loader)

    class Short(Table):
        draws_random_numbers = False

        def __getitems__(self, places):
            return super().__getitems__(places)[1:]

    loader = ODBDataLoader(Short(SAMPLES), token_budget=64)
    assert sum(len(batch["input_ids"]) for batch in loader) == len(SAMPLES)


# Shares that few people mean.


@pytest.mark.parametrize(
    ("options", "fate"),
    [
        ({}, "'small' is exhausted after 18.2% of the epoch"),
        ({"weights": Mixing(stop="first_exhausted")}, "ends the epoch .* after 18.2%"),
        ({"weights": Mixing(stop="cycle")}, "'small' is read 10 times for each"),
        ({"weights": {"large": 1, "small": 1}}, None),
        ({"weights": "proportional"}, None),
        ({"dataset": {"large": SAMPLES * 9, "small": SAMPLES}}, None),
        ({"dataset": {"large": SAMPLES * 10, "unknown": Stream()}}, None),
        ({"sharded": True}, None),  # These are the sizes of one rank.
    ],
)
def test_equal_shares_of_very_unequal_datasets_are_warned_of_where_nobody_chose_them(options, fate):
    arguments = {
        "dataset": {"large": SAMPLES * 10, "small": SAMPLES},
        "token_budget": 16,
        **options,
    }
    with nullcontext() if fate is None else pytest.warns(match=f"`weights` .*{fate}") as caught:
        if fate is None:
            warnings.simplefilter("error")
        ODBDataLoader(**arguments)
    assert fate is None or caught[0].filename == __file__


def test_a_long_epoch_of_one_length_a_step_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(pipeline, "_noted", [])
    data = [{"input_ids": [1, 2]}] * 10_000
    for options in (
        {"accumulate": 2},
        {"token_budget": TokenBudget(99, layout="packed")},
        {"virtual_ranks": 2},
        {"dataset": data[1:]},
    ):
        ODBDataLoader(**{"dataset": data, "token_budget": 99, **options})
    assert not caplog.messages
    for _ in range(2):
        ODBDataLoader(data, token_budget=99)
    (message,) = caplog.messages
    assert "samples of about one length" in message and "`accumulate=4`" in message
