"""The alignment of ranks over the in-process exchange: one thread per rank."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    LengthObserver,
    Loader,
    RankAligner,
    WindowBucketer,
)
from odb_nodes.exchange import InProcessHub

TIMEOUT_S = 20.0


def shard(rank, size):
    """Samples of one rank, whose lengths come from their ids; every third is masked in part."""
    ids = range(1000 * rank, 1000 * rank + size)
    return [
        {"input_ids": [1] * (2 + 7 * i % 23), "labels": [-100] * (i % 3) + [1] * 30, "id": i}
        for i in ids
    ]


def cut(sample):
    length = len(sample["input_ids"])
    return {**sample, "labels": sample["labels"][:length]}


def graph(exchange, samples, *, budget=60, window=8, **options):
    source = LengthObserver(IterableWrapper([cut(sample) for sample in samples]))
    bucketer = WindowBucketer(source, budget, window)
    return RankAligner(bucketer, exchange, timeout_s=TIMEOUT_S, **options)


def on_ranks(world_size, run, timeout_s=TIMEOUT_S):
    """What `run(exchange)` returns on each rank, all at once; raises what one of them raised."""
    hub = InProcessHub(world_size, timeout_s)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, hub.exchange(rank)) for rank in range(world_size)]
        return [future.result(120) for future in futures]


def epochs_of(exchange, samples, epochs=2, **options):
    loader = Loader(graph(exchange, samples, **options))
    return [list(loader) for _ in range(epochs)]


def ids(items):
    return [sample.data["id"] for item in items if not item.info.is_filler for sample in item[0]]


SIZES = {
    "even": [60, 60],
    "uneven by one": [60, 61, 60],
    "by three times": [30, 90],
    "one empty": [50, 0],
    "nearly all empty": [0, 1, 0, 40],
    "one sample each": [1, 1, 1],
    "fewer samples than steps": [2, 120],
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equal_steps_and_every_sample_once(sizes, accumulate):
    runs = on_ranks(
        len(sizes),
        lambda exchange: epochs_of(
            exchange, shard(exchange.rank, sizes[exchange.rank]), accumulate=accumulate
        ),
    )
    for epoch in range(2):
        items = [run[epoch] for run in runs]
        assert len({len(steps) for steps in items}) == 1
        for rank, steps in enumerate(items):
            expected = [sample["id"] for sample in shard(rank, sizes[rank])]
            assert sorted(ids(steps)) == expected
        check_infos(items, accumulate)


def check_infos(items, accumulate):
    """What each rank is told about all ranks is what they have."""
    for step, of_ranks in enumerate(zip(*items, strict=True)):
        infos = [item.info for item in of_ranks]
        assert {info.step for info in infos} == {step}
        samples = sum(info.local_samples for info in infos)
        targets = sum(info.local_targets for info in infos)
        assert {info.all_samples_this_step for info in infos} == {samples}
        assert {info.all_targets for info in infos} == {targets}
        for group, info in of_ranks:
            real = 0 if info.is_filler else sum(sample.targets for sample in group)
            assert info.local_targets == real
            assert len(group) == (1 if info.is_filler else info.local_samples)
    boundaries = [item.info.ends_optimizer_step for item in items[0]]
    assert not boundaries or boundaries[-1]
    start = 0
    for stop in [index + 1 for index, last in enumerate(boundaries) if last]:
        assert stop - start <= accumulate
        for steps in items:
            infos = [item.info for item in steps[start:stop]]
            assert [info.micro_step for info in infos] == list(range(stop - start))
            assert {info.micro_steps for info in infos} == {stop - start}
            assert {info.optimizer_targets for info in infos} == {
                sum(info.all_targets for info in infos)
            }
            total = infos[0].optimizer_targets
            for info in infos:
                expected = len(items) * info.local_targets / total if total else 0.0
                assert info.loss_scale == expected
        start = stop


@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    budget=st.integers(30, 150),
    window=st.integers(1, 30),
    round_size=st.integers(1, 40),
    accumulate=st.integers(1, 5),
    seed=st.integers(0, 9),
)
@settings(deadline=None, max_examples=40)
def test_any_shards_and_rounds(sizes, budget, window, round_size, accumulate, seed):
    runs = on_ranks(
        len(sizes),
        lambda exchange: epochs_of(
            exchange,
            shard(exchange.rank, sizes[exchange.rank]),
            budget=budget,
            window=window,
            round_size=round_size,
            accumulate=accumulate,
            seed=seed,
        ),
    )
    for epoch in range(2):
        items = [run[epoch] for run in runs]
        assert len({len(steps) for steps in items}) == 1
        for rank, steps in enumerate(items):
            assert sorted(ids(steps)) == [sample["id"] for sample in shard(rank, sizes[rank])]
        check_infos(items, accumulate)


def test_one_rank_needs_no_exchange_and_keeps_the_order():
    samples = shard(0, 80)
    source = LengthObserver(IterableWrapper([cut(sample) for sample in samples]))
    expected = list(Loader(WindowBucketer(source, 60, 8)))
    items = list(Loader(graph(None, samples)))
    assert [item.samples for item in items] == expected
    assert {item.info.loss_scale for item in items} == {1.0}
    assert [item.info.step for item in items] == list(range(len(items)))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("sizes", [[60, 61], [20, 90], [50, 0]])
def test_every_step_resumes_on_every_rank(sizes, accumulate):
    world_size = len(sizes)
    runs = on_ranks(
        world_size,
        lambda exchange: states_of(
            exchange, shard(exchange.rank, sizes[exchange.rank]), accumulate
        ),
    )
    events, states = zip(*runs, strict=True)
    assert len({len(of_rank) for of_rank in states}) == 1
    for start in range(len(states[0])):
        resumed = on_ranks(
            world_size,
            lambda exchange: resume_from(
                exchange,
                shard(exchange.rank, sizes[exchange.rank]),
                accumulate,
                states[exchange.rank][start],
                len(events[0]) - start,
            ),
        )
        for rank in range(world_size):
            assert resumed[rank] == events[rank][start:]


def describe(item):
    return ([sample.data["id"] for sample in item.samples], item.info)


def states_of(exchange, samples, accumulate):
    loader = Loader(graph(exchange, samples, accumulate=accumulate))
    events, states = [], [loader.state_dict()]
    for _ in range(2):
        for item in loader:
            events.append(describe(item))
            states.append(loader.state_dict())
        events.append("end")
        states.append(loader.state_dict())
    return events, states


def resume_from(exchange, samples, accumulate, state, count):
    loader = Loader(graph(exchange, samples, accumulate=accumulate))
    loader.load_state_dict(state)
    events = []
    while len(events) < count:
        for item in loader:
            events.append(describe(item))
        events.append("end")
    return events
