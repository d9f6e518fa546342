"""From datasets to a node of samples: what `ODBDataLoader` puts below its `WindowBucketer`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_callable
from odb_nodes._core.fingerprints import stable_names
from odb_nodes._core.hashing import hash_ints
from odb_nodes.processing import ParallelProcessor, WorkerOptions
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import Observe, Sample, Skipped
from odb_nodes.sources.datasets import source_of
from odb_nodes.sources.source_mixer import Mixing, PerSource, SourceMixer, check_names

ProcessFn = Callable[[Any], Any] | None


@dataclass(frozen=True)
class SampleProcess:
    """Makes a `Sample` of an item of the source: looks it up, processes it, observes it.

    Args:
        dataset: what items are indices into; `None` where they are the data themselves.
        process_fn: item of the dataset -> processed sample; `None` where it is one already.
        observe: processed sample -> its cost; see `LengthObserver`.
        prepare: what the collate function would do with each sample first; `None` for nothing.
    """

    dataset: Any
    process_fn: ProcessFn
    observe: Observe | None
    prepare: Callable[[Any], Any] | None

    @property
    def fingerprint_name(self) -> str:
        """The names of the functions that are given, and decide lengths."""
        named = {"process_fn": self.process_fn, "observe": self.observe}
        given = {key: function for key, function in named.items() if function is not None}
        return f"sample({stable_names(given)})"

    def __call__(self, item: Any) -> Sample | Skipped:
        """Return the sample of an item."""
        data = item if self.dataset is None else self.dataset[item]
        if self.process_fn is not None:
            data = self.process_fn(data)
        if self.prepare is None:
            return observe_sample(data, self.observe)
        if self.observe is None:
            return observe_sample(self.prepare(data))  # counts arrays faster than lists
        sample = observe_sample(data, self.observe)
        if isinstance(sample, Skipped):
            return sample
        return sample._replace(data=self.prepare(data))


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """How the samples are read and made; see `ODBDataLoader` for those not explained here.

    Attributes:
        prepare: what the collate function would do with each sample.
        shard: which one of how many ranks that share each dataset this is.
        rank: of this rank, for its random numbers.
        world_size: number of ranks, likewise.
    """

    shuffle: bool | None
    seed: int
    sampler: Iterable[int] | None
    shard: tuple[int, int]
    process_fn: ProcessFn | Mapping[str, ProcessFn]
    observe: Observe | None
    prepare: Callable[[Any], Any] | None
    weights: Mapping[str, float] | Mixing | None
    workers: WorkerOptions
    rank: int
    world_size: int


def sample_node(dataset: Any, options: SampleOptions) -> BaseNode[Sample | Skipped]:
    """Return a node that yields the samples of a dataset, or of several that are mixed.

    Raises:
        TypeError, ValueError: names the argument of `ODBDataLoader` that is not valid.
    """
    named = isinstance(dataset, dict) and dataset and all(type(name) is str for name in dataset)
    if not named:
        check_callable("process_fn", options.process_fn)
        if options.weights is not None:
            raise ValueError("`weights` must be None, unless `dataset` is a dict of datasets.")
        source, process = _read(dataset, options.process_fn, options.seed, options)  # type: ignore[arg-type]
        return _processor(source, process, options.seed, options.workers, options)
    if type(dataset) is not dict:
        raise TypeError(
            f"`dataset` must be one dataset, or a plain dict of those to mix, but is a "
            f"`{type(dataset).__name__}` of {sorted(dataset)}. Pass one of them, such as "
            '`dataset["train"]`; or `dict(dataset)` to mix them all.'
        )
    return _mixed(dataset, options)


def _mixed(datasets: dict[str, Any], options: SampleOptions) -> BaseNode[Sample | Skipped]:
    if options.sampler is not None:
        raise ValueError(
            "`sampler` must be None where `dataset` is a dict of datasets: make the one that it "
            "is for an `IterableSource`."
        )
    functions = options.process_fn
    if not isinstance(functions, Mapping):
        functions = dict.fromkeys(datasets, functions)
    check_names("process_fn", functions, "dataset", datasets)
    seeds = {name: hash_ints(options.seed, zlib.crc32(name.encode())) >> 1 for name in datasets}
    read = {}
    for name, dataset in datasets.items():
        check_callable(f"process_fn[{name!r}]", functions[name])
        try:
            read[name] = _read(dataset, functions[name], seeds[name], options)
        except (TypeError, ValueError) as error:
            raise type(error)(f"of source {name!r}: {error}") from error
    mixing = Mixing.of(options.weights)
    mixed = {"weights": mixing.weights, "by": mixing.by, "stop": mixing.stop}
    if mixing.by == "samples":  # before they are made, so that all workers make those of any source
        mixer = SourceMixer({name: source for name, (source, _) in read.items()}, **mixed)  # type: ignore[arg-type]
        process = PerSource({name: process for name, (_, process) in read.items()})
        return _processor(mixer, process, options.seed, options.workers, options)
    workers = _share(options.workers, len(read))
    nodes = {
        name: _processor(source, process, seeds[name], workers, options)
        for name, (source, process) in read.items()
    }
    return SourceMixer(nodes, **mixed)  # type: ignore[arg-type]


def _read(
    dataset: Any, process_fn: ProcessFn, seed: int, options: SampleOptions
) -> tuple[BaseNode[Any], SampleProcess]:
    source, items = source_of(dataset, options.shuffle, seed, options.sampler, options.shard)
    return source, SampleProcess(items, process_fn, options.observe, options.prepare)


def _processor(
    source: BaseNode[Any],
    process: Callable[[Any], Any],
    seed: int,
    workers: WorkerOptions,
    options: SampleOptions,
) -> ParallelProcessor[Any]:
    return ParallelProcessor(
        source,
        process,
        seed=seed,
        workers=workers,
        rank=options.rank,
        world_size=options.world_size,
    )


def _share(workers: WorkerOptions, sources: int) -> WorkerOptions:
    """Return the part of the workers that each source gets, at least one where there are any."""
    ahead = workers.in_flight_samples
    return replace(
        workers,
        num_workers=-(-workers.num_workers // sources),
        in_flight_samples=None if ahead is None else max(1, ahead // sources),
    )
