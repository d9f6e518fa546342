"""The alignment of ranks over the in-process exchange: one thread per rank."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from aligned_ranks import TIMEOUT_S, cut, graph, ids, on_ranks, shard
from hypothesis import given
from hypothesis import strategies as st
from sampling import fewer
from torchdata.nodes import BaseNode, IterableWrapper, Prefetcher

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    SourceMixer,
    StateError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.testing import assert_resumes_exactly


def epochs_of(exchange, samples, epochs=2, **options):
    loader = Loader(graph(exchange, samples, **options))
    return [list(loader) for _ in range(epochs)]


def sum_of_tokens(group):
    return sum(sample.tokens for sample in group)


def is_odd(sample):
    return sample.tokens % 2 == 1


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
@fewer(3)
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
def test_every_step_resumes_on_every_rank(sizes, accumulate, exhaustive):
    world_size = len(sizes)
    runs = on_ranks(
        world_size,
        lambda exchange: states_of(
            exchange, shard(exchange.rank, sizes[exchange.rank]), accumulate
        ),
    )
    events, states = zip(*runs, strict=True)
    assert len({len(of_rank) for of_rank in states}) == 1
    for start in range(0, len(states[0]), 1 if exhaustive else 3):
        left = len(events[0]) - start

        def resume(exchange, start=start, left=left):
            samples = shard(exchange.rank, sizes[exchange.rank])
            return resume_from(exchange, samples, accumulate, states[exchange.rank][start], left)

        resumed = on_ranks(world_size, resume)
        assert resumed == [of_rank[start:] for of_rank in events]


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


# --- ranks that end alone, or all with the first --------------------------------------------------


@pytest.mark.parametrize("sizes", [[30, 90], [60, 61, 60], [90, 5, 40]])
def test_join_ends_each_rank_with_its_data(sizes):
    def run(exchange):
        samples = shard(exchange.rank, sizes[exchange.rank])
        return epochs_of(exchange, samples, epochs=3, uneven="join")

    for epoch in zip(*on_ranks(len(sizes), run), strict=True):
        for rank, items in enumerate(epoch):
            assert sorted(ids(items)) == [sample["id"] for sample in shard(rank, sizes[rank])]
            assert not any(item.info.is_filler for item in items)
        for step in range(max(map(len, epoch))):
            infos = [items[step].info for items in epoch if step < len(items)]
            assert {info.all_targets for info in infos} == {
                sum(info.local_targets for info in infos)
            }


@pytest.mark.parametrize("sizes", [[30, 90], [60, 61, 60], [40, 0]])
def test_stop_ends_all_with_the_first_and_counts_the_rest(sizes):
    def run(exchange):
        aligner = graph(exchange, shard(exchange.rank, sizes[exchange.rank]), uneven="stop")
        loader, epochs = Loader(aligner), []
        for _ in range(2):
            epochs.append((list(loader), aligner.unemitted_samples))
        return epochs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runs = on_ranks(len(sizes), run)
    for epoch in zip(*runs, strict=True):
        assert len({len(items) for items, _ in epoch}) == 1
        for rank, (items, unemitted) in enumerate(epoch):
            assert len(ids(items)) + unemitted == sizes[rank]
            assert len({*ids(items)}) == len(ids(items))
        assert any(unemitted == 0 for _, unemitted in epoch)


def test_a_rank_that_closes_after_its_end_goes_on_answering():
    def run(exchange):
        samples = shard(exchange.rank, [20, 90][exchange.rank])
        with Loader(graph(exchange, samples, uneven="join")) as loader:
            return len(ids(list(loader)))

    assert on_ranks(2, run) == [20, 90]


def test_join_has_one_denominator_for_the_micro_steps_of_all_ranks():
    def run(exchange):
        samples = shard(exchange.rank, [30, 90][exchange.rank])
        return epochs_of(exchange, samples, epochs=1, uneven="join", accumulate=4)[0]

    short, long = on_ranks(2, run)
    for mine, theirs in zip(short, long, strict=False):
        assert mine.info.optimizer_targets == theirs.info.optimizer_targets
    assert short[-1].info.ends_optimizer_step and long[-1].info.ends_optimizer_step


@pytest.mark.parametrize("size", [20, 10, 36])  # the last two end with a round
def test_join_resumes_at_every_step_that_all_ranks_take(size):
    sizes = [size, 90]

    def make(exchange):
        return Loader(graph(exchange, shard(exchange.rank, sizes[exchange.rank]), uneven="join"))

    def whole(exchange):
        loader = make(exchange)
        states, items = [loader.state_dict()], []
        for item in loader:
            items.append(item)
            states.append(loader.state_dict())
        return states, plain(items)

    runs = on_ranks(2, whole)
    for start in range(len(runs[0][1]) + 1):

        def resumed(exchange, start=start):
            loader = make(exchange)
            loader.load_state_dict(runs[exchange.rank][0][start])
            return plain(list(loader))

        assert on_ranks(2, resumed) == [items[start:] for _, items in runs]


def test_another_budget_within_a_round_is_refused_whatever_strict_says():
    def make(budget):
        return Loader(graph(None, shard(0, 60), budget=budget, accumulate=8))

    loader = make(60)
    next(iter(loader))
    changed = make(40)
    changed.load_state_dict(loader.state_dict(), strict=False)
    with pytest.raises(StateError, match="`budget.tokens` was 60 when saved, but is 40 now"):
        iter(changed)


def test_a_rank_without_samples_begins_the_next_epoch_after_a_resume():
    sizes = [[40, 40], [0, 40], [25, 40]]  # of rank 1, by epoch: none, then some

    def make(exchange):
        sampler = ShardedSampler(40, seed=1, rank=0, world_size=1)
        if exchange.rank:
            sampler = Shrinking(sampler, [size[0] for size in sizes[1:]])
        source = LengthObserver(sampler, lambda index: 1 + index % 9)
        return Loader(RankAligner(WindowBucketer(source, 30, 8), exchange, timeout_s=TIMEOUT_S))

    def whole(exchange):
        loader = make(exchange)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        list(iterator)
        return state, plain(list(loader))

    runs = on_ranks(2, whole)

    def resumed(exchange):
        loader = make(exchange)
        loader.load_state_dict(runs[exchange.rank][0])
        list(loader)
        return plain(list(loader))

    assert on_ranks(2, resumed) == [run[1] for run in runs]


def plain(items):
    return [([sample.data for sample in item.samples], item.info) for item in items]


class Shrinking(BaseNode):
    """Yields as many items of a sampler as each epoch has."""

    def __init__(self, sampler, sizes):
        super().__init__()
        self.sampler, self.sizes = sampler, sizes

    def reset(self, initial_state=None):
        super().reset(initial_state)
        self.sampler.reset(initial_state)

    def next(self):
        item = next(self.sampler)
        state = self.sampler.state_dict()
        if state["position"] > self.sizes[state["epoch"]]:
            raise StopIteration
        return item

    def get_state(self):
        return self.sampler.state_dict()


def test_stop_warns_of_what_is_left_over():
    with pytest.warns(UserWarning, match="samples of rank 1 are not emitted in epoch 0"):
        on_ranks(2, lambda e: epochs_of(e, shard(e.rank, [30, 90][e.rank]), 1, uneven="stop"))


# --- ranks that are not alike ---------------------------------------------------------------------


def errors_on_ranks(world_size, run):
    def caught(exchange):
        try:
            run(exchange)
        except Exception as error:
            return error
        return None

    return on_ranks(world_size, caught)


@pytest.mark.parametrize(
    ("field", "values"),
    [("seed", [0, 1]), ("accumulate", [1, 2]), ("uneven", ["fill", "stop"])],
)
def test_another_configuration_is_the_same_error_on_all_ranks(field, values):
    errors = errors_on_ranks(
        2, lambda e: epochs_of(e, shard(e.rank, 40), **{field: values[e.rank]})
    )
    assert {type(error) for error in errors} == {StateError}
    assert len({str(error) for error in errors}) == 1
    assert f"`RankAligner.{field}` is" in str(errors[0]) and "on rank 1" in str(errors[0])


def test_another_order_of_a_mixed_source_is_the_same_error_on_all_ranks():
    def run(exchange):
        shard = {"rank": exchange.rank, "world_size": 2}
        children = [ShardedSampler(40, seed=seed, **shard) for seed in (7 * exchange.rank, 1)]
        mixed = SourceMixer(dict(zip("ab", children, strict=True)), {"a": 1, "b": 1})
        source = LengthObserver(mixed, lambda index: 1 + index % 9)
        bucketer = WindowBucketer(source, 30, 8)
        list(Loader(RankAligner(bucketer, exchange, timeout_s=TIMEOUT_S)))

    for error in errors_on_ranks(2, run):
        assert type(error) is StateError
        assert "`ShardedSampler.seed` is 0 on rank 0, 7 on rank 1" in str(error)


def test_other_weights_of_a_mixed_source_are_the_same_error_on_all_ranks():
    def run(exchange):
        children = [ShardedSampler(40, seed=1, rank=exchange.rank, world_size=2) for _ in "ab"]
        weights = {"a": 1, "b": 1 + exchange.rank}
        mixed = SourceMixer(dict(zip("ab", children, strict=True)), weights)
        source = LengthObserver(mixed, lambda index: 1 + index % 9)
        bucketer = WindowBucketer(source, 30, 8)
        list(Loader(RankAligner(bucketer, exchange, timeout_s=TIMEOUT_S)))

    for error in errors_on_ranks(2, run):
        assert type(error) is StateError
        assert "`SourceMixer.weights` is" in str(error)


def test_another_round_size_is_an_error_on_all_ranks():
    errors = errors_on_ranks(2, lambda e: epochs_of(e, shard(e.rank, 40), round_size=32 << e.rank))
    assert {type(error) for error in errors} == {StateError}
    assert all("different sizes" in str(error) for error in errors)


def test_resuming_from_different_steps_is_the_same_error_on_all_ranks():
    runs = on_ranks(2, lambda e: states_of(e, shard(e.rank, 60), 1))

    def run(exchange):
        loader = Loader(graph(exchange, shard(exchange.rank, 60)))
        loader.load_state_dict(runs[exchange.rank][1][3 + 2 * exchange.rank])
        next(iter(loader))

    errors = errors_on_ranks(2, run)
    assert {type(error) for error in errors} == {StateError}
    assert len({str(error) for error in errors}) == 1
    assert "`step` is 3 on rank 0, 5 on rank 1" in str(errors[0])


def test_another_world_size_is_an_error_on_all_ranks():
    runs = on_ranks(2, lambda e: states_of(e, shard(e.rank, 60), 1))

    def run(exchange):
        loader = Loader(graph(exchange, shard(exchange.rank, 60)))
        loader.load_state_dict(runs[exchange.rank % 2][1][5])
        next(iter(loader))

    errors = errors_on_ranks(3, run)
    assert {type(error) for error in errors} == {StateError}
    assert all("`world_size` was 2 when saved, but is 3 now" in str(error) for error in errors)


@pytest.mark.filterwarnings("ignore:the state does not fit")
@pytest.mark.parametrize(
    "changed",
    [{"cost_fn": sum_of_tokens}, {"modalities": {"odd": is_odd}}],
    ids=["cost_fn", "modalities"],
)
def test_what_the_plan_was_made_from_does_not_change_within_a_round(changed):
    loader = Loader(graph(None, shard(0, 60), accumulate=8))
    next(iter(loader))
    other = Loader(graph(None, shard(0, 60), accumulate=8, **changed))
    other.load_state_dict(loader.state_dict(), strict=False)
    with pytest.raises(StateError, match=f"`{next(iter(changed))}` was .* can change only between"):
        iter(other)


@pytest.mark.parametrize(
    "options", [{"round_size": 64}, {"accumulate": 2}, {"uneven": "stop"}], ids=str
)
@pytest.mark.filterwarnings("ignore:the state does not fit")
def test_what_decides_the_steps_changes_only_between_epochs(options):
    def loader():
        return Loader(graph(None, shard(0, 60), **options))

    _, states = states_of(None, shard(0, 60), 1)
    changed = loader()
    ended = len(list(loader()))
    for state in (states[0], states[3], states[ended - 1]):
        changed.load_state_dict(state, strict=False)
        with pytest.raises(StateError, match="can change only between epochs"):
            iter(changed)
    changed.load_state_dict(states[ended + 1], strict=False)
    assert len(list(changed)) == ended


def test_a_state_that_one_rank_cannot_load_is_an_error_on_all():
    runs = on_ranks(2, lambda e: states_of(e, shard(e.rank, 60), 1))

    def run(exchange):
        loader = Loader(graph(exchange, shard(exchange.rank, 60), window=8 + exchange.rank))
        loader.load_state_dict(runs[exchange.rank][1][5])
        next(iter(loader))

    errors = errors_on_ranks(2, run)
    assert {type(error) for error in errors} == {StateError}
    assert all("`window` was 8 when saved, but is 9 now" in str(error) for error in errors)


def test_after_an_error_of_one_rank_all_go_on_where_they_were():
    broken = threading.Event()
    broken.set()

    def run(exchange):
        def observe(sample):
            if exchange.rank == 1 and sample["id"] == 1050 and broken.is_set():
                raise OSError("not there")
            return len(sample["input_ids"])

        source = LengthObserver(IterableWrapper(shard(exchange.rank, 80)), observe)
        bucketer = WindowBucketer(source, 60, 8)
        loader, items = Loader(RankAligner(bucketer, exchange, timeout_s=TIMEOUT_S)), []
        with pytest.raises(SampleError if exchange.rank else PeerError, match="not there"):
            for item in loader:
                items.append(item)
        broken.clear()
        return items + list(loader)

    runs = on_ranks(2, run)
    assert len({len(items) for items in runs}) == 1
    for rank, items in enumerate(runs):
        assert sorted(ids(items)) == [sample["id"] for sample in shard(rank, 80)]


@pytest.mark.parametrize("read_ahead", [False, True])
def test_breaking_out_and_beginning_again(read_ahead):
    sizes = [90, 40, 60]

    def run(exchange):
        node = graph(exchange, shard(exchange.rank, sizes[exchange.rank]))
        loader = Loader(Prefetcher(node, 2) if read_ahead else node)
        for stop in (3, 0, 5, 1, 8):
            for step, _ in enumerate(loader):
                if step == stop:
                    break
        items = list(loader)
        loader.close()
        return items

    for rank, items in enumerate(on_ranks(3, run)):
        assert sorted(ids(items)) == [sample["id"] for sample in shard(rank, sizes[rank])]


def test_a_rank_that_never_comes_is_named():
    def run(exchange):
        if exchange.rank != 1:
            next(iter(Loader(graph(exchange, shard(exchange.rank, 40)))))

    hub = InProcessHub(3, timeout_s=1.0)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(run, hub.exchange(rank)) for rank in range(3)]
        for rank in (0, 2):
            with pytest.raises(PeerError, match=r"rank \[1\]"):
                futures[rank].result(20)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"round_size": 0}, ValueError, "`round_size`"),
        ({"accumulate": 0}, ValueError, "`accumulate`"),
        ({"uneven": "x"}, ValueError, "`uneven` must be one of"),
        ({"loss_scaling": "x"}, ValueError, "`loss_scaling` must be one of"),
        ({"timeout_s": 0}, ValueError, "`timeout_s`"),
        ({"seed": "x"}, TypeError, "`seed`"),
        ({"cost_fn": 3}, TypeError, "`cost_fn`"),
    ],
)
def test_arguments_that_are_not_valid_are_named(options, error, message):
    with pytest.raises(error, match=message):
        graph(None, shard(0, 5), **options)


@pytest.mark.parametrize("items", [[1, 2], [None], [[]]])
def test_a_source_of_something_else_is_an_error(items):
    with pytest.raises(TypeError, match="must yield groups"):
        list(Loader(RankAligner(IterableWrapper(items))))


def test_a_cost_that_raises_stop_iteration_does_not_end_the_epoch():
    with pytest.raises(RuntimeError, match=r"round 0 of epoch 0 .* raised StopIteration"):
        list(Loader(graph(None, shard(0, 40), cost_fn=lambda group: next(iter(())))))


def test_a_source_that_shards_over_other_ranks_is_an_error():
    source = LengthObserver(ShardedSampler(10, rank=0, world_size=2), lambda index: 1 + index)
    with pytest.raises(RuntimeError, match="`ShardedSampler` is rank 0 of 2 ranks.*is rank 0 of 1"):
        iter(Loader(RankAligner(WindowBucketer(source, 20))))


def test_modalities_of_any_rank_are_known_on_all():
    def run(exchange):
        samples = [
            {"input_ids": [1] * 5, "image": exchange.rank == 1 and i == 7} for i in range(40)
        ]
        source = LengthObserver(IterableWrapper(samples))
        modalities = {
            "audio": lambda sample: False,
            "image": lambda sample: sample.data["image"],
        }
        bucketer = WindowBucketer(source, 20, 8)
        aligner = RankAligner(bucketer, exchange, modalities=modalities)
        return [item.info.modalities for item in Loader(aligner)]

    first, second = on_ranks(2, run)
    assert first == second
    assert sorted(first)[-1] == ("image",) and first.count(("image",)) == 1


@pytest.mark.parametrize("state", ["replay", "payload"])
def test_one_rank_resumes_exactly(state, sampled):
    def make():
        sampler = ShardedSampler(90, seed=3, rank=0, world_size=1)
        source = LengthObserver(sampler, lambda index: 1 + 7 * index % 23)
        bucketer = WindowBucketer(source, 60, 8, state)
        node = RankAligner(bucketer, accumulate=3)
        return Loader(GroupCollator(node, lambda indices: {"id": indices}))

    assert_resumes_exactly(make, epochs=3, **sampled(horizon=12, chain=1))
    sizes = [pop_step_info(batch).micro_steps for batch in make()]
    assert set(sizes[:-3]) == {3}


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_knows_what_the_dearest_batch_of_a_step_costs(world_size):
    def run(exchange):
        return [*graph(exchange, shard(exchange.rank, 30 + 9 * exchange.rank))]

    budget = TokenBudget(60)
    for items in zip(*on_ranks(world_size, run), strict=True):
        batches = [item.samples for item in items if not item.info.is_filler]
        most = max(budget.cost([sample.tokens for sample in batch]) for batch in batches)
        assert [item.info.most_cost for item in items] == [most] * world_size
