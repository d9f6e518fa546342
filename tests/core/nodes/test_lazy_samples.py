"""Samples of a restored state: known at once, made and compared before the group with them."""

from functools import partial

import numpy as np
import pytest
from aligned_ranks import on_ranks

from odb_nodes import (
    ItemKey,
    LengthObserver,
    Observation,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    Sample,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceMixer,
    StateError,
    WindowBucketer,
    WorkerOptions,
)
from odb_nodes.core.contract import copy_state, restore_items
from odb_nodes.core.contract.again import make_again
from odb_nodes.core.nodes.lazy_samples import LazySamples
from odb_nodes.core.nodes.sample_records import from_records, to_records
from odb_nodes.core.sample_block import DATA, SampleBlock

SIZE, WINDOW, BUDGET = 240, 32, 200


def length(number):
    return 1 + number * 7919 % 61


class Process:
    """Makes a sample of a number, and notes which; `changed` are the numbers of other content."""

    def __init__(self, changed=(), skipped=(), raising=()):
        self.changed, self.skipped, self.raising, self.made = changed, skipped, raising, []

    def __call__(self, number):
        self.made.append(number)
        if number in self.raising:
            raise ValueError("a bad sample")
        if number in self.skipped:
            return Skipped("empty")
        return {"input_ids": [number + (number in self.changed)] * length(number)}


def shard_of(exchange):
    if exchange is None:
        return {"rank": 0, "world_size": 1}
    return {"rank": exchange.rank, "world_size": exchange.world_size}


def pool_of(process, exchange=None, **options):
    shard = shard_of(exchange)
    node = ParallelProcessor(ShardedSampler(SIZE, **shard), process, **shard)
    return WindowBucketer(LengthObserver(node), BUDGET, WINDOW, **options)


def aligner_of(process, exchange=None, pool=None, **options):
    options = {"round_size": 8, "timeout_s": 20.0, **options}
    return RankAligner(pool_of(process, exchange, **pool or {}), exchange, **options)


def steps_of(node, count=None):
    """The numbers of the samples of each step, or of so many."""
    steps = []
    for item in node:
        group = item[0] if isinstance(item, tuple) else item
        steps.append([sample.data["input_ids"][0] for sample in group])
        if len(steps) == count:
            break
    return steps


def saved(make, step=6):
    """The state of a node after some steps, and the steps after it."""
    node = make(Process())
    node.reset(None)
    steps_of(node, step)
    return node.state_dict(), steps_of(node)


MAKERS = {"pool": pool_of, "aligner": aligner_of}
both = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


# --- what the records say -------------------------------------------------------------------------


def test_records_say_all_of_a_sample_but_its_data():
    samples = [
        Sample("a", 7, 6, 0, "", "tokens", 3, ItemKey("", 3, 2), 11),
        Sample("b", 70_000, 9, 300, "web", "labels", 4, ItemKey("web", 9, 2, 5), 12, "chat"),
        Sample("c", 1, 0, 0, "web", "observed", None, ItemKey("web", 2**40, 1), 13, padding=4),
        Sample("d", 2, 1, 0, "ocr/x", "", 2**62, ItemKey("ocr/x", 0, 1), 14),
        Sample("e", 9, 8, 0, "", "tokens", 5, ItemKey("", 5, 1), 15),
    ]
    for some in samples, samples[:1], samples[2:3], []:
        records = from_records(copy_state(to_records(SampleBlock.of(some))))
        assert (records.facts[:DATA] == SampleBlock.of(some).facts[:DATA]).all()


def test_records_of_samples_that_are_numbered_need_no_keys():
    keyed = Sample("e", 9, 8, 0, "", "tokens", 5, ItemKey("", 5, 1), 15)
    samples = [keyed, Sample("f", 3, 2, 0, "", "tokens", None, None, 16)]
    for some in samples, samples[1:]:
        block = SampleBlock.of(some)
        with pytest.raises(SampleError, match=r"`item_key\(\)` returned None"):
            to_records(block)
        records = to_records(block, is_numbered=True)
        assert (from_records(records, is_numbered=True).facts[:DATA] == block.facts[:DATA]).all()
        with pytest.raises(StateError, match="not valid"):
            from_records(records)


def test_records_that_contradict_the_samples_are_an_error():
    state, _ = saved(pool_of)
    *bits, (costs, *others), payload = state["held"]
    tokens = np.frombuffer(costs, "<u8").copy()
    tokens[:] += 1  # with the digests of before
    root = {key: value for key, value in state.items() if key != "digest"}
    node = pool_of(Process())
    node.reset({**root, "held": (*bits, (tokens.tobytes(), *others), payload)})
    with pytest.raises(StateError, match=r"the record of a sample.* in the state is damaged"):
        steps_of(node)


# --- when samples are made ------------------------------------------------------------------------


@both
def test_samples_are_made_before_the_group_that_holds_them(make):
    state, rest = saved(make)
    node = make(process := Process())
    node.reset(state)
    assert process.made == []
    first = steps_of(node, 1)
    assert first == rest[:1] and {*first[0]} <= {*process.made}
    assert steps_of(node) == rest[1:]
    # Only the samples of the step, and new ones, were made: none twice.
    assert len(process.made) == len({*process.made})


@both
def test_samples_that_are_excluded_or_put_back_are_not_made(make):
    state, rest = saved(make)
    keys = {number for step in rest[:4] for number in step[::2]}
    kinds = {"pool": partial(pool_of, exclude=keys)}
    kinds["aligner"] = partial(aligner_of, pool={"exclude": keys})
    node = kinds["pool" if make is pool_of else "aligner"](process := Process())
    node.reset(state)
    assert process.made == []
    steps = steps_of(node)
    waiting = {*range(SIZE)} - {number for step in rest for number in step}
    assert sorted(sum(steps, [])) == sorted({*sum(rest, [])} - keys)
    assert not waiting & {*sum(steps, [])}
    assert len(process.made) < len(sum(rest, []))


@pytest.mark.slow
def test_a_round_is_planned_without_the_data_of_samples_unless_a_function_asks_for_them():
    def run(exchange, **options):
        node = aligner_of(Process(), exchange, **options)
        node.reset(None)
        steps_of(node, 9)
        state, rest = node.state_dict(), steps_of(node)
        again = aligner_of(process := Process(), exchange, **options)
        again.reset(state)
        assert steps_of(again, 1) == rest[:1]
        made = len(process.made)
        assert steps_of(again) == rest[1:]
        return made

    asks = [
        {"step_time": lambda group: sum(len(sample.data["input_ids"]) for sample in group)},
        {"modalities": {"even": lambda sample: sample.data["input_ids"][0] % 2 == 0}},
    ]
    fewest = max(on_ranks(2, run))
    for options in asks:
        assert on_ranks(2, partial(run, **options))
    assert fewest < 4 * WINDOW


@pytest.mark.filterwarnings('ignore:`uneven="stop"`')
def test_unemitted_samples_are_named_without_being_made():
    """Rank 1 has far less, so rank 0 leaves samples over that it never makes."""

    def run(exchange):
        size = (300, 100)[exchange.rank]

        def make(process):
            pool = WindowBucketer(
                LengthObserver(ParallelProcessor(ShardedSampler(size), process)), BUDGET, WINDOW
            )
            return RankAligner(pool, exchange, 8, "stop", timeout_s=20.0)

        node = make(Process())
        node.reset(None)
        taken = 0
        states = [node.state_dict()]
        for _ in node:
            taken += 1
            states.append(node.state_dict())
        state = states[max(0, taken - 6)]
        expected = node.unemitted_samples
        again = make(process := Process())
        again.reset(state)
        left = [sample for _, info in again for sample in info.left_out]
        assert again.unemitted_samples == expected
        return len(process.made), [sample.key for sample in left if sample.reason == "unemitted"]

    (_, left), _ = on_ranks(2, run)
    assert left


# --- what is not what it was ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "how"), [(aligner_of, "changed"), (pool_of, "skipped"), (aligner_of, "raising")]
)
def test_a_changed_skipped_or_failing_sample_is_an_error_before_its_group(make, how):
    state, rest = saved(make)
    number = next(number for number, step in enumerate(rest) if number >= 2)
    key = rest[number][0]
    kind, message = StateError, rf"\(key {key}\)"
    if how == "raising":
        kind, message = SampleError, rf"item {key}, which is made again for a restore"
    node = make(Process(**{how: (key,)}))
    node.reset(state)
    assert steps_of(node, number) == rest[:number]
    with pytest.raises(kind, match=message):
        next(node)
    after = node.state_dict()
    again = make(Process())
    again.reset(after)
    assert steps_of(again) == rest[number:]


def test_a_custom_source_makes_samples_when_they_are_taken():
    class Own(LengthObserver):
        make_again = None  # as a node that knows nothing of it

        def restore_items(self, items):
            return LengthObserver(self.source).make_again(items).take(range(len(items)))[0][0]

    def make(process):
        return WindowBucketer(Own(ParallelProcessor(ShardedSampler(SIZE), process)), BUDGET, WINDOW)

    state, rest = saved(make)
    node = make(process := Process())
    node.reset(state)
    assert process.made == []
    assert steps_of(node) == rest


def test_a_mixture_of_processed_sources_makes_its_samples_when_they_are_taken():
    def make(process):
        sources = {
            name: LengthObserver(ParallelProcessor(ShardedSampler(SIZE // 2), process))
            for name in ("a", "b")
        }
        return WindowBucketer(SourceMixer(sources, by="tokens"), BUDGET, WINDOW)

    state, rest = saved(make)
    node = make(process := Process())
    node.reset(state)
    assert process.made == []
    assert steps_of(node) == rest


def test_a_sample_may_be_asked_for_alone():
    node = ParallelProcessor(ShardedSampler(SIZE), lambda number: Sample(number, 5, 4))
    node.reset(None)
    items = [ItemKey("", number, 1) for number in (7, 3, 5)]
    known = SampleBlock.of([*restore_items(node, items)])
    lazy = known.with_data(LazySamples(known, make_again(node, items), "a node"))
    assert [sample.data for sample in lazy] == [7, 3, 5]
    assert lazy.take([1]).data() == [3] and len(lazy.holders[lazy.facts[DATA, 0]]) == 3


# --- in a loader ----------------------------------------------------------------------------------


def loader_of(process, **options):
    return ODBDataLoader(
        range(SIZE), token_budget=BUDGET, window=WINDOW, process_fn=process, **options
    )


def test_a_loader_makes_all_samples_first_where_that_is_asked_for():
    batches = iter(loader := loader_of(Process()))
    for _ in range(5):
        next(batches)
    state = loader.state_dict()
    for options in {"verify": "eager"}, {"strict": False}:
        again = loader_of(process := Process())
        again.load_state_dict(state, **options)
        iter(again)
        assert len(process.made) == again.replayed_samples > WINDOW // 2
    again = loader_of(process := Process())
    again.load_state_dict(state)
    iter(again)
    assert not process.made and again.replayed_samples > WINDOW // 2
    with pytest.raises(ValueError, match="`verify` must be .*'never'"):
        again.load_state_dict(state, verify="never")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["thread", "process"])
def test_workers_reprocess_samples_ahead_of_use(method):
    workers = WorkerOptions(num_workers=2, method=method, chunk_size=4)

    def observe(sample):
        return Observation(len(sample["input_ids"]), key=sample["input_ids"][0] + 1000)

    def make(**options):
        return loader_of(Process(), workers=workers, observe=observe, **options)

    with make() as loader:
        states, batches = [], []
        for batch in loader:
            states.append(loader.state_dict())
            batches.append(batch["input_ids"].tolist())
    for step in range(0, len(states), 18):
        with make() as lazy, make() as eager:
            lazy.load_state_dict(states[step])
            eager.load_state_dict(states[step], verify="eager")
            ids = []
            for batch, same in zip(lazy, eager, strict=True):
                ids.append(batch["input_ids"].tolist())
                assert ids[-1] == same["input_ids"].tolist()
                assert lazy.state_dict() == eager.state_dict()
            assert ids == batches[step + 1 :]


def test_a_new_epoch_discards_samples_to_reprocess():
    workers = WorkerOptions(num_workers=2, method="thread")
    with loader_of(Process(), workers=workers) as loader:
        next(iter(loader))
        state = loader.state_dict()
        second = [batch["input_ids"].tolist() for batch in loader]
    with loader_of(Process(), workers=workers) as again:
        again.load_state_dict(state)
        next(iter(again))
        assert [batch["input_ids"].tolist() for batch in again] == second


@pytest.mark.parametrize("labels", [False, True])
def test_a_record_of_text_has_at_most_20_bytes(labels):
    samples = [
        Sample(None, 100 + n, 99 + n - labels * n % 7, 0, "", "labels", n, ItemKey("", n, 1), n)
        for n in range(500)
    ]
    costs, keys, _, numbers, columns = to_records(SampleBlock.of(samples))
    parts = [costs, keys, numbers or b"", *columns.values()]
    assert sum(map(len, parts)) <= (16 + 4 * labels) * 500
