"""Epochs over a table of lengths against real `ODBDataLoader`s, one thread per rank."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import numpy as np
import pytest

from odb_nodes import (
    Mixing,
    Observation,
    ODBDataLoader,
    Skipped,
    TokenBudget,
    WeightSchedule,
    pop_step_info,
)
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.planning import SimulationOptions
from odb_nodes.tools.length_table import LengthTable
from odb_nodes.tools.lengths import observe_lengths
from odb_nodes.tools.simulate import lognormal_lengths, simulate
from odb_nodes.tools.table_epoch import TableEpoch

TIMEOUT_S = 20.0
WEIGHTS = {"code": 1, "text": 2.5}


def make_dataset(samples, seed=0):
    lengths = lognormal_lengths(samples, cv=1.0, mean_tokens=90, longest_tokens=700, seed=seed)
    patches = np.random.default_rng(seed).integers(0, 9, samples)
    return [*zip(lengths.tolist(), patches.tolist(), strict=True)]


def process(item):
    tokens, patches = item
    return Skipped("short") if tokens < 20 else {"input_ids": [1] * tokens, "patches": patches}


def observe(sample):
    return Observation(len(sample["input_ids"]), patches=sample["patches"])


def real_steps(dataset, world_size, **options):
    """Of each step: rows, width and keys of each rank; `None` where it fills, or has left."""
    hub = InProcessHub(world_size, TIMEOUT_S)
    lock = threading.Lock()  # global generators of random numbers are shared by the threads

    def run(rank):
        with lock:
            loader = ODBDataLoader(
                dataset,
                process_fn=process,
                observe=observe,
                process_group=hub.exchange(rank),
                timeout_s=TIMEOUT_S,
                **options,
            )
        steps = []
        for batch in loader:
            info = pop_step_info(batch)
            keys = [*zip(info.row_sources, info.keys, strict=True)]
            steps.append(None if info.is_filler else (tuple(batch["input_ids"].shape), keys))
        return steps

    with ThreadPoolExecutor(world_size) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of oversize and skipped samples
        ranks = [pool.submit(run, rank) for rank in range(world_size)]
        return [[*step] for step in zip_longest(*(rank.result(60) for rank in ranks))]


def planned_steps(table, world_size, token_budget, shuffle=True, weights=None, **options):
    epoch = TableEpoch(table=table, shuffle=shuffle, weights=weights)
    job = SimulationOptions(world_size=world_size, budget=token_budget, **options)
    budget = TokenBudget.of(token_budget)

    def planned(group):
        rows = [sample.data for sample in group]
        names = [table.names[number] for number in table.sources[rows]]
        shape = budget.shape([sample.tokens for sample in group])
        return shape, [*zip(names, table.keys[rows].tolist(), strict=True)]

    return [[group and planned(group) for group in step] for step in epoch.steps(job)]


BUDGETS = {
    "padded": TokenBudget(1500, pad_to_multiple_of=8, max_patches=60),
    "packed": TokenBudget(1500, layout="packed"),
    "shapes": TokenBudget(1500, shapes=5),
    "dropping": TokenBudget(500, oversize="drop", attention_tokens=400),
}


@pytest.mark.parametrize(
    ("name", "world_size", "window"),
    [("padded", 4, 40), ("packed", 1, "auto"), ("shapes", 2, 40), ("dropping", 4, "auto")],
)
def test_steps_and_shapes_are_those_of_a_real_loader(name, world_size, window):
    dataset, options = make_dataset(500), {"window": window, "seed": 3, "round_size": 8}
    expected = real_steps(dataset, world_size, token_budget=BUDGETS[name], **options)
    table = observe_lengths(dataset, process_fn=process, observe=observe)
    steps = planned_steps(table, world_size, BUDGETS[name], **options)
    if name == "shapes":  # Its last rows are empty, which the loader does not tell apart.
        assert [[one and one[1] for one in step] for step in steps] == [
            [one and one[1] for one in step] for step in expected
        ]
    else:
        assert steps == expected
    report = simulate(table, world_size=world_size, budget=BUDGETS[name], **options)
    shapes = [one[0] for step in expected for one in step if one]
    assert report.steps == len(expected)
    assert report.padded_tokens == sum(rows * width for rows, width in shapes)
    assert report.shapes == len({*shapes})


SCHEDULE = WeightSchedule([(0, WEIGHTS), (100, {"code": 0, "text": 1}), (200, WEIGHTS)])
IN_TOKENS = WeightSchedule([(0, WEIGHTS), (20_000, {"code": 3, "text": 1})], ramp=True)


@pytest.mark.parametrize(
    "weights",
    [
        None,
        "proportional",
        WEIGHTS,
        Mixing(by="tokens"),
        SCHEDULE,
        Mixing(weights=IN_TOKENS, by="tokens"),
        Mixing(stop="first_exhausted"),
    ],
)
def test_the_steps_of_a_mixture_are_those_of_a_real_loader(weights):
    dataset = {"code": make_dataset(150), "text": make_dataset(250, seed=1)}
    options = {"window": 40, "weights": weights, "accumulate": 2}
    expected = real_steps(dataset, 2, token_budget=1500, **options)
    table = observe_lengths(dataset, process_fn=process, observe=observe)
    assert planned_steps(table, 2, 1500, **options) == expected


def test_a_schedule_has_its_places_in_the_share_of_the_data_that_is_drawn():
    half = {"code": 1, "text": 0}, {"code": 0, "text": 1}
    weights = WeightSchedule([(0, half[0]), (15_000, half[1]), (30_000, {"code": 1, "text": 1})])
    dataset = {name: make_dataset(20_000, seed) for seed, name in enumerate(("code", "text"))}
    known = observe_lengths(dataset, process_fn=process, observe=observe, samples=500)
    epoch = TableEpoch(table=known, weights=weights, most_drawn=4000, least_windows=0)
    table, (rows,) = epoch.order(SimulationOptions(world_size=1, budget=1500))
    assert len(table) == 4000
    assert set(table.sources[rows[:1500]]) == {0} and set(table.sources[rows[1500:3000]]) == {1}
    assert len({*rows.tolist()}) == 4000


class Stream:
    """An iterable that is no sequence."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Sized(Stream):
    def __len__(self):
        return len(self.items)


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (make_dataset(200), {"shuffle": False}),
        (Stream(make_dataset(200)), {}),
        ({"alone": make_dataset(200)}, {}),
        ({"code": make_dataset(150), "text": Stream(make_dataset(120, seed=1))}, {}),
        (
            {"code": Sized(make_dataset(150)), "text": Sized(make_dataset(250, seed=1))},
            {"weights": "proportional"},
        ),
    ],
    ids=["not shuffled", "stream", "alone", "mixed", "sized"],
)
def test_streams_and_what_is_not_shuffled_are_read_in_their_order(dataset, options, tmp_path):
    options = {"window": 40, "seed": 3} | options
    expected = real_steps(dataset, 2, token_budget=1500, **options)
    observe_lengths(dataset, process_fn=process, observe=observe).save(tmp_path / "lengths.npz")
    table = LengthTable.load(tmp_path / "lengths.npz")
    assert planned_steps(table, 2, 1500, **options) == expected


def test_more_ranks_than_samples_and_weights_without_sources_are_refused():
    table = LengthTable.of([3, 4])
    with pytest.raises(ValueError, match="the 2 samples of the data, but is 3"):
        simulate(table, world_size=3, budget=9)
    for lengths in (table, [3, 4]):
        with pytest.raises(ValueError, match="`weights` must be None"):
            simulate(lengths, world_size=1, budget=9, weights={"a": 1})


def test_jobs_that_differ_in_seed_or_ranks_are_read_anew():
    epoch = TableEpoch(table=LengthTable.of(lognormal_lengths(300, cv=1.0)))
    for seed in (0, 1):
        for world_size in (1, 2):
            job = SimulationOptions(world_size=world_size, budget=16_384, seed=seed)
            alone = TableEpoch(table=epoch.table)
            assert [*epoch.steps(job)] == [*alone.steps(job)]


def test_some_samples_tell_about_the_steps_of_all():
    lengths = lognormal_lengths(40_000, cv=0.6)
    table = LengthTable.of(lengths)
    options = {"world_size": 8, "budget": 16_384, "window": 256}
    whole = simulate(table, **options)
    for seed in range(2):
        picked = np.random.default_rng(seed).permutation(len(lengths))[:512]
        estimate = simulate(table.rows(picked), **options)
        # Their mean has an error that no estimate can know of. Nothing else is off.
        known = lengths[picked].mean() / lengths.mean()
        assert estimate.steps / whole.steps == pytest.approx(known, rel=0.025)
        assert estimate.efficiency == pytest.approx(whole.efficiency, abs=0.02)
