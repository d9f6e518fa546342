"""The lengths of a dataset's samples: observed before a run, saved, and planned with."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Subset
from torchdata.nodes import BaseNode

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import check_count, check_integer
from odb_nodes._support.files import replacing
from odb_nodes._support.hashing import stable_name
from odb_nodes._support.progress import Bar
from odb_nodes._support.text import counted
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.contract.graph import close_nodes, known_length_of
from odb_nodes.core.contract.node import call_member
from odb_nodes.core.loader.options import LoaderOptions, ProcessFn
from odb_nodes.core.loader.pipeline import check_no_columns, sample_node
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.sample_costs import SampleCosts, check_lengths
from odb_nodes.core.processing import WorkerOptions
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.sample import ItemKey, Observation, Observe, Sample, Skipped, nested_name
from odb_nodes.core.sources.dataset_order import shuffle_blocks
from odb_nodes.core.sources.datasets import source_of
from odb_nodes.core.sources.jsonl_source import JsonlSource
from odb_nodes.core.sources.known_lengths import TABLE_VERSION, data_id_of, read_length_file
from odb_nodes.core.sources.mixing import check_same_names

__all__ = ["LengthTable", "observe_lengths"]

NO_KEY = -1
_COLUMNS = ("tokens", "targets", "patches", "sources", "keys")
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthTable:
    """The costs of all samples of a dataset, or of samples drawn at random: one row each.

    Attributes:
        tokens: length of each sample in tokens, (n,) int64; 0 for a sample that processing skips.
        targets: supervised tokens of each sample, (n,) int64.
        patches: image patches of each sample, (n,) int64.
        sources: index of each sample's source in `names`, (n,) int64.
        keys: key of each sample within its source, (n,) int64; -1 without a key.
        names: names of the sources; `("",)` without names.
        sizes: number of samples of each source; above the number of rows if samples were drawn.
        streams: names of the sources that a loader reads in order, such as iterables.
        blocks: source read in blocks -> (first index of each block, number of mixed blocks).
        made_by: what the lengths depend on, such as the name of `process_fn`.
        data_id: identifier of the data, if the dataset has one; otherwise "".
    """

    tokens: IntArray
    targets: IntArray
    patches: IntArray
    sources: IntArray
    keys: IntArray
    names: tuple[str, ...] = ("",)
    sizes: tuple[int, ...]
    streams: tuple[str, ...] = ()
    blocks: Mapping[str, tuple[Sequence[int], int]] = field(default_factory=dict)
    made_by: Mapping[str, str] = field(default_factory=dict)
    data_id: str = ""

    @classmethod
    def of(cls, lengths: npt.ArrayLike, **made_by: str) -> LengthTable:
        """Return a table from lengths alone.

        Args:
            lengths: tokens of each sample, (n,), integers of at least 1.
            made_by: what the lengths depend on, shown beside the digest.

        Raises:
            ValueError: `lengths` is something else.
        """
        tokens = check_lengths(lengths)
        none = np.zeros_like(tokens)
        return cls(
            tokens=tokens,
            targets=tokens - 1,
            patches=none,
            sources=none,
            keys=np.arange(len(tokens)),
            sizes=(len(tokens),),
            made_by=made_by,
        )

    def __len__(self) -> int:
        """Return the number of samples in the table."""
        return len(self.tokens)

    def __str__(self) -> str:
        seen = counted(self.num_samples, "sample")
        if not self.is_whole:
            seen = f"{len(self):,} of {seen}"
        if skipped := self.skipped():
            seen += f" ({skipped:,} skipped)"
        made_by = ", ".join(f"{name} {value}" for name, value in self.made_by.items())
        return f"lengths of {seen}, digest {self.digest}{made_by and f' ({made_by})'}"

    @property
    def num_samples(self) -> int:
        """Number of samples of the dataset."""
        return sum(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether the table has all samples of the dataset."""
        return len(self) == self.num_samples

    @property
    def digest(self) -> str:
        """First 12 hexadecimal digits of a SHA-256 of the whole table."""
        digest = hashlib.sha256(self._about().encode())
        for column in _COLUMNS:
            digest.update(np.ascontiguousarray(getattr(self, column), "<i8").data)
        return digest.hexdigest()[:12]

    @property
    def costs(self) -> SampleCosts:
        """The costs of the samples for planning. Each source is a task."""
        return SampleCosts(self.tokens, self.targets, self.patches, self.sources)

    @property
    def relative_error(self) -> float:
        """Relative standard error of the mean length, and so of the number of steps.

        0 if the table has all samples.
        """
        variance = total = 0.0
        for number, size in enumerate(self.sizes):
            lengths = self.tokens[self.sources == number]
            if seen := len(lengths):
                total += size * lengths.mean()
                variance += size * (size - seen) * lengths.var(ddof=seen > 1) / seen
        return float(np.sqrt(variance) / total)

    def lengths(self, source: str | None = None) -> IntArray:
        """Return the lengths of all samples, or of a source, without skipped ones, (m,) int64."""
        tokens = self._tokens_of(source)
        return tokens[tokens > 0]

    def skipped(self, source: str | None = None) -> int:
        """Return how many of all samples, or of a source, processing skips."""
        return int(np.count_nonzero(self._tokens_of(source) == 0))

    def _tokens_of(self, source: str | None) -> IntArray:
        is_its = slice(None) if source is None else self.sources == self.names.index(source)
        return np.asarray(self.tokens[is_its])

    def rows(self, rows: IntArray, sizes: tuple[int, ...] | None = None) -> LengthTable:
        """Return a table of some rows, which may repeat. `sizes`: new sizes of the sources."""
        columns = {column: getattr(self, column)[rows] for column in _COLUMNS}
        return replace(self, **columns, sizes=self.sizes if sizes is None else sizes, blocks={})

    def skipping(self, rows: npt.NDArray[np.bool_]) -> LengthTable:
        """Return this table as if processing skipped the samples where `rows`, (n,), is true."""
        return replace(self, tokens=np.where(rows, 0, self.tokens))

    def kept(self, budget: TokenBudget) -> LengthTable:
        """Return this table as if processing skipped the samples that a budget drops."""
        if budget.oversize != "drop":
            return self
        return self.skipping(self.costs.are_oversize(budget))

    def drawn(self, samples: int, seed: int = 0) -> LengthTable:
        """Return a whole table of about `samples` samples, drawn from each source by its size.

        The numbers of repeats of a source's rows differ by at most one: independent draws would add
        a sampling error.
        """
        rng = np.random.default_rng(abs(seed))
        share = samples / self.num_samples
        rows: list[IntArray] = []
        for number, size in enumerate(self.sizes):
            rows_of_source = np.flatnonzero(self.sources == number)
            wanted = max(1, round(size * share)) if len(rows_of_source) else 0
            rows.append(np.resize(rng.permutation(rows_of_source), wanted))
        return self.rows(np.concatenate(rows), tuple(map(len, rows)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table to a file, atomically.

        Args:
            path: the file, by custom `.npz`; its folder must exist.

        Raises:
            OSError: the file cannot be written.
        """
        columns = {column: getattr(self, column) for column in _COLUMNS}
        with replacing(Path(path)) as file:
            np.savez_compressed(file, about=np.array(self._about()), **columns)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LengthTable:
        """Read a table that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            StateError: the file is not a table of lengths.
        """
        return read_length_file(path, _COLUMNS, cls)

    def _about(self) -> str:
        optional = [name for name in ("blocks", "data_id") if getattr(self, name)]
        names = ("names", "sizes", "streams", "made_by", *optional)
        about = {name: getattr(self, name) for name in names}
        return json.dumps({"version": TABLE_VERSION} | about)


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

    Processing is seeded as in the first epoch of an `ODBDataLoader`: if all samples are processed,
    random lengths equal the lengths in that epoch. Call it in one process: it reads the whole
    dataset on every rank.

    Args:
        dataset: a map-style dataset, an iterable, or a `JsonlSource`; or a dict of datasets by
            name. An iterable is read from its beginning, a node until its epoch ends.
        process_fn: item of the dataset -> processed sample; or a dict with one for each dataset.
        observe: processed sample -> its tokens, or `Observation`.
        samples: number of samples of each dataset to process, drawn at random. `None`: all. If a
            dataset is not map-style, all items are read, and the drawn ones are processed.
        seed: seed of the draw and of processing.
        workers: how processing runs in parallel. Default: in this thread.

    Returns:
        A row for each sample, in the order of the data.

    Raises:
        TypeError, ValueError: an argument is not valid, or there is no sample.
        SampleError: a sample cannot be processed.
    """
    seed = check_integer("seed", seed)
    if samples is not None:
        samples = check_count("samples", samples)
    check_no_columns(dataset)
    named = dataset if isinstance(dataset, dict) else {"": dataset}
    functions: Any = process_fn
    if not isinstance(process_fn, Mapping):
        functions = dict.fromkeys(named, process_fn)
    check_same_names("process_fn", functions, "dataset", named)
    made_by = {"seed": str(seed)}
    for name, function in {**functions, "observe": observe}.items():
        if function is not None:
            label = name if name == "observe" else f"process_fn{name and f' of {name}'}"
            made_by[label] = stable_name(function)
    observed = _Observed()
    for number, (name, data) in enumerate(named.items()):
        options = LoaderOptions(
            token_budget=1,
            process_fn=functions[name],
            observe=partial(_counts, observe),
            shuffle=False,
            seed=seed,
            workers=workers,
            sharded=True,
        )
        observed.add(name, data, options, samples, np.random.default_rng((abs(seed), number)))
    return observed.table(made_by, "" if isinstance(dataset, dict) else data_id_of(dataset))


class _Observed:
    """The lengths of the samples that were observed so far, by source."""

    def __init__(self) -> None:
        self._rows = array("q")  # 5 integers for each sample
        self._numbers: dict[str, int] = {}  # source -> its number
        self._sizes: dict[str, float] = {}
        self._streams: list[str] = []
        self._blocks: dict[str, tuple[list[int], int]] = {}
        self._skipped: Skipped | None = None  # the last skipped sample

    def add(
        self,
        name: str,
        dataset: Any,
        options: LoaderOptions,
        samples: int | None,
        rng: np.random.Generator,
    ) -> None:
        """Process samples of a dataset: all, or `samples` that are drawn."""
        items, keys, size = dataset, None, None
        if samples is not None:
            items, keys, size = _drawn(dataset, samples, rng)
        read: Counter[str] = Counter()  # samples of each source
        for index, sample in enumerate(
            _processed(items, options, f"lengths{name and f' of {name}'}")
        ):
            counts = (0, 0, 0)
            if isinstance(sample, Skipped):
                self._skipped = sample
            else:
                counts = sample.tokens, sample.targets, sample.patches
            source = nested_name(name, sample.source) if sample.source else name
            key = sample.key if keys is None else keys[index]
            number = self._numbers.setdefault(source, len(self._numbers))
            self._rows.extend((*counts, number, NO_KEY if key is None else key))
            read[source] += 1
        stands_for = 1.0 if size is None else size / max(read.total(), 1)
        self._sizes |= {source: count * stands_for for source, count in read.items()}
        if keys is None and _is_stream(dataset):
            self._streams += read
        if samples is None and is_map_style(dataset):
            if blocks := shuffle_blocks(dataset):
                self._blocks[name] = blocks

    def table(self, made_by: Mapping[str, str], data_id: str) -> LengthTable:
        """Return the table; warn if more than half of the samples are skipped."""
        columns = np.frombuffer(self._rows, dtype=np.int64).reshape(-1, 5).T
        why = "" if self._skipped is None else f" The last is skipped {self._skipped.why}"
        if not columns[0].any():
            raise ValueError(
                f"`dataset` must have a sample that is not skipped, but has none.{why}"
            )
        if 2 * (skipped := int(np.count_nonzero(columns[0] == 0))) > columns.shape[1]:
            warn_user(
                f"{skipped:,} of {counted(columns.shape[1], 'sample')} are skipped: the lengths "
                f"are of the others.{why}"
            )
        return LengthTable(
            **dict(zip(_COLUMNS, np.ascontiguousarray(columns), strict=True)),
            names=tuple(self._numbers),
            sizes=tuple(round(self._sizes[name]) for name in self._numbers),
            streams=tuple(self._streams),
            blocks=self._blocks,
            made_by=made_by,
            data_id=data_id,
        )


def _drawn(
    dataset: Any, samples: int, rng: np.random.Generator
) -> tuple[Any, Sequence[int | None], int]:
    """Return items drawn at random, the key of each, and the number of items of the dataset."""
    if is_map_style(dataset):
        places = np.sort(rng.permutation(len(dataset))[:samples]).tolist()
        return Subset(dataset, places), places, len(dataset)
    source, _ = source_of(dataset, False, 0, None, (0, 1))
    drawn: list[tuple[int, Any, int | None]] = []
    size = 0
    source.reset(None)
    for item in source:
        size += 1
        # Each item so far is drawn with equal probability (Vitter, 1985, algorithm R).
        place = len(drawn) if len(drawn) < samples else int(rng.integers(size))
        if place < samples:
            key: ItemKey | None = call_member(source, "item_key")
            drawn[place : place + 1] = [(size, item, None if key is None else key.key)]
    close_nodes(source, _STOP_TIMEOUT_S)
    drawn.sort(key=lambda row: row[0])
    return [item for _, item, _ in drawn], [key for _, _, key in drawn], size


def _processed(dataset: Any, options: LoaderOptions, label: str) -> Iterator[Sample | Skipped]:
    node = sample_node(dataset, options, _Nothing())
    try:
        node.reset(None)
        yield from Bar(node, label, known_length_of(node))
    finally:
        close_nodes(node, _STOP_TIMEOUT_S)


def count_lengths(lengths: IntArray, bins: int) -> tuple[list[int], list[int]]:
    """Return edges at equal ratios, and the number of lengths between each two edges."""
    edges = np.geomspace(lengths.min(), lengths.max() + 1, bins + 1).round().astype(np.int64)
    edges = np.unique(edges)
    counts, _ = np.histogram(lengths, edges)
    return edges.tolist(), counts.tolist()


def is_map_style(dataset: Any) -> bool:
    """Tell whether samples can be read by index, without changing an iteration of the dataset."""
    return (
        isinstance(dataset, Sized)
        and hasattr(dataset, "__getitem__")
        and not isinstance(dataset, (Mapping, BaseNode, IterableDataset))
    )


def _is_stream(dataset: Any) -> bool:
    """Tell whether a loader reads a dataset in order."""
    if isinstance(dataset, JsonlSource):
        return not dataset.fingerprint()["shuffle"]
    return not is_map_style(dataset)


def _counts(observe: Observe | None, data: Any) -> Observation:
    sample = observe_sample(data, observe)
    assert isinstance(sample, Sample)  # skipped samples are not observed
    return Observation(sample.tokens, sample.targets, sample.patches, sample.key)


class _Nothing:
    """A collate function without data: workers send only the counts of samples."""

    def prepare(self, _: Any) -> None:
        """Return no data."""
