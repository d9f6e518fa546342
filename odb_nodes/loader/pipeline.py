"""From datasets to a node of samples: what `ODBDataLoader` puts below its `WindowBucketer`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_callable
from odb_nodes._core.fingerprints import stable_names
from odb_nodes._core.hashing import hash_ints
from odb_nodes._core.seeds import declares_draws
from odb_nodes._core.user_warning import warn_user
from odb_nodes.alignment.exchange import group_rank
from odb_nodes.loader.dataset_checks import check_is_dataset, check_no_columns, warn_of_sizes
from odb_nodes.loader.options import LoaderOptions, ProcessFn
from odb_nodes.nodes.exclusions import ExcludedKeys
from odb_nodes.processing import ParallelProcessor, PerSource
from odb_nodes.processing.observation import observe_sample
from odb_nodes.processing.options import share_of
from odb_nodes.sample import Observe, Sample, Skipped
from odb_nodes.sources.datasets import source_of
from odb_nodes.sources.jsonl_source import JsonlSource
from odb_nodes.sources.mixing import Mixing, check_names
from odb_nodes.sources.source_mixer import SourceMixer
from odb_nodes.sources.weight_schedule import WeightSchedule

_PLAIN = (list, tuple, range)  # datasets that draw nothing


@dataclass(frozen=True)
class SampleProcess:
    """Makes a `Sample` of an item of the source: looks it up, processes it, observes it.

    Args:
        dataset: dataset that items are indices into; `None` where items are the data themselves.
        process_fn: item of the dataset -> processed sample; `None` where it is one already.
        observe: processed sample -> its cost; see `LengthObserver`.
        prepare: first step of the collate function, done here sample by sample; `None` for none.
    """

    dataset: Any
    process_fn: ProcessFn
    observe: Observe | None
    prepare: Callable[[Any], Any] | None

    @property
    def fingerprint_name(self) -> str:
        """The names of the functions that decide the lengths, where they are given."""
        named = {"process_fn": self.process_fn, "observe": self.observe}
        given = {key: function for key, function in named.items() if function is not None}
        return f"sample({stable_names(given)})"

    @property
    def draws_random_numbers(self) -> bool | None:
        """`False` where all that is given says so; `None` where it is not known."""
        given = [one for one in (self.dataset, self.process_fn, self.observe) if one is not None]
        quiet = all(type(one) in _PLAIN or declares_draws(one) is False for one in given)
        return False if quiet else None

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


def sample_node(
    dataset: Any, options: LoaderOptions, prepare: Callable[[Any], Any] | None = None
) -> BaseNode[Any]:
    """Return a node that yields the samples of a dataset, or of several that are mixed.

    Args:
        dataset: the `dataset` of the `ODBDataLoader`.
        options: the options of the loader.
        prepare: first step of the collate function, done by the workers sample by sample.

    Raises:
        TypeError, ValueError: names the argument of `ODBDataLoader` that is not valid.
    """
    check_no_columns(dataset)
    pipeline = _Pipeline(options, prepare)
    named = isinstance(dataset, dict) and dataset and all(type(name) is str for name in dataset)
    if named or not isinstance(dataset, BaseNode):  # which may have sources of any name
        _check_excluded(ExcludedKeys.of(options.exclude), [*dataset] if named else [])
    if not named:
        return pipeline.of_one(dataset)
    if type(dataset) is not dict:
        raise TypeError(
            f"`dataset` must be one dataset, or a plain dict of those to mix, but is a "
            f"`{type(dataset).__name__}` of {sorted(dataset)}. Pass one of them, such as "
            '`dataset["train"]`; or `dict(dataset)` to mix them all.'
        )
    return pipeline.of_several(dataset)


class _Pipeline:
    """Builds the nodes that read and process the datasets of a loader, on this rank."""

    def __init__(self, options: LoaderOptions, prepare: Callable[[Any], Any] | None) -> None:
        self._options = options
        self._prepare = prepare
        rank, self._world_size = group_rank(options.process_group)
        self._shard = (0, 1) if options.sharded else (rank, self._world_size)
        self._processor = partial(ParallelProcessor, rank=rank, world_size=self._world_size)

    def of_one(self, dataset: Any) -> BaseNode[Any]:
        """Return a node that yields the samples of one dataset."""
        options = self._options
        check_callable("process_fn", options.process_fn)
        if options.weights is not None:
            raise ValueError("`weights` must be None, unless `dataset` is a dict of datasets.")
        source, process = self._read(dataset, options.process_fn, options.seed)
        return self._processor(source, process, seed=options.seed, workers=options.worker_options)

    def of_several(self, datasets: dict[str, Any]) -> BaseNode[Any]:
        """Return a node that yields the samples of several datasets, mixed by weight."""
        options = self._options
        if options.sampler is not None:
            raise ValueError(
                "`sampler` must be None where `dataset` is a dict of datasets. Pass an "
                "`IterableSource` of that order in place of the dataset that it is for."
            )
        functions = options.process_fn
        if not isinstance(functions, Mapping):
            functions = dict.fromkeys(datasets, functions)
        check_names("process_fn", functions, "dataset", datasets)
        seeds = {name: hash_ints(options.seed, zlib.crc32(name.encode())) >> 1 for name in datasets}
        sources, processes = {}, {}
        for name, dataset in datasets.items():
            try:
                sources[name], processes[name] = self._read(dataset, functions[name], seeds[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"of source {name!r}: {error}") from error
        mixing = Mixing.of(options.weights)
        weights = self._weights(mixing, datasets)
        if weights is None and mixing.by == "samples" and not options.sharded:
            sizes = {name: _known_size(name, dataset) for name, dataset in datasets.items()}
            if all(sizes.values()):
                warn_of_sizes(sizes, mixing.stop)
        workers = options.worker_options
        mix = partial(
            SourceMixer,
            weights=weights,
            by=mixing.by,
            stop=mixing.stop,
            world_size=self._world_size,
        )
        if mixing.by == "samples":
            # Mixed before they are processed, so that all workers process items of any source.
            process = PerSource(processes)
            return self._processor(mix(sources), process, seed=options.seed, workers=workers)
        make = partial(self._processor, workers=share_of(workers, len(datasets)))
        return mix({name: make(sources[name], processes[name], seed=seeds[name]) for name in seeds})

    def _weights(
        self, mixing: Mixing, datasets: Mapping[str, Any]
    ) -> Mapping[str, float] | WeightSchedule | None:
        if mixing.weights != "proportional":
            return mixing.weights
        if mixing.by != "samples" or self._options.sharded:
            raise ValueError(
                '`weights="proportional"` goes by the number of samples of whole datasets, so `by` '
                'must be "samples" and `sharded` False. Pass weights.'
            )
        return {name: _size_of(name, dataset) for name, dataset in datasets.items()}

    def _read(self, dataset: Any, process_fn: Any, seed: int) -> tuple[Any, SampleProcess]:
        options = self._options
        check_is_dataset(dataset)
        source, items = source_of(dataset, options.shuffle, seed, options.sampler, self._shard)
        return source, SampleProcess(items, process_fn, options.observe, self._prepare)


def _check_excluded(exclude: ExcludedKeys, names: list[str]) -> None:
    """Raise a ValueError for keys of a source that there is not; warn where none have names."""
    for source in exclude.sources:
        if source in names or any(source.startswith(f"{name}/") for name in names):
            continue
        if names:
            raise ValueError(
                f"`exclude` has keys of source {source!r}, but the sources are {sorted(names)}. "
                "Pass a dict of source -> keys, with the names that `StepInfo.row_sources` shows."
            )
        if source:
            warn_user(
                f"`exclude` has keys of source {source!r}, but `dataset` is no dict of sources, so "
                "they exclude nothing unless processing names that source."
            )


def _size_of(name: str, dataset: Any) -> int:
    needed = f'`weights="proportional"` needs the number of samples of source {name!r}'
    try:
        if isinstance(dataset, JsonlSource):
            return dataset.num_records
        if not isinstance(dataset, BaseNode):  # whose length is that of one rank
            return len(dataset)
    except TypeError as error:
        reason = str(error).removesuffix(".")
        raise TypeError(f"{needed}: {reason}. Otherwise pass weights.") from error
    raise TypeError(f"{needed}, which a node does not tell. Pass weights.")


def _known_size(name: str, dataset: Any) -> int:
    """Return the number of samples of a dataset, 0 where it is not known."""
    try:
        return _size_of(name, dataset)
    except Exception:  # of the user's `__len__`: only a warning depends on it
        return 0
