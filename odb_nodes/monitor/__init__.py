"""What a run does while it trains, and what it did; knows `StepInfo`, and no trainer."""

from odb_nodes.monitor.metrics import StepMeter, summarize, timed

__all__ = ["StepMeter", "summarize", "timed"]
