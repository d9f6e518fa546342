"""Computes a loss of a trainer as if it had not been computed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import send_to_device

DATASETS = ("train_dataset", "eval_dataset")  # They may be long lists, and no loss changes them.


def loss_of(twin: Any, batch: Mapping[str, Any], items: int) -> float:
    """Return the loss of a batch without gradients, and leave the generators as they were."""
    model, device = twin.model_wrapped, twin.args.device
    model.eval()  # The `Trainer` sets it to training at each step.
    inputs, told = send_to_device(dict(batch), device), torch.tensor(items, device=device)
    generators = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(generators):
        return float(twin.compute_loss(model, inputs, num_items_in_batch=told))


def twin_of(trainer: Any) -> Any:
    """Return a copy of a trainer with the same parts, which computes losses without a trace.

    Trainers gather metrics where they compute a loss, in lists and dicts of their own, or log them.
    So the containers and the `TrainerState` of the copy are copies, too, and it does not log.
    """
    twin = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if name not in DATASETS:
            vars(twin)[name] = _copied(value)
    twin.state, twin.control = copy.copy(trainer.state), copy.copy(trainer.control)
    twin.log = _ignore
    return twin


def _ignore(*_: Any, **__: Any) -> None:
    """Log nothing."""


def _copied(value: Any) -> Any:
    """Return a container of builtin kinds, with the containers in it, as a copy; or the value."""
    if not isinstance(value, (dict, list, set, deque)):
        return value
    copied: Any = copy.copy(value)  # keeps what makes the values of a defaultdict
    if isinstance(value, dict):
        copied.update((key, _copied(one)) for key, one in value.items())
    elif not isinstance(value, set):  # whose members are hashable, so no containers
        for place, one in enumerate(value):
            copied[place] = _copied(one)
    return copied
