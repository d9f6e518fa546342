"""Jobs of every kind, for whatever must hold for all of them: who they are, and a run that goes on.

A job is a loader on each of N ranks, which are threads of this process.
"""

import gzip
import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pytest
from in_process import InProcessHub
from torchdata.nodes import Prefetcher

from odb_nodes import (
    GroupCollator,
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    Mixing,
    Observation,
    ODBDataLoader,
    PaddingCollate,
    ParallelProcessor,
    RankAligner,
    ShardedSampler,
    Skipped,
    TokenBudget,
    WeightedSampler,
    WeightSchedule,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.contract.graph import walk
from odb_nodes.core.planning import StepTime

SAMPLES = 110
LONG, TIMEOUT_S = 90, 20.0
BUDGET = TokenBudget(80, oversize="drop")


def tokens_of(index):
    """From 2 to 40 numbers, which come from the index; two samples are longer than a budget."""
    length = LONG if index in (40, 41) else 2 + index * 7919 % 39
    return np.full(length, index, np.int64)


def sample(index):
    """A sample, but for some that are skipped; of a record of a file, or of an index."""
    index = index["i"] if isinstance(index, dict) else index
    if index % 9 == 5:
        return Skipped("ninth")
    return {
        "input_ids": tokens_of(index),
        "labels": np.where(np.arange(len(tokens_of(index))) % 3, index, -100),
    }


def augmented(index):
    """A sample that draws its length and its tokens from the global generators."""
    tokens = np.random.randint(0, 99, 3 + random.randrange(20))
    return {"input_ids": tokens + index * 0, "labels": tokens}


def noisy(samples):
    """A batch that holds a number from a global generator."""
    return {**PaddingCollate()(samples), "noise": np.array(random.random())}


class Shuffled:
    """An iterable with an order for each epoch, and a state of its own."""

    epoch = position = start = 0

    def __init__(self, size=SAMPLES):
        self.size = size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(self.size), self.size)
        self.position, self.start = self.start, 0
        for index in order[self.position :]:
            self.position += 1
            yield index


class Stateful(Shuffled):
    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"]


def two(a=60, b=50, names="ab"):
    return lambda *_: dict(zip(names, (range(a), range(b)), strict=True))


def records(folder, end=""):
    """A folder of two files of records, with an empty file and empty lines between."""
    with writing:  # Ranks are threads.
        return written(folder / f"records{end}", end)


writing = threading.Lock()


@cache
def written(folder, end):
    folder.mkdir(exist_ok=True)
    for name, indices in (("a", range(0, 70)), ("b", ()), ("c", range(70, SAMPLES))):
        text = "".join(f'{{"i": {index}}}\n{index % 3 * chr(10)}' for index in indices)
        with (gzip.open if end else open)(folder / f"{name}.jsonl{end}", "wt") as file:
            file.write(text)
    return folder


def read(end="", **options):
    return lambda folder, *shard: JsonlSource(records(folder, end), *shard, **options)


def of_nodes(exchange, budget=BUDGET, exclude=(), source=ShardedSampler, **options):
    """The graph of `ODBDataLoader`, node by node."""
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    data = SAMPLES if source is ShardedSampler else range(SAMPLES)
    observed = LengthObserver(ParallelProcessor(source(data, **shard), sample, **shard))
    bucketer = WindowBucketer(observed, budget, 16, exclude=exclude, **options)
    if options:
        return Loader(Prefetcher(GroupCollator(bucketer), 3))  # which needs no aligner
    return Loader(GroupCollator(RankAligner(bucketer, exchange, 8, timeout_s=TIMEOUT_S)))


def with_own_key(sample):
    return Observation(len(sample["input_ids"]), key=1000 + int(sample["input_ids"][0]))


def tokens_squared(group):
    """What a step with a group takes."""
    return sum(sample.tokens**2 for sample in group)


class Kind(NamedTuple):
    """How a job is made.

    Attributes:
        options: of `ODBDataLoader`; a `dataset` may be made of (folder, rank, world size).
        moves: whether it goes on with another number of ranks also within an epoch.
        make: exchange, budget, exclude -> loader, in place of `ODBDataLoader`.
        ranks: the numbers of ranks that it may have.
        once: whether each sample comes once in an epoch.
        counts_unread: whether samples that no rank reads are counted, as their number is known.
        calls: weights that are set after a step, by its number, for the next epoch; or (rank,
            tokens): that rank asks for a smaller budget then.
    """

    options: dict
    moves: bool = True
    make: object = None
    ranks: tuple = (1, 2, 3, 4)
    once: bool = True
    counts_unread: bool = True
    calls: dict = {}  # noqa: RUF012

    def budget(self, cuts=0):
        """Its budget, after it was lowered so many times."""
        budget = self.options.get("token_budget", BUDGET)
        return replace(budget, tokens=budget.tokens * (4, 3, 2)[cuts] // 4)

    def loader(self, exchange, folder, exclude=(), cuts=0):
        by_source = {name: [] for name, _ in exclude}
        for name, key in exclude:
            by_source[name].append(key)
        excluded = {"exclude": by_source.get("", by_source)} if exclude else {}
        if self.make is not None:
            return self.make(exchange, self.budget(cuts), **excluded)
        given = {
            "dataset": range(SAMPLES),
            "process_fn": sample,
            "window": 16,
            "round_size": 8,
            "seed": 3,
            "timeout_s": TIMEOUT_S,
            "process_group": exchange,
        }
        given |= self.options | excluded | {"token_budget": self.budget(cuts)}
        if callable(given.get("sampler")):
            given["sampler"] = given["sampler"]()  # Each loader draws by itself.
        if callable(given["dataset"]):
            given["dataset"] = given["dataset"](folder, exchange.rank, exchange.world_size)
        return ODBDataLoader(**given)


def known(told=lambda index: len(tokens_of(index)), **options):
    """A job whose lengths are told before samples are made."""
    given = {"lengths": [told(index) for index in range(SAMPLES)], "window": "auto"}
    return Kind({**given, **options})


def lies(index):
    """A length that is told: of one in three another one."""
    tokens = len(tokens_of(index))
    return tokens if index % 3 else max(1, tokens // 2 if index % 2 else 2 * tokens)


THREADS = WorkerOptions(num_workers=2, method="thread", chunk_size=3)
SCHEDULE = WeightSchedule([(0, {"a": 1, "b": 1}), (40, {"a": 3, "b": 1})])
ASKS = {2: (0, 60), 3: (-1, 45), 9: (0, 40)}
CALLS = {1: {"a": 1, "b": 8}, 4: {"a": 8, "b": 1}, 5: {"a": 2, "b": 1}}
EQUAL = {"a": 1, "b": 1}
TO_VIRTUAL = ("accumulate", "auto window", "threads", "packed", "collate", "stop", "stateful")
TO_VIRTUAL += ("payload",)
KINDS = {
    "replay": Kind({}),
    "payload": Kind({"state": "payload"}, moves=False),
    "random": Kind({"process_fn": augmented}),
    "threads": Kind({"workers": THREADS, "process_fn": augmented}),
    "accumulate": Kind({"accumulate": 3}),
    "collate": Kind({"collate_fn": noisy}),
    "packed": Kind({"token_budget": TokenBudget(90, layout="packed")}),
    "attention": Kind({"token_budget": TokenBudget(80, attention_tokens=50, oversize="drop")}),
    "shapes": Kind({"token_budget": TokenBudget(80, shapes=4, oversize="drop")}),
    "auto window": Kind({"window": "auto", "token_budget": TokenBudget(40, oversize="drop")}),
    "largest first": Kind({"largest_first": 3}),
    "not prefetched": Kind({"prefetch": 0}),
    "stop": Kind({"uneven": "stop"}, moves=False),
    "stop iterable": Kind(
        {"uneven": "stop", "dataset": lambda *_: Shuffled()}, moves=False, counts_unread=False
    ),
    "in order": Kind({"shuffle": False}),
    "own keys": Kind({"observe": with_own_key}),
    "sampler": Kind({"sampler": [*range(60, SAMPLES), *range(60)]}, moves=False),
    "weighted": Kind(
        {"sampler": lambda: WeightedSampler(range(1, SAMPLES + 1), replacement=False)}, False
    ),
    "drawn again": Kind({"sampler": lambda: WeightedSampler(range(SAMPLES))}, False, once=False),
    "own data": Kind({"sharded": True, "dataset": range(60)}, False, once=False, ranks=(2, 3)),
    "iterable": Kind({"dataset": lambda *_: Shuffled()}, moves=False),
    "stateful": Kind({"dataset": lambda *_: Stateful()}, moves=False),
    "records": Kind({"dataset": read()}),
    "records in order": Kind({"dataset": read(shuffle=False)}),
    "compressed": Kind({"dataset": read(".gz", shuffle=False)}, moves=False),
    "mixed records": Kind({"dataset": lambda *given: {"a": range(60), "records": read()(*given)}}),
    "mixed": Kind({"dataset": two(), "weights": {"a": 0.6, "b": 0.4}}),
    "names": Kind({"dataset": two(names=("web", "web/en"))}),
    "mixed by tokens": Kind({"dataset": two(), "weights": Mixing(by="tokens")}),
    "first exhausted": Kind(
        {"dataset": two(), "weights": Mixing(stop="first_exhausted")}, once=False
    ),
    "cycle": Kind(
        {"dataset": two(90, 9), "weights": Mixing(by="tokens", stop="cycle")}, False, once=False
    ),
    "scheduled": Kind({"dataset": two(), "weights": Mixing(weights=SCHEDULE)}),
    "set weights": Kind({"dataset": two(), "weights": EQUAL}, calls=CALLS),
    "set weights of an iterable": Kind(
        {"dataset": lambda *_: {"a": Shuffled(60), "b": Shuffled(50)}, "weights": EQUAL},
        moves=False,
        calls=CALLS,
    ),
    "mixed kinds of sources": Kind(
        {
            "dataset": lambda *given: {"a": read()(*given), "b": Shuffled(50)},
            "process_fn": {"a": sample, "b": augmented},
        },
        moves=False,
    ),
    "mixed tasks": Kind({"dataset": two(), "diversity": 0.5, "round_size": 4}),
    "ramp": Kind(
        {
            "dataset": two(),
            "weights": Mixing(
                weights=WeightSchedule([(0, {"a": 3, "b": 1}), (900, {"a": 1, "b": 1})], ramp=True),
                by="tokens",
            ),
        }
    ),
    "asks": Kind({}, calls=ASKS),
    "asks packed": Kind(
        {"token_budget": TokenBudget(88, layout="packed", oversize="drop"), "accumulate": 3},
        calls=ASKS,
    ),
    "asks iterable": Kind(
        {"dataset": lambda *_: Shuffled(), "uneven": "stop"},
        moves=False,
        counts_unread=False,
        calls=ASKS,
    ),
    "nodes": Kind({}, make=of_nodes),
    "no aligner": Kind({}, make=partial(of_nodes, state="replay"), ranks=(1,)),
    "no aligner, iterable": Kind(
        {}, False, partial(of_nodes, source=IterableSource, state="payload"), ranks=(1,)
    ),
    "virtual": Kind({"virtual_ranks": 4}, ranks=(1, 2, 4)),
    "virtual mixed": Kind(
        {"virtual_ranks": 3, "dataset": two(), "weights": Mixing(by="tokens")}, ranks=(1, 3)
    ),
}
"""The kinds of jobs, by name."""
KINDS |= {
    "known": known(),
    "known windows": known(window=16),
    "known packed": known(token_budget=TokenBudget(90, layout="packed")),
    "known lies": known(lies),
    "known lies packed": known(lies, token_budget=TokenBudget(90, layout="packed")),
    "known random": known(lambda _: 12, process_fn=augmented, workers=THREADS),
    "known collate": known(collate_fn=noisy, accumulate=3, largest_first=2),
    "known own keys": known(observe=with_own_key, shuffle=False),
    "known asks": known(lies)._replace(calls=ASKS),
    "known stop": known(lies, uneven="stop")._replace(moves=False),
    "known virtual": known(lies, virtual_ranks=4)._replace(ranks=(1, 2, 4)),
}
KINDS |= {
    f"virtual {name}": Kind(KINDS[name].options | {"virtual_ranks": 4}, ranks=(1, 2, 4))
    for name in TO_VIRTUAL
}
KINDS |= {
    "early": Kind({"window": 64, "window_start": "early"}),
    "early iterable": Kind(
        {"window": 40, "window_start": "early", "dataset": lambda *_: Shuffled()}, moves=False
    ),
    "early packed": Kind(KINDS["packed"].options | {"window": 64, "window_start": "early"}),
}
LEVEL = StepTime(squares=1 / 800)
KINDS |= {
    "packed level in tokens": Kind(KINDS["packed"].options | {"step_time": StepTime()}),
    "packed level in attention": Kind(
        {
            "token_budget": TokenBudget(90, layout="packed", oversize="drop"),
            "step_time": StepTime(squares=1 / 20),
            "accumulate": 2,
        }
    ),
    "padded level in time": Kind({"step_time": LEVEL}),
    "padded level in attention": Kind({"step_time": StepTime(squares=1 / 20), "window": 32}),
    "function of time": Kind({"step_time": tokens_squared}),
    "asks level in time": Kind({"step_time": LEVEL}, calls=ASKS),
    "virtual level in time": Kind({"step_time": LEVEL, "virtual_ranks": 4}, ranks=(1, 2, 4)),
}


class Given(NamedTuple):
    """What makes a job.

    Attributes:
        kind: name of its kind.
        world_size: number of ranks.
        folder: where files of data may be.
        exclude: (source, key) of samples that are left out.
        cuts: how many times the budget was lowered.
    """

    kind: str
    world_size: int
    folder: object
    exclude: frozenset = frozenset()
    cuts: int = 0


class Job:
    """A run of N ranks that goes on: their loaders, and what each has at a step.

    Args:
        given: what makes it.
        states: a state of each rank; None begins.
    """

    def __init__(self, given, states=None):
        self.kind = KINDS[given.kind]
        hub = InProcessHub(given.world_size, TIMEOUT_S)
        self.threads = [ThreadPoolExecutor(1) for _ in range(given.world_size)]  # one for each rank
        make = self.kind.loader
        self.loaders = self.each(
            lambda rank: make(hub.exchange(rank), given.folder, given.exclude, given.cuts),
            range(given.world_size),
        )
        self.its, self.touched = None, False  # whether a step was taken since `iter`
        self.loaded = False  # a state, which no `iter` has taken up yet
        if states is not None:
            self.load(states)

    def each(self, do, *of_ranks):
        """What `do` returns on every rank at once."""
        calls = zip(self.threads, *of_ranks, strict=True)
        futures = [thread.submit(do, *given) for thread, *given in calls]
        return [future.result(4 * TIMEOUT_S) for future in futures]

    def states(self):
        return self.each(lambda loader: loader.state_dict(), self.loaders)

    def load(self, states):
        self.each(
            lambda loader, state: loader.load_state_dict(state, change_budget=True),
            self.loaders,
            states,
        )
        self.its, self.touched, self.loaded = None, False, True

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
        self.call(self.kind.calls.get(found[0].info.step))
        return found

    def call(self, what):
        if isinstance(what, dict):
            self.each(lambda loader: loader.set_weights(what), self.loaders)
        elif what is not None:
            rank, tokens = what
            root = self.loaders[rank % len(self.loaders)].root
            (aligner,) = (node for node in walk(root) if isinstance(node, RankAligner))
            aligner.request_budget(tokens)

    def epoch(self):
        """The steps that are left of an epoch."""
        return list(iter(self.step, None))

    def begin(self):
        """Begin an epoch, or go on with one that was loaded."""
        self.its, self.touched, self.loaded = self.each(iter, self.loaders), False, False

    def set_epoch(self, number):
        self.each(lambda loader: loader.set_epoch(number), self.loaders)
        self.its, self.touched = None, False

    def counts(self):
        """Over all ranks: samples that were left out, trained on, and left over by other ranks."""
        out = [
            sum(loader.skipped_samples.values()) + loader.dropped_samples + loader.excluded_samples
            for loader in self.loaders
        ]
        done = sum(loader.samples_done for loader in self.loaders)
        return sum(out), done, sum(loader.unemitted_samples for loader in self.loaders)

    def close(self):
        self.each(lambda loader: loader.close(), self.loaders)
        self.its, self.touched = None, False

    def end(self):
        self.close()
        for thread in self.threads:
            thread.shutdown()


class Step(NamedTuple):
    """What a rank has in a step: a checksum of its tensors, and numbers that come from them."""

    info: object
    content: int
    tokens: int  # padded
    targets: int

    @property
    def rows(self):
        """(source, key, repeat) of each sample that is trained on."""
        info = self.info
        facts = zip(info.row_sources, info.keys, info.row_repeats, strict=True)
        return [] if info.is_filler else [*facts]

    @property
    def keys(self):
        """(source, key) of each sample that is trained on."""
        return [row[:2] for row in self.rows]


def described(batch):
    if batch is None:
        return None
    info = pop_step_info(batch)
    values = b"".join(np.asarray(batch[name]).tobytes() for name in sorted(batch))
    targets = 0 if info.is_filler else int((batch["labels"][:, 1:] != -100).sum())
    return Step(info, zlib.crc32(values), batch["input_ids"].numel(), targets)


def left_out_of(steps):
    """What all ranks have left out in some steps."""
    return [one for step in steps for rank in step for one in rank.info.left_out]


def keys_of(steps):
    """The keys of all ranks in some steps: of samples that were trained on, and left out."""
    trained = [key for step in steps for rank in step for key in rank.keys]
    return trained, [(one.source, one.key) for one in left_out_of(steps)]


def check_counts(steps):
    """Check that what steps say of all ranks is what the batches of all ranks hold."""
    optimizer_step, number = [], 0
    for step in steps:
        optimizer_step += step
        number += 1
        assert len({one.info.ends_optimizer_step for one in step}) == 1
        if not step[0].info.ends_optimizer_step:
            continue
        targets = sum(one.targets for one in optimizer_step)
        samples = sum(len(one.rows) for one in optimizer_step)
        assert samples
        for one in optimizer_step:
            info = one.info
            assert (info.micro_steps, info.local_targets) == (number, one.targets)
            assert (info.optimizer_samples, info.optimizer_targets) == (samples, targets)
            assert info.loss_scale == pytest.approx(len(step) * one.targets / max(1, targets))
        optimizer_step, number = [], 0
    assert not optimizer_step


def by_virtual_rank(steps):
    """What each virtual rank has at each step, the same whichever process hosts it."""
    found = {}
    for of_ranks in steps:
        for process, one in enumerate(of_ranks):
            info = one.info
            step, number = divmod(info.step, hosted := info.batches_per_step)
            found[info.epoch, step, process * hosted + number] = (
                one[1:],
                one.rows,
                info.left_out,
                (info.micro_step // hosted, info.micro_steps // hosted),
                (info.optimizer_samples, info.optimizer_targets, info.all_samples_this_step),
                round(info.loss_scale / len(of_ranks), 9),
            )
    return found
