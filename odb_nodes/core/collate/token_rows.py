"""Values per token of samples: the base of all collate functions for text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from odb_nodes._support.arrays import INT64, array_of_ints
from odb_nodes._support.checks import check_count, check_integer, check_names, keep_count
from odb_nodes.core.collate.protocol import NewTensor, copy_for_collate, new_tensor
from odb_nodes.core.planning.budget import Layout, Shape, TokenBudget
from odb_nodes.core.processing.columns import DataColumns, RowsLike
from odb_nodes.core.sample import IGNORE_INDEX, LazyData
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.core.token_values import flatten_row, is_mapping
from odb_nodes.errors import SampleError

Rows = TypeVar("Rows", bound="TokenRows")

TOKEN_KEYS = (
    "input_ids",
    "labels",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "special_tokens_mask",
)

_INT64_END = 2**63


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Checks, converts and joins the values per token of the samples of a group."""

    pad_token_id: int = 0
    token_keys: tuple[str, ...] = TOKEN_KEYS
    pad_to_multiple_of: int = 1
    shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        keep_count(self, "pad_to_multiple_of")
        remedy = "A tokenizer without a padding token has None: pass its `eos_token_id`."
        pad_token_id = check_integer("pad_token_id", self.pad_token_id, remedy)
        object.__setattr__(self, "pad_token_id", pad_token_id)
        token_keys = check_names("token_keys", self.token_keys, '["input_ids", "labels"]')
        object.__setattr__(self, "token_keys", token_keys)
        if "input_ids" not in token_keys:
            raise ValueError(
                f"`token_keys` must have `input_ids`, but is {token_keys!r:.80} instead. Add it."
            )
        object.__setattr__(self, "shapes", _checked_shapes(self.shapes))
        widths = [width for _, width in self.shapes]
        if widths != sorted(widths):
            raise ValueError(
                f"`shapes` must go from narrow to wide, but have the widths {widths} instead. "
                "Make them with `TokenBudget.shape_ladder()`."
            )

    @property
    def layout(self) -> Layout:
        """Layout of the budgets that it collates for."""
        raise NotImplementedError

    @classmethod
    def of(cls: type[Rows], budget: int | TokenBudget, **options: Any) -> Rows:
        """Return the collate function for the groups of a budget."""
        budget = TokenBudget.of(budget)
        multiple = budget.pad_to_multiple_of
        shapes = budget.shape_ladder()
        return cls(pad_to_multiple_of=multiple, shapes=shapes, **options)

    def prepare(self, sample: Any) -> Any:
        """Return a sample with its values per token as (L,) arrays, which collating only copies.

        `ODBDataLoader` calls this in its workers, since lists take long to convert. A sample that
        is no mapping, or has nothing to convert, is returned unchanged.
        """
        if not is_mapping(sample):
            return sample
        rows = {}
        for key in self.token_keys:
            if (value := sample.get(key)) is None:
                continue
            if is_int64_row(value):
                rows[key] = value
            elif not is_number(value):
                rows[key] = token_array(key, value)
        ids = rows.get("input_ids")
        is_converted = False
        for key, row in rows.items():
            if ids is not None:
                _check_length(key, row, len(ids))
            is_converted = is_converted or row is not sample[key]
        return {**sample, **rows} if is_converted else sample

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`."""
        return self.batch_of(self.group_of(samples))

    def group_of(self, samples: Sequence[Mapping[str, Any]]) -> GroupRows:
        """Return samples as a group, checked to have `input_ids` and the same keys."""
        self.check_mappings(samples)
        if any(sample.keys() != samples[0].keys() for sample in samples):
            raise _differing_keys(samples)
        return GroupRows(samples)

    def collate_block(self, block: SampleBlock, new: NewTensor = new_tensor) -> dict[str, Any]:
        """Return the batch of a block's samples, from their columns if they have columns."""
        columns = None if block.has_objects else GroupColumns.of(block, new)
        return self(block_data(block)) if columns is None else self.batch_of(columns)

    def batch_of(self, group: GroupRows) -> dict[str, Any]:
        """Return the batch of a group."""
        raise NotImplementedError

    def check_mappings(self, samples: Sequence[Any]) -> None:
        """Raise a `TypeError` unless all samples are mappings with `input_ids`."""
        for index, sample in enumerate(samples):
            if not is_mapping(sample) or "input_ids" not in sample:
                keys = f" with the keys {[*sample]}" if is_mapping(sample) else ""
                raise TypeError(
                    f"`{type(self).__name__}` takes mappings with `input_ids`, but sample {index} "
                    f"of the group is a `{type(sample).__name__}`{keys}. Pass a `collate_fn`."
                )

    def join(self, key: str, group: GroupRows, shape: Shape) -> Any:
        """Return the value of a batch under `key`: a tensor of `shape` or (n,), or a list."""
        rows = group.int64_rows(key) if key in self.token_keys else None
        dtype: np.dtype[Any] = INT64
        if rows is None:
            values = group.values(key)
            if all(map(is_number, values)):
                return _tensor_of(key, values)
            if key not in self.token_keys:
                return values
            rows = _rows_of(key, values, group.lengths)
            dtype = np.result_type(*{row.dtype for row in rows})
            if dtype.kind in "iu":
                dtype = INT64  # as embeddings and losses need
        joined = group.new(shape, self._fill_of(key), dtype)
        self.place(key, joined.numpy(), rows, group.lengths)
        return joined

    def _fill_of(self, key: str) -> int:
        """Return the padding of a key."""
        return {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX}.get(key, 0)

    def place(
        self, key: str, joined: npt.NDArray[Any], rows: list[Any], lengths: list[int]
    ) -> None:
        """Write the rows of all samples into `joined`, (rows, width), which holds padding."""
        raise NotImplementedError


class GroupRows:
    """The samples of a group, which all have the same keys; lengths in tokens."""

    new: NewTensor = staticmethod(new_tensor)  # makes the tensors of the batch

    def __init__(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self._samples = samples
        self.keys: Sequence[str] = [*samples[0]]
        self.lengths = [*map(length_of, samples)]

    def values(self, key: str) -> list[Any]:
        """Return the values of a key."""
        return [sample[key] for sample in self._samples]

    def int64_rows(self, key: str) -> list[Any] | None:
        """Return the values of a key if all are int64 arrays with a value per token."""
        values = self.values(key)
        if all(map(is_int64_row, values)) and [*map(len, values)] == self.lengths:
            return values
        return None


class GroupColumns(GroupRows):
    """The samples of a group whose data are in columns, from which rows are copied directly."""

    def __init__(
        self, block: SampleBlock, token_columns: Mapping[int, RowsLike], new: NewTensor
    ) -> None:
        self._holders = block.holders
        self._token_columns = token_columns  # by holder: the columns with values per token
        self.new = new
        self._places = [*block.places()]
        self._spans: list[tuple[int, int, int]] = []  # holder, and where a row starts and stops
        for holder, row in self._places:
            offsets, _ = token_columns[holder]
            self._spans.append((holder, offsets[row], offsets[row + 1]))
        self.keys = next(iter(block.holders.values())).keys
        self.lengths = [stop - start for _, start, stop in self._spans]

    @classmethod
    def of(cls, block: SampleBlock, new: NewTensor = new_tensor) -> GroupColumns | None:
        """Return a group; `None` if some of its `input_ids` are not in columns."""
        token_columns: dict[int, RowsLike] = {}
        keys = None
        for holder, data in block.holders.items():
            rows = data.rows_like("input_ids") if isinstance(data, DataColumns) else None
            if rows is None or (token_columns and data.keys != keys):
                return None
            token_columns[holder] = rows
            keys = data.keys
        return cls(block, token_columns, new) if token_columns else None

    def values(self, key: str) -> list[Any]:
        """Return the values of a key."""
        columns = {holder: data.column(key) for holder, data in self._holders.items()}
        return [columns[holder][row] for holder, row in self._places]

    def int64_rows(self, key: str) -> list[Any] | None:
        """Return the values of a key if all are int64 arrays with a value per token."""
        joined: dict[int, Any] = {}
        for holder, (_, values_of_keys) in self._token_columns.items():
            values = values_of_keys.get(key)
            if values is None or values.dtype != INT64:
                return None
            joined[holder] = values
        return [joined[holder][start:stop] for holder, start, stop in self._spans]


def block_data(block: SampleBlock) -> list[Any]:
    """Return the data of samples, as dicts that a collate function may change."""
    holders = block.holders.values()
    are_columns = all(isinstance(holder, DataColumns) and holder.keys for holder in holders)
    if are_columns and not block.has_objects:
        return block.data()  # new dicts each time
    return [
        copy_for_collate(data.load() if isinstance(data, LazyData) else data)
        for data in block.data()
    ]


def _checked_shapes(shapes: Any) -> tuple[Shape, ...]:
    try:
        pairs = [(rows, width) for rows, width in shapes]
    except (TypeError, ValueError):
        raise TypeError(
            f"`shapes` must be pairs (rows, width), but is {shapes!r:.80} instead."
        ) from None
    return tuple(
        (check_count(f"shapes[{index}]", rows), check_count(f"shapes[{index}]", width))
        for index, (rows, width) in enumerate(pairs)
    )


def _differing_keys(samples: Sequence[Mapping[str, Any]]) -> SampleError:
    """Return the error that names the first sample whose keys differ from the most common."""
    counts = Counter(frozenset(sample) for sample in samples)
    usual = max(counts, key=lambda keys: (counts[keys], len(keys)))
    index = next(row for row, sample in enumerate(samples) if sample.keys() != usual)
    differs = []
    if additional := samples[index].keys() - usual:
        differs.append(f"also has {sorted(map(str, additional))}")
    if missing := usual - samples[index].keys():
        differs.append(f"lacks {sorted(map(str, missing))}")
    return SampleError(
        f"the samples of a group must have the same keys, but sample {index} "
        f"{' and '.join(differs)}: {counts[usual]} of {len(samples)} have "
        f"{sorted(map(str, usual))}. Give `labels`, and any other key, to all samples or to none. "
        "If only some have images, use a collate function of `odb_nodes.vision`.",
        index,
    )


def _rows_of(key: str, values: list[Any], lengths: list[int]) -> list[Any]:
    """Return the values per token of samples as (L,) arrays, L from `lengths`."""
    rows: list[Any] = []
    try:
        for value, length in zip(values, lengths, strict=True):
            row = token_array(key, value)
            _check_length(key, row, length)
            rows.append(row)
    except SampleError as error:
        raise of_group(error, len(rows)) from error
    return rows


def _tensor_of(key: str, numbers: list[Any]) -> torch.Tensor:
    """Return the numbers of samples as an (n,) tensor."""
    if all(isinstance(number, torch.Tensor) for number in numbers):
        return torch.stack([number.detach().cpu() for number in numbers])
    array = np.asarray(
        [number.item() if isinstance(number, torch.Tensor) else number for number in numbers]
    )
    for index, number in enumerate(numbers if array.dtype.kind in "Ouf" else ()):
        is_wide = isinstance(number, Integral) and not -_INT64_END <= int(number) < _INT64_END
        if is_wide or (array.dtype == object and np.asarray(number).dtype == object):
            raise of_group(
                SampleError(
                    f"`{key}` must be a number that a tensor can hold, an integer of 64 bits with "
                    f"its sign, but is {number!r:.80} instead. Pass it as a string, say."
                ),
                index,
            )
    return torch.as_tensor(array)


def of_group(error: SampleError, index: int) -> SampleError:
    """Return the error of a sample with the sample's index in its group."""
    return SampleError(f"sample {index} of the group: {error}", index)


def length_of(sample: Mapping[str, Any]) -> int:
    """Return the length of a sample, in tokens."""
    return len(flatten_row("input_ids", sample["input_ids"]))


def _check_length(key: str, row: Any, tokens: int) -> None:
    if len(row) != tokens:
        raise SampleError(
            f"`{key}` must have the length of `input_ids` ({tokens}), but has {len(row)} instead. "
            "Leave it out of `token_keys` if it has no value per token."
        )


def is_number(value: Any) -> bool:
    """Tell whether a value is a single number, not a value per token."""
    if (dimensions := getattr(value, "ndim", None)) is not None:
        # Strings and times of numpy are no numbers. Torch has no such dtypes.
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        return bool(dimensions == 0) and kind in "biufc"
    return type(value) is not list and isinstance(value, Number)


def is_int64_row(value: Any) -> bool:
    """Tell whether a value is an (L,) array of int64, as most prepared values are."""
    return type(value) is np.ndarray and value.dtype is INT64 and value.ndim == 1


def token_array(key: str, value: Any) -> Any:
    """Return values per token as an (L,) array."""
    row = value if type(value) is np.ndarray and value.ndim == 1 else _array_of(key, value)
    if is_int64_row(row):
        return row
    if row.ndim != 1 or row.dtype.kind not in ("iu" if key == "input_ids" else "biuf"):
        rule = "integers" if key == "input_ids" else "numbers"
        raise SampleError(
            f"`{key}` must hold {rule}, one per token, but is {value!r:.200} instead. Convert it "
            "in processing, or pass your own `collate_fn`."
        )
    if row.dtype == np.uint64 and (row >= _INT64_END).any():
        raise SampleError(
            f"`{key}` must hold integers of 64 bits with their sign, but has {row.max()}. Map "
            "such numbers to smaller ones in processing."
        )
    return row


def _array_of(key: str, value: Any) -> Any:
    row = flatten_row(key, value)
    if type(row) is list:
        ints = array_of_ints(row)
        if ints is not None:
            return ints
    try:
        row = row.numpy(force=True) if isinstance(row, torch.Tensor) else np.asarray(row)
    except (TypeError, ValueError):  # numpy lacks the dtype, or the list is ragged
        row = np.empty(0, object)
    if row.shape == (0,) and row.dtype == np.float64:
        row = row.astype(np.int64)  # An empty list has no dtype.
    return row
