"""The graph of one rank of an `ODBDataLoader`, from its datasets to its batches."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
import torchdata.nodes
from torch.utils.data import ConcatDataset, Subset
from torchdata.nodes import BaseNode, Stateful

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_callable, describe
from odb_nodes._support.hashing import hash_ints, stable_names
from odb_nodes._support.seeds import declares_draws
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.alignment.peers import VirtualTeam
from odb_nodes.core.collate import PackedCollate, PaddingCollate
from odb_nodes.core.collate.for_budget import collate_for
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.collate.rows import RowsCollate, RowsObserve
from odb_nodes.core.collate.token_rows import TOKEN_KEYS, length_of
from odb_nodes.core.contract.graph import length_of as samples_of_epoch
from odb_nodes.core.loader.loader import Loader
from odb_nodes.core.loader.options import LoaderOptions, ProcessFn
from odb_nodes.core.nodes import GroupCollator, LengthObserver, ReadAhead, WindowBucketer
from odb_nodes.core.nodes.exclusions import ExcludedKeys
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.auto_window import AUTO
from odb_nodes.core.planning.known_epochs import known_window
from odb_nodes.core.processing import ParallelProcessor, PerSource, WorkerOptions
from odb_nodes.core.processing.chunk import Fetcher
from odb_nodes.core.processing.first_samples import FirstSamples, process_kept
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.processing.options import share_of
from odb_nodes.core.sample import CLASS_KEYS, Observe, Sample, Skipped
from odb_nodes.core.sources.datasets import (
    dataset_of_rank,
    draws_nothing,
    holds_no_generators,
    is_iterated,
    reads_alike,
    source_of,
)
from odb_nodes.core.sources.feed_source import FeedSource
from odb_nodes.core.sources.iterable_source import is_stream
from odb_nodes.core.sources.jsonl_source import JsonlSource
from odb_nodes.core.sources.known_lengths import KnownLengths, known_lengths
from odb_nodes.core.sources.mixing import Mixing, Stop, WeightSchedule, check_names
from odb_nodes.core.sources.source_mixer import SourceMixer

logger = logging.getLogger("odb_nodes")

_OF_GROUPS = (WindowBucketer, RankAligner, GroupCollator, ReadAhead)
_FAR_APART = 10
"""Without weights, a warning names sizes of datasets that differ by this factor."""
_FATE = {
    "all_exhausted": "is exhausted after {share:.1%} of the epoch, and missing from then on",
    "first_exhausted": "ends the epoch when it is exhausted, after {share:.1%} of all samples",
    "cycle": "is read {passes:.0f} times for each time that {largest!r} is",
}


class RankGraph:
    """The nodes of one rank, which yield samples, groups, aligned groups and batches."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        collate = collate_for(options.budget, options.collate_fn)
        # Not for a subclass: its `__call__` may expect the samples as processing returned them.
        is_ours = type(collate) in (PaddingCollate, PackedCollate)
        prepared = collate if is_ours else None
        self.samples: BaseNode[Any]
        self.bucketer: WindowBucketer | PlannedGroups
        self.origin = ""
        """Where known lengths come from, such as "the column 'n_tokens'"; "" without them."""
        lengths = lengths_before(dataset, options)
        if lengths is not None:
            planned = planned_groups(lengths.tokens, dataset, options, collate, prepared)
            if options.collate_in == "workers" and planned.why_not_collated:
                warn_user(
                    f'`collate_in="workers"` has no effect, since {planned.why_not_collated}: the '
                    "trainer's process makes the batches."
                )
            self.samples = self.bucketer = planned
            self.origin = lengths.origin
        else:
            if options.collate_in == "workers":
                logger.warning(
                    '`collate_in="workers"` has no effect: workers make batches only where the '
                    "lengths of samples are known before they are read (`lengths`). The trainer's "
                    "process makes them."
                )
            state = options.state
            if isinstance(dataset, FeedSource):
                self.samples = _fed(dataset, options)
                state = "payload"
                collate = RowsCollate(collate)
            else:
                self.samples = sample_node(dataset, options, prepared)
            self.bucketer = WindowBucketer(
                self.samples,
                options.budget,
                options.window,
                state,
                options.exclude,
                options.largest_first,
                options.diversity,
                options.window_start,
            )
        self.aligner = RankAligner(
            self.bucketer,
            options.process_group,
            options.round_size,
            options.uneven,
            options.loss_scaling,
            options.accumulate,
            options.seed,
            options.timeout_s,
            step_time=options.step_time,
            tasks=options.tasks,
        )
        rank, _ = group_rank(options.process_group)
        self.collator = GroupCollator(
            self.aligner, collate, options.seed, rank, pin_memory=options.pin_memory
        )


def note_of_lengths(graphs: Sequence[RankGraph], options: LoaderOptions) -> None:
    """Log, once in a process, that optimizer steps of a long epoch have samples of one length."""
    budget, world_size = options.budget, group_rank(options.process_group)[1]
    is_mixed = world_size * len(graphs) * options.accumulate > 1 or budget.layout == "packed"
    if is_mixed or budget.max_samples == 1 or _noted:
        return
    with suppress(TypeError):  # of data without a length
        if samples_of_epoch(graphs[0].samples) < _LONG_EPOCH:
            return
    _noted.append(True)
    logger.warning(
        "each optimizer step has samples of about one length, which trains worse than mixed ones: "
        "accumulate some smaller batches (`accumulate=4` and a fourth of `token_budget`, or "
        "`gradient_accumulation_steps` of a trainer), or pack them. See docs/distributed.md."
    )


_LONG_EPOCH = 10_000  # samples: shorter epochs are not worth a line
_noted: list[bool] = []


def graphs_of_team(dataset: Any, options: LoaderOptions, team: VirtualTeam) -> list[RankGraph]:
    """Return the graphs of this process's virtual ranks, which share its workers."""
    workers = options.workers or WorkerOptions(num_workers=options.num_workers)
    workers = share_of(workers, team.ranks_per_process)
    shared = replace(options, workers=workers, num_workers=0, virtual_ranks=None)
    graphs = []
    for rank in team.ranks():
        data = dataset_of_rank(dataset, rank.rank, rank.world_size)
        graphs.append(RankGraph(data, replace(shared, process_group=rank)))
    return graphs


# --- from datasets to a node of samples -----------------------------------------------------------


class _Fetched(NamedTuple):
    """The data of an item, read from the dataset."""

    data: Any


@dataclass(frozen=True)
class SampleProcess(Fetcher):
    """Makes a `Sample` of an item of the source: looks it up, processes it, observes it."""

    dataset: Any  # that the items index; `None` if items are the data
    process_fn: ProcessFn
    observe: Observe | None
    collate: Any  # its `prepare` is called here for each sample; `None` if it has none
    first: FirstSamples = field(default_factory=FirstSamples, compare=False)

    @property
    def parts(self) -> Sequence[Any]:  # type: ignore[override]
        """The datasets and functions that may hold random generators, or have `set_epoch`."""
        dataset = None if holds_no_generators(self.dataset) else self.dataset
        return dataset, self.process_fn, self.observe

    @property
    def fingerprint_name(self) -> str:
        """The names of the functions that decide the lengths."""
        named = {"process_fn": self.process_fn, "observe": self.observe}
        functions = {key: function for key, function in named.items() if function is not None}
        return f"sample({stable_names(functions)})"

    @property
    def draws_random_numbers(self) -> bool | None:
        """`False` if the dataset and all functions declare it; `None` otherwise."""
        for function in (self.process_fn, self.observe):
            if function is not None and declares_draws(function) is not False:
                return None
        return False if self.dataset is None or draws_nothing(self.dataset) else None

    @property
    def gives_keys(self) -> bool:
        """Whether samples may have keys other than the numbers of their items."""
        return self.observe is not None or getattr(self.process_fn, "gives_keys", False)

    def fetch(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return items with their data, if the dataset can read many items at once."""
        read = getattr(self.dataset, "__getitems__", None)
        if read is None or not reads_alike(self.dataset):  # now: a transform may have been set
            return items
        data = read([*items])
        return [*map(_Fetched, data)] if len(data) == len(items) else items

    def __call__(self, item: Any) -> Sample | Skipped:
        """Return the sample of an item."""
        if self.dataset is None:
            data = item
        else:
            data = item.data if type(item) is _Fetched else self.dataset[item]
        if self.process_fn is not None:
            # The dataset may hold the object, which the function must not change.
            is_shared = self.dataset is not None and type(item) is not _Fetched
            if is_shared and self.first.take(1):
                data = process_kept(self.dataset, item, data, self.process_fn)
            else:
                data = self.process_fn(data)
        if self.collate is None:
            return observe_sample(data, self.observe)
        if self.observe is None:
            sample = observe_sample(self.collate.prepare(data))  # counts arrays faster than lists
        else:
            sample = observe_sample(data, self.observe)
            if isinstance(sample, Sample):
                sample = sample._replace(data=self.collate.prepare(data))
        multiple = getattr(self.collate, "sample_multiple", 1)
        if multiple == 1 or isinstance(sample, Skipped) or not isinstance(data, Mapping):
            return sample
        return sample._replace(padding=-length_of(data) % multiple)


def sample_node(dataset: Any, options: LoaderOptions, collate: Any = None) -> BaseNode[Any]:
    """Return a node that yields the samples of a dataset, or of a dict of datasets to mix."""
    check_no_columns(dataset)
    is_mixture = (
        isinstance(dataset, dict) and dataset and all(type(name) is str for name in dataset)
    )
    if is_mixture or not isinstance(dataset, BaseNode):  # which may have sources of any name
        _check_excluded(ExcludedKeys.of(options.exclude), [*dataset] if is_mixture else [])
    if not is_mixture:
        return _one_dataset(dataset, options, collate)
    if type(dataset) is not dict:
        raise TypeError(
            f"`dataset` must be one dataset, or a plain dict of datasets to mix, but is a "
            f"`{type(dataset).__name__}` of {sorted(dataset)}. Pass one of them, such as "
            '`dataset["train"]`; or `dict(dataset)` to mix them all.'
        )
    return _mixture(dataset, options, collate)


def _fed(feed: FeedSource, options: LoaderOptions) -> BaseNode[Any]:
    """Return a node that yields the samples of a feed, which its generators have processed."""
    _check_of_one_dataset(options)
    given = {
        "process_fn": options.process_fn is not None,
        "num_workers": options.worker_options.num_workers > 0,
        "sampler": options.sampler is not None,
        "shuffle": options.shuffle is not None,
    }
    if names := [name for name, is_given in given.items() if is_given]:
        raise ValueError(
            f"`{names[0]}` must not be given where `dataset` is a `FeedSource`: what is put is not "
            "processed further, and its source decides the order. Process before `put`."
        )
    return LengthObserver(feed, RowsObserve(options.observe, options.budget.layout))


def lengths_before(dataset: Any, options: LoaderOptions) -> KnownLengths | None:
    """Return the known lengths of the samples; `None` if batches are not planned from them."""
    if options.lengths is False:
        return None
    if why_not := _why_not_planned(dataset, options):
        if options.lengths is not None:
            raise ValueError(f"`lengths` must not be given {why_not}. Leave out one of the two.")
        return None
    # A pool leaves less padding than a planned window of the same size.
    if options.lengths is None and (options.shuffle is False or options.window != AUTO):
        return None
    is_processed = options.process_fn is not None or options.observe is not None
    lengths = known_lengths(dataset, options.lengths, is_processed=is_processed)
    if lengths is not None:
        logger.info("batches are planned from lengths that are known: %s", lengths.origin)
    return lengths


def planned_groups(
    tokens: IntArray, dataset: Any, options: LoaderOptions, collate: Collate, prepared: Any
) -> PlannedGroups:
    """Return a node that plans whole epochs from the length of each sample, (n,).

    prepared: the collate function, if workers call its `prepare` for each sample.
    """
    _check_is_dataset(dataset)
    _check_excluded(ExcludedKeys.of(options.exclude), [])
    _check_of_one_dataset(options)
    process_fn: Any = options.process_fn
    shuffle = options.shuffle is not False
    if options.observe is None:  # A packed sample is padded before it is measured.
        multiple = getattr(prepared, "sample_multiple", 1)
        tokens = -(-tokens // multiple) * multiple
    rank, world_size = group_rank(options.process_group)
    # So that blocks are read together.
    in_order = not shuffle or getattr(dataset, "shuffle_blocks", None) is not None
    return PlannedGroups(
        tokens,
        SampleProcess(dataset, process_fn, options.observe, prepared),
        options.budget,
        data=dataset,
        window=known_window(options.window, in_order=in_order),
        shuffle=shuffle,
        seed=options.seed,
        exclude=options.exclude,
        largest_first=options.largest_first,
        accumulate=options.accumulate,
        step_time=options.step_time if isinstance(options.step_time, StepTime) else None,
        collate=None if options.collate_in == "main" else collate,
        workers=options.worker_options,
        rank=rank,
        world_size=world_size,
    )


def _why_not_planned(dataset: Any, options: LoaderOptions) -> str:
    """Return why batches cannot be planned from known lengths; "" if they can."""
    budget = options.budget
    reasons = {
        "for a dict of datasets": isinstance(dataset, Mapping),
        "for a dataset without a length and `__getitem__`": isinstance(dataset, BaseNode)
        or is_iterated(dataset)
        or not isinstance(dataset, Sized),
        "with a `sampler`": options.sampler is not None,
        "with `sharded=True`": options.sharded,
        "with `diversity`": bool(options.diversity),
        'with `state="payload"`': options.state == "payload",
        "with `max_patches`, since only tokens are known": budget.max_patches is not None,
        "with a number as `row_sizes`": isinstance(budget.row_sizes, int),
        "with a function as `step_time`": callable(options.step_time),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _one_dataset(dataset: Any, options: LoaderOptions, collate: Any) -> BaseNode[Any]:
    _check_of_one_dataset(options)
    source, process = _read(dataset, options.process_fn, options.seed, options, collate)
    return _processor_of(options)(
        source, process, seed=options.seed, workers=options.worker_options
    )


def _check_of_one_dataset(options: LoaderOptions) -> None:
    """Raise for options that only a dict of datasets has."""
    check_callable("process_fn", options.process_fn)
    if options.weights is not None:
        raise ValueError("`weights` must be None, unless `dataset` is a dict of datasets.")


def _mixture(datasets: dict[str, Any], options: LoaderOptions, collate: Any) -> BaseNode[Any]:
    if options.sampler is not None:
        raise ValueError(
            "`sampler` must be None where `dataset` is a dict of datasets. Pass an "
            "`IterableSource` of that order in place of its dataset."
        )
    with_position = [
        dataset
        for dataset in datasets.values()
        if isinstance(dataset, Stateful) and is_iterated(dataset) and not is_stream(dataset)
    ]
    if len({*map(id, with_position)}) < len(with_position):
        raise ValueError(
            "`dataset` must hold different objects if they keep a position, but of "
            f"{sorted(datasets)} two are the same object, and would share its items. Make one for "
            "each."
        )
    functions = options.process_fn
    if not isinstance(functions, Mapping):
        functions = dict.fromkeys(datasets, functions)
    check_names("process_fn", functions, "dataset", datasets)
    seeds = {name: hash_ints(options.seed, zlib.crc32(name.encode())) >> 1 for name in datasets}
    sources, processes = {}, {}
    for name, dataset in datasets.items():
        try:
            sources[name], processes[name] = _read(
                dataset, functions[name], seeds[name], options, collate
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"of source {name!r}: {error}") from error
    mixing, workers = Mixing.of(options.weights), options.worker_options
    mix = partial(
        SourceMixer,
        weights=_weights(mixing, datasets, options),
        by=mixing.by,
        stop=mixing.stop,
        world_size=group_rank(options.process_group)[1],
    )
    processor = _processor_of(options)
    if mixing.by == "samples":
        # Items are mixed before processing, so that all workers process items of any source.
        return processor(mix(sources), PerSource(processes), seed=options.seed, workers=workers)
    make = partial(processor, workers=share_of(workers, len(datasets)))
    return mix({name: make(sources[name], processes[name], seed=seeds[name]) for name in seeds})


def _processor_of(options: LoaderOptions) -> Callable[..., ParallelProcessor[Any]]:
    rank, world_size = group_rank(options.process_group)
    return partial(ParallelProcessor, rank=rank, world_size=world_size)


def _read(
    dataset: Any, process_fn: Any, seed: int, options: LoaderOptions, collate: Any
) -> tuple[Any, SampleProcess]:
    """Return the source of a dataset, and the function that makes samples of its items."""
    _check_is_dataset(dataset)
    shard = (0, 1) if options.sharded else group_rank(options.process_group)
    source, items = source_of(dataset, options.shuffle, seed, options.sampler, shard)
    return source, SampleProcess(items, process_fn, options.observe, collate)


def _weights(
    mixing: Mixing, datasets: Mapping[str, Any], options: LoaderOptions
) -> Mapping[str, float] | WeightSchedule | None:
    goes_by_size = mixing.by == "samples" and not options.sharded
    if mixing.weights == "proportional":
        if not goes_by_size:
            raise ValueError(
                '`weights="proportional"` goes by the number of samples of whole datasets, so `by` '
                'must be "samples" and `sharded` False. Pass weights.'
            )
        return {name: _size_of(name, dataset) for name, dataset in datasets.items()}
    if mixing.weights is None and goes_by_size:
        _warn_of_sizes(datasets, mixing.stop)
    return mixing.weights


def _size_of(name: str, dataset: Any) -> int:
    needed = f'`weights="proportional"` needs the number of samples of source {name!r}'
    try:
        if isinstance(dataset, JsonlSource):
            return dataset.num_records
        if not isinstance(dataset, BaseNode):  # the length of a node is of one rank
            return len(dataset)
    except TypeError as error:
        reason = str(error).removesuffix(".")
        raise TypeError(f"{needed}: {reason}. Otherwise pass weights.") from error
    raise TypeError(f"{needed}, which a node does not have. Pass weights.")


def _warn_of_sizes(datasets: Mapping[str, Any], stop: Stop) -> None:
    """Warn of the default, equal shares, if the sizes of datasets are far apart."""
    try:
        sizes = {name: _size_of(name, dataset) for name, dataset in datasets.items()}
    except Exception:  # of the user's `__len__`: only a warning depends on it
        return
    smallest, largest = (pick(sizes, key=sizes.__getitem__) for pick in (min, max))
    if not sizes[smallest] or sizes[largest] < _FAR_APART * sizes[smallest]:
        return
    share = sizes[smallest] * len(sizes) / sum(sizes.values())
    passes = sizes[largest] / sizes[smallest]
    fate = _FATE[stop].format(share=share, passes=passes, largest=largest)
    warn_user(
        f"`weights` are not given, so all datasets have equal shares, despite their sizes {sizes}"
        f': {smallest!r} {fate}. Pass `weights="proportional"` for shares by size, or weights, '
        f"such as {dict.fromkeys(sizes, 1)} if equal shares are meant."
    )


def _check_excluded(exclude: ExcludedKeys, names: list[str]) -> None:
    """Raise for keys of a source that does not exist; warn if sources have no names."""
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
                "they have no effect unless processing names that source."
            )


def check_no_columns(dataset: Any) -> None:
    """Raise a `TypeError` for a dict of columns of numbers, which is no mixture of datasets."""
    if not isinstance(dataset, Mapping):
        return
    names = sorted({*TOKEN_KEYS, *CLASS_KEYS} & {*dataset})
    if columns := [name for name in names if _is_column(dataset[name])]:
        raise TypeError(
            "`dataset` must be a dataset, or a dict of datasets to mix, but is a "
            f"`{type(dataset).__name__}` with the columns {columns}. Pass "
            "`datasets.Dataset.from_dict(columns)`, or a list with a dict for each sample."
        )


def _is_column(value: Any) -> bool:
    if not isinstance(value, (Sequence, np.ndarray, torch.Tensor)) or isinstance(value, str):
        return False
    return len(value) > 0 and isinstance(value[0], (Number, list, tuple, np.ndarray, torch.Tensor))


_ROWS_OF = {
    "pandas": "`datasets.Dataset.from_pandas(frame)`, or `frame.to_dict('records')`; "
    "of a series, `series.tolist()`",
    "polars": "`datasets.Dataset.from_polars(frame)`, or `frame.to_dicts()`",
    "pyarrow.lib": "`datasets.Dataset(table)`, or `table.to_pylist()`",
    "datasets.table": "`datasets.Dataset(table)`",
}
"""Module of tables and their columns -> how to get their rows."""


def _check_is_dataset(dataset: Any) -> None:
    """Raise a `TypeError` for a loader, a table, and a node that yields groups or batches."""
    if isinstance(dataset, (Subset, ConcatDataset)):
        for part in dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset.dataset]:
            _check_is_dataset(part)
    remedy, module = "", type(dataset).__module__
    if getattr(type(dataset), "yields_batches", False):
        remedy = "yields batches already. Pass the dataset that it reads, or iterate it directly"
    elif isinstance(dataset, (Loader, torchdata.nodes.Loader)):
        remedy = "iterates a graph already. Pass its node, `loader.root`, if that yields samples"
    elif rows := _ROWS_OF.get(module) or _ROWS_OF.get(module.partition(".")[0]):
        remedy = f"yields columns or scalars, not rows. Pass {rows}"
    elif isinstance(dataset, dict) and dataset and all(isinstance(name, str) for name in dataset):
        remedy = "has no samples at 0, 1, 2 and so on. Mixtures do not nest: name all its datasets"
    elif isinstance(dataset, _OF_GROUPS):
        remedy = "yields groups or batches. Iterate it by `Loader(node)`, or pass one of samples"
    if remedy:
        raise TypeError(
            f"`dataset` must be a dataset, but is {describe(dataset)} instead, which {remedy}. "
            "How nodes of your own become a graph is in docs/composing.md."
        )
