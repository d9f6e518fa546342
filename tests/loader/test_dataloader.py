import random
import time

import numpy as np
import pytest
import torch
from graphs import LENGTHS, SIZE, Dataset, augment, make_dataloader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from odb_nodes import (
    ODBDataLoader,
    PaddingCollate,
    SampleError,
    TokenBudget,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.sample import data_of
from odb_nodes.testing import assert_resumes_exactly


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def groups(**options):
    with make_dataloader(**options) as loader:
        return [ids(loader) for _ in range(2)]


WORKERS = [
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 4},
    {"num_workers": 2, "prefetch": 0},
    {"num_workers": 2, "prefetch": 1},
    {"num_workers": 2, "prefetch": 64},
    {"workers": WorkerOptions(num_workers=2, chunk_size=1, in_flight_samples=1)},
    {"workers": WorkerOptions(num_workers=2, chunk_size=500)},
    {"workers": WorkerOptions(num_workers=1, method="thread")},
    {"workers": WorkerOptions(num_workers=4, method="thread")},
    {"state": "payload"},
    *(
        pytest.param(
            {"workers": WorkerOptions(num_workers=2, start_method=method)},
            marks=pytest.mark.slow,
        )
        for method in ("forkserver", "spawn")
    ),
]


@pytest.mark.parametrize("options", WORKERS, ids=str)
def test_groups_depend_on_data_seed_and_configuration_alone(options):
    # The lengths are drawn at random in processing.
    assert groups(**options) == groups()


@pytest.mark.parametrize("options", [{"seed": 6}, {"window": 23}, {"token_budget": 250}])
def test_seed_and_configuration_change_the_groups(options):
    assert groups(**options) != groups()


def test_every_sample_comes_once_per_epoch_in_another_order():
    first, second = groups()
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(SIZE))
    assert first != second


def tokens(index):
    return [int(index) + 1] * int(LENGTHS[index])


KINDS = {
    "list": tokens,
    "numpy": lambda index: np.array(tokens(index)),
    "torch": lambda index: torch.tensor(tokens(index)),
    "nested list": lambda index: [tokens(index)],
    "numpy (1, L)": lambda index: np.array([tokens(index)]),
    "torch (1, L)": lambda index: torch.tensor([tokens(index)]),
}


@pytest.mark.parametrize("workers", [0, 2])
def test_groups_do_not_depend_on_how_the_ids_come(workers):
    def batches(kind):
        process = lambda index: {"input_ids": KINDS[kind](index)}  # noqa: E731
        loader = ODBDataLoader(
            range(SIZE), token_budget=256, window=24, process_fn=process, num_workers=workers
        )
        with loader:
            return [batch["input_ids"].tolist() for batch in loader]

    assert all(batches(kind) == batches("list") for kind in KINDS)


@pytest.mark.parametrize("workers", [0, 2])
def test_ids_are_converted_in_the_workers_and_nowhere_else(workers):
    def listed(index):
        return {"input_ids": tokens(index), "id": index}

    def observe(sample):
        assert type(sample["input_ids"]) is list  # what processing returned
        return len(sample["input_ids"])

    def own(samples):
        assert all(type(sample["input_ids"]) is list for sample in samples)
        return PaddingCollate()(samples)

    class Subclass(PaddingCollate):
        __call__ = staticmethod(own)

    def batches(**options):
        given = {"token_budget": 256, "window": 24, "num_workers": workers, **options}
        with ODBDataLoader(range(SIZE), process_fn=listed, **given) as loader:
            pooled = []
            for batch in loader:
                pooled += [
                    data_of(one)["input_ids"]
                    for one in loader._graphs[0].bucketer._pool.items().values()
                ]
                yield batch["input_ids"].tolist()
            kinds.append({type(row) for row in pooled})

    kinds = []
    expected = list(batches())
    for options in ({"collate_fn": PaddingCollate()}, {"observe": observe}):
        assert list(batches(**options)) == expected
    assert kinds == [{np.ndarray}] * 3
    kinds.clear()
    for collate_fn in (own, Subclass()):
        assert list(batches(collate_fn=collate_fn, observe=observe)) == expected
    assert kinds == [{list}] * 2


@pytest.mark.parametrize("state", ["replay", "payload"])
def test_converted_ids_resume_exactly(state, sampled):
    def listed(index):
        ids = augment(index)["input_ids"].tolist()
        return {"input_ids": ids, "labels": ids, "id": index}

    def make():
        return ODBDataLoader(
            range(SIZE), token_budget=256, window=24, process_fn=listed, state=state
        )

    assert_resumes_exactly(make, **sampled(horizon=12))


def test_ids_that_cannot_be_converted_name_key_value_and_item():
    loader = ODBDataLoader([{"input_ids": ["a", "b"]}], token_budget=256)
    with pytest.raises(SampleError, match=r"item 0.*: `input_ids` must hold integers.*'a', 'b'"):
        next(iter(loader))


def test_groups_do_not_depend_on_the_names_of_keys():
    other = ODBDataLoader(
        range(SIZE),
        token_budget=256,
        window=24,
        process_fn=lambda index: {"text": "x" * int(LENGTHS[index]), "id": index},
        observe=lambda item: len(item["text"]),
        collate_fn=lambda items: {"id": torch.tensor([item["id"] for item in items])},
    )
    named = ODBDataLoader(
        range(SIZE),
        token_budget=256,
        window=24,
        process_fn=lambda index: {"input_ids": tokens(index), "id": index},
    )
    assert ids(other) == ids(named)


def test_batches_keep_to_the_budget_and_carry_their_counts():
    budget = TokenBudget(256, max_samples=6, pad_to_multiple_of=16)
    steps = 0
    for step, batch in enumerate(make_dataloader(token_budget=budget)):
        info = pop_step_info(batch)
        rows, width = batch["input_ids"].shape
        assert rows * width <= 256
        assert width % 16 == 0
        assert rows <= 6
        assert (info.step, info.local_samples) == (step, rows)
        assert info.local_targets == int(batch["attention_mask"].sum()) - rows
        steps += 1
    assert steps > 20


class Stream(IterableDataset):
    def __init__(self, size=SIZE):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return map(augment, order)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_datasets_are_read_once_per_epoch(workers):
    def plain(item):
        return {"input_ids": [1] * int(LENGTHS[item["id"]]), "id": item["id"]}

    loader = ODBDataLoader(
        Stream(), token_budget=256, window=24, num_workers=workers, process_fn=plain
    )
    with loader:
        first, second = ids(loader), ids(loader)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(SIZE))
    assert first != second


def test_set_epoch_chooses_the_order_and_repeats_it():
    loader = make_dataloader()
    epochs = [ids(loader), ids(loader), ids(loader)]
    loader.set_epoch(1)
    assert ids(loader) == epochs[1]
    assert ids(loader) == epochs[2]


def test_breaking_out_of_an_epoch_begins_the_next_one_whole():
    with make_dataloader(num_workers=2) as loader, make_dataloader() as reference:
        for index, _ in enumerate(loader):
            if index == 3:
                break
        list(reference)
        assert ids(loader) == ids(reference)


def test_progress_is_measured_in_samples():
    loader = make_dataloader()
    assert loader.num_samples == SIZE
    with pytest.raises(TypeError, match="samples"):
        len(loader)
    assert sum(pop_step_info(batch).local_samples for batch in loader) == SIZE


def collate(items):
    return {"id": torch.tensor([item["id"] for item in items]), "mine": True}


def test_an_existing_dataloader_is_taken_over():
    stock = DataLoader(Dataset(), batch_size=4, shuffle=True, num_workers=2, collate_fn=collate)
    with ODBDataLoader.from_dataloader(stock, token_budget=256, window=24, seed=5) as loader:
        batches = list(loader)
        assert len(loader.worker_pids) == 2
    assert all(batch["mine"] for batch in batches)
    assert [batch["id"].tolist() for batch in batches] == groups()[0]


def test_the_order_of_an_existing_dataloader_is_kept():
    def taken(**options):
        stock = DataLoader(Dataset(), batch_size=4, collate_fn=collate, **options)
        return ids(ODBDataLoader.from_dataloader(stock, token_budget=256, window=1))

    assert sum(taken(), []) == list(range(SIZE))
    assert sum(taken(sampler=[5, 3, 9]), []) == [5, 3, 9]
    distributed = DistributedSampler(Dataset(), 1, 0, shuffle=False)
    assert sum(taken(sampler=distributed), []) == list(range(SIZE))
    assert sum(taken(shuffle=True), []) != list(range(SIZE))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(SIZE), replacement=True),
        RandomSampler(range(SIZE), num_samples=10),
        WeightedRandomSampler([1.0] * SIZE, 50),
    ],
)
def test_an_order_that_cannot_be_drawn_again_is_refused(sampler):
    stock = DataLoader(Dataset(), batch_size=4, sampler=sampler)
    with pytest.raises(ValueError, match="`sampler` is a .* cannot be drawn again"):
        ODBDataLoader.from_dataloader(stock, token_budget=256)


@pytest.mark.parametrize("size", [4, None])
def test_the_default_collate_function_of_torch_gives_way_to_padding(size):
    stock = DataLoader(Dataset(), batch_size=size)
    batch = next(iter(ODBDataLoader.from_dataloader(stock, token_budget=256)))
    assert batch["input_ids"].ndim == 2


def test_the_order_of_a_batch_sampler_is_that_of_its_sampler():
    def taken(sampler, **options):
        stock = DataLoader(Dataset(), batch_sampler=BatchSampler(sampler, 4, False))
        return ids(ODBDataLoader.from_dataloader(stock, token_budget=256, window=1, **options))

    assert taken(RandomSampler(range(SIZE))) == taken(SequentialSampler(range(SIZE)), shuffle=True)
    assert sum(taken(SequentialSampler(range(SIZE))), []) == list(range(SIZE))

    class Own(BatchSampler):
        pass

    stock = DataLoader(Dataset(), batch_sampler=Own(RandomSampler(range(SIZE)), 4, False))
    with pytest.raises(ValueError, match="`loader.batch_sampler` is a `Own`"):
        ODBDataLoader.from_dataloader(stock, token_budget=256)
    assert ODBDataLoader.from_dataloader(stock, token_budget=256, shuffle=False).num_samples == SIZE


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stateful_dataloader_is_taken_over(shuffle):
    stock = StatefulDataLoader(Dataset(), batch_size=4, shuffle=shuffle)
    loader = ODBDataLoader.from_dataloader(stock, token_budget=256, window=24, seed=5)
    assert (ids(loader) == groups()[0]) is shuffle


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset": []}, ValueError, "`dataset` must have at least 1 sample, but is empty"),
        ({"dataset": iter([1])}, TypeError, "`dataset` must .* once per epoch, .*`list_iterator`"),
        ({"dataset": 5}, TypeError, "`dataset`.*`int`"),
        ({"token_budget": -1}, ValueError, "`token_budget`"),
        ({"token_budget": "x"}, TypeError, "`token_budget` must be an integer, but is 'x'"),
        ({"sampler": 5}, TypeError, "`sampler`.*`int`"),
        ({"sampler": iter([5])}, TypeError, "`sampler`.*once per epoch"),
        ({"sampler": [5], "shuffle": True}, ValueError, "`sampler` must be None where `shuffle`"),
        ({"dataset": Stream(), "shuffle": True}, ValueError, "`shuffle` must not be True for an"),
        ({"shuffle": "no"}, TypeError, "`shuffle` must be True or False, but is 'no' instead"),
        ({"dataset": Stream(), "shuffle": 0}, TypeError, "`shuffle` must be True or False"),
        ({"num_workers": -1}, ValueError, "`num_workers`"),
        ({"num_workers": 2, "workers": WorkerOptions()}, ValueError, "must not both be given"),
        ({"window": 0}, ValueError, "`window`"),
        ({"prefetch": -1}, ValueError, "`prefetch`"),
        ({"state": "x"}, ValueError, "`state`"),
        ({"dataset": Stream(), "sampler": [1]}, ValueError, "`sampler`"),
    ],
)
def test_arguments_that_are_not_valid_are_named(options, error, message):
    with pytest.raises(error, match=message):
        ODBDataLoader(**{"dataset": Dataset(), "token_budget": 256, **options})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*exceeds.*")
def test_an_epoch_without_a_batch_is_an_error_each_time(workers):
    budget = TokenBudget(2, oversize="drop")
    with make_dataloader(token_budget=budget, num_workers=workers) as loader:
        for _ in range(2):
            with pytest.raises(SampleError, match=f"all {SIZE} samples of the epoch exceed"):
                list(loader)
            loader.load_state_dict(loader.state_dict())


def test_an_empty_stream_is_an_error():
    with pytest.raises(ValueError, match="yielded no sample in epoch 0"):
        list(ODBDataLoader(Stream(0), token_budget=256))


def test_what_says_that_an_order_is_not_shuffled_may_be_given_anywhere():
    in_order = list(range(SIZE))
    for options, expected in (({"sampler": [5, 3]}, [5, 3]), ({}, in_order)):
        loader = make_dataloader(
            shuffle=False, window=1, token_budget=TokenBudget(256, max_samples=1), **options
        )
        assert [index for (index,) in ids(loader)] == expected


@pytest.mark.parametrize("sampler", [RandomSampler(range(SIZE)), WeightedRandomSampler([1.0], 5)])
def test_a_sampler_that_cannot_yield_its_order_again_is_refused(sampler):
    with pytest.raises(ValueError, match="`sampler` is a .* cannot be drawn again"):
        make_dataloader(sampler=sampler)


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(30)),
        DistributedSampler(range(SIZE), 2, 1, shuffle=False),
    ],
)
def test_a_sampler_over_a_part_of_the_data_is_not_widened(sampler):
    stock = DataLoader(Dataset(), batch_size=4, sampler=sampler)
    loader = ODBDataLoader.from_dataloader(stock, token_budget=256, window=1)
    assert sum(ids(loader), []) == list(sampler)


def test_a_reset_does_not_wait_for_slow_processing():
    def slow(index):
        time.sleep(0.5)
        return augment(index)

    options = {"process_fn": slow, "workers": WorkerOptions(num_workers=1, chunk_size=8)}
    with ODBDataLoader(range(SIZE), token_budget=256, window=64, **options) as loader:
        state = loader.state_dict()  # begins to fill the pool, which takes half a minute
        loader.load_state_dict(state)
        start = time.monotonic()
        iter(loader)
        assert time.monotonic() - start < 15


def test_a_job_of_several_ranks_needs_a_process_group(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = make_dataloader()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="2 ranks, but torch.distributed is not initialised"):
            iter(loader)


def test_a_dataset_that_raises_names_the_sample_and_loses_nothing():
    class Broken(Dataset):
        def __getitem__(self, index):
            if index == 77 and broken:
                raise OSError("disk")
            return super().__getitem__(index)

    for workers in (0, 2):
        broken, seen = True, []
        options = {"token_budget": 256, "window": 24, "num_workers": workers}
        with ODBDataLoader(Broken(), **options) as loader:
            with pytest.raises(ValueError, match="item 77, sample .* of epoch 0.*: OSError: disk"):
                for batch in loader:
                    seen.append(batch["id"].tolist())
            broken = False
            seen += ids(loader)  # goes on where it stood, with new workers
        with ODBDataLoader(Dataset(), **options) as reference:
            assert seen == ids(reference)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_tells_where_it_stands_also_after_a_resume(num_workers):
    def make():
        return ODBDataLoader(Dataset(), token_budget=256, window=24, num_workers=num_workers)

    with make() as loader:
        assert (loader.epoch, loader.step, loader.samples_done) == (0, 0, 0)
        list(loader)
        samples = 0
        for step, batch in enumerate(loader, 1):
            samples += len(batch["id"])
            assert (loader.epoch, loader.step, loader.samples_done) == (1, step, samples)
            if step == 3:
                break
        state = loader.state_dict()
    with make() as resumed:
        resumed.load_state_dict(state)
        expected = f"epoch 1, step 3: {samples} of {len(Dataset())} samples done)"
        assert repr(resumed).endswith(expected)
        assert repr(resumed).startswith("ODBDataLoader(Dataset, TokenBudget(tokens=256")


def test_a_step_tells_its_tokens_with_and_without_padding():
    for batch in ODBDataLoader(Dataset(), token_budget=256, window=24):
        info = pop_step_info(batch)
        assert info.local_tokens == int(batch["attention_mask"].sum())
        assert info.local_padded_tokens == batch["input_ids"].numel()


def test_a_loop_that_moves_the_step_info_to_a_device_is_told_to_take_it_out():
    batch = next(iter(ODBDataLoader(Dataset(), token_budget=256)))
    with pytest.raises(AttributeError, match="'to': take it out of the batch first, by `pop_st"):
        {key: value.to("cpu") for key, value in batch.items()}
    assert not hasattr(pop_step_info(batch), "cpu")


@pytest.mark.parametrize(
    ("option", "instead"),
    [("batch_size", "token_budget"), ("drop_last", "uneven"), ("timeout", "s=")],
)
def test_an_argument_of_a_dataloader_names_what_there_is_instead(option, instead):
    with pytest.raises(TypeError, match=f"`{option}` is an argument of `DataLoader`.*{instead}"):
        ODBDataLoader(Dataset(), token_budget=64, **{option: 8})
    with pytest.raises(TypeError, match="unexpected keyword argument 'windw'"):
        ODBDataLoader(Dataset(), token_budget=64, windw=8)  # type: ignore[call-arg]


@pytest.mark.parametrize("lacking", [0, 4])
@pytest.mark.parametrize("own", [{}, {"id": "sample-7"}])
def test_a_sample_without_labels_among_others_is_named_by_its_key_and_its_id(lacking, own):
    data = [{"input_ids": [n] * 9, "labels": [n] * 9} for n in range(8)]
    data[lacking] = {"input_ids": list(range(50, 59)), **own}
    name = rf"\(key {lacking}\)" + (", `id` 'sample-7'" if own else "")
    loader = ODBDataLoader(data, token_budget=100, window=8, shuffle=False)
    if own:
        for sample in data:
            sample.setdefault("id", "another")
    with pytest.raises(SampleError, match=f"^a sample {name}: the samples of a group must"):
        list(loader)


numbers = []
DRAWN = [*range(12)]


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
        (DRAWN, lambda n: noted(n), None, True),
        (DRAWN, quiet(lambda n: noted(n)), None, False),
        (DRAWN, quiet(lambda n: noted(n)), lambda sample: 3, True),
        (DRAWN, quiet(lambda n: noted(n)), quiet(lambda sample: 3), False),
        (Quiet(DRAWN), quiet(lambda n: noted(n)), None, False),
        (type("Loud", (Quiet,), {})(DRAWN), quiet(lambda n: noted(n)), None, True),
        ({"a": DRAWN, "b": DRAWN}, quiet(lambda n: noted(n)), None, False),
    ],
)
def test_nothing_is_seeded_where_all_say_that_they_draw_nothing(
    dataset, process_fn, observe, seeded
):
    random.seed(7)
    numbers.clear()
    with ODBDataLoader(
        dataset, token_budget=64, process_fn=process_fn, observe=observe, shuffle=False
    ) as loader:
        for _ in loader:
            pass
    own = random.Random(7)
    assert (numbers != [own.random() for _ in numbers]) is seeded
