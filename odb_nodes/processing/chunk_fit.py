"""How many items go into the next chunk."""

from __future__ import annotations

from odb_nodes.processing.options import AUTO, WorkerOptions

_CHUNK_S = 0.02
_CHUNK_BYTES = 1 << 20
_GROWTH = 2  # from one chunk to the next: the first items may be cheap by chance


class ChunkFit:
    """Fits chunks to the time and the bytes that their items have taken so far.

    A chunk costs a message and two pickles, whatever is in it; one that takes long keeps the next
    batch waiting, while other workers are idle. What is in a chunk decides nothing else.

    Args:
        options: how processing runs. With a given `chunk_size`, and without workers, it stays.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self.items = options.first_chunk_samples
        """Items of the next chunk."""
        self._fits = options.chunk_size == AUTO and options.num_workers > 0
        # Two for each worker: one that it processes, and one that waits for it.
        shared = options.samples_ahead // max(1, 2 * options.num_workers)
        self._most = min(options.most_chunk_samples, max(1, shared))
        if self._fits:
            self.items = min(self.items, self._most)

    def note(self, items: int, seconds: float, size_bytes: int) -> None:
        """Note what a chunk has taken.

        Args:
            items: its items.
            seconds: that a worker was busy with it.
            size_bytes: of its results on their way here; 0 where they were not sent.
        """
        if not self._fits or not items:
            return
        share = max(seconds / _CHUNK_S, size_bytes / _CHUNK_BYTES, 1e-9)
        self.items = int(max(1, min(items / share, _GROWTH * self.items, self._most)))
