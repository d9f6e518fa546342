"""Samples that a node has pulled from its source, before they go into the pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

from odb_nodes.core.sample_block import SampleBlock


class PulledSamples:
    """Samples that were pulled and are not in the pool yet."""

    def __init__(self, pulled: int) -> None:
        self.stop = pulled  # samples of the epoch that were pulled so far
        self.ordinals: list[int] = []  # ordinals of the admitted samples
        self._admitted: list[Any] = []  # blocks, and lists of samples

    def add(self, pulled: Sequence[Any], rows: Sequence[int], count: int) -> None:
        """Add `count` pulled samples, of which `rows` are admitted."""
        self.ordinals += [self.stop + row for row in rows]
        self.stop += count
        if isinstance(pulled, SampleBlock):
            self._admitted.append(pulled if len(rows) == len(pulled) else pulled.take(rows))
        else:
            self._admitted.append([pulled[row] for row in rows])

    def block(self) -> SampleBlock:
        """Return the admitted samples."""
        blocks: list[SampleBlock] = []
        for kind, parts in groupby(self._admitted, type):
            if kind is SampleBlock:
                blocks += parts
            else:
                blocks.append(SampleBlock.of([*chain.from_iterable(parts)]))
        return SampleBlock.joined(blocks)
