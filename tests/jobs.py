"""Jobs of every kind, and a run of one: for promises that hold for all kinds.

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
    """The graph of `ODBDataLoader`, built from nodes."""
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
    """The time of a step with this group."""
    return sum(sample.tokens**2 for sample in group)


class Kind(NamedTuple):
    """The configuration of a job.

    Attributes:
        options: options of `ODBDataLoader`; a callable `dataset` gets (folder, rank, world size).
        moves: whether its states can be resharded within an epoch.
        make: exchange, budget, exclude -> loader, in place of `ODBDataLoader`.
        ranks: the numbers of ranks to test.
        once: whether each sample comes once in an epoch.
        counts_unread: whether the number of samples is known, so that unread ones are counted.
        calls: step -> weights to set for the next epoch, or (rank, tokens): the smaller budget
            that the rank requests.
    """

    options: dict
    moves: bool = True
    make: object = None
    ranks: tuple = (1, 2, 3, 4)
    once: bool = True
    counts_unread: bool = True
    calls: dict = {}  # noqa: RUF012

    def budget(self, cuts=0):
        """The budget after `cuts` reductions."""
        budget = self.options.get("token_budget", BUDGET)
        return replace(budget, tokens=budget.tokens * (4, 3, 2)[cuts] // 4)

    def loader(self, exchange, folder, exclude=(), cuts=0):
        by_source = {name: [] for name, _ in exclude}
        for name, key in exclude:
            by_source[name].append(key)
        excluded = {"exclude": by_source.get("", by_source)} if exclude else {}
        if self.make is not None:
            return self.make(exchange, self.budget(cuts), **excluded)
        options = {
            "dataset": range(SAMPLES),
            "process_fn": sample,
            "window": 16,
            "round_size": 8,
            "seed": 3,
            "timeout_s": TIMEOUT_S,
            "process_group": exchange,
        }
        options |= self.options | excluded | {"token_budget": self.budget(cuts)}
        if callable(options.get("sampler")):
            options["sampler"] = options["sampler"]()  # Each loader draws by itself.
        if callable(options["dataset"]):
            options["dataset"] = options["dataset"](folder, exchange.rank, exchange.world_size)
        return ODBDataLoader(**options)


def known(length_of=lambda index: len(tokens_of(index)), **options):
    """A job with `lengths`."""
    lengths = [length_of(index) for index in range(SAMPLES)]
    return Kind({"lengths": lengths, "window": "auto", **options})


def partly_wrong_length(index):
    """A length for `lengths`, wrong for one sample in three."""
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
    "mixed records": Kind({"dataset": lambda *shard: {"a": range(60), "records": read()(*shard)}}),
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
            "dataset": lambda *shard: {"a": read()(*shard), "b": Shuffled(50)},
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
    "known wrong lengths": known(partly_wrong_length),
    "known wrong lengths packed": known(
        partly_wrong_length, token_budget=TokenBudget(90, layout="packed")
    ),
    "known random": known(lambda _: 12, process_fn=augmented, workers=THREADS),
    "known collate": known(collate_fn=noisy, accumulate=3, largest_first=2),
    "known own keys": known(observe=with_own_key, shuffle=False),
    "known asks": known(partly_wrong_length)._replace(calls=ASKS),
    "known stop": known(partly_wrong_length, uneven="stop")._replace(moves=False),
    "known virtual": known(partly_wrong_length, virtual_ranks=4)._replace(ranks=(1, 2, 4)),
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


class JobSpec(NamedTuple):
    """A kind of job, and what may change between runs.

    Attributes:
        kind: name of its kind.
        world_size: number of ranks.
        folder: folder for files of data.
        exclude: (source, key) of excluded samples.
        cuts: number of reductions of the budget.
    """

    kind: str
    world_size: int
    folder: object
    exclude: frozenset = frozenset()
    cuts: int = 0


class Job:
    """A run of N ranks: their loaders, and the step of each rank.

    Args:
        spec: the job.
        states: a state of each rank; None begins an epoch.
    """

    def __init__(self, spec, states=None):
        self.kind = KINDS[spec.kind]
        hub = InProcessHub(spec.world_size, TIMEOUT_S)
        self.threads = [ThreadPoolExecutor(1) for _ in range(spec.world_size)]  # one for each rank
        make = self.kind.loader
        self.loaders = self.each(
            lambda rank: make(hub.exchange(rank), spec.folder, spec.exclude, spec.cuts),
            range(spec.world_size),
        )
        self.iterators, self.touched = None, False  # whether a step was taken since `iter`
        self.loaded = False  # whether a state waits for `iter`
        if states is not None:
            self.load(states)

    def each(self, do, *of_ranks):
        """Call `do` on all ranks at once; return its results."""
        calls = zip(self.threads, *of_ranks, strict=True)
        futures = [thread.submit(do, *arguments) for thread, *arguments in calls]
        return [future.result(4 * TIMEOUT_S) for future in futures]

    def states(self):
        return self.each(lambda loader: loader.state_dict(), self.loaders)

    def load(self, states):
        self.each(
            lambda loader, state: loader.load_state_dict(state, change_budget=True),
            self.loaders,
            states,
        )
        self.iterators, self.touched, self.loaded = None, False, True

    def step(self):
        """The next step of each rank; None at the end of an epoch."""
        if self.iterators is None:
            self.begin()
        self.touched = True
        step = self.each(lambda iterator: described(next(iterator, None)), self.iterators)
        if step[0] is None:
            assert not any(step), "some ranks have steps left"
            self.iterators, self.touched = None, False
            return None
        self.call(self.kind.calls.get(step[0].info.step))
        return step

    def call(self, request):
        if isinstance(request, dict):
            self.each(lambda loader: loader.set_weights(request), self.loaders)
        elif request is not None:
            rank, tokens = request
            root = self.loaders[rank % len(self.loaders)].root
            (aligner,) = (node for node in walk(root) if isinstance(node, RankAligner))
            aligner.request_budget(tokens)

    def epoch(self):
        """The remaining steps of the epoch."""
        return list(iter(self.step, None))

    def begin(self):
        """Begin an epoch, or resume a loaded one."""
        self.iterators, self.touched, self.loaded = self.each(iter, self.loaders), False, False

    def set_epoch(self, number):
        self.each(lambda loader: loader.set_epoch(number), self.loaders)
        self.iterators, self.touched = None, False

    def counts(self):
        """Counts over all ranks: samples left out, trained on, and not emitted."""
        out = [
            sum(loader.skipped_samples.values()) + loader.dropped_samples + loader.excluded_samples
            for loader in self.loaders
        ]
        done = sum(loader.samples_done for loader in self.loaders)
        return sum(out), done, sum(loader.unemitted_samples for loader in self.loaders)

    def close(self):
        self.each(lambda loader: loader.close(), self.loaders)
        self.iterators, self.touched = None, False

    def end(self):
        self.close()
        for thread in self.threads:
            thread.shutdown()


class Step(NamedTuple):
    """The step of a rank: a checksum of its tensors, and counts from them."""

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
    """The samples that all ranks left out in these steps."""
    return [sample for step in steps for rank in step for sample in rank.info.left_out]


def keys_of(steps):
    """The keys of all ranks in these steps: of trained samples, and of samples left out."""
    trained = [key for step in steps for rank in step for key in rank.keys]
    return trained, [(sample.source, sample.key) for sample in left_out_of(steps)]


def check_counts(steps):
    """Compare the totals in `StepInfo` with the batches of all ranks."""
    optimizer_step, number = [], 0
    for step in steps:
        optimizer_step += step
        number += 1
        assert len({rank.info.ends_optimizer_step for rank in step}) == 1
        if not step[0].info.ends_optimizer_step:
            continue
        targets = sum(batch.targets for batch in optimizer_step)
        samples = sum(len(batch.rows) for batch in optimizer_step)
        assert samples
        for batch in optimizer_step:
            info = batch.info
            assert (info.micro_steps, info.local_targets) == (number, batch.targets)
            assert (info.optimizer_samples, info.optimizer_targets) == (samples, targets)
            assert info.loss_scale == pytest.approx(len(step) * batch.targets / max(1, targets))
        optimizer_step, number = [], 0
    assert not optimizer_step


def by_virtual_rank(steps):
    """The step of each virtual rank, without the process that hosts it."""
    by_rank = {}
    for of_ranks in steps:
        for process, batch in enumerate(of_ranks):
            info = batch.info
            ranks_per_process = info.batches_per_step
            step, number = divmod(info.step, ranks_per_process)
            by_rank[info.epoch, step, process * ranks_per_process + number] = (
                batch[1:],
                batch.rows,
                info.left_out,
                (info.micro_step // ranks_per_process, info.micro_steps // ranks_per_process),
                (info.optimizer_samples, info.optimizer_targets, info.all_samples_this_step),
                round(info.loss_scale / len(of_ranks), 9),
            )
    return by_rank
