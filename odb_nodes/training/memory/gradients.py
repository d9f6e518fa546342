"""Gradients of a step that may be recomputed: accumulated on this rank, then averaged once."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from odb_nodes._compat.torch import is_sharded, leaves_of

Kind = Literal["local", "ddp", "sharded"]
"""How ranks compute a step. "local": alone. "ddp": alone, then all ranks average their gradients.
"sharded": together, with collectives in forward and backward."""


def kind_of(model: nn.Module) -> Kind:
    """Return how ranks compute a step of a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be an `nn.Module`, but is `{type(model).__name__}` instead.")
    if overrides_backward(model):
        raise TypeError(
            f"`{type(model).__name__}` overrides `backward`, which cannot be computed in parts. "
            "Pass a plain module, DDP or FSDP."
        )
    if has_collectives(model):
        return "sharded"
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise TypeError(
            f"`{type(model).__name__}` contains a DDP model, which averages gradients before "
            "all ranks agree. Wrap the whole model by DDP."
        )
    return "local"


def has_collectives(model: nn.Module) -> bool:
    """Tell whether forward or backward has collectives: sharded weights, or `SyncBatchNorm`."""
    modules = model.modules()
    return is_sharded(model) or any(isinstance(module, nn.SyncBatchNorm) for module in modules)


def overrides_backward(model: nn.Module) -> bool:
    """Tell whether a model overrides torch's backward, as DeepSpeed's engine does."""
    # `LightningModule.backward` calls torch's, and manual optimization does not call it.
    is_lightning = hasattr(type(model), "manual_backward")
    return callable(getattr(model, "backward", None)) and not is_lightning


def check_has_all(model: nn.Module, loss: torch.Tensor) -> None:
    """Raise a `TypeError` if a loss trains parameters outside of a model."""
    ids = {id(parameter) for parameter in model.parameters()}
    outside = [
        leaf for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter) and id(leaf) not in ids
    ]
    if outside:
        raise TypeError(
            f"`loss_fn` trains {len(outside)} parameters that `model` does not have, such as one "
            f"of shape {tuple(outside[0].shape)}: if the step is recomputed, their gradients count "
            "twice. Put all trained parameters into one module."
        )


def check_no_gradients(model: nn.Module) -> None:
    """Raise a `RuntimeError` if a parameter has a gradient that is not 0."""
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if grads and any(bool(grad.any()) for grad in grads):
        raise RuntimeError(
            "the parameters have gradients before `step.backward`, and recomputing the step would "
            "lose them. Call `optimizer.zero_grad()` at the end of each step."
        )


def scale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply the gradients of a model."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def give_gradients(model: nn.Module) -> None:
    """Set the gradients of a model to 0 if it has none: optimizers and scalers need some."""
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    if all(weight.grad is None for weight in parameters):
        for weight in parameters:
            weight.grad = torch.zeros_like(weight)


def average_gradients(model: DistributedDataParallel) -> None:
    """Average the gradients over the ranks of a DDP model, as its backward does without hooks."""
    group = model.process_group
    ranks = dist.get_world_size(model.process_group)
    parameters = [
        weight
        for name, weight in model.module.named_parameters()
        if weight.requires_grad and name not in model.parameters_to_ignore
    ]
    if not parameters:
        return
    device = parameters[0].device
    has_grad = torch.tensor([weight.grad is not None for weight in parameters], dtype=torch.uint8)
    has_grad = has_grad.to(device)
    dist.all_reduce(has_grad, dist.ReduceOp.MAX, group=group)
    works = []
    for parameter, is_trained in zip(parameters, has_grad.tolist(), strict=True):
        if not is_trained:  # no rank has trained it
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.div_(ranks)
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        work.wait()
