"""Count the samples and tokens of each source that a run has trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from odb_nodes._support.checks import check_type
from odb_nodes._support.text import markdown_table
from odb_nodes.core.sources.mixing import check_same_names
from odb_nodes.core.step_info import SourceCount, StepInfo, add_counts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SourceReport"]


class SourceReport:
    """Running samples and tokens by source, over steps, epochs and resumes.

        report = SourceReport()
        for batch in loader:
            report.add(pop_step_info(batch))
        print(report.over_ranks())

    It counts the samples of this rank, without fillers.

    Args:
        counts: name of the source -> its counts so far, to continue from.
    """

    def __init__(self, counts: Mapping[str, SourceCount] | None = None) -> None:
        self._counts = dict(counts or {})

    @property
    def counts(self) -> dict[str, SourceCount]:
        """Samples and unpadded tokens so far, by source."""
        return dict(self._counts)

    def add(self, info: StepInfo) -> None:
        """Add the counts of a step.

        Raises:
            TypeError: `info` is no `StepInfo`.
        """
        check_type("info", info, StepInfo, "Pass what `pop_step_info(batch)` returns.")
        if info.local_sources:
            self._counts = add_counts([*self._counts.items(), *info.local_sources.items()])

    def shares(self, by: Literal["samples", "tokens"] = "samples") -> dict[str, float]:
        """Return each source's share of all samples or tokens so far; the shares add up to 1."""
        total = sum(getattr(count, by) for count in self._counts.values())
        return {name: getattr(count, by) / total for name, count in self._counts.items()}

    def over_ranks(self, process_group: ProcessGroup | None = None) -> SourceReport:
        """Return the sums over all ranks. A collective: all ranks call it, at the same point.

        Args:
            process_group: the ranks to sum over. Default: all ranks of the job; this rank alone if
                torch.distributed is not initialised.
        """
        parts: list[Any] = [self._counts]
        if dist.is_available() and dist.is_initialized():
            parts *= dist.get_world_size(process_group)
            dist.all_gather_object(parts, self._counts, group=process_group)
        return SourceReport(add_counts(count for part in parts for count in part.items()))

    def table(self, weights: Mapping[str, float] | None = None) -> str:
        """Return the counts and shares as a table in markdown.

        Args:
            weights: name of the source -> weight, shown beside its shares.

        Raises:
            TypeError, ValueError: `weights` is no dict, or lacks the weight of a source.
        """
        counts = dict(self._counts)
        if weights is not None:
            if isinstance(weights, Mapping):  # Some sources may have no counts yet.
                counts = dict.fromkeys(weights, SourceCount(0, 0)) | counts
            check_same_names("weights", weights, "sources", counts)
        total = sum(weights.values()) if weights else 1.0
        samples, tokens = self.shares("samples"), self.shares("tokens")
        rows = []
        for name, count in sorted(counts.items()):
            row = {
                "source": name,
                "samples": f"{count.samples:,}",
                "of samples": f"{samples.get(name, 0):.2%}",
                "tokens": f"{count.tokens:,}",
                "of tokens": f"{tokens.get(name, 0):.2%}",
            }
            rows.append(row | ({"weight": f"{weights[name] / total:.2%}"} if weights else {}))
        return markdown_table(rows) if rows else "no samples of any source so far"

    def __str__(self) -> str:
        return self.table()

    def state_dict(self) -> dict[str, list[int]]:
        """Return the counts, as plain data for a checkpoint."""
        return {name: list(count) for name, count in self._counts.items()}

    def load_state_dict(self, state_dict: Mapping[str, list[int]]) -> None:
        """Continue from the counts of a checkpoint."""
        self._counts = {name: SourceCount(*count) for name, count in state_dict.items()}
