"""Public: plans of whole epochs, and what a step takes."""

from odb_nodes.core.planning import StepTime, plan_epoch

__all__ = ["StepTime", "plan_epoch"]
