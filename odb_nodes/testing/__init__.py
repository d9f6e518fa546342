"""Tools for your tests: the checkpoint contract as one assertion, and a limited memory."""

from odb_nodes.testing.resuming import ResumeReport, assert_resumes_exactly
from odb_nodes.testing.saved_tensors import SavedTensorMeter

__all__ = ["ResumeReport", "SavedTensorMeter", "assert_resumes_exactly"]
