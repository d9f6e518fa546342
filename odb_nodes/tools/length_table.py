"""The lengths of a dataset's samples, as a table that can be saved and planned with."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._core.files import replacing
from odb_nodes._core.text import counted, html_table, html_text
from odb_nodes.errors import StateError
from odb_nodes.planning import TokenBudget
from odb_nodes.planning.simulation import SampleCosts, check_lengths
from odb_nodes.planning.table import IntArray

__all__ = ["LengthTable"]

VERSION = 1
NO_KEY = -1
_COLUMNS = ("tokens", "targets", "patches", "sources", "keys")


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthTable:
    """What the samples of a dataset cost: a row for each, or for some drawn at random.

    Attributes:
        tokens: length of each sample in tokens, (n,) int64; 0 for one that processing skips.
        targets: supervised tokens of each, (n,) int64.
        patches: image patches of each, (n,) int64.
        sources: number of its source in `names`, (n,) int64.
        keys: which sample of its source each is, (n,) int64; -1 where nobody knows.
        names: names of the sources; `("",)` where they have none.
        sizes: number of samples that each source has; more than rows where some were drawn.
        streams: names of the sources that a loader reads in their order, such as iterables.
        made_by: what the lengths depend on, such as the name of `process_fn`.
    """

    tokens: IntArray
    targets: IntArray
    patches: IntArray
    sources: IntArray
    keys: IntArray
    names: tuple[str, ...] = ("",)
    sizes: tuple[int, ...]
    streams: tuple[str, ...] = ()
    made_by: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, lengths: npt.ArrayLike, **made_by: str) -> LengthTable:
        """Return a table of samples of which only the lengths are known.

        Args:
            lengths: tokens of each sample, (n,), integers of at least 1.
            made_by: what they depend on, shown beside the digest.

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
        if skipped := np.count_nonzero(self.tokens == 0):
            seen += f" ({skipped:,} skipped)"
        made_by = ", ".join(f"{name} {value}" for name, value in self.made_by.items())
        return f"lengths of {seen}, digest {self.digest}{made_by and f' ({made_by})'}"

    def _repr_html_(self) -> str:
        rows = []
        for number, (name, size) in enumerate(zip(self.names, self.sizes, strict=True)):
            tokens = self.tokens[(self.sources == number) & (self.tokens > 0)]
            row = {"source": name, "samples": f"{size:,}", "tokens": f"{tokens.sum():,}"}
            mean, longest = (tokens.mean(), tokens.max()) if len(tokens) else (0, 0)
            rows.append(row | {"mean": f"{mean:,.0f}", "longest": f"{longest:,}"})
        return html_text(str(self)) + html_table(rows)

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
        """What planning needs to know of the samples, whose tasks are taken to be their sources."""
        return SampleCosts(self.tokens, self.targets, self.patches, self.sources)

    @property
    def relative_error(self) -> float:
        """Standard error of the mean length, relative to it: 0 where the table has all samples.

        As uncertain is the number of steps that follows from it.
        """
        variance = total = 0.0
        for number, size in enumerate(self.sizes):
            lengths = self.tokens[self.sources == number]
            if len(lengths):
                total += size * lengths.mean()
                left = 1 - len(lengths) / size
                variance += size**2 * left * lengths.var(ddof=len(lengths) > 1) / len(lengths)
        return float(np.sqrt(variance) / total)

    def lengths(self, source: str | None = None) -> IntArray:
        """Return the lengths of the samples that processing does not skip, (m,) int64.

        Args:
            source: the name of a source; `None` for all.
        """
        wanted = self.tokens > 0
        if source is not None:
            wanted = wanted & (self.sources == self.names.index(source))
        return self.tokens[wanted]

    def rows(self, rows: IntArray, sizes: tuple[int, ...] | None = None) -> LengthTable:
        """Return a table of some rows of this one, which may repeat.

        Args:
            rows: their numbers.
            sizes: number of samples of each source; default: as in this table.
        """
        columns = {column: getattr(self, column)[rows] for column in _COLUMNS}
        return replace(self, **columns, sizes=self.sizes if sizes is None else sizes)

    def skipping(self, rows: npt.NDArray[np.bool_]) -> LengthTable:
        """Return this table as if processing skipped some more samples.

        Args:
            rows: whether to skip each, (n,) bool.
        """
        return replace(self, tokens=np.where(rows, 0, self.tokens))

    def kept(self, budget: TokenBudget) -> LengthTable:
        """Return this table as if processing skipped the samples that a budget drops."""
        if budget.oversize != "drop":
            return self
        return self.skipping(self.costs.are_oversize(budget))

    def drawn(self, samples: int, seed: int = 0) -> LengthTable:
        """Return a whole table of about as many samples, drawn from each source by its size.

        All rows of a source come equally often, or once more: to draw each at random would add an
        error of its own.

        Args:
            samples: number of samples, at least 1 of each source that has any.
            seed: seed of their order, and of which rows come once more.
        """
        rng = np.random.default_rng(seed)
        share = samples / self.num_samples
        rows: list[IntArray] = []
        for number, size in enumerate(self.sizes):
            own = np.flatnonzero(self.sources == number)
            wanted = max(1, round(size * share)) if len(own) else 0
            rows.append(np.resize(rng.permutation(own), wanted))
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
            StateError: it holds something else.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                columns: Any = {column: file[column] for column in _COLUMNS}
            if about.pop("version") != VERSION:
                raise ValueError("another version")
            about |= {name: tuple(about[name]) for name in ("names", "sizes", "streams")}
            table = cls(**columns, **about)
            table.check()
        except (KeyError, TypeError, ValueError, EOFError, zipfile.BadZipFile) as error:
            # numpy's advice to allow pickles is none for a file that is no table.
            reason = "" if "pickle" in str(error) else f" ({error})"
            raise StateError(
                f"`{path}` is no table of lengths of version {VERSION}{reason}. Make it by "
                "`observe_lengths(...).save(path)`, or `odb-nodes profile --save-lengths`."
            ) from error
        return table

    def check(self) -> None:
        """Check that the columns go together.

        Raises:
            ValueError: they do not.
        """
        columns = [getattr(self, column) for column in _COLUMNS]
        if {(column.dtype.kind, column.shape) for column in columns} != {("i", (len(self),))}:
            raise ValueError(f"the columns {_COLUMNS} must be integers, one for each sample")
        if not len(self) or min(self.tokens.min(), self.targets.min(), self.patches.min()) < 0:
            raise ValueError("there must be samples, and no count below 0")
        counts = np.bincount(self.sources, minlength=len(self.names))
        if len(self.names) != len(self.sizes) or len(counts) != len(self.names):
            raise ValueError(f"`sources` must be numbers of {self.names}, each with a size")
        if any(has > size for has, size in zip(counts.tolist(), self.sizes, strict=True)):
            raise ValueError(f"there must be at most {self.sizes} samples of {self.names}")

    def _about(self) -> str:
        about = {
            "version": VERSION,
            "names": self.names,
            "sizes": self.sizes,
            "streams": self.streams,
            "made_by": dict(self.made_by),
        }
        return json.dumps(about)
