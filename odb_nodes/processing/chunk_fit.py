"""How many items go into the next chunk, and how many may be in flight."""

from __future__ import annotations

from odb_nodes.processing.options import AUTO, WorkerOptions

_FIRST_ITEMS = 4
_CHUNK_S = 0.02
_CHUNK_BYTES = 1 << 20
_GROWTH = 2  # from one chunk to the next: the first items may be cheap by chance
_NEWS = 0.25  # weight of the last chunk in what an item is taken to have


class ChunkFit:
    """Fits chunks to the time and the bytes that their items have taken so far.

    A chunk costs a message and two pickles, whatever is in it; one that takes long keeps the next
    batch waiting, while other workers are idle. What is in a chunk decides nothing else.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.items = options.nominal_chunk_samples
        """Items of the next chunk."""
        self._fits = options.chunk_size == AUTO and options.num_workers > 0
        # Two for each worker: one that it processes, and one that waits for it.
        self._chunks = 2 * options.num_workers
        shared = options.samples_ahead // max(1, self._chunks)
        self._most = min(options.most_chunk_samples, max(1, shared))
        if self._fits:
            self.items = min(_FIRST_ITEMS, self._most)
        self._ahead, self._most_bytes = options.samples_ahead, options.in_flight_bytes
        self._items_seen = 0
        self._item_bytes = 0.0

    @property
    def items_ahead(self) -> int:
        """Items that may be in flight, beyond the chunk in hand.

        There are few before it is known what they have: twice as many as have come.
        """
        if self._most_bytes is None:
            return self._ahead
        most: float = 2 * self._items_seen
        if self._item_bytes:
            most = min(most, self._most_bytes / self._item_bytes)
        return min(self._ahead, max(self._chunks * self.items, int(most)))

    def note(self, items: int, seconds: float, size_bytes: int) -> None:
        """Note what a chunk has taken."""
        if not items:
            return
        self._items_seen += items
        if size_bytes:
            known = self._item_bytes or size_bytes / items
            self._item_bytes = known + _NEWS * (size_bytes / items - known)
        if not self._fits:
            return
        share = max(seconds / _CHUNK_S, size_bytes / _CHUNK_BYTES, 1e-9)
        self.items = int(max(1, min(items / share, _GROWTH * self.items, self._most)))
