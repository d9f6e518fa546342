"""Looks at some samples of each process: whether processing changes what it was given.

What it finds would be wrong data without an error: samples that a later one overwrites, and items
of the dataset that are others in the next epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from odb_nodes._core.content import content_digest, copied
from odb_nodes._core.held_generators import generators_in
from odb_nodes._core.seeds import GLOBAL_GENERATORS, preserved, put_back, state_of
from odb_nodes.errors import SampleError
from odb_nodes.sample import Sample

_FIRST = 16
_EVERY = 256  # samples, after which the first of a chunk is looked at

OVERWRITTEN = (
    "its result was changed while later items were processed, as where `process_fn`, or the "
    "dataset, fills one buffer again: the batch would have a later sample in its place. Return "
    "data of its own for each sample, such as `buffer[:n].clone()`."
)


@dataclass
class FirstSamples:
    """Which samples of this process are looked at: the first, and those that begin some chunks."""

    left: int = _FIRST  # of the first; below 0, how many have come since one was looked at

    def take(self, count: int) -> int:
        """Return how many of the next `count` samples to look at, and count them."""
        taken = min(max(self.left, 0), count)
        self.left -= count
        if count == 1 or self.left > -_EVERY:  # None comes after a single one to overwrite it.
            return taken
        self.left = 0
        return max(taken, 1)


def digest_of(result: Any) -> int:
    """Return the digest of a result of processing; 0 where it has none."""
    try:
        return content_digest(result.data if isinstance(result, Sample) else result)
    except Exception:  # of the user's types; if it matters, it is raised where digests are kept
        return 0


def first_overwritten(results: Sequence[Any], digests: Sequence[int]) -> int | None:
    """Return which of the results has no longer the digest that it had first."""
    pairs = enumerate(zip(results, digests, strict=False))
    return next((at for at, (result, was) in pairs if digest_of(result) != was), None)


def process_kept(dataset: Any, index: Any, data: Any, process_fn: Callable[[Any], Any]) -> Any:
    """Return what `process_fn` makes of the item `data` of a dataset.

    Raises:
        SampleError: the dataset keeps what the function has changed in place, and so the next epoch
            would make another sample of the item.
    """
    before, copy = digest_of(data), copied(data)
    generators = [*GLOBAL_GENERATORS, *generators_in((dataset, process_fn))]
    states = [*map(state_of, generators)]
    result = process_fn(data)
    if digest_of(data) == before:
        return result
    made = digest_of(result)

    def make(item: Any) -> int:
        for generator, state in zip(generators, states, strict=True):
            put_back(generator, state)
        return digest_of(process_fn(item))

    with preserved(generators):
        try:
            if (now := digest_of(dataset[index])) == before:
                return result  # The dataset makes a new item each time.
            if now != digest_of(dataset[index]) or make(copy) != made:
                return result  # What is random in itself tells nothing.
        except Exception:
            return result
        try:
            if make(dataset[index]) == made:
                return result
            other = "another sample"
        except Exception as error:
            other = f"none ({type(error).__name__}: {error})"
    raise SampleError(
        "`process_fn` changes the dataset's item in place, of which the next epoch, or a resume, "
        f"would make {other}. Let it change a copy: `sample = {{**sample}}`, or "
        "`copy.deepcopy(sample)` for lists and dicts within; and make the dataset anew."
    )
