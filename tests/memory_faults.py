"""Models that run out of memory where a test wants them to."""

import torch
from gradients import LanguageModel, mean_loss

PLACES = ("forward", "backward")


class FailsInBackward(torch.autograd.Function):
    """The identity, whose backward runs out of memory."""

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        raise torch.OutOfMemoryError("out of memory, as the test wants it")


def fail(model, method, fails, place="forward"):
    """Let a method of a model run out of memory in training, and return the model.

    Args:
        fails: called with the shape of the method's first argument: whether it runs out of memory.
        place: where, "forward" or "backward".
    """
    whole = getattr(model, method)

    def failing(first, *args, **kwargs):
        is_out = model.training and fails(*first.shape[:2])
        value = whole(first, *args, **kwargs)
        if is_out and place == "forward":
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return FailsInBackward.apply(value) if is_out else value

    setattr(model, method, failing)
    return model


class FailingModel(LanguageModel):
    """A language model that runs out of memory for some batches.

    Args:
        fails: called with (rows, width) of each batch: whether it runs out of memory.
        place: where, "forward" or "backward".
    """

    def __init__(self, fails, place="forward", **options):
        super().__init__(**options)
        self.fails, self.place, self.calls = fails, place, []

    def forward(self, input_ids, position_ids=None):
        self.calls.append(tuple(input_ids.shape))
        fails = self.fails(*input_ids.shape)
        logits = super().forward(input_ids, position_ids)
        if fails and self.place == "forward":
            raise torch.OutOfMemoryError("out of memory, as the test wants it")
        return FailsInBackward.apply(logits) if fails else logits


def never(rows, width):
    """No batch runs out of memory."""
    return False


def above(cost):
    """Batches of more tokens than this, padding included, run out of memory."""
    return lambda rows, width: rows * width > cost


def at_call(numbers, least_rows=2):
    """Batches of several samples run out of memory in the calls of these numbers."""
    calls = iter(range(1 << 30))
    return lambda rows, width: next(calls) in numbers and rows >= least_rows


def loss_of(model):
    return lambda batch: mean_loss(model, batch)
