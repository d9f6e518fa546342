"""What the graphs of an `ODBDataLoader` count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torchdata.nodes import BaseNode

from odb_nodes.contract.graph import length_of, walk
from odb_nodes.loader.rank_graph import RankGraph
from odb_nodes.processing import ParallelProcessor


class GraphCounts:
    """Base of `ODBDataLoader`: counts of this rank, over all virtual ranks that it hosts."""

    _graphs: Sequence[RankGraph]

    @property
    def accumulate(self) -> int:
        """Number of batches of an optimizer step."""
        return self._graphs[0].aligner.accumulate * len(self._graphs)

    @property
    def num_samples(self) -> int:
        """Number of samples of an epoch on this rank.

        Raises:
            TypeError: the dataset does not know its length.
        """
        return sum(length_of(graph.samples) for graph in self._graphs)

    @property
    def replayed_samples(self) -> int:
        """Number of samples that the last restore processed again."""
        return self._total("replayed_samples", "bucketer", "aligner")

    @property
    def oversize_samples(self) -> int:
        """Number of samples of this epoch so far that exceeded the budget on their own."""
        return self._total("oversize_samples", "bucketer")

    @property
    def dropped_samples(self) -> int:
        """Number of samples of this epoch so far that `oversize="drop"` left out."""
        return self._total("dropped_samples", "bucketer")

    @property
    def skipped_samples(self) -> dict[str, int]:
        """Number of samples of this epoch so far that processing skipped, by reason."""
        reasons = [Counter(graph.bucketer.skipped_samples) for graph in self._graphs]
        return dict(sum(reasons, Counter()))

    @property
    def excluded_samples(self) -> int:
        """Number of samples of this epoch so far that `exclude` left out."""
        return self._total("excluded_samples", "bucketer")

    @property
    def unemitted_samples(self) -> int:
        """Number of samples of this rank and epoch that `uneven="stop"` left over."""
        return self._total("unemitted_samples", "aligner")

    def _total(self, count: str, *nodes: str) -> int:
        """Return the sum of a count of some nodes of each graph."""
        return sum(getattr(getattr(one, node), count) for one in self._graphs for node in nodes)

    @property
    def exchange_wait_s(self) -> float:
        """Seconds that the thread that makes the batches has waited for other ranks so far."""
        return self._graphs[0].aligner.exchange_wait_s

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running worker processes."""
        processors = (one for one in self._nodes_of_samples() if isinstance(one, ParallelProcessor))
        return [pid for one in processors for pid in one.worker_pids]

    def _nodes_of_samples(self) -> Iterator[BaseNode[Any]]:
        for graph in self._graphs:
            yield from walk(graph.samples)
