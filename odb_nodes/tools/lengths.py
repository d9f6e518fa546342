"""Observe the lengths of a dataset before a run."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from torchdata.nodes import BaseNode

from odb_nodes._core.checks import check_count, check_integer
from odb_nodes._core.hashing import stable_name
from odb_nodes._core.progress import Bar
from odb_nodes.contract.graph import close_nodes, length_of, walk
from odb_nodes.contract.node import call_member
from odb_nodes.loader.options import LoaderOptions, ProcessFn
from odb_nodes.loader.pipeline import check_no_columns, sample_node
from odb_nodes.processing import WorkerOptions
from odb_nodes.processing.observation import observe_sample
from odb_nodes.sample import ItemKey, Observation, Observe, Sample, Skipped, nested_name
from odb_nodes.sources.datasets import source_of
from odb_nodes.sources.iterable_source import is_stream
from odb_nodes.sources.jsonl_source import JsonlSource
from odb_nodes.sources.mixing import check_names
from odb_nodes.tools.length_table import NO_KEY, LengthTable

__all__ = ["LengthTable", "files_read", "observe_lengths"]

_STOP_TIMEOUT_S = 60.0


def observe_lengths(
    dataset: Any,
    *,
    process_fn: ProcessFn | Mapping[str, ProcessFn] = None,
    observe: Observe | None = None,
    samples: int | None = None,
    seed: int = LoaderOptions.seed,
    workers: WorkerOptions | None = None,
) -> LengthTable:
    """Process the samples of a dataset as a loader would, and return their lengths.

    Processing is seeded as in the first epoch of an `ODBDataLoader`: where all of one dataset are
    processed, random lengths are those of that epoch. Call it in one process: it reads the
    whole dataset, whatever the rank.

    Args:
        dataset: map-style, an iterable, or a `JsonlSource`; or a dict of those by name. An iterable
            is read from its beginning, a node until its epoch ends.
        process_fn: item of the dataset -> processed sample; or a dict with one for each dataset.
        observe: processed sample -> its tokens, or `Observation`.
        samples: number of samples of each dataset to process, drawn at random. `None`: all. Of
            what is not map-style, all items are read, and only those that are drawn processed.
        seed: seed of what is drawn, and of processing.
        workers: how processing runs in parallel. Default: in this thread.

    Returns:
        A row for each sample, in the order of the data.

    Raises:
        TypeError, ValueError: an argument is not valid, or there is no sample.
        SampleError: a sample cannot be processed.
    """
    check_integer("seed", seed)
    check_no_columns(dataset)
    named = dataset if isinstance(dataset, dict) else {"": dataset}
    functions: Any = process_fn
    if not isinstance(process_fn, Mapping):
        functions = dict.fromkeys(named, process_fn)
    check_names("process_fn", functions, "dataset", named)
    rows = _Rows()
    for number, (name, one) in enumerate(named.items()):
        options = LoaderOptions(
            token_budget=1,
            process_fn=functions[name],
            observe=partial(_counts, observe),
            shuffle=False,
            seed=seed,
            workers=workers,
            sharded=True,
        )
        if samples is None:
            rows.read(one, options, name)
        else:
            draw = np.random.default_rng((abs(seed), number))
            rows.read_some(one, options, name, check_count("samples", samples), draw)
    made_by = {"seed": str(seed)}
    functions |= {"observe": observe}
    for name, function in functions.items():
        if function is not None:
            label = name if name == "observe" else f"process_fn{name and f' of {name}'}"
            made_by[label] = stable_name(function)
    return rows.table(made_by)


class _Rows:
    """Collects the rows of a table, source by source."""

    def __init__(self) -> None:
        self._rows = array("q")  # of 5 columns each
        self._numbers: dict[str, int] = {}  # of the sources, by name
        self._streams: list[str] = []
        self._sizes: dict[str, float] = {}  # samples of each in the data

    def read(
        self,
        dataset: Any,
        options: LoaderOptions,
        name: str,
        keys: list[int | None] | None = None,
        size: int | None = None,
    ) -> None:
        """Add the samples of one dataset."""
        read: Counter[str] = Counter()  # samples of each source
        node = sample_node(dataset, options, _nothing)
        try:
            node.reset(None)
            for place, sample in enumerate(_with_bar(node, name)):
                key = sample.key if keys is None else keys[place]
                counts = (0, 0, 0) if isinstance(sample, Skipped) else sample[1:4]
                source = nested_name(name, sample.source) if sample.source else name
                number = self._numbers.setdefault(source, len(self._numbers))
                self._rows.extend((*counts, number, NO_KEY if key is None else key))
                read[source] += 1
        finally:
            close_nodes(node, _STOP_TIMEOUT_S)
        weight = 1.0 if size is None else size / max(read.total(), 1)
        self._sizes.update({source: count * weight for source, count in read.items()})
        if _is_stream(dataset):
            self._streams += read

    def read_some(
        self,
        dataset: Any,
        options: LoaderOptions,
        name: str,
        samples: int,
        rng: np.random.Generator,
    ) -> None:
        """Add some samples of one dataset, drawn at random."""
        if _is_stream(dataset) or isinstance(dataset, BaseNode):  # whose keys are lost by drawing
            items, keys, size = _drawn(dataset, samples, rng)
            self.read(items, options, name, keys, size)
        else:
            places = np.sort(rng.permutation(len(dataset))[:samples]).tolist()
            self.read(dataset, replace(options, sampler=places), name, size=len(dataset))

    def table(self, made_by: Mapping[str, str]) -> LengthTable:
        """Return the table."""
        columns = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, 5).T
        if not columns[0].any():
            raise ValueError("`dataset` must have a sample that is not skipped, but has none.")
        tokens, targets, patches, sources, keys = np.ascontiguousarray(columns)
        return LengthTable(
            tokens=tokens,
            targets=targets,
            patches=patches,
            sources=sources,
            keys=keys,
            names=tuple(self._numbers),
            sizes=tuple(round(self._sizes[name]) for name in self._numbers),
            streams=tuple(self._streams),
            made_by=made_by,
        )


def files_read(dataset: Any) -> list[Path]:
    """Return the files of each `JsonlSource` in a dataset, a dict of them, or a graph."""
    named = dataset.values() if isinstance(dataset, dict) else [dataset]
    nodes = [node for one in named if isinstance(one, BaseNode) for node in walk(one)]
    return [path for node in nodes if isinstance(node, JsonlSource) for path in node.paths]


def _is_stream(dataset: Any) -> bool:
    """Tell whether a loader reads a dataset in its order."""
    if isinstance(dataset, JsonlSource):
        return not dataset.fingerprint()["shuffle"]
    is_known = isinstance(dataset, (BaseNode, IterableDataset)) or is_stream(dataset)
    return is_known or not hasattr(dataset, "__getitem__")


def _counts(observe: Observe | None, data: Any) -> Observation:
    sample = observe_sample(data, observe)
    assert isinstance(sample, Sample)  # what is skipped is not observed
    return Observation(sample.tokens, sample.targets, sample.patches, sample.key)


def _nothing(_: Any) -> None:
    """Stand for the data of a sample, which workers need not send."""


def _drawn(
    dataset: Any, samples: int, rng: np.random.Generator
) -> tuple[list[Any], list[int | None], int]:
    """Return items drawn from what is not map-style, the key of each, and how many it has."""
    source, _ = source_of(dataset, False, 0, None, (0, 1))
    drawn: list[tuple[int, Any, int | None]] = []
    size = 0
    source.reset(None)
    for item in source:
        size += 1
        # Every item so far is among those drawn with the same chance (Vitter, 1985, algorithm R).
        place = len(drawn) if len(drawn) < samples else int(rng.integers(size))
        if place < samples:
            key: ItemKey | None = call_member(source, "item_key")
            drawn[place : place + 1] = [(size, item, None if key is None else key.key)]
    close_nodes(source, _STOP_TIMEOUT_S)
    drawn.sort(key=lambda one: one[0])
    return [item for _, item, _ in drawn], [key for _, _, key in drawn], size


def _with_bar(node: BaseNode[Any], name: str) -> Iterable[Any]:
    try:
        total: int | None = length_of(node)
    except TypeError:  # a stream
        total = None
    return Bar(node, f"lengths{name and f' of {name}'}", total)
