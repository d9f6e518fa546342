"""Graphs of all kinds, their states, and what damage can do to those."""

import random
import warnings

from torchdata.nodes import Mapper, Prefetcher

from odb_nodes import (
    GroupCollator,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.contract.state import add_digest

SAMPLES = 60
MOST_BATCHES = 400  # of two epochs; more is a hang


def length(index):
    return (index * 7919) % 31 + 4


def sample(index):
    return {"input_ids": [index] * length(index)}


def from_record(record):
    return sample(record["i"])


class Dataset:
    def __init__(self, size=SAMPLES):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return sample(index)


class Shuffled:
    """An iterable with an order for each epoch, and perhaps with a state of its own."""

    def __init__(self):
        self.epoch = self.position = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def indices(self):
        indices = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(indices)
        return indices

    def __iter__(self):
        return iter(self.indices())


class Samples(Shuffled):
    def __iter__(self):
        return map(sample, self.indices())


class StatefulSamples(Samples):
    start = 0  # of the next pass: a loaded state is for one alone

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]

    def __iter__(self):
        self.position, self.start = self.start, 0
        for index in self.indices()[self.position :]:
            self.position += 1
            yield sample(index)


def make(dataset=None, **options):
    dataset = Dataset() if dataset is None else dataset
    return ODBDataLoader(dataset, **{"token_budget": 128, "window": 8, **options})


def nodes():
    samples = ParallelProcessor(ShardedSampler(SAMPLES), sample)
    groups = WindowBucketer(LengthObserver(samples), 128, 8)
    return Loader(GroupCollator(RankAligner(groups, round_size=8)))


def torchdata_nodes():
    samples = Prefetcher(Mapper(ShardedSampler(SAMPLES), sample), 4, snapshot_frequency=4)
    return Loader(Prefetcher(GroupCollator(WindowBucketer(LengthObserver(samples), 128, 8)), 2))


def graphs(folder):
    """Return functions that make a graph, by name."""
    path = folder / "records.jsonl"
    path.write_text("".join(f'{{"i": {index}}}\n' for index in range(SAMPLES)))
    two = {"a": Dataset(40), "b": Dataset(20)}
    return {
        "replay": make,
        "payload": lambda: make(state="payload"),
        "accumulate": lambda: make(accumulate=4, round_size=8),
        "packed": lambda: make(token_budget=TokenBudget(128, layout="packed")),
        "stop": lambda: make(uneven="stop"),
        "jsonl": lambda: make(JsonlSource(path), process_fn=from_record),
        "iterable": lambda: make(Samples()),
        "stateful": lambda: make(StatefulSamples()),
        "sampler": lambda: make(sampler=Shuffled()),
        "mixed": lambda: make(two, weights={"a": 0.6, "b": 0.4}),
        "settable": lambda: make(two, weights=Mixing(settable=True)),
        "mixed by tokens": lambda: make(two, weights=Mixing(by="tokens")),
        "mixed in cycles": lambda: make(two, weights=Mixing(stop="cycle")),
        "nodes": nodes,
        "torchdata": torchdata_nodes,
    }


def batches(loader, epochs=2):
    """Return the first token of each sample of each batch, by epoch."""
    found, left = [], MOST_BATCHES
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            left -= 1
            if not left:
                raise TimeoutError(f"more than {MOST_BATCHES} batches")
            found[-1].append(tuple(batch["input_ids"].flatten().tolist()))
    return found


def paths(state, path=()):
    """Yield the path of every part of a state; of long lists those of the first two."""
    items = state.items() if isinstance(state, dict) else enumerate(state[:2])
    for key, value in items:
        yield (*path, key)
        if isinstance(value, (dict, list, tuple)):
            yield from paths(value, (*path, key))


def part(state, path):
    for key in path:
        state = state[key]
    return state


def replaced(state, path, value):
    """Return a copy of a state with another part; without it where `value` is `MISSING`."""
    key, *rest = path
    copy = dict(state) if isinstance(state, dict) else list(state)
    if rest:
        copy[key] = replaced(copy[key], rest, value)
    elif value is MISSING:
        del copy[key]
    else:
        copy[key] = value
    return copy if isinstance(state, dict) else type(state)(copy)


MISSING = object()


def mutations(value):
    """Yield what may stand in place of a value, by name."""
    yield from {
        "None": None,
        "-1": -1,
        "2**62": 2**62,
        "a string": "x",
        "True": True,
        "1.5": 1.5,
        "[]": [],
        "{}": {},
        "a byte": b"\x01",
        "nothing": MISSING,
    }.items()
    if type(value) is int:
        yield from {"one more": value + 1, "one less": value - 1, "more": 2 * value + 3}.items()
    elif type(value) is bool:
        yield "not", not value
    elif type(value) is str:
        yield "empty", ""
    elif type(value) is dict:
        yield "one field more", {**value, "unknown": 1}
    elif type(value) is list and value:
        yield from {"reversed": value[::-1], "cut": value[:-1], "doubled": value + value}.items()
    elif type(value) is bytes:
        for cut in (1, 4, 12, 32):
            yield f"cut by {cut}", value[:-cut]
        middle = len(value) // 2
        yield "doubled", value + value
        yield "first bit", bytes([value[0] ^ 1]) + value[1:]
        yield "middle bit", value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
        yield "last bit", value[:-1] + bytes([value[-1] ^ 0x40])
        yield "all ones", b"\xff" * len(value)
        yield "reversed", value[::-1]


def damaged(state):
    """Yield (what, state) for every mutation of every part of a state."""
    for path in paths(state):
        value = part(state, path)
        for name, mutation in mutations(value):
            if type(mutation) is not type(value) or mutation != value:
                yield f"{'.'.join(map(str, path))}: {name}", replaced(state, path, mutation)


def resealed(state):
    """Return a changed state as one that was saved like that."""
    return add_digest({key: value for key, value in state.items() if key != "digest"})


def outcome(make_graph, state, expected):
    """Return what comes of a state: "refused", "equal", "other", or an error that is not ours."""
    graph = make_graph()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph.load_state_dict(state)
            return "equal" if batches(graph) == expected else "other"
    except StateError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error!s:.300}"
    finally:
        graph.close()
