"""What a run does while it trains, and what it did; knows `StepInfo`, and no trainer."""

from odb_nodes.monitor.loss_book import SampleLoss, read_losses, worst_samples
from odb_nodes.monitor.metrics import StepMeter, summarize, timed
from odb_nodes.monitor.monitor import Monitor
from odb_nodes.monitor.records import Record, RunRecords, read_run, scalars
from odb_nodes.monitor.reporting import Report, RunSummary, report
from odb_nodes.monitor.row_losses import RowLosses, row_losses
from odb_nodes.monitor.writers import RecordWriter

__all__ = [
    "Monitor",
    "Record",
    "RecordWriter",
    "Report",
    "RowLosses",
    "RunRecords",
    "RunSummary",
    "SampleLoss",
    "StepMeter",
    "read_losses",
    "read_run",
    "report",
    "row_losses",
    "scalars",
    "summarize",
    "timed",
    "worst_samples",
]
