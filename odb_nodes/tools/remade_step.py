"""A step of one rank that was made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from odb_nodes._core.text import counted
from odb_nodes.step_info import StepInfo


@dataclass(frozen=True, kw_only=True)
class RemadeStep:
    """A step of one rank, made again.

    Attributes:
        rank: the rank.
        info: its `StepInfo`; `keys`, `row_sources` and `left_out` say which samples.
        tokens: length of each sample, in the order of the rows.
        targets: supervised tokens of each sample.
        batch: its batch, bit for bit; `None` of a filler step that a ledger has recorded, which
            does not say of which sample it was.
    """

    rank: int
    info: StepInfo
    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    batch: Mapping[str, Any] | None

    def __str__(self) -> str:
        info = self.info
        head = (
            f"rank {self.rank}, epoch {info.epoch}, step {info.step}: "
            f"{counted(info.local_samples, 'sample')}, "
            f"{info.local_targets:,} of {counted(info.optimizer_targets, 'target')}, "
            f"loss_scale {info.loss_scale:.6g}{', filler' if info.is_filler else ''}"
        )
        rows = zip(info.row_sources, info.keys, self.tokens, self.targets, strict=True)
        lines = [
            f"  {f'{source} ' if source else ''}{key}: "
            f"{counted(tokens, 'token')}, {counted(targets, 'target')}"
            for source, key, tokens, targets in rows
        ]
        out = [f"  left out: {one.source} {one.key} ({one.reason})" for one in info.left_out]
        return "\n".join([head, *lines, *out])

    def as_dict(self) -> dict[str, Any]:
        """Return the step as plain data and tensors."""
        info = vars(self.info) | {
            "own_sources": sorted(self.info.own_sources),
            "local_sources": {name: (*one,) for name, one in self.info.local_sources.items()},
            "left_out": [(*one,) for one in self.info.left_out],
        }
        return {
            "rank": self.rank,
            "info": info,
            "tokens": list(self.tokens),
            "targets": list(self.targets),
            "batch": None if self.batch is None else dict(self.batch),
        }
