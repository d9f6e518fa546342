"""What a run does while it trains, and what it did; knows `StepInfo`, and no trainer."""

from odb_nodes.monitor.metrics import StepMeter, summarize, timed
from odb_nodes.monitor.monitor import Monitor
from odb_nodes.monitor.records import Record, RunRecords, read_run
from odb_nodes.monitor.reporting import Report, RunSummary, report

__all__ = [
    "Monitor",
    "Record",
    "Report",
    "RunRecords",
    "RunSummary",
    "StepMeter",
    "read_run",
    "report",
    "summarize",
    "timed",
]
