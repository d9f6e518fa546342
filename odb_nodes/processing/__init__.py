"""Run the user's processing in parallel: workers, transport, and the node on top of them."""

from odb_nodes.processing.parallel_processor import ParallelProcessor
from odb_nodes.processing.pools import WorkerOptions

__all__ = ["ParallelProcessor", "WorkerOptions"]
