"""The alignment of ranks over the in-process exchange: one thread per rank."""

import threading
from dataclasses import dataclass, field

import pytest
from aligned_ranks import (
    TIMEOUT_S,
    described,
    epoch_of,
    errors_on_ranks,
    graph,
    on_ranks,
    shard,
)
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from sampling import fewer
from torchdata.nodes import BaseNode, IterableWrapper

from odb_nodes import (
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceMixer,
    StateError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.core.contract import NodeState, SourceState, StatefulNode


def epochs_of(exchange, samples, epochs=2, **options):
    loader = Loader(graph(exchange, samples, **options))
    return [list(loader) for _ in range(epochs)]


def ids(items):
    return [sample.data["id"] for item in items if not item.info.is_filler for sample in item[0]]


def check_aligned(sizes, **options):
    """Equal steps, every sample once, and each rank is told what all ranks have."""
    runs = on_ranks(len(sizes), lambda e: epochs_of(e, shard(e.rank, sizes[e.rank]), **options))
    for items in zip(*runs, strict=True):
        assert len({len(steps) for steps in items}) == 1
        for rank, steps in enumerate(items):
            assert sorted(ids(steps)) == [sample["id"] for sample in shard(rank, sizes[rank])]
        check_infos(items, TokenBudget.of(options.get("budget", 60)), options.get("accumulate", 1))


def check_infos(items, budget, accumulate):
    for step, of_ranks in enumerate(zip(*items, strict=True)):
        infos = [item.info for item in of_ranks]
        groups = [group for group, info in of_ranks if not info.is_filler]
        assert {info.step for info in infos} == {step}
        samples = sum(info.local_samples for info in infos)
        targets = sum(info.local_targets for info in infos)
        assert {info.all_samples_this_step for info in infos} == {samples}
        assert {info.all_targets for info in infos} == {targets}
        costs = [budget.cost([sample.tokens for sample in group]) for group in groups]
        assert {info.most_cost for info in infos} == {max(costs)}
        assert max(costs) <= budget.tokens
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
            total = sum(info.all_targets for info in infos)
            for info in infos:
                assert info.optimizer_targets == total
                scale = len(items) * info.local_targets / total if total else 0.0
                assert info.loss_scale == scale
        start = stop


SIZES = [[60, 61, 60], [30, 90], [50, 0], [0, 1, 0, 40], [1, 1, 1], [2, 120]]
BUDGETS = st.integers(30, 150).map(TokenBudget) | st.builds(
    TokenBudget,
    st.just(60),
    layout=st.sampled_from(["padded", "packed"]),
    pad_to_multiple_of=st.sampled_from([1, 8]),
    shapes=st.none() | st.just(5),
    attention_tokens=st.none() | st.just(30),
)


@pytest.mark.fast
@given(
    sizes=st.sampled_from(SIZES) | st.lists(st.integers(0, 70), min_size=1, max_size=5).filter(any),
    budget=BUDGETS,
    window=st.integers(1, 30),
    round_size=st.integers(1, 40),
    accumulate=st.integers(1, 5),
    seed=st.integers(0, 9),
)
@fewer(3)
def test_equal_steps_and_every_sample_once_for_any_shards_and_rounds(sizes, **options):
    check_aligned(sizes, **options)


def test_modalities_of_any_rank_are_known_on_all():
    def run(exchange):
        samples = [{"input_ids": [1] * 5, "id": i + 40 * exchange.rank} for i in range(40)]
        modalities = {
            "audio": lambda sample: False,
            "image": lambda sample: sample.data["id"] == 47,
        }
        return [item.info.modalities for item in graph(exchange, samples, modalities=modalities)]

    first, second = on_ranks(2, run)
    assert first == second
    assert sorted(first)[-1] == ("image",) and first.count(("image",)) == 1


@pytest.mark.parametrize("sizes", [[60, 61, 60], [40, 0]])
def test_stop_ends_all_with_the_first_and_counts_the_rest(sizes):
    def run(exchange):
        aligner = graph(exchange, shard(exchange.rank, sizes[exchange.rank]), uneven="stop")
        loader, epochs = Loader(aligner), []
        for _ in range(2):
            epochs.append((list(loader), aligner.unemitted_samples))
        return epochs

    with pytest.warns(UserWarning, match="samples of rank . are not emitted in epoch ."):
        runs = on_ranks(len(sizes), run)
    for epoch in zip(*runs, strict=True):
        assert len({len(items) for items, _ in epoch}) == 1
        for rank, (items, unemitted) in enumerate(epoch):
            assert len(ids(items)) + unemitted == sizes[rank]
            assert len({*ids(items)}) == len(ids(items))
        assert any(unemitted == 0 for _, unemitted in epoch)


@pytest.mark.filterwarnings("ignore:.*not emitted", "ignore:.*skipped", "ignore:.*padding")
def test_stop_names_all_samples_that_were_read(size=41):
    def process(sample):
        return Skipped("odd") if sample["id"] % 2 else sample

    def run(exchange):
        samples = shard(0, (size, 300)[exchange.rank])
        options = {"window": 8, "round_size": 4, "shuffle": False, "sharded": True}
        loader = ODBDataLoader(
            samples,
            token_budget=60,
            uneven="stop",
            process_fn=process,
            process_group=exchange,
            **options,
        )
        infos = [pop_step_info(batch) for batch in loader]
        emitted = [key for info in infos if not info.is_filler for key in info.keys]
        return emitted + [sample.key for info in infos for sample in info.left_out]

    for keys in on_ranks(2, run):
        assert sorted(keys) == [*range(len(keys))]


class PerEpoch(BaseNode):
    """As many samples as each epoch has."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.epoch = sizes, -1

    def reset(self, state=None):
        super().reset(state)
        self.epoch, self.at = state["at"] if state else (self.epoch + 1, 0)

    def next(self):
        if self.at == self.sizes[self.epoch]:
            raise StopIteration
        self.at += 1
        return shard(0, 40)[self.at - 1]

    def get_state(self):
        return {"at": (self.epoch, self.at)}


def test_a_rank_without_samples_begins_the_next_epoch_after_a_resume():
    def make(exchange):
        source = LengthObserver(PerEpoch([[40, 40], [0, 25]][exchange.rank]))
        return Loader(RankAligner(WindowBucketer(source, 30, 8), exchange, timeout_s=TIMEOUT_S))

    def whole(exchange):
        loader = make(exchange)
        return epoch_of(loader), [*map(described, loader)]

    runs = on_ranks(2, whole)

    def resumed(exchange):
        loader = make(exchange)
        loader.load_state_dict(runs[exchange.rank][0][1][1])
        return [*map(described, loader)], [*map(described, loader)]

    assert on_ranks(2, resumed) == [(steps[1:], after) for (steps, _), after in runs]
    assert not runs[0][1][0].is_filler and not runs[1][1][0].is_filler


# --- ranks that are not alike ---------------------------------------------------------------------


def differs(field, *values):
    return lambda e: graph(e, shard(e.rank, 40), **{field: values[e.rank]})


def mixed(seeds, weights):
    """The graph of a rank over two sources, which differ in the second item of these."""

    def make(exchange):
        place = {"rank": exchange.rank, "world_size": 2}
        children = [ShardedSampler(40, seed=seed, **place) for seed in (seeds[exchange.rank], 1)]
        sources = dict(zip("ab", children, strict=True))
        source = SourceMixer(sources, {"a": 1, "b": weights[exchange.rank]})
        bucketer = WindowBucketer(LengthObserver(source, lambda index: 1 + index % 9), 30, 8)
        return RankAligner(bucketer, exchange, timeout_s=TIMEOUT_S)

    return make


UNLIKE = {
    "seed": (differs("seed", 0, 1), "`RankAligner.seed` is 0 on rank 0, 1 on rank 1"),
    "accumulate": (differs("accumulate", 1, 2), "`RankAligner.accumulate` is"),
    "uneven": (differs("uneven", "fill", "stop"), "`RankAligner.uneven` is"),
    "round size": (differs("round_size", 32, 64), "different sizes"),
    "order": (mixed((0, 7), (1, 1)), "`ShardedSampler.seed` is 0 on rank 0, 7 on rank 1"),
    "weights": (mixed((0, 0), (1, 2)), "`SourceMixer.weights` is"),
}


@pytest.mark.parametrize(("make", "message"), UNLIKE.values(), ids=UNLIKE)
def test_ranks_that_differ_are_the_same_error_on_all(make, message):
    errors = errors_on_ranks(2, lambda exchange: list(Loader(make(exchange))))
    assert {type(error) for error in errors} == {StateError}
    assert all(message in str(error) for error in errors)


STATES = {
    "steps": (2, lambda rank: 3 + 2 * rank, {}, "`step` is 3 on rank 0, 5 on rank 1"),
    "number of ranks": (3, lambda rank: 5, {}, "`world_size` was 2 when saved, but is 3 now"),
    "graph of one": (2, lambda rank: 5, {1: {"window": 9}}, "`window` was 8 .*but is 9 now"),
}


@pytest.mark.parametrize(("ranks", "place", "options", "message"), STATES.values(), ids=STATES)
def test_a_state_refused_by_one_rank_is_an_error_on_all(ranks, place, options, message):
    def make(exchange, **changed):
        return Loader(graph(exchange, shard(exchange.rank, 60), **changed))

    states = [states for _, states in on_ranks(2, lambda exchange: epoch_of(make(exchange)))]

    def run(exchange):
        loader = make(exchange, **options.get(exchange.rank, {}))
        loader.load_state_dict(states[exchange.rank % 2][place(exchange.rank)])
        next(iter(loader))

    for rank, error in enumerate(errors_on_ranks(ranks, run)):
        kind = PeerError if options and rank not in options else StateError
        with pytest.raises(kind, match=message):
            raise error


def sum_of_tokens(group):
    return sum(sample.tokens for sample in group)


def is_odd(sample):
    return sample.tokens % 2 == 1


@pytest.mark.parametrize(
    ("options", "message", "within"),
    [
        ({"step_time": sum_of_tokens}, "`step_time` was .* can change only between", "round"),
        ({"modalities": {"odd": is_odd}}, "`modalities` was .* can change only between", "round"),
        ({"round_size": 64}, "can change only between epochs", "epoch"),
        ({"accumulate": 2}, "can change only between epochs", "epoch"),
        ({"uneven": "stop"}, "can change only between epochs", "epoch"),
    ],
)
@pytest.mark.filterwarnings("ignore:the state does not fit")
def test_options_that_decide_steps_may_not_change_within_a_round_or_epoch(options, message, within):
    plain = {"accumulate": 8} if within == "round" else {}
    steps, states = epoch_of(Loader(graph(None, shard(0, 60), **plain)))
    changed = Loader(graph(None, shard(0, 60), **{**plain, **options}))
    for place in [1] if within == "round" else [0, 3, len(steps) - 1]:
        changed.load_state_dict(states[place], strict=False)
        with pytest.raises(StateError, match=message):
            iter(changed)
    changed.load_state_dict(states[-1], strict=False)  # after the last step
    assert list(changed) == []
    assert sorted(ids(changed)) == [*range(60)]


def test_after_an_error_of_one_rank_all_ranks_resume():
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


def test_a_rank_that_never_comes_is_named():
    others = threading.Barrier(2)  # which meet, however slow the machine is

    def run(exchange):
        if exchange.rank != 1:
            loader = iter(Loader(graph(exchange, shard(exchange.rank, 40))))
            others.wait()
            next(loader)

    first, _, third = errors_on_ranks(3, run, timeout_s=0.2)
    for error in (first, third):
        with pytest.raises(PeerError, match=r"rank \[1\]"):
            raise error


# --- bad input ------------------------------------------------------------------------------------


def with_options(**options):
    return lambda: graph(None, shard(0, 40), **options)


def over(*items):
    return lambda: RankAligner(IterableWrapper(items))


REFUSALS = [
    (with_options(round_size=0), ValueError, "`round_size`"),
    (with_options(accumulate=0), ValueError, "`accumulate`"),
    (with_options(uneven="x"), ValueError, "`uneven` must be one of"),
    (with_options(loss_scaling="x"), ValueError, "`loss_scaling` must be one of"),
    (with_options(timeout_s=0), ValueError, "`timeout_s`"),
    (with_options(seed="x"), TypeError, "`seed`"),
    (with_options(step_time=3), TypeError, "`step_time`"),
    (with_options(step_time=lambda group: next(iter(()))), ValueError, "raised StopIteration"),
    (over(1, 2), TypeError, "must yield groups"),
    (over(None), TypeError, "must yield groups"),
    (over([]), TypeError, "must yield groups"),
    (lambda: over()().request_budget(0), ValueError, "`tokens` must be in 1"),
    (lambda: over()().request_budget("x"), TypeError, "`tokens` must be an integer"),
    (with_options(modalities={"a": 3}), TypeError, r"`modalities\['a'\]` must be a function"),
]


def look(_sample):
    raise LookupError("no such thing")


@pytest.mark.parametrize(
    ("name", "option"),
    [("step_time", {"step_time": look}), ("modalities", {"modalities": {"sound": look}})],
)
def test_an_error_of_a_function_of_the_user_names_it_and_the_samples(name, option):
    rows = [{"input_ids": [1] * (n % 5 + 1)} for n in range(9)]
    samples = ODBDataLoader(rows, token_budget=8)._graphs[0].samples
    aligner = RankAligner(WindowBucketer(samples, TokenBudget(8), 8), **option)
    expected = rf"`{name}` raised LookupError: no such thing. It was given \d samples? \(key \d\)"
    with pytest.raises(SampleError, match=expected) as caught:
        list(Loader(aligner))
    assert type(caught.value.__cause__) is LookupError


def test_what_is_no_process_group_is_refused_before_ranks_meet():
    with pytest.raises(TypeError, match="`process_group` must be a process group.* is `str`"):
        RankAligner(IterableWrapper([]), "x")


test_arguments_that_are_not_valid_are_named = refuses(REFUSALS, lambda make: list(Loader(make())))


def test_no_sample_on_any_rank_is_an_error_on_all():
    for error in errors_on_ranks(2, lambda exchange: list(Loader(graph(exchange, [])))):
        with pytest.raises(SampleError, match="no rank has a sample in epoch 0"):
            raise error


# --- runs that resume, of ranks with data of their own --------------------------------------------


def own_data(exchange, sizes, process, window=64, exclude=None, **options):
    source = ShardedSampler(sizes[exchange.rank], shuffle=False, rank=0, world_size=1)
    source = ParallelProcessor(source, process, rank=0, world_size=1)
    pool = WindowBucketer(LengthObserver(source), 200, window, exclude=exclude)
    return RankAligner(pool, exchange, round_size=8, timeout_s=TIMEOUT_S, **options)


class Process:
    """A `process_fn` that counts its calls."""

    made = shift = 0

    def __call__(self, index):
        self.made += 1
        return {"input_ids": [index + self.shift] * (40 + index % 20)}


def ids_of_group(group):
    return [data["input_ids"][0] for data in group.data()]


def states_of(exchange, sizes, **options):
    node, states = own_data(exchange, sizes, Process(), **options), []
    node.reset(None)
    for _ in node:
        states.append(node.state_dict())
    return states


def resumed(exchange, states, step, **options):
    node = own_data(exchange, **options)
    node.reset(states[exchange.rank][step])
    return [
        (info.is_filler, [data["input_ids"][0] for data in group.data()]) for group, info in node
    ]


def test_no_step_is_filled_with_a_sample_that_is_excluded_at_a_resume():
    sizes = [3, 60]
    states = on_ranks(2, lambda exchange: states_of(exchange, sizes))
    for step in (2, len(states[0]) // 2):
        steps = on_ranks(
            2,
            lambda exchange, step=step: resumed(
                exchange, states, step, sizes=sizes, process=Process(), exclude=[0]
            ),
        )
        assert any(is_filler for is_filler, _ in steps[0])
        assert all(0 not in ids for _, ids in steps[0])


def test_an_error_below_a_node_of_the_user_loses_no_sample():
    """It is raised at once: a node in between may have no state after an error."""

    class Pass(StatefulNode):
        @dataclass(kw_only=True)
        class STATE(NodeState):
            source: SourceState = field(default_factory=dict)

        def __init__(self, source):
            super().__init__()
            self.source = source

        def next(self):
            return next(self.source)

    bad = {120}

    def process(index):
        if index in bad:
            raise OSError("the disk is away")
        return Process()(index)

    def loader():
        source = ParallelProcessor(ShardedSampler(240, shuffle=False), process)
        return Loader(RankAligner(Pass(WindowBucketer(LengthObserver(source), 200, 32))))

    ids, first = [], loader()
    with pytest.raises(SampleError, match="the disk is away"):
        for group, _ in first:
            ids += ids_of_group(group)
    bad.clear()
    second = loader()
    second.load_state_dict(first.state_dict())
    ids += [number for group, _ in second for number in ids_of_group(group)]
    assert sorted(ids) == [*range(240)]


def test_a_rank_hears_at_the_end_of_the_epoch_that_another_could_not_make_a_sample_again():
    sizes = [60, 60]
    states = on_ranks(2, lambda exchange: states_of(exchange, sizes))

    def resume(exchange):
        process = Process()
        if exchange.rank == 1:
            process.shift = 1
        return resumed(exchange, states, -4, sizes=sizes, process=process)

    errors = errors_on_ranks(2, resume)
    assert "rank 1 failed in step" in str(errors[0])
    assert all("has other content" in str(error) for error in errors)
