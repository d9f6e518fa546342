"""Makes the sample of an item: look up, process, prepare for collating, observe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from odb_nodes._support.hashing import stable_names
from odb_nodes._support.seeds import declares_draws
from odb_nodes.core.collate.token_rows import length_of
from odb_nodes.core.loader.options import ProcessFn
from odb_nodes.core.processing.chunk import Fetcher
from odb_nodes.core.processing.first_samples import FirstSamples, process_kept
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.sample import Observe, Sample, Skipped
from odb_nodes.core.sources.datasets import draws_nothing, holds_no_generators, reads_alike


class _Fetched(NamedTuple):
    """The data of an item, read from the dataset."""

    data: Any


@dataclass(frozen=True)
class SampleProcess(Fetcher):
    """Makes a `Sample` of an item of the source: looks it up, processes it, observes it."""

    dataset: Any  # indexed by the items; `None` if the items are the data
    process_fn: ProcessFn
    observe: Observe | None
    collate: Any  # the collate function whose `prepare` is called here; `None`: none is called
    first: FirstSamples = field(default_factory=FirstSamples, compare=False)

    @property
    def parts(self) -> Sequence[Any]:  # type: ignore[override]
        """The datasets and functions that may hold random generators, or have `set_epoch`."""
        dataset = None if holds_no_generators(self.dataset) else self.dataset
        return dataset, self.process_fn, self.observe

    @property
    def fingerprint_name(self) -> str:
        """The names of the functions that decide the lengths."""
        named = {"process_fn": self.process_fn, "observe": self.observe}
        functions = {key: function for key, function in named.items() if function is not None}
        return f"sample({stable_names(functions)})"

    @property
    def draws_random_numbers(self) -> bool | None:
        """`False` if the dataset and all functions declare it; `None` otherwise."""
        for function in (self.process_fn, self.observe):
            if function is not None and declares_draws(function) is not False:
                return None
        return False if self.dataset is None or draws_nothing(self.dataset) else None

    @property
    def gives_keys(self) -> bool:
        """Whether samples may have keys other than the numbers of their items."""
        return self.observe is not None or getattr(self.process_fn, "gives_keys", False)

    def fetch(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return items with their data, if the dataset can read many items at once."""
        read = getattr(self.dataset, "__getitems__", None)
        # Checked in each call: a transform may be new.
        if read is None or not reads_alike(self.dataset):
            return items
        data = read([*items])
        return [*map(_Fetched, data)] if len(data) == len(items) else items

    def __call__(self, item: Any) -> Sample | Skipped:
        """Return the sample of an item."""
        if self.dataset is None:
            data = item
        else:
            data = item.data if type(item) is _Fetched else self.dataset[item]
        if self.process_fn is not None:
            # The dataset may hold the object, which the function must not change.
            is_shared = self.dataset is not None and type(item) is not _Fetched
            if is_shared and self.first.take(1):
                data = process_kept(self.dataset, item, data, self.process_fn)
            else:
                data = self.process_fn(data)
        if self.collate is None:
            return observe_sample(data, self.observe)
        if self.observe is None:
            sample = observe_sample(self.collate.prepare(data))  # counts arrays faster than lists
        else:
            sample = observe_sample(data, self.observe)
            if isinstance(sample, Sample):
                sample = sample._replace(data=self.collate.prepare(data))
        multiple = getattr(self.collate, "sample_multiple", 1)
        if multiple == 1 or isinstance(sample, Skipped) or not isinstance(data, Mapping):
            return sample
        return sample._replace(padding=-length_of(data) % multiple)
