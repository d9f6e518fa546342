"""Several datasets in one `ODBDataLoader`: by weight, each with processing of its own."""

import json
from collections import Counter

import numpy as np
import pytest
from aligned_ranks import TIMEOUT_S, on_ranks
from refusals import refuses
from torch.utils.data import IterableDataset

from odb_nodes import (
    GroupCollator,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    PeerError,
    SampleError,
    ShardedSampler,
    SourceMixer,
    StateError,
    TokenBudget,
    WeightSchedule,
    WindowBucketer,
    pop_step_info,
)


def encode(text):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return {"input_ids": ids, "labels": ids}


class Scans(IterableDataset):
    def __iter__(self):
        return ((n, "scan " * (n % 7 + 1)) for n in range(16))


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"text": f"since {n}"}) + "\n" for n in range(20)))
    return path


def test_the_length_of_an_epoch_is_known_where_that_of_each_dataset_is():
    sized = {"a": [1] * 30, "b": [1] * 12}
    assert ODBDataLoader(sized, token_budget=9).num_samples == 42
    with pytest.raises(TypeError):
        _ = ODBDataLoader({**sized, "c": Scans()}, token_budget=9).num_samples
    with pytest.raises(TypeError, match='where `stop` is "cycle"'):
        _ = ODBDataLoader(sized, token_budget=9, weights=Mixing(stop="cycle")).num_samples


class Chats(JsonlSource):
    """A source with arguments of its own."""

    def __init__(self, *, folder):
        super().__init__(folder / "chats.jsonl")


def test_a_source_may_be_in_many_loaders_and_under_many_names(chats):
    file = JsonlSource(chats)
    options = {
        "token_budget": 400,
        "window": 8,
        "process_fn": lambda record: encode(record["text"]),
    }
    for data, size in (({"a": file, "b": file}, 40), (file, 20), (Chats(folder=chats.parent), 20)):
        first, other = (
            [pop_step_info(batch) for batch in ODBDataLoader(data, **options)] for _ in range(2)
        )
        assert sum(info.local_samples for info in first) == size
        assert first == other


@pytest.mark.parametrize("stop", ["all_exhausted", "first_exhausted", "cycle"])
def test_a_source_may_have_fewer_samples_than_virtual_ranks_only_if_it_may_run_out(stop):
    datasets = {"a": range(40), "b": range(2)}
    loader = ODBDataLoader(
        datasets,
        token_budget=40,
        window=8,
        process_fn=lambda index: {"input_ids": [index] * 5},
        weights=Mixing(weights={"a": 1, "b": 1}, stop=stop),
        virtual_ranks=4,
    )
    if stop == "all_exhausted":
        assert sum(len(batch["input_ids"]) for batch in loader) == 42
        return
    with pytest.raises(SampleError, match=r"'b' has 2 samples for 4 ranks, .* needs a sample"):
        list(loader)


def test_each_source_has_an_order_of_its_own():
    same = [{"input_ids": [n + 1]} for n in range(50)]
    order = {"a": [], "b": []}
    for batch in ODBDataLoader({"a": same, "b": same}, token_budget=1, window=1):
        (name,) = pop_step_info(batch).local_sources
        order[name].append(batch["input_ids"].item())
    assert sorted(order["a"]) == sorted(order["b"]) == list(range(1, 51))
    assert order["a"] != order["b"]


def test_shares_in_proportion_to_the_sizes_of_datasets(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"input_ids": [3]}\n' * 50)
    data = {"a": [{"input_ids": [1]}] * 100, "b": [{"input_ids": [2]}] * 300}
    loader = ODBDataLoader(
        {**data, "c": JsonlSource(path)}, weights="proportional", token_budget=45, window=9
    )
    counts = Counter()
    for step, batch in enumerate(loader, 1):
        sources = pop_step_info(batch).local_sources
        counts.update({name: count.samples for name, count in sources.items()})
        if step % 3 == 0:
            total = sum(counts.values())
            assert counts["b"] / total == pytest.approx(300 / 450, abs=12 / total)
    assert counts == {"a": 100, "b": 300, "c": 50}


# Errors name the source, and the sample or the line.


@pytest.mark.parametrize("oversize", ["alone", "error"])
@pytest.mark.filterwarnings("ignore:no token of:UserWarning")
def test_an_oversize_sample_is_named_with_its_source_and_limit(oversize):
    data = {"a": ["x y"] * 3, "b": ["y" * 30]}
    budget = TokenBudget(20, pad_to_multiple_of=8, oversize=oversize)
    loader = ODBDataLoader(data, token_budget=budget, process_fn=encode)
    said = r"\(source 'b', key 0\), with 30 tokens .*: `tokens` is 20, so a sample may have 16"
    alone = oversize == "alone"
    with pytest.warns(match=said) if alone else pytest.raises(SampleError, match=said):
        list(loader)


def cut_labels(text):
    return {**encode(text), "labels": [1]}


def no_labels(text):
    return {"input_ids": encode(text)["input_ids"], "id": text}


def broken_scan(item):
    if item[0] == 7:
        raise OSError("not there")
    return encode(item[1])


def broken_chat(record):
    if record["text"] == "since 11":
        raise KeyError("role")
    return encode(record["text"])


BY_TOKENS = {"weights": Mixing(weights={"a": 1, "b": 1}, by="tokens")}
FAULTS = {  # the second of two datasets, its function, other options
    "labels": (lambda _: ["yyy"], cut_labels, {}, "sample 0 of source 'b'.*`labels` must have the"),
    "keys": (lambda _: ["yyy"], no_labels, {}, r"\(source 'b', key 0\), `id` 'yyy': .* also has"),
    "no length": (lambda _: Scans(), None, {}, "source 'b'.*a sample has no length"),
    "array": (lambda _: [[{"text": "a"}]], None, {}, "'b'.*JSON array, write one object per line"),
    "sample": (lambda _: Scans(), broken_scan, {}, "sample 7 of source 'b'.*OSError: not there"),
    "by tokens": (lambda _: Scans(), broken_scan, BY_TOKENS, "'b': .*sample 7 of epoch.*not there"),
    "line": (JsonlSource, broken_chat, {}, r"of source 'b', line 12 of .*chats.jsonl.*'role'"),
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_source_and_sample(chats, fault, num_workers):
    make, function, options, message = FAULTS[fault]
    arguments = {"token_budget": 64, "process_fn": {"a": encode, "b": function}, "shuffle": False}
    data = {"a": ["x"] * 9, "b": make(chats)}
    with (
        ODBDataLoader(data, num_workers=num_workers, **arguments | options) as loader,
        pytest.raises(SampleError, match=message),
    ):
        list(loader)


# Batches that mix tasks more evenly.


def test_samples_without_a_task_are_refused():
    loader = ODBDataLoader([{"input_ids": [1, 2]}] * 8, token_budget=99, diversity=0.5)
    with pytest.raises(SampleError, match=r"`diversity` must be 0 .* sample \(key \d\) has none"):
        next(iter(loader))


# --- weights of a mixture that are set for the next epoch ----------------------------------------


NAMES = ("a", "b", "c")
FIRST = {"a": 3, "b": 2, "c": 1}
OTHER, LATER = {"a": 1, "b": 1, "c": 8}, {"a": 8, "b": 1, "c": 1}
SIZE = 180

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens of the first")


def loader_of(exchange=None, by="samples", weights=FIRST, **options):
    data = {n: [{"input_ids": [i] * (3 + 7 * i % 29)} for i in range(SIZE)] for n in NAMES}
    arguments = {
        "token_budget": 160,
        "window": 12,
        "seed": 1,
        "round_size": 8,
        "timeout_s": TIMEOUT_S,
    }
    arguments |= {"weights": Mixing(weights=weights, by=by), "process_group": exchange}
    return ODBDataLoader(data, **arguments | options)


def rows_of(loader):
    return [batch["input_ids"].tolist() for batch in loader]


EARLY = {"samples": 90, "tokens": 1800}  # no source is exhausted before


def drawn(loader, by="samples", ranks=1):
    """What an epoch has of each source, and what those had early in it."""
    seen, early = Counter(), Counter()
    for batch in loader:
        info = pop_step_info(batch)
        rows = [*zip(info.row_sources, info.keys, strict=True)]
        if early.total() < EARLY[by] / ranks:
            early.update({name: getattr(count, by) for name, count in info.local_sources.items()})
        seen.update([] if info.is_filler else rows)
    return seen, early


def shares(weights):
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@pytest.mark.parametrize(
    ("ranks", "options", "by"), [(1, {}, "tokens"), (2, {"virtual_ranks": 2}, "samples")]
)
def test_set_weights_decides_the_next_epochs(ranks, options, by):
    def run(exchange):
        loader, by_epoch = loader_of(exchange, by, **options), []
        for calls in ([], [], [LATER, OTHER], [LATER], []):
            for weights in calls:
                loader.set_weights(weights)
            by_epoch.append(drawn(loader, by, ranks))
        return by_epoch

    epochs = zip(*on_ranks(ranks, run), strict=True)
    for weights, of_ranks in zip((FIRST, FIRST, OTHER, LATER, LATER), epochs, strict=True):
        seen, early = (sum(counts, Counter()) for counts in zip(*of_ranks, strict=True))
        assert seen == Counter((name, key) for name in NAMES for key in range(SIZE))
        assert shares(early) == pytest.approx(shares(weights), abs=0.1)


def test_set_weights_does_not_change_the_present_epoch():
    with loader_of() as loader, loader_of() as other:
        expected = rows_of(loader)
        rows = []
        for step, batch in enumerate(other):
            rows.append(batch["input_ids"].tolist())
            if step in (0, 7):
                other.set_weights(LATER)
        assert rows == expected
        with loader_of(weights=LATER) as third:
            next(iter(third))  # leaves its first epoch
            assert rows_of(other) == rows_of(third)


@pytest.mark.parametrize(("within", "other"), [(False, LATER), (True, None)])
def test_ranks_that_set_different_weights_all_raise_when_the_epoch_begins(within, other):
    def run(exchange):
        loader = loader_of(exchange)
        weights = OTHER if exchange.rank == 0 else other
        it = iter(loader) if within else None
        if it is not None:
            next(it)
        if weights:
            loader.set_weights(weights)
        for _ in it or ():
            pass
        with pytest.raises((StateError, PeerError)) as caught:
            next(iter(loader))
        return str(caught.value)

    for message in on_ranks(2, run):
        assert '`SourceMixer.weights` is {"a": 1.0, "b": 1.0, "c": 8.0} on rank 0, {"' in message
        assert f'"a": {(other or FIRST)["a"]:.1f}' in message


REFUSALS = [
    ({"a": 1, "b": 1}, {}, ValueError, "the names of `sources`"),
    ({**FIRST, "d": 1}, {}, ValueError, "but has .*'d'"),
    ({**FIRST, "a": 0}, {}, ValueError, r"`weights\['a'\]`.* is 0"),
    ({**FIRST, "a": "x"}, {}, ValueError, "but is 'x'"),
    ([1, 2, 3], {}, TypeError, "must be a dict by name"),
    (FIRST, {"weights": WeightSchedule([(0, FIRST)])}, ValueError, "follow a `WeightSchedule`"),
]


test_what_cannot_be_set_is_refused = refuses(
    REFUSALS, lambda weights, options: loader_of(**options).set_weights(weights)
)


def test_one_dataset_has_no_weights_to_set():
    with pytest.raises(ValueError, match="`set_weights` needs a mixture"):
        ODBDataLoader([{"input_ids": [1]}], token_budget=9).set_weights(FIRST)


def test_the_outermost_mixture_of_a_graph_of_nodes_has_them():
    def graph(weights):
        inner = SourceMixer(
            {name: ShardedSampler(90, seed=1, rank=0, world_size=1) for name in "ab"}, world_size=1
        )
        last = ShardedSampler(90, seed=1, rank=0, world_size=1)
        mixed = SourceMixer({"in": inner, "c": last}, weights, world_size=1)
        samples = LengthObserver(mixed, lambda item: 3)
        return Loader(GroupCollator(WindowBucketer(samples, 30, 12), collate_fn=lambda rows: {}))

    def keys(loader):
        return [pop_step_info(batch).keys for batch in loader]

    loader = graph({"in": 1, "c": 1})
    loader.set_weights({"in": 5, "c": 1})
    assert keys(loader) == keys(graph({"in": 5, "c": 1}))
