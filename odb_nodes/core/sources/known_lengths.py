"""The lengths of a dataset's samples, if they are known before a sample is made."""

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
from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import MAX_COUNT, check_integer, describe
from odb_nodes.core.sources.datasets import is_iterated
from odb_nodes.core.sources.parquet_dataset import ParquetDataset
from odb_nodes.errors import StateError

TABLE_VERSION = 1
"""Version of the files that `LengthTable` writes."""

_NULL = np.iinfo(np.int64).min  # in place of a null in a column
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
    """Return the length of each row of a dataset; `None` if only reading the rows tells.

    Args:
        dataset: the dataset that samples are made of.
        lengths: the name of a column of integers, or of lists, whose lengths count; or an integer
            for each row; or a file that `odb-nodes profile --save-lengths` has written, in which a
            row that processing skips counts as 1 token. A string that names a column is not taken
            for a file. Default: the list offsets of `input_ids` in a `datasets.Dataset`, unless
            the samples are processed.
        is_processed: whether a function makes or measures the samples (`process_fn`, `observe`).

    Raises:
        TypeError: `lengths` has another type, or the dataset is not read by index.
        ValueError: a length is below 1, or null; there is no such column; or the lengths are not
            one for each row, or not of this data.
        FileNotFoundError: `lengths` is a path, and there is no such file.
        StateError: the file is not a table of lengths.
    """
    if lengths is None:
        return None if is_processed else _stored_lengths(dataset)
    _check_has_rows(dataset)
    column: IntArray | None = None
    if isinstance(lengths, str) and lengths in (_columns_of(dataset) or ()):
        column = _joined(dataset, partial(_of_column, lengths))
    if column is not None:
        tokens = column
        origin = f"the column {lengths!r}"
    elif isinstance(lengths, os.PathLike) or (isinstance(lengths, str) and os.path.isfile(lengths)):
        path = os.fspath(lengths)
        tokens = _of_file(dataset, path)
        origin = f"the file {path!r}"
    elif isinstance(lengths, str):
        raise ValueError(
            f"`lengths` must name a column or a file, but is {lengths!r} instead: there is no such "
            f"file, and {_columns_text(dataset)}"
        )
    else:
        tokens = _of_rows(len(dataset), lengths)
        origin = "`lengths`"
    return KnownLengths(_checked(tokens, origin), origin)


# --- from the dataset -----------------------------------------------------------------------------


def _stored_lengths(dataset: Any) -> KnownLengths | None:
    tokens = _joined(dataset, _token_lists)
    if tokens is None or not len(tokens) or not _is_count(tokens).all():
        return None
    return KnownLengths(tokens, f"list offsets of the column {_IDS!r}")


def _token_lists(table: Any) -> IntArray | None:
    """Return the tokens of each row of a tokenized table; `None` for other datasets."""
    shown = shown_columns(table)
    if shown is None or _IDS not in shown or not _WITH_PATCHES.isdisjoint(shown):
        return None
    return _of_arrow(_IDS, *stored_column(table, _IDS)) if has_integer_lists(table, _IDS) else None


def _of_column(name: str, dataset: Any) -> IntArray:
    """Return the lengths in a column, `_NULL` for a null."""
    if is_table(dataset):
        return _of_arrow(name, *stored_column(dataset, name))
    if isinstance(dataset, ParquetDataset):
        blocks = range(len(dataset.shuffle_blocks))
        groups = [_of_arrow(name, dataset.column_of(block, name)) for block in blocks]
        return np.concatenate([np.empty(0, np.int64), *groups])
    counts = (_of_value(name, row, place) for place, row in enumerate(dataset))
    return np.fromiter(counts, np.int64, len(dataset))


def _joined(dataset: Any, read: Callable[[Any], IntArray | None]) -> IntArray | None:
    """Return the lengths that `read` finds, also through torch's `Subset` and `ConcatDataset`."""
    if type(dataset) is Subset:
        lengths = _joined(dataset.dataset, read)
        rows = np.asarray(dataset.indices)
        are_rows = rows.ndim == 1 and (rows.dtype.kind in "iu" or not len(rows))
        return lengths[rows.astype(np.int64)] if lengths is not None and are_rows else None
    if type(dataset) is ConcatDataset:
        parts = [_joined(part, read) for part in dataset.datasets]
        with_lengths = [part for part in parts if part is not None]
        return np.concatenate(with_lengths) if len(with_lengths) == len(parts) else None
    return read(dataset)


def _columns_of(dataset: Any) -> Sequence[str] | None:
    """Return the columns that lengths can be read from; `None` for a dataset without columns."""
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


def _columns_text(dataset: Any) -> str:
    """Return the columns, and the remedy, for the error about a missing column."""
    if (names := _columns_of(dataset)) is not None:
        return f"the columns are {[*names]}. Name one of these, or pass an integer for each row."
    return (
        f"a `{type(dataset).__name__}` has no columns, as a `datasets.Dataset`, a "
        "`ParquetDataset` and a list of dicts have. Pass an integer for each row."
    )


def _of_arrow(name: str, column: Any, rows: IntArray | None = None) -> IntArray:
    """Return the integers of an Arrow column, or the lengths of its lists, `_NULL` for a null.

    Args:
        name: the name of the column.
        column: an array, chunked or not. Of lists, only the offsets are read.
        rows: the rows to return. Default: all.
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
    lengths: IntArray = (values if rows is None else values[rows]).astype(np.int64)
    if column.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        lengths[nulls if rows is None else nulls[rows]] = _NULL
    return lengths


def _of_value(name: str, row: Any, place: int) -> int:
    """Return the integer in a column of a row, or the length of its list."""
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
    """Return lengths that the user passed, an integer for each row."""
    values: Any = None
    try:
        if isinstance(lengths, torch.Tensor):
            values = lengths.numpy(force=True)
        elif isinstance(lengths, Sequence) and type(lengths) not in (list, tuple, range):
            values = np.asarray(lengths[:])  # A column of `datasets` is read row by row otherwise.
        else:
            values = np.asarray(lengths)
    except (TypeError, ValueError):  # numpy lacks the dtype, or `lengths` are rows
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
    return np.array(values, np.int64)  # a copy: the user may change the array


def _checked(tokens: IntArray, origin: str) -> IntArray:
    """Return the lengths; raise an error that names the first invalid length."""
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
    """Raise a `TypeError` unless a dataset is read by index."""
    is_mixture = isinstance(dataset, (Mapping, BaseNode))
    if is_mixture or is_iterated(dataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"`lengths` must be None for a `{type(dataset).__name__}`: they belong to the rows of "
            "one map-style dataset, by index. Leave them out, or pass such a dataset."
        )


# --- from a file ----------------------------------------------------------------------------------


def read_length_file(
    path: str | os.PathLike[str], columns: Sequence[str], make: Callable[..., T]
) -> T:
    """Return `make` of the columns, and of the other fields, of a file of a `LengthTable`."""
    with open(path, "rb") as opened:  # before `try`: a missing file is a `FileNotFoundError`
        try:
            with np.load(opened, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                arrays: dict[str, Any] = {column: file[column] for column in columns}
            if about.pop("version") != TABLE_VERSION:
                raise ValueError("another version")
            about |= {name: tuple(about[name]) for name in ("names", "sizes", "streams")}
            return make(**arrays, **about)
        except Exception as error:  # numpy and zipfile raise any of damaged bytes
            raise StateError(
                f"`{path}` is no table of lengths of version {TABLE_VERSION}. Make it by "
                "`observe_lengths(...).save(path)`, or `odb-nodes profile --save-lengths`."
            ) from error


def data_id_of(dataset: Any) -> str:
    """Return the identity that a dataset declares for its data; "" without one."""
    if is_table(dataset):
        return fingerprint_of_table(dataset)
    data_id = getattr(dataset, "data_id", "")
    return data_id if isinstance(data_id, str) else ""


def _of_file(dataset: Any, path: str) -> IntArray:
    """Return the lengths of a dataset's rows from a file, 1 for a row that is skipped."""
    table = read_length_file(path, ("tokens", "keys"), dict[str, Any])
    tokens, keys, names = table["tokens"], table["keys"], table["names"]
    size = sum(table["sizes"])
    saved_id = table.get("data_id", "")
    present_id = data_id_of(dataset)
    order = np.argsort(keys, kind="stable")
    why = ""
    if len(names) > 1:
        why = f"they are of the datasets {[*names]}"
    elif len(tokens) != size:
        why = f"they are of {len(tokens):,} of {size:,} samples"
    elif len(tokens) != len(dataset):
        why = f"they are of {len(tokens):,} samples, and the dataset has {len(dataset):,}"
    elif not np.array_equal(keys[order], np.arange(len(keys))):
        why = (
            "their keys are not the numbers of the rows, but such as the byte offsets of JSON Lines"
        )
    elif saved_id and present_id and saved_id != present_id:
        why = f"they are of other data ({saved_id!r}, and the dataset is {present_id!r})"
    if why:
        raise ValueError(
            f"`lengths` must be of all rows of this dataset, but in the file {path!r} {why}. "
            "Profile this dataset: `odb-nodes profile module:function --save-lengths`, with a "
            "function that returns it. Or, if row n of the dataset is sample n of the file, pass "
            "`LengthTable.load(path).tokens`."
        )
    return np.asarray(np.maximum(tokens[order], 1), np.int64)
