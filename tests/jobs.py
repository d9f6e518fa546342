"""Jobs of every kind, for whatever must hold for all of them: who they are, and a run that goes on.

A job is a loader on each of N ranks, which are threads of this process.
"""

import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np

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
    Skipped,
    TokenBudget,
    WeightSchedule,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.alignment.exchange.in_process import InProcessHub

SAMPLES = 110
LONG, TIMEOUT_S = 90, 20.0


def tokens_of(index):
    """From 2 to 40 numbers, which come from the index; two samples are longer than a budget."""
    length = LONG if index in (40, 41) else 2 + index * 7919 % 39
    return np.full(length, index, np.int64)


def sample(index):
    """A sample, but for some that are skipped; of a record of a file, or of an index."""
    index = index["i"] if isinstance(index, dict) else index
    if index % 31 == 5:
        return Skipped("thirty-first")
    return {
        "input_ids": tokens_of(index),
        "labels": np.where(np.arange(len(tokens_of(index))) % 3, index, -100),
    }


def augmented(index):
    """A sample that draws its length and its tokens from the global generators."""
    tokens = np.random.randint(0, 99, 3 + random.randrange(20))
    return {"input_ids": tokens + index * 0}


class Shuffled:
    """An iterable with an order for each epoch, and a state of its own."""

    epoch = position = start = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        self.position, self.start = self.start, 0
        for index in order[self.position :]:
            self.position += 1
            yield index


class Stateful(Shuffled):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def two(a=60, b=50):
    return {"a": range(a), "b": range(b)}


@cache
def records(folder):
    """A folder of two files of records."""
    for name, indices in (("a", range(0, 70)), ("b", range(70, SAMPLES))):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"i": {index}}}\n' for index in indices))
    return folder


def of_nodes(exchange, exclude=(), accumulate=1, **options):
    """The graph of `ODBDataLoader`, node by node."""
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    source = ParallelProcessor(ShardedSampler(SAMPLES, seed=3, **shard), sample, **shard)
    budget = TokenBudget(80, oversize="drop")
    bucketer = WindowBucketer(LengthObserver(source), budget, 16, exclude=exclude)
    return Loader(GroupCollator(RankAligner(bucketer, exchange, 8, timeout_s=TIMEOUT_S)))


class Kind(NamedTuple):
    """How a job is made.

    Attributes:
        options: of `ODBDataLoader`; a `dataset` may be made of (folder, rank, world size).
        moves: whether it goes on with another number of ranks also within an epoch.
        make: exchange, options -> loader, in place of `ODBDataLoader`.
    """

    options: dict
    moves: bool = True
    make: object = None

    def loader(self, exchange, folder, exclude=()):
        by_source = {name: [] for name, _ in exclude}
        for name, key in exclude:
            by_source[name].append(key)
        options = {"exclude": by_source.get("", by_source)} if exclude else {}
        if self.make is not None:
            return self.make(exchange, **options)
        given = {
            "dataset": range(SAMPLES),
            "process_fn": sample,
            "token_budget": TokenBudget(80, oversize="drop"),
            "window": 16,
            "round_size": 8,
            "seed": 3,
            "timeout_s": TIMEOUT_S,
            "process_group": exchange,
        }
        given |= self.options
        if callable(given["dataset"]):
            given["dataset"] = given["dataset"](folder, exchange.rank, exchange.world_size)
        return ODBDataLoader(**given | options)


THREADS = WorkerOptions(num_workers=2, method="thread", chunk_size=3)
KINDS = {
    "replay": Kind({}),
    "payload": Kind({"state": "payload"}, moves=False),
    "random": Kind({"process_fn": augmented}),
    "threads": Kind({"workers": THREADS, "process_fn": augmented}),
    "accumulate": Kind({"accumulate": 3}),
    "packed": Kind({"token_budget": TokenBudget(90, layout="packed")}),
    "attention": Kind({"token_budget": TokenBudget(80, attention_tokens=50, oversize="drop")}),
    "auto window": Kind({"window": "auto"}),
    "dearest first": Kind({"dearest_first": 3}),
    "not prefetched": Kind({"prefetch": 0}),
    "stop": Kind({"uneven": "stop"}, moves=False),
    "in order": Kind({"shuffle": False}),
    "iterable": Kind({"dataset": lambda *_: Shuffled()}, moves=False),
    "stateful": Kind({"dataset": lambda *_: Stateful()}, moves=False),
    "records": Kind({"dataset": lambda folder, *shard: JsonlSource(records(folder), *shard)}),
    "mixed": Kind({"dataset": lambda *_: two(), "weights": {"a": 0.6, "b": 0.4}}),
    "mixed by tokens": Kind({"dataset": lambda *_: two(), "weights": Mixing(by="tokens")}),
    "scheduled": Kind(
        {
            "dataset": lambda *_: two(),
            "weights": Mixing(
                weights=WeightSchedule([(0, {"a": 1, "b": 1}), (40, {"a": 3, "b": 1})])
            ),
        }
    ),
    "ramp": Kind(
        {
            "dataset": lambda *_: two(),
            "weights": Mixing(
                weights=WeightSchedule([(0, {"a": 3, "b": 1}), (900, {"a": 1, "b": 1})], ramp=True),
                by="tokens",
            ),
        }
    ),
    "virtual ranks": Kind({"virtual_ranks": 4}),
    "nodes": Kind({}, make=of_nodes),
}
"""The kinds of jobs, by name."""


class Job:
    """A run of N ranks that goes on: their loaders, and what each has at a step.

    Args:
        kind: name of its kind.
        world_size: number of ranks.
        folder: where files of data may be.
        exclude: keys that are left out.
        states: a state of each rank; None begins.
    """

    def __init__(self, kind, world_size, folder, exclude=frozenset(), states=None):
        hub = InProcessHub(world_size, TIMEOUT_S)
        self.pool = ThreadPoolExecutor(world_size)
        self.loaders = self.each(
            lambda rank: KINDS[kind].loader(hub.exchange(rank), folder, exclude), range(world_size)
        )
        self.its, self.touched = None, False  # whether a step was taken since `iter`
        if states is not None:
            self.load(states)

    def each(self, do, *of_ranks):
        """What `do` returns on every rank at once."""
        futures = [self.pool.submit(do, *given) for given in zip(*of_ranks, strict=True)]
        return [future.result(4 * TIMEOUT_S) for future in futures]

    def states(self):
        return self.each(lambda loader: loader.state_dict(), self.loaders)

    def load(self, states):
        self.each(lambda loader, state: loader.load_state_dict(state), self.loaders, states)
        self.its, self.touched = None, False

    def step(self):
        """What each rank has in its next step; None at the end of an epoch."""
        if self.its is None:
            self.begin()
        self.touched = True
        found = self.each(lambda it: described(next(it, None)), self.its)
        if found[0] is None:
            assert not any(found), "some ranks have steps left"
            self.its, self.touched = None, False
            return None
        return found

    def epoch(self):
        """The steps that are left of an epoch."""
        return list(iter(self.step, None))

    def begin(self):
        """Begin an epoch, or go on with one that was loaded."""
        self.its, self.touched = self.each(iter, self.loaders), False

    def close(self):
        self.each(lambda loader: loader.close(), self.loaders)
        self.its, self.touched = None, False

    def end(self):
        self.close()
        self.pool.shutdown()


class Step(NamedTuple):
    """What a rank has in a step, and a checksum of its tensors."""

    info: object
    content: int

    @property
    def keys(self):
        """(source, key) of each sample that is trained on."""
        info = self.info
        sources = info.row_sources or ("",) * len(info.keys)
        return [] if info.is_filler else list(zip(sources, info.keys, strict=True))

    @property
    def left_out(self):
        return [(one.source, one.key) for one in self.info.left_out]


def described(batch):
    if batch is None:
        return None
    info = pop_step_info(batch)
    values = b"".join(np.asarray(batch[name]).tobytes() for name in sorted(batch))
    return Step(info, zlib.crc32(values))


def keys_of(steps):
    """The keys of all ranks in some steps: of samples that were trained on, and left out."""
    ranks = [rank for step in steps for rank in step]
    return (
        [key for rank in ranks for key in rank.keys],
        [key for rank in ranks for key in rank.left_out],
    )
