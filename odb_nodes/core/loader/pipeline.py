"""The graph of one rank of an `ODBDataLoader`, from its datasets to its batches."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torchdata.nodes import BaseNode, Stateful

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.hashing import hash_ints
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.alignment import RankAligner
from odb_nodes.core.alignment.exchange import group_rank
from odb_nodes.core.alignment.peers import VirtualTeam
from odb_nodes.core.collate import PackedCollate, PaddingCollate
from odb_nodes.core.collate.for_budget import collate_for
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.collate.rows import RowsCollate, RowsObserve
from odb_nodes.core.contract.graph import length_of as samples_of_epoch
from odb_nodes.core.loader.dataset_checks import check_excluded, check_is_dataset
from odb_nodes.core.loader.dataset_checks import check_no_columns as check_no_columns
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.core.loader.sample_process import SampleProcess
from odb_nodes.core.nodes import GroupCollator, LengthObserver, WindowBucketer
from odb_nodes.core.nodes.exclusions import ExcludedKeys
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.nodes.window_bucketer import StateMode
from odb_nodes.core.planning import StepTime
from odb_nodes.core.planning.auto_window import AUTO
from odb_nodes.core.planning.known_epochs import known_window
from odb_nodes.core.processing import ParallelProcessor, PerSource, WorkerOptions
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.processing.options import share_of
from odb_nodes.core.sources.datasets import dataset_of_rank, is_iterated, source_of
from odb_nodes.core.sources.feed_source import FeedSource
from odb_nodes.core.sources.iterable_source import is_stream
from odb_nodes.core.sources.jsonl_source import JsonlSource
from odb_nodes.core.sources.known_lengths import KnownLengths, known_lengths
from odb_nodes.core.sources.mixing import Mixing, Stop, WeightSchedule, check_same_names
from odb_nodes.core.sources.source_mixer import SourceMixer

logger = logging.getLogger("odb_nodes")

_FAR_APART = 10
"""Without weights, a warning names sizes of datasets that differ by this factor."""
_SMALLEST_DATASET = {
    "all_exhausted": "is exhausted after {share:.1%} of the epoch, and missing from then on",
    "first_exhausted": "ends the epoch when it is exhausted, after {share:.1%} of all samples",
    "cycle": "is read {passes:.0f} times for each time that {largest!r} is",
}
"""`stop` -> what becomes of the smallest dataset under equal shares."""


class RankGraph:
    """The nodes of one rank, which yield samples, groups, aligned groups and batches."""

    def __init__(self, dataset: Any, options: LoaderOptions) -> None:
        collate = collate_for(options.budget, options.collate_fn)
        # A subclass gets the samples as processing returned them, as its `__call__` may expect.
        prepares = type(collate) in (PaddingCollate, PackedCollate)
        prepared = collate if prepares else None
        self.samples: BaseNode[Any]
        self.bucketer: WindowBucketer | PlannedGroups
        self.origin = ""
        """Where known lengths come from, such as "the column 'n_tokens'"; "" without them."""
        lengths = lengths_before(dataset, options)
        if lengths is not None:
            self.bucketer = planned_groups(lengths.tokens, dataset, options, collate, prepared)
            self.samples = self.bucketer
            self.origin = lengths.origin
        elif isinstance(dataset, FeedSource):
            collate = collate if isinstance(collate, RowsCollate) else RowsCollate(collate)
            self.samples = _fed(dataset, options, collate)
            self.bucketer = _bucketer(self.samples, options, "payload")
        else:
            self.samples = sample_node(dataset, options, prepared)
            self.bucketer = _bucketer(self.samples, options, options.state)
        _note_who_collates(self.bucketer, options)
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


def _bucketer(samples: BaseNode[Any], options: LoaderOptions, state: StateMode) -> WindowBucketer:
    return WindowBucketer(
        samples,
        options.budget,
        options.window,
        state,
        options.exclude,
        options.largest_first,
        options.diversity,
        options.window_start,
    )


def _note_who_collates(bucketer: WindowBucketer | PlannedGroups, options: LoaderOptions) -> None:
    """Warn or log where `collate_in="workers"` has no effect."""
    if options.collate_in != "workers":
        return
    if isinstance(bucketer, WindowBucketer):
        logger.warning(
            '`collate_in="workers"` has no effect: workers make batches only where the lengths of '
            "samples are known before they are read (`lengths`). The trainer's process makes them."
        )
    elif bucketer.why_not_collated:
        warn_user(
            f'`collate_in="workers"` has no effect, since {bucketer.why_not_collated}: the '
            "trainer's process makes the batches."
        )


def note_of_lengths(graphs: Sequence[RankGraph], options: LoaderOptions) -> None:
    """Log, once in a process, that optimizer steps of a long epoch have samples of one length."""
    budget = options.budget
    world_size = group_rank(options.process_group)[1]
    is_mixed = world_size * len(graphs) * options.accumulate > 1 or budget.layout == "packed"
    if is_mixed or budget.max_samples == 1 or _noted:
        return
    with suppress(TypeError):  # The data has no length.
        if samples_of_epoch(graphs[0].samples) < _LONG_EPOCH:
            return
    _noted.append(True)
    logger.warning(
        "each optimizer step has samples of about one length, which trains worse than mixed ones: "
        "accumulate some smaller batches (`accumulate=4` and a fourth of `token_budget`, or "
        "`gradient_accumulation_steps` of a trainer), or pack them. See docs/concepts.md."
    )


_LONG_EPOCH = 10_000  # samples: a shorter epoch is not worth a line of the log
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


def sample_node(dataset: Any, options: LoaderOptions, collate: Any = None) -> BaseNode[Any]:
    """Return a node that yields the samples of a dataset, or of a dict of datasets to mix."""
    check_no_columns(dataset)
    is_mixture = (
        isinstance(dataset, dict) and dataset and all(type(name) is str for name in dataset)
    )
    if is_mixture or not isinstance(dataset, BaseNode):  # which may have sources of any name
        check_excluded(ExcludedKeys.of(options.exclude), [*dataset] if is_mixture else [])
    if not is_mixture:
        return _one_dataset(dataset, options, collate)
    if type(dataset) is not dict:
        raise TypeError(
            f"`dataset` must be one dataset, or a plain dict of datasets to mix, but is a "
            f"`{type(dataset).__name__}` of {sorted(dataset)}. Pass one of them, such as "
            '`dataset["train"]`; or `dict(dataset)` to mix all of them.'
        )
    return _mixture(dataset, options, collate)


def _fed(feed: FeedSource, options: LoaderOptions, collate: RowsCollate) -> BaseNode[Any]:
    """Return a node that yields the samples of a feed, which its generators have processed."""
    _check_of_one_dataset(options)
    are_passed = {
        "process_fn": options.process_fn is not None,
        "num_workers": options.worker_options.num_workers > 0,
        "sampler": options.sampler is not None,
        "shuffle": options.shuffle is not None,
    }
    if names := [name for name, is_passed in are_passed.items() if is_passed]:
        raise ValueError(
            f"`{names[0]}` must not be given where `dataset` is a `FeedSource`, whose samples are "
            "processed before `put` and come in the order of the feed. Leave it out."
        )
    layout = options.budget.layout
    observe = RowsObserve(options.observe, layout, share_prefix=collate.shares_prefix)
    feed.check_by(partial(observe_sample, observe=observe), collate.check)
    return LengthObserver(feed, observe)


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
    check_is_dataset(dataset)
    check_excluded(ExcludedKeys.of(options.exclude), [])
    _check_of_one_dataset(options)
    process_fn: Any = options.process_fn
    shuffle = options.shuffle is not False
    if options.observe is None:  # A packed sample is padded before it is measured.
        multiple = getattr(prepared, "sample_multiple", 1)
        tokens = -(-tokens // multiple) * multiple
    rank, world_size = group_rank(options.process_group)
    # A dataset with blocks is planned in windows, so that each block is read within a short time.
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
    if isinstance(options.process_fn, Mapping):
        raise TypeError(
            "`process_fn` must be a function or None for a single dataset, but is a dict instead. "
            "A dict of functions is for a dict of datasets with the same names."
        )
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
            f"{sorted(datasets)} two are the same object, and would share its items. Make an "
            "object for each."
        )
    functions = options.process_fn
    if not isinstance(functions, Mapping):
        functions = dict.fromkeys(datasets, functions)
    check_same_names("process_fn", functions, "dataset", datasets)
    seeds = {name: hash_ints(options.seed, zlib.crc32(name.encode())) >> 1 for name in datasets}
    sources, processes = {}, {}
    for name, dataset in datasets.items():
        try:
            sources[name], processes[name] = _read(
                dataset, functions[name], seeds[name], options, collate
            )
        except (TypeError, ValueError) as error:
            raise type(error)(f"of source {name!r}: {error}") from error
    mixing = Mixing.of(options.weights)
    workers = options.worker_options
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
    check_is_dataset(dataset)
    shard = (0, 1) if options.sharded else group_rank(options.process_group)
    source, items = source_of(dataset, options.shuffle, seed, options.sampler, shard)
    return source, SampleProcess(items, process_fn, options.observe, collate)


def _weights(
    mixing: Mixing, datasets: Mapping[str, Any], options: LoaderOptions
) -> Mapping[str, float] | WeightSchedule | None:
    has_sizes = mixing.by == "samples" and not options.sharded
    if mixing.weights == "proportional":
        if not has_sizes:
            raise ValueError(
                '`weights="proportional"` goes by the number of samples of whole datasets, so `by` '
                'must be "samples" and `sharded` False. Pass weights.'
            )
        return {name: _size_of(name, dataset) for name, dataset in datasets.items()}
    if mixing.weights is None and has_sizes:
        _warn_of_sizes(datasets, mixing.stop)
    return mixing.weights


def _size_of(name: str, dataset: Any) -> int:
    needed = f'`weights="proportional"` needs the number of samples of source {name!r}'
    try:
        if isinstance(dataset, JsonlSource):
            return dataset.num_records
        if not isinstance(dataset, BaseNode):  # whose length would be the share of this rank
            return len(dataset)
    except TypeError as error:
        reason = str(error).removesuffix(".")
        raise TypeError(f"{needed}: {reason}. Otherwise pass weights.") from error
    raise TypeError(f"{needed}, which a node does not have. Pass weights.")


def _warn_of_sizes(datasets: Mapping[str, Any], stop: Stop) -> None:
    """Warn of the default, equal shares, if the sizes of datasets are far apart."""
    try:
        sizes = {name: _size_of(name, dataset) for name, dataset in datasets.items()}
    except Exception:  # The user's `__len__` raised: only a warning depends on the sizes.
        return
    smallest, largest = (pick(sizes, key=sizes.__getitem__) for pick in (min, max))
    if not sizes[smallest] or sizes[largest] < _FAR_APART * sizes[smallest]:
        return
    share = sizes[smallest] * len(sizes) / sum(sizes.values())
    passes = sizes[largest] / sizes[smallest]
    fate = _SMALLEST_DATASET[stop].format(share=share, passes=passes, largest=largest)
    warn_user(
        f"`weights` are not given, so all datasets have equal shares, despite their sizes {sizes}"
        f': {smallest!r} {fate}. Pass `weights="proportional"` for shares by size, or weights, '
        f"such as {dict.fromkeys(sizes, 1)} if equal shares are meant."
    )
