"""What a worker process does all day: it processes chunks, and makes batches in between."""

from __future__ import annotations

import os
import pickle
import select
import socket
import time
import traceback
from collections import deque
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult
from odb_nodes.processing.collate_request import INLINE, BatchResult, CollateRequest
from odb_nodes.processing.messages import Message, Reply
from odb_nodes.processing.shared_pages import (
    NO_FILE,
    SHARED_BYTES,
    FilePool,
    Lease,
    PageFile,
    Pages,
    split_parts,
)
from odb_nodes.processing.transport import mapped, pack, receive, send, unpack

__all__ = ["WorkerLoop"]

_CHUNK_BYTES = 64 << 10  # that are worth a file
_POLL_S = 0.001  # between two looks, within a chunk, at whether a batch is to be made


class WorkerLoop:
    """Processes chunks in order; a batch is made once it is asked for, also within a chunk."""

    def __init__(self, connection: socket.socket, processor: ChunkProcessor) -> None:
        self._connection = connection
        self._waiting: deque[tuple[int, Pages]] = deque()  # chunks, pickled
        self._newest = 0  # generation: chunks of an older one are skipped
        self._chunks: dict[int, _Chunk] = {}  # that batches are made of
        self._dropped: deque[int] = deque()  # of them, those forgotten, and read no more
        self._files = FilePool()
        self._maker = processor.maker
        self._next_look_s = 0.0
        self._batches_s = 0.0  # spent on batches within a chunk
        self._own_pid = os.getpid()
        self._process_fn = processor.process_fn
        self._processor = processor
        if self._maker is not None:
            self._processor = replace(processor, process_fn=self._process_item)
            self._poll = select.poll()
            self._poll.register(connection, select.POLLIN)

    def run(self) -> None:
        """Work until the trainer closes the connection."""
        while True:
            # Everything that has come is read first: the newest generation decides what is stale.
            while not self._waiting or wait([self._connection], 0):
                self._read()
            generation, task = self._waiting.popleft()
            self._batches_s = 0.0
            stale = generation != self._newest
            result = ChunkResult([], None) if stale else self._processor.run_pickled(task)
            self._end_child()
            seconds = max(0.0, result.seconds - self._batches_s)
            self._reply(replace(result, results=None, seconds=seconds), *result.results)

    def _reply(self, result: ChunkResult | BatchResult, *parts: memoryview) -> None:
        """Send a result, with its content, if it has one, as the last part."""
        content: list[PageFile | bytes] = []
        file = NO_FILE
        if result.content is not None:
            # A chunk is worth a file sooner than a batch: other workers read it, too.
            least_bytes = _CHUNK_BYTES if isinstance(result, ChunkResult) else SHARED_BYTES
            joined, file = self._files.join(result.content, least_bytes)
            content = [joined]
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        reply = Reply(replace(result, content=None), bool(content), file, dropped)
        send(self._connection, [pickle.dumps(reply), *parts, *content])

    def _process_item(self, item: Any) -> Any:
        """Make the batches that are asked for by now, then process an item."""
        if (now := time.perf_counter()) >= self._next_look_s and os.getpid() == self._own_pid:
            try:
                while self._poll.poll(0):
                    self._read()
            except BaseException as error:  # It would pass for an error of the item.
                if not isinstance(error, (EOFError, ConnectionError)):
                    traceback.print_exc()
                os._exit(1)
            after = time.perf_counter()
            self._batches_s += after - now
            self._next_look_s = after + _POLL_S
        return self._process_fn(item)

    def _read(self) -> None:
        head, *parts = receive(self._connection)
        message: Message = pickle.loads(mapped(head))
        for number in message.forgotten:
            self._chunks.pop(number, None)
        self._files.take_back(message.free)
        self._newest = message.generation
        if message.has_task:
            self._waiting.append((message.generation, mapped(parts[0])))
        elif message.request is not None:
            made = self._make(message.request, parts)
            self._end_child()
            self._reply(made)

    def _end_child(self) -> None:
        """End a process that a function of the user has forked: it must not answer, too."""
        if os.getpid() != self._own_pid:
            os._exit(0)

    def _make(self, request: CollateRequest, parts: list[Pages | PageFile]) -> BatchResult:
        try:
            for number, content in zip(request.chunks, parts, strict=False):
                if isinstance(content, PageFile):
                    content.lease = Lease(number, self._dropped.append)
                self._chunks[number] = _Chunk(content)
            inline = [*unpack(split_parts(parts[-1]))] if request.has_inline else []
            samples = [
                inline[row] if number == INLINE else self._chunks[number].data()[row]
                for number, row in request.rows
            ]
            assert self._maker is not None
            batch = self._maker(samples, request.key, request.info)
            return BatchResult(pack(batch))
        except BaseException as error:
            return BatchResult(None, f"{type(error).__name__}: {error}".removesuffix(": "))


class _Chunk:
    """The data of samples; unpacked when one of them is first asked for."""

    def __init__(self, content: PageFile | Pages) -> None:
        self._content: PageFile | Pages | None = content
        self._data: list[Any] = []

    def data(self) -> list[Any]:
        if self._content is not None:
            self._data, self._content = [*unpack(split_parts(self._content))], None
        return self._data
