"""Checks on some samples of each process that processing does not change its input or results.

Without these checks, data would be silently wrong: a later sample may overwrite an earlier sample,
and items of the dataset may differ in the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odb_nodes._support.content import copied
from odb_nodes._support.digest import content_digest
from odb_nodes._support.held_generators import generators_in
from odb_nodes._support.seeds import GLOBAL_GENERATORS, preserved, put_back, state_of
from odb_nodes.core.sample import Sample
from odb_nodes.errors import SampleError

_FIRST = 16  # first samples of a process, which are all checked
_EVERY = 256  # later, once in so many samples, the first sample of a chunk is checked

OVERWRITTEN = (
    "its result was changed while later items were processed, since `process_fn` or the dataset "
    "reuses a buffer, for example: the batch would have a later sample in its place. Return new "
    "data for each sample, such as `buffer[:n].clone()`."
)


@dataclass
class FirstSamples:
    """Decides which samples of this process are checked: the first, and first samples of chunks."""

    unchecked: int = _FIRST  # first samples still to check; below 0, samples since the last check

    def take(self, count: int) -> int:
        """Return how many of the first samples to check in a chunk of `count` samples."""
        checked = min(max(self.unchecked, 0), count)
        self.unchecked -= count
        # In a chunk of 1, no later sample overwrites the first one.
        if count == 1 or self.unchecked > -_EVERY:
            return checked
        self.unchecked = 0
        return max(checked, 1)


def result_digest(result: Any) -> int:
    """Return the digest of a result of processing; 0 if values of its type have no digest."""
    try:
        return content_digest(result.data if isinstance(result, Sample) else result)
    except Exception:  # A type of the user raised. Code that needs the digest raises again.
        return 0


def first_overwritten(results: Sequence[Any], digests: Sequence[int]) -> int | None:
    """Return the index of the first result with a changed digest; `None` without a change."""
    for index, (result, digest) in enumerate(zip(results, digests, strict=False)):
        if result_digest(result) != digest:
            return index
    return None


def process_kept(dataset: Any, index: Any, data: Any, process_fn: Callable[[Any], Any]) -> Any:
    """Process the item `data` of a dataset, and check that this does not change the dataset.

    Raises:
        SampleError: the dataset keeps an item that the function has changed in place, so the next
            epoch would make another sample of it.
    """
    before = result_digest(data)
    copy = copied(data)
    generators = [*GLOBAL_GENERATORS, *generators_in((dataset, process_fn))]
    states = [*map(state_of, generators)]
    result = process_fn(data)
    if result_digest(data) == before:
        return result
    expected = result_digest(result)

    def digest_again(item: Any) -> int:
        for generator, state in zip(generators, states, strict=True):
            put_back(generator, state)
        return result_digest(process_fn(item))

    with preserved(generators):
        try:
            current = result_digest(dataset[index])
            if current == before:
                return result  # The dataset makes a new item each time.
            if current != result_digest(dataset[index]) or digest_again(copy) != expected:
                return result  # Random data differ each time, and prove nothing.
        except Exception:
            return result
        try:
            if digest_again(dataset[index]) == expected:
                return result
            outcome = "another sample"
        except Exception as error:
            outcome = f"none ({type(error).__name__}: {error})"
    raise SampleError(
        "`process_fn` changes the dataset's item in place: from that item, the next epoch, or a "
        f"resume, would make {outcome}. Let it change a copy: `sample = {{**sample}}`, or "
        "`copy.deepcopy(sample)` for lists and dicts within; then create the dataset anew."
    )
