"""Records of a training run, and reports of them; independent of any trainer."""

from odb_nodes.training.monitor.counts import StepMeter, summarize, timed
from odb_nodes.training.monitor.losses import (
    RowLosses,
    SampleLoss,
    read_losses,
    row_losses,
    worst_samples,
)
from odb_nodes.training.monitor.monitor import Monitor
from odb_nodes.training.monitor.records import Record, RunRecords, read_run, scalars
from odb_nodes.training.monitor.reports import Report, RunSummary, report
from odb_nodes.training.monitor.step_times import fitted_step_time
from odb_nodes.training.monitor.writers import MlflowWriter, RecordWriter, WandbWriter

__all__ = [
    "MlflowWriter",
    "Monitor",
    "Record",
    "RecordWriter",
    "Report",
    "RowLosses",
    "RunRecords",
    "RunSummary",
    "SampleLoss",
    "StepMeter",
    "WandbWriter",
    "fitted_step_time",
    "read_losses",
    "read_run",
    "report",
    "row_losses",
    "scalars",
    "summarize",
    "timed",
    "worst_samples",
]
