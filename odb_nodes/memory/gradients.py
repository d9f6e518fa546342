"""Gradients of a step that may be computed again: kept on this rank, then averaged once."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes._compat.torch import is_sharded, leaves_of

Kind = Literal["local", "ddp", "sharded"]
"""Who computes a step: this rank alone; this rank, and then all average their gradients; or all
ranks together, in collectives within forward and backward."""


def kind_of(model: nn.Module) -> Kind:
    """Return who computes a step of a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an `nn.Module`, but is `{type(model).__name__}` instead.")
    if has_own_backward(model):
        raise TypeError(
            f"`{type(model).__name__}` has a `backward` of its own, which cannot be computed in "
            "parts. Pass a plain module, DDP or FSDP."
        )
    if has_collectives(model):
        return "sharded"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if any(isinstance(one, DistributedDataParallel) for one in model.modules()):
        raise TypeError(
            f"`{type(model).__name__}` has a DDP model within, whose gradients cannot be kept on "
            "this rank until all agree. Wrap the whole model by DDP."
        )
    return "local"


def has_collectives(model: nn.Module) -> bool:
    """Tell whether ranks compute a model together: its parameters, or statistics, are shared."""
    return is_sharded(model) or any(isinstance(one, nn.SyncBatchNorm) for one in model.modules())


def has_own_backward(model: nn.Module) -> bool:
    """Tell whether the backward of a model is not torch's, as that of DeepSpeed's engine."""
    # That of a module of Lightning is torch's, and is not called where it optimizes by hand.
    is_lightning = hasattr(type(model), "manual_backward")
    return callable(getattr(model, "backward", None)) and not is_lightning


def check_has_all(model: nn.Module, loss: torch.Tensor) -> None:
    """Check that a loss trains no parameter but those of a model."""
    own = {id(one) for one in model.parameters()}
    others = [
        tuple(one.shape)
        for one in leaves_of(loss)
        if isinstance(one, nn.Parameter) and id(one) not in own
    ]
    if others:
        raise TypeError(
            f"`loss_fn` trains {len(others)} parameters that `model` does not have, such as one of "
            f"shape {others[0]}, whose gradients a step that is computed again would count twice. "
            "Put all that is trained into one module."
        )


def check_no_gradients(model: nn.Module) -> None:
    """Raise a `RuntimeError` if a parameter has a gradient that is not 0."""
    grads = [one.grad for one in model.parameters() if one.grad is not None]
    if grads and any(bool(grad.any()) for grad in grads):
        raise RuntimeError(
            "the parameters have gradients before `step.backward`, which a step that is computed "
            "again would lose. Call `optimizer.zero_grad()` at the end of each step."
        )


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply the gradients of a model."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def give_gradients(model: nn.Module) -> None:
    """Give a model gradients of 0 if it has none, so that what steps by them finds some."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    if all(one.grad is None for one in parameters):
        for one in parameters:
            one.grad = torch.zeros_like(one)


def average_gradients(model: DistributedDataParallel) -> None:
    """Average the gradients over the ranks of a model, as its own backward does without hooks."""
    group, ranks = model.process_group, dist.get_world_size(model.process_group)
    parameters = [
        one
        for name, one in model.module.named_parameters()
        if one.requires_grad and name not in model.parameters_to_ignore
    ]
    if not parameters:
        return
    device = parameters[0].device
    has_one = torch.tensor([one.grad is not None for one in parameters], dtype=torch.uint8)
    has_one = has_one.to(device)
    dist.all_reduce(has_one, dist.ReduceOp.MAX, group=group)
    works = []
    for parameter, has in zip(parameters, has_one.tolist(), strict=True):
        if not has:  # on no rank
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(ranks)
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()
