"""Processing of items that a mixer routes, by their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from odb_nodes._core.hashing import stable_names
from odb_nodes._core.seeds import declares_draws
from odb_nodes.errors import SampleError
from odb_nodes.sample import Sample, Skipped, SourceItem


class PerSource:
    """Processes the items of each source with a function of its own.

    Args:
        functions: name of the source -> function of an item. They must be picklable where workers
            are processes that are not forked.
    """

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        self._functions = dict(functions)

    @property
    def fingerprint_name(self) -> str:
        """The sources, each with the name of its function."""
        return f"{type(self).__name__}({stable_names(self._functions)})"

    @property
    def draws_random_numbers(self) -> bool | None:
        """`False` where all functions say so; `None` where it is not known."""
        quiet = all(declares_draws(one) is False for one in self._functions.values())
        return False if quiet else None

    def __call__(self, routed: SourceItem) -> Sample | Skipped | SourceItem:
        """Return what the function of the item's source makes of it, with its name."""
        try:
            function = self._functions[routed.source]
        except KeyError:
            raise SampleError(
                f"`PerSource` has no function for source {routed.source!r}, but for "
                f"{sorted(self._functions)}."
            ) from None
        result = function(routed.item)
        if isinstance(result, (Sample, Skipped)):
            return result.of_source(routed.source)
        return SourceItem(routed.source, result)
