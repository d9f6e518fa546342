"""Measure the cost of a processed sample: tokens, targets and patches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from zlib_ng.zlib_ng import crc32

from odb_nodes._support.arrays import INT64, array_of_ints
from odb_nodes._support.checks import MAX_COUNT, MAX_KEY, check_count, check_type
from odb_nodes._support.digest import content_digest
from odb_nodes.core.sample import (
    CLASS_KEYS,
    IGNORE_INDEX,
    ItemKey,
    Observation,
    Observe,
    Sample,
    Skipped,
    SourceItem,
    data_of,
)
from odb_nodes.core.sample_block import check_fits
from odb_nodes.core.token_values import flatten_row, is_mapping
from odb_nodes.errors import SampleError

_SPANS = ("start_positions", "end_positions")
_COUNTED_KEYS = frozenset((*CLASS_KEYS, *_SPANS, "image_grid_thw", "pixel_values"))
_ARRAY = "If it is a file with one JSON array, write one object per line. "
_IGNORED = np.array(IGNORE_INDEX)  # Numpy compares an array faster than a number.


def observe_sample(data: Any, observe: Observe | None = None) -> Sample | Skipped:
    """Return `data` with its length, supervised tokens and patches; `Skipped` unchanged."""
    if observe is None and type(data) is dict:
        text = _observe_text(data)
        if text is not None:
            return text
    if isinstance(data, SourceItem):
        try:
            sample = observe_sample(data.item, observe)
        except SampleError as error:
            raise SampleError(f"of source {data.source!r}: {error}") from error
        return sample.of_source(data.source)
    if isinstance(data, Skipped):
        return data
    if data is None:
        raise SampleError(
            "its processing (`process_fn`, or the dataset) returned None. Return a sample, or "
            "`Skipped(reason, text)` to leave it out."
        )
    observation = Observation(_length_of(data)) if observe is None else observe(data)
    if not isinstance(observation, tuple):
        observation = Observation(observation)
    try:
        tokens, targets, patches, key, task = Observation(*observation)
        tokens = check_count("tokens", tokens)
        check_type("task", task, str | None)
        counted = "observed"
        if targets is None:
            targets, counted = _count_targets(data, tokens)
        if patches is None:
            patches = _count_patches(data)
        return Sample(
            data,
            tokens,
            check_count("targets", targets, 0),
            check_count("patches", patches, 0),
            counted=counted,
            key=None if key is None else check_count("key", key, 0, MAX_KEY),
            task=task or "",
        )
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"the observation of a sample is not valid: {str(error).rstrip('.')}. "
            f"The sample is {_describe_sample(data)}. Leave it out of the data, return `Skipped` "
            "from its processing, or pass an `observe` that returns its length in tokens."
        ) from error


def sample_of(
    read: Callable[[int], Any], index: int, process_fn: Any, observe: Observe | None
) -> Sample | Skipped:
    """Read, process and observe an item. Errors name the item."""
    try:
        item = read(index)
        return observe_sample(item if process_fn is None else process_fn(item), observe)
    except Exception as error:
        cause = error if isinstance(error, SampleError) else f"{type(error).__name__}: {error}"
        raise SampleError(f"item {index} cannot be processed: {cause}") from error


def _observe_text(data: dict[Any, Any]) -> Sample | None:
    """Return the sample of text, (L,) integers, the most common data; `None` for other data."""
    ids: Any = data.get("input_ids")
    labels: Any = data.get("labels")
    if type(ids) is list:
        if not ids or type(ids[0]) is not int:
            return None
    elif type(ids) not in (np.ndarray, torch.Tensor) or ids.ndim != 1:
        return None
    tokens = len(ids)
    if not 1 <= tokens <= MAX_COUNT or not _COUNTED_KEYS.isdisjoint(data):
        return None
    if labels is None:
        return Sample(data, tokens, tokens - 1, 0, "", "tokens")
    if type(labels) is list:
        labels = array_of_ints(labels)
    elif type(labels) is torch.Tensor and labels.dtype is torch.int64:
        labels = labels.numpy(force=True)
    if type(labels) is not np.ndarray or labels.dtype is not INT64 or labels.ndim != 1:
        return None
    if len(labels) == 1 < tokens:
        return None
    targets = int(np.count_nonzero(labels[1:] != _IGNORED))
    return Sample(data, tokens, targets, 0, "", "labels")


def with_item_key(result: Any, item: ItemKey | None) -> Any:
    """Return a result of processing with the key of its item, if the item has a key."""
    if type(result) is Sample:
        check_fits(result)
    if isinstance(result, Sample):
        # Unpacked at once, because attributes take longer.
        data, tokens, targets, patches, source, counted, key, old_item, digest, task, _, padding = (
            result
        )
        return Sample(
            data,
            tokens,
            targets,
            patches,
            source,
            counted,
            item.key if key is None and item is not None else key,
            item or old_item,
            digest_of_sample(result) if digest is None else digest,
            task,
            padding=padding,
        )
    if item is None:
        return result
    if isinstance(result, Skipped) and result.key is None:
        return replace(result, key=item.key, source=result.source or item.source)
    return result


def digest_of_sample(sample: Sample) -> int:
    """Return a CRC-32 of a sample's data and costs."""
    if sample.digest is not None:
        return sample.digest
    costs = b"%d %d %d" % sample[1:4] + sample.task.encode()
    return content_digest(data_of(sample), crc32(costs))


def _length_of(data: Any) -> int:
    if not (is_mapping(data) and "input_ids" in data):
        is_array = isinstance(data, list) and any(isinstance(part, dict) for part in data)
        raise SampleError(
            f"a sample has no length: it is {_describe_sample(data)}. {_ARRAY * is_array}Return a "
            "mapping with `input_ids`, or pass an `observe` that returns its length in tokens."
        )
    return len(flatten_row("input_ids", data["input_ids"]))


def _count_targets(data: Any, tokens: int) -> tuple[int, str]:
    """Return the number of targets of a sample, and their kind, one of `COUNTED`."""
    fields = data if is_mapping(data) else {}
    labels = fields.get("labels")
    if labels is None:
        labels = next((fields[key] for key in CLASS_KEYS if not _is_note(fields.get(key))), None)
    if labels is None:
        is_span = any(fields.get(key) is not None for key in _SPANS)
        return (1, "samples") if is_span else (tokens - 1, "tokens")
    if not hasattr(labels, "__len__") or getattr(labels, "ndim", 1) == 0:
        return 1, "samples"
    row = flatten_row("labels", labels)
    if type(row) is list:
        ints = array_of_ints(row)
        row = row if ints is None else ints
    if isinstance(row, torch.Tensor):
        row = row.numpy(force=True)
    is_array = isinstance(row, np.ndarray)
    are_floats = row.dtype.kind == "f" if is_array else len(row) > 0 and isinstance(row[0], float)
    if are_floats:
        return 1, "samples"
    if "labels" not in fields and len(row) != tokens:  # several classes of a sample
        return 1, "samples"
    if len(row) == 1 < tokens:  # a class, or the only token of a decoder's answer
        return 1, "labels"
    if is_array:
        return int(np.count_nonzero(row[1:] != IGNORE_INDEX)), "labels"
    return sum(label != IGNORE_INDEX for label in row[1:]), "labels"


def _is_note(label: Any) -> bool:
    """Return whether a label is absent or text, from which no loss is computed."""
    first = label[0] if isinstance(label, (list, tuple)) and label else label
    return first is None or isinstance(first, (str, bytes, Mapping))


def _count_patches(data: Any) -> int:
    if not is_mapping(data):
        return 0
    if (grid := data.get("image_grid_thw")) is not None:
        return int(np.asarray(grid).reshape(-1, 3).prod(axis=1).sum())
    pixels = data.get("pixel_values")
    return 0 if pixels is None else len(pixels)


def _describe_sample(data: Any) -> str:
    if isinstance(data, Mapping):
        return f"a `{type(data).__name__}` with keys {sorted(map(str, data))}"
    return f"{str(data)[:60]!r} of type `{type(data).__name__}`"
