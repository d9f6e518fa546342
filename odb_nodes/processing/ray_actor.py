"""What runs in an actor of a Ray cluster: it processes chunks, perhaps on another machine."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from odb_nodes._core.processes import keep_freed_memory
from odb_nodes.processing.chunk import ChunkProcessor, ChunkResult
from odb_nodes.processing.worker import KEPT_BYTES

__all__ = ["ChunkActor"]

Parts = list[np.ndarray[Any, Any]]


class ChunkActor:
    """Processes chunks, one at a time.

    What goes wrong is returned as a text: not every exception can be sent, and Ray's would hide it.
    """

    _processor: ChunkProcessor

    def begin(self, index: int, setup: bytes) -> str:
        """Get ready to process chunks."""
        self._pid = os.getpid()
        doing = "It could not unpickle its work"
        try:
            torch.set_num_threads(1)
            keep_freed_memory(KEPT_BYTES)
            self._processor, worker_init_fn = pickle.loads(setup)
            doing = "Its `worker_init_fn` raised"
            if worker_init_fn is not None:
                worker_init_fn(index)
        except BaseException:
            return f"{doing}:\n{traceback.format_exc()}"
        return ""

    def run(self, task: bytes) -> tuple[ChunkResult, Parts]:
        """Process a pickled chunk; return what became of it, and its results as arrays."""
        result = self._processor.run_pickled(task)
        if os.getpid() != self._pid:  # `process_fn` has forked, and this is the child
            os._exit(0)
        failure = result.failure
        if failure is not None:
            where = f"{failure.worker}, machine {socket.gethostname()!r}"
            failure = replace(failure, worker=where)
        parts = [np.asarray(part) for part in result.results]  # which Ray sends without a copy
        return replace(result, results=None, failure=failure), parts
