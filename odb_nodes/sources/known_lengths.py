"""The lengths of a dataset's samples, where they are known before a sample is made."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset
from torchdata.nodes import BaseNode

from odb_nodes._compat.datasets import (
    fingerprint_of_table,
    has_integer_lists,
    is_table,
    shown_columns,
    stored_column,
)
from odb_nodes._core.checks import MAX_COUNT, check_integer, describe
from odb_nodes.errors import StateError
from odb_nodes.planning.table import IntArray
from odb_nodes.sources.datasets import is_iterated
from odb_nodes.sources.parquet_dataset import ParquetDataset

TABLE_VERSION = 1
"""Of the files that `LengthTable` writes."""

_NULL = np.iinfo(np.int64).min  # stands for a null of a column
_IDS = "input_ids"
_WITH_PATCHES = {"image_grid_thw", "pixel_values"}

T = TypeVar("T")


Lengths = Any
"""What a `lengths` argument may be: see `known_lengths`."""


class KnownLengths(NamedTuple):
    """The length of each sample of a dataset, known before the sample is made.

    Attributes:
        tokens: length in tokens of each row of the dataset, by index, (n,) int64, at least 1.
        origin: where the lengths come from, such as "the column 'n_tokens'".
    """

    tokens: IntArray
    origin: str


def known_lengths(dataset: Any, lengths: Any = None, *, is_processed: bool) -> KnownLengths | None:
    """Return the length of each row of a dataset, or `None` where lengths are not known.

    Args:
        dataset: the dataset that samples are made of.
        lengths: the name of a column of integers, or of lists, whose lengths count; or an integer
            for each row; or a file that `odb-nodes profile --save-lengths` has written, in which a
            row that processing skips counts as 1 token. A string is a file only if the dataset
            has no such column. Default: where nothing is processed, the lengths of the lists
            `input_ids` of a `datasets.Dataset`, of which no data is read.
        is_processed: whether a function makes or measures the samples (`process_fn`, `observe`).

    Raises:
        TypeError: `lengths` is nothing of these, or the dataset has no rows with numbers.
        ValueError: a length is below 1, or null; there is no such column; or the lengths are not
            one for each row, or not of this data.
        FileNotFoundError: `lengths` is a path, and there is no such file.
        StateError: the file holds something else.
    """
    if lengths is None:
        return None if is_processed else _stored_lengths(dataset)
    _check_has_rows(dataset)
    column: IntArray | None = None
    if isinstance(lengths, str) and lengths in (_columns_of(dataset) or ()):
        column = _joined(dataset, partial(_of_column, lengths))
    if column is not None:
        tokens, origin = column, f"the column {lengths!r}"
    elif isinstance(lengths, os.PathLike) or (isinstance(lengths, str) and os.path.isfile(lengths)):
        path = os.fspath(lengths)
        tokens, origin = _of_file(dataset, path), f"the file {path!r}"
    elif isinstance(lengths, str):
        raise ValueError(
            f"`lengths` must name a column or a file, but is {lengths!r} instead: there is no such "
            f"file, and {_columns_said(dataset)}"
        )
    else:
        tokens, origin = _of_rows(len(dataset), lengths), "`lengths`"
    return KnownLengths(_checked(tokens, origin), origin)


# --- from the dataset -----------------------------------------------------------------------------


def _stored_lengths(dataset: Any) -> KnownLengths | None:
    tokens = _joined(dataset, _token_lists)
    if tokens is None or not len(tokens) or not _is_count(tokens).all():
        return None
    return KnownLengths(tokens, f"list offsets of the column {_IDS!r}")


def _token_lists(table: Any) -> IntArray | None:
    """Return how many tokens the rows of a table have; `None` where only reading them tells."""
    shown = shown_columns(table)
    if shown is None or _IDS not in shown or not _WITH_PATCHES.isdisjoint(shown):
        return None
    return _of_arrow(_IDS, *stored_column(table, _IDS)) if has_integer_lists(table, _IDS) else None


def _of_column(name: str, dataset: Any) -> IntArray:
    """Return the lengths that a column says, `_NULL` where it says none."""
    if is_table(dataset):
        return _of_arrow(name, *stored_column(dataset, name))
    if isinstance(dataset, ParquetDataset):
        blocks = range(len(dataset.shuffle_blocks))
        groups = [_of_arrow(name, dataset.column_of(block, name)) for block in blocks]
        return np.concatenate([np.empty(0, np.int64), *groups])
    counts = (_of_value(name, row, place) for place, row in enumerate(dataset))
    return np.fromiter(counts, np.int64, len(dataset))


def _joined(dataset: Any, read: Callable[[Any], IntArray | None]) -> IntArray | None:
    """Return what `read` says of the rows of a dataset, through torch's `Subset` and so on."""
    if type(dataset) is Subset:
        whole, rows = _joined(dataset.dataset, read), np.asarray(dataset.indices)
        is_of_rows = rows.ndim == 1 and (rows.dtype.kind in "iu" or not len(rows))
        return whole[rows.astype(np.int64)] if whole is not None and is_of_rows else None
    if type(dataset) is ConcatDataset:
        parts = [_joined(part, read) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    return read(dataset)


def _columns_of(dataset: Any) -> Sequence[str] | None:
    """Return the columns that lengths can be read from; `None` where they are not known."""
    if type(dataset) is Subset:
        return _columns_of(dataset.dataset)
    if type(dataset) is ConcatDataset:
        parts = [_columns_of(part) or () for part in dataset.datasets]
        return [name for name in parts[0] if all(name in names for names in parts)]
    if is_table(dataset) or isinstance(dataset, ParquetDataset):
        names: list[str] = dataset.column_names
        return names
    is_of_dicts = type(dataset) in (list, tuple) and dataset and isinstance(dataset[0], Mapping)
    return [*dataset[0]] if is_of_dicts else None


def _columns_said(dataset: Any) -> str:
    """Return what an error says of a dataset that has no such column."""
    if (names := _columns_of(dataset)) is not None:
        return f"the columns are {[*names]}. Name one of these, or pass an integer for each row."
    return (
        f"a `{type(dataset).__name__}` has no columns that are read by themselves, as a "
        "`datasets.Dataset`, a `ParquetDataset` and a list of dicts have. Pass an integer for each "
        "row."
    )


def _of_arrow(name: str, column: Any, rows: IntArray | None = None) -> IntArray:
    """Return the integers of an Arrow column, or the lengths of its lists, `_NULL` for a null.

    Args:
        name: that of the column.
        column: an array, chunked or not. Of lists, only the offsets are read.
        rows: the places in it that are wanted. Default: all.
    """
    from pyarrow import compute, types

    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        column = compute.list_value_length(column)
    elif not types.is_integer(kind):
        raise TypeError(
            f"`lengths` must name a column of integers, or of lists, but {name!r} is of {kind}."
        )
    no_nulls = column.fill_null(0) if column.null_count else column
    values = no_nulls.to_numpy(zero_copy_only=False)
    taken: IntArray = (values if rows is None else values[rows]).astype(np.int64)
    if column.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        taken[nulls if rows is None else nulls[rows]] = _NULL
    return taken


def _of_value(name: str, row: Any, place: int) -> int:
    """Return the integer that a row has by a name, or the length of its list."""
    value = row[name] if isinstance(row, Mapping) and name in row else None
    if value is None:
        return _NULL
    is_text = isinstance(value, (str, bytes, Mapping))
    if isinstance(value, Sized) and not is_text and getattr(value, "ndim", None) != 0:
        return len(value)
    try:
        return check_integer(name, value)
    except TypeError:
        raise TypeError(
            f"`lengths` must name a column of integers, or of lists, but {name!r} of row {place} "
            f"is {describe(value)} instead."
        ) from None


# --- from the user --------------------------------------------------------------------------------


def _of_rows(rows: int, lengths: Any) -> IntArray:
    """Return lengths that are an integer for each row."""
    values: Any = None
    try:
        if isinstance(lengths, torch.Tensor):
            values = lengths.numpy(force=True)
        elif isinstance(lengths, Sequence) and type(lengths) not in (list, tuple, range):
            values = np.asarray(lengths[:])  # A column of `datasets` is read row by row otherwise.
        else:
            values = np.asarray(lengths)
    except (TypeError, ValueError):  # of a dtype that numpy lacks; of rows
        pass
    if values is None or values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        kind = "" if values is None or not values.ndim else f" {values.shape} of {values.dtype}"
        raise TypeError(
            "`lengths` must be one integer for each row of the dataset, or the name of a column or "
            f"a file, but is {describe(lengths)}{kind} instead."
        )
    if len(values) != rows:
        raise ValueError(
            f"`lengths` must have an integer for each of the {rows:,} rows of the dataset, but has "
            f"{len(values):,}."
        )
    return np.array(values, np.int64)  # not the array of the user, who may change it


def _checked(tokens: IntArray, origin: str) -> IntArray:
    """Return lengths each of which is a count, or raise an error that names the first other one."""
    if not (are_counts := _is_count(tokens)).all():
        row = int(np.argmin(are_counts))
        seen = "no value" if tokens[row] == _NULL else f"{tokens[row]}"
        raise ValueError(
            f"`lengths` must be in 1..{MAX_COUNT}, but row {row} has {seen} in {origin}. Leave the "
            "row out of the dataset, or pass the length that its sample has."
        )
    return tokens


def _is_count(tokens: IntArray) -> Any:
    return (tokens >= 1) & (tokens <= MAX_COUNT)


def _check_has_rows(dataset: Any) -> None:
    """Raise a `TypeError` unless samples of a dataset are found by their index."""
    is_mixture = isinstance(dataset, (Mapping, BaseNode))
    if is_mixture or is_iterated(dataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"`lengths` must be None for a `{type(dataset).__name__}`: they are those of the rows "
            "of one map-style dataset, by index. Leave them out, or pass such a dataset."
        )


# --- from a file ----------------------------------------------------------------------------------


def read_length_file(
    path: str | os.PathLike[str], columns: Sequence[str], make: Callable[..., T]
) -> T:
    """Return what `make` makes of some columns of a file that `LengthTable` wrote, and the rest."""
    with open(path, "rb") as opened:  # an error of the path is one of its own
        try:
            with np.load(opened, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                found: dict[str, Any] = {column: file[column] for column in columns}
            if about.pop("version") != TABLE_VERSION:
                raise ValueError("another version")
            about |= {name: tuple(about[name]) for name in ("names", "sizes", "streams")}
            return make(**found, **about)
        except Exception as error:  # numpy and zipfile raise any of damaged bytes
            raise StateError(
                f"`{path}` is no table of lengths of version {TABLE_VERSION}. Make it by "
                "`observe_lengths(...).save(path)`, or `odb-nodes profile --save-lengths`."
            ) from error


def data_id_of(dataset: Any) -> str:
    """Return what tells the data of a dataset from other data; "" where nothing does."""
    if is_table(dataset):
        return fingerprint_of_table(dataset)
    found = getattr(dataset, "data_id", "")
    return found if isinstance(found, str) else ""


def _of_file(dataset: Any, path: str) -> IntArray:
    """Return the lengths that a file has of the rows of a dataset, 1 for one that is skipped."""
    table = read_length_file(path, ("tokens", "keys"), dict[str, Any])
    tokens, keys, names, size = table["tokens"], table["keys"], table["names"], sum(table["sizes"])
    saved, present = table.get("data_id", ""), data_id_of(dataset)
    order = np.argsort(keys, kind="stable")
    why = ""
    if len(names) > 1:
        why = f"they are of the datasets {[*names]}"
    elif len(tokens) != size:
        why = f"they are of {len(tokens):,} of {size:,} samples"
    elif len(tokens) != len(dataset):
        why = f"they are of {len(tokens):,} samples, and the dataset has {len(dataset):,}"
    elif not np.array_equal(keys[order], np.arange(len(keys))):
        why = "their keys are not the numbers of the rows"
    elif saved and present and saved != present:
        why = f"they are of other data ({saved!r}, and the dataset is {present!r})"
    if why:
        raise ValueError(
            f"`lengths` must be those of all rows of this dataset, but in the file {path!r} {why}. "
            "Make it anew with `odb-nodes profile --save-lengths`; or, where it does say the "
            "length of each row, pass `LengthTable.load(path).tokens`."
        )
    return np.asarray(np.maximum(tokens[order], 1), np.int64)
