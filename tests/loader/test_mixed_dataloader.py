"""Three sources, each with processing of its own, that several tests and rank programs mix."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from torch.utils.data import IterableDataset

from odb_nodes import (
    GroupCollator,
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    Observation,
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

TEMPLATES = ("user: {} bot: {}", "<u>{}<b>{}", "Q {}\nA {}")
WEIGHTS = {"chat": 0.5, "captions": 0.3, "ocr": 0.2}


def encode(text, masked=0):
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    return {"input_ids": ids, "labels": np.where(np.arange(len(ids)) < masked, -100, ids)}


def chat(record):
    """A template that Python draws, and a cut that torch does; the question is not learned."""
    text = random.choice(TEMPLATES).format(record["question"], record["answer"])
    return encode(text[: len(text) - int(torch.randint(3, ()))], masked=len(record["question"]))


def caption(text):
    return encode(" ".join(np.random.permutation(text.split())))


def ocr(pair):
    shape, text = pair
    return encode(f"{shape[0]}x{shape[1]} {text}", masked=4)


FUNCTIONS = {"chat": chat, "captions": caption, "ocr": ocr}


class Scans(IterableDataset):
    def __iter__(self):
        return (((n, n + 1), "scan " * (n % 7 + 1)) for n in range(16))


def write_chats(path, size=24):
    records = [{"question": "why " * (n % 5 + 1), "answer": f"since {n} " * 3} for n in range(size)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def mixture(chats):
    captions = [f"the picture number {n} of " + "very " * (n % 11) + "many" for n in range(30)]
    return {"chat": JsonlSource(chats), "captions": captions, "ocr": Scans()}


def make(datasets, **options):
    given = {"token_budget": 400, "window": 12, "seed": 3, "round_size": 8, **options}
    given = {"weights": WEIGHTS, "process_fn": FUNCTIONS, **given}
    return ODBDataLoader(datasets(), **given)


def rows(loader):
    """What the batches of an epoch hold, as plain data."""
    return [(pop_step_info(batch), batch["input_ids"].tolist()) for batch in loader]


# --- several datasets in one `ODBDataLoader`: by weight, each with processing of its own ---------


@pytest.fixture
def datasets(tmp_path):
    chats = write_chats(tmp_path / "chats.jsonl")
    return lambda: mixture(chats)


def test_the_length_of_an_epoch_is_known_where_that_of_each_dataset_is(datasets):
    sized = {"a": [1] * 30, "b": [1] * 12}
    assert make(lambda: sized, weights=None, process_fn=None).num_samples == 42
    with pytest.raises(TypeError):
        _ = make(datasets).num_samples
    with pytest.raises(TypeError, match='where `stop` is "cycle"'):
        _ = make(lambda: sized, weights=Mixing(stop="cycle"), process_fn=None).num_samples


class Chats(JsonlSource):
    """A source with arguments of its own."""

    def __init__(self, *, folder):
        super().__init__(folder / "chats.jsonl")


def test_a_source_may_be_in_many_loaders_and_under_many_names(tmp_path):
    file = JsonlSource(write_chats(tmp_path / "chats.jsonl", 20))
    given = {"token_budget": 400, "window": 8, "process_fn": chat}
    for data, size in (({"a": file, "b": file}, 40), (file, 20), (Chats(folder=tmp_path), 20)):
        loaders = [ODBDataLoader(data, **given) for _ in range(2)]
        both = [
            [pop_step_info(batch) for batch in batches] for batches in zip(*loaders, strict=True)
        ]
        assert sum(info.local_samples for info, _ in both) == size
        assert all(one == other for one, other in both)


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
def test_what_is_said_of_a_sample_that_is_too_large_names_its_source_and_the_limit(oversize):
    data = {"a": ["x y"] * 3, "b": ["y" * 30]}
    budget = TokenBudget(20, pad_to_multiple_of=8, oversize=oversize)
    loader = ODBDataLoader(data, token_budget=budget, process_fn=encode)
    said = r"\(source 'b', key 0\), with 30 tokens .*: `tokens` is 20, in multiples of 8 16\."
    alone = oversize == "alone"
    with pytest.warns(match=said) if alone else pytest.raises(SampleError, match=said):
        list(loader)


def cut_labels(text):
    return {**encode(text), "labels": [1]}


def no_labels(text):
    return {"input_ids": encode(text)["input_ids"], "id": text}


def broken_ocr(pair):
    if pair[0][0] == 7:
        raise OSError("not there")
    return ocr(pair)


def broken_chat(record):
    if "since 11" in record["answer"]:
        raise KeyError("role")
    return chat(record)


def short(function):
    return {"a": ["x"] * 9, "b": ["yyy"]}, {"a": encode, "b": function}


FAULTS = {
    "labels": (*short(cut_labels), r"sample 0 of source 'b'.*`labels` must have the length"),
    "keys": (*short(no_labels), r"\(source 'b', key 0\), `id` 'yyy': .* also has"),
    "no length": (None, {"ocr": None}, "source 'ocr'.*a sample has no length"),
    "sample": (None, {"ocr": broken_ocr}, "sample 7 of source 'ocr'.*OSError: not there"),
    "line": (
        None,
        {"chat": broken_chat},
        r"sample \d+ of source 'chat', line 12 of .*chats.jsonl.*KeyError: 'role'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_names_source_and_sample(datasets, fault, num_workers):
    data, functions, message = FAULTS[fault]
    if data is None:
        loader = make(datasets, process_fn={**FUNCTIONS, **functions}, num_workers=num_workers)
    else:
        given = {"token_budget": 64, "process_fn": functions, "num_workers": num_workers}
        loader = ODBDataLoader(data, shuffle=False, **given)
    with loader, pytest.raises(SampleError, match=message):
        list(loader)


def test_where_shares_are_of_tokens_too(datasets):
    functions = {**FUNCTIONS, "ocr": broken_ocr}
    mixing = Mixing(weights=WEIGHTS, by="tokens")
    with pytest.raises(SampleError, match="source 'ocr': .*sample 7 of epoch.*not there"):
        list(make(datasets, process_fn=functions, weights=mixing))


# Batches that mix tasks more evenly.


def test_a_task_that_is_observed_counts_like_a_source():
    lengths = np.random.default_rng(0).integers(4, 30, 200).tolist()
    items = [(tokens, "ab"[n % 3 == 0]) for n, tokens in enumerate(lengths)]

    def groups(names, **options):
        source = IterableSource([(tokens, names[task]) for tokens, task in items])
        observed = LengthObserver(source, lambda item: Observation(item[0], task=item[1]))
        bucketer = WindowBucketer(observed, 128, 16, **options)
        return [[sample.data[0] for sample in group] for group in bucketer]

    mixed = groups({"a": "a", "b": "b"}, diversity=0.5)
    assert groups({"a": "z", "b": "y"}, diversity=0.5) == mixed
    assert groups({"a": "a", "b": "b"}) != mixed


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
    given = {"token_budget": 160, "window": 12, "seed": 1, "round_size": 8, "timeout_s": TIMEOUT_S}
    given |= {"weights": Mixing(weights=weights, by=by), "process_group": exchange}
    return ODBDataLoader(data, **given | options)


def rows_of(loader):
    return [batch["input_ids"].tolist() for batch in loader]


def drawn(loader, by="samples"):
    """What an epoch has of each source, and the shares of those early in it."""
    seen, early = Counter(), Counter()
    for batch in loader:
        info = pop_step_info(batch)
        rows = [*zip(info.row_sources, info.keys, strict=True)]
        if sum(early.values()) < (90 if by == "samples" else 1800):
            early.update({name: getattr(one, by) for name, one in info.local_sources.items()})
        seen.update([] if info.is_filler else rows)
    return seen, {name: early[name] / early.total() for name in NAMES}


def shares(weights):
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 2}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_epochs_are_drawn_by_what_was_set_last_and_each_sample_comes_once(
    ranks, options, by
):
    def run(exchange):
        loader, found = loader_of(exchange, by, **options), []
        for calls in ([], [], [LATER, OTHER], [LATER], []):
            for weights in calls:
                loader.set_weights(weights)
            found.append(drawn(loader, by))
        return found

    epochs = zip(*on_ranks(ranks, run), strict=True)
    for weights, of_ranks in zip((FIRST, FIRST, OTHER, LATER, LATER), epochs, strict=True):
        seen = sum((seen for seen, _ in of_ranks), Counter())
        assert seen == Counter((name, key) for name in NAMES for key in range(SIZE))
        for _, early in of_ranks:
            assert early == pytest.approx(shares(weights), abs=0.1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_present_epoch_goes_on_as_it_began(num_workers):
    options = {"workers": None, "num_workers": num_workers}
    with loader_of(**options) as loader, loader_of(**options) as other:
        expected = rows_of(loader)
        found = []
        for step, batch in enumerate(other):
            found.append(batch["input_ids"].tolist())
            if step in (0, 7):
                other.set_weights(LATER)
        assert found == expected
        with loader_of(weights=LATER) as third:
            next(iter(third))  # leaves its first epoch
            assert rows_of(other) == rows_of(third)


@pytest.mark.parametrize("other", [LATER, None])
@pytest.mark.parametrize("within", [False, True])
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
    (lambda: loader_of().set_weights({"a": 1, "b": 1}), ValueError, "the names of `sources`"),
    (lambda: loader_of().set_weights({**FIRST, "d": 1}), ValueError, "but has .*'d'"),
    (lambda: loader_of().set_weights({**FIRST, "a": 0}), ValueError, r"`weights\['a'\]`.* is 0"),
    (lambda: loader_of().set_weights({**FIRST, "a": "x"}), ValueError, "but is 'x'"),
    (lambda: loader_of().set_weights([1, 2, 3]), TypeError, "must be a dict by name"),
    (
        lambda: ODBDataLoader([{"input_ids": [1]}], token_budget=9).set_weights(FIRST),
        ValueError,
        "`set_weights` needs a mixture",
    ),
    (
        lambda: loader_of(weights=WeightSchedule([(0, FIRST)])).set_weights(FIRST),
        ValueError,
        "they follow a `WeightSchedule`",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_cannot_be_set_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_refused_call_changes_nothing():
    loader = loader_of()
    loader.set_weights(OTHER)
    with pytest.raises(ValueError, match="weights"):
        loader.set_weights({**FIRST, "a": -1})
    assert rows_of(loader) == rows_of(loader_of(weights=OTHER))


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
