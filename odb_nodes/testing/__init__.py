"""For tests of your own: the checkpoint contract as one assertion, and a memory of a set size."""

from odb_nodes.testing.resuming import ResumeReport, assert_resumes_exactly
from odb_nodes.testing.saved_tensors import SavedTensorMeter

__all__ = ["ResumeReport", "SavedTensorMeter", "assert_resumes_exactly"]
