"""Activation checkpointing: less memory for a second forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from odb_nodes._core.checks import check_type

OWN_METHODS = ("activation_checkpointing", "gradient_checkpointing")
"""Of transformers, since version 5 and before: `<name>_enable`, `<name>_disable`, `is_<name>`."""
REMEDY = "Pass `blocks=`, the modules to checkpoint."


class Checkpointing:
    """Activation checkpointing of a model, which can be disabled again.

    Attributes:
        blocks: the modules that are computed again; empty where the model's own method chose them.
    """

    def __init__(self, blocks: Sequence[torch.nn.Module], disable: Callable[[], Any]) -> None:
        self.blocks = tuple(blocks)
        self._disable: Callable[[], Any] | None = disable

    def disable(self) -> None:
        """Disable it. Does nothing the second time."""
        if self._disable is not None:
            self._disable()
            self._disable = None


def enable_checkpointing(
    model: torch.nn.Module, *, blocks: Sequence[torch.nn.Module] | None = None
) -> Checkpointing:
    """Let a model keep only the inputs of its blocks, and compute the rest again in backward.

    Loss and gradients stay bitwise the same, dropout included, where a block computes twice the
    same. The names of weights in `state_dict` do, too. A model of transformers does it by its own
    method. In any other one the blocks are wrapped in `torch.utils.checkpoint`: by default the
    `ModuleList` or `Sequential` of two or more modules of one class that has the most weights.
    A block that changes a buffer in its forward pass, which it would do twice, as a batch norm does
    in training, is an error then.

    Args:
        model: the model.
        blocks: the modules to checkpoint, each called on its own in the forward pass.

    Returns:
        What disables it again.

    Raises:
        TypeError: `model` is no module, or `blocks` are no list.
        ValueError: there are no such blocks, the model supports none, or it is checkpointed
            already.
    """
    check_type("model", model, torch.nn.Module)
    name = next((one for one in OWN_METHODS if hasattr(model, f"{one}_enable")), None)
    chosen = list(model.modules())
    if blocks is not None:
        check_type("blocks", blocks, Iterable, "Pass a list of modules.")
        chosen = list(blocks)
        if not chosen or any(all(one is not block for one in model.modules()) for block in chosen):
            raise ValueError(
                "`blocks` must be modules of `model`, one or more, but are "
                f"{[type(one).__name__ for one in chosen]}, some of which are not in it."
            )
    if getattr(model, f"is_{name}", False) or any(map(_is_wrapped, chosen)):
        raise ValueError(
            f"`{type(model).__name__}` is checkpointed already, so that disabling it once would "
            "disable it for all who have enabled it. Disable it first, or leave this out."
        )
    if blocks is None and name is not None:
        if not getattr(model, "supports_gradient_checkpointing", True):
            raise ValueError(
                f"`{type(model).__name__}` does not support activation checkpointing. {REMEDY}"
            )
        getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
        return Checkpointing((), getattr(model, f"{name}_disable"))
    chosen = _repeated_blocks(model) if blocks is None else chosen
    before = [vars(block).get("forward") for block in chosen]
    for block in chosen:
        # A `partial` of a bound method is copied together with its module; a closure is not.
        vars(block)["forward"] = partial(_forward, block.forward)

    def disable() -> None:
        for block, forward in zip(chosen, before, strict=True):
            del vars(block)["forward"]
            if forward is not None:
                vars(block)["forward"] = forward

    return Checkpointing(chosen, disable)


def _repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the children of the largest list of modules of one class."""
    lists = [
        list(one.children())
        for one in model.modules()
        if isinstance(one, (torch.nn.ModuleList, torch.nn.Sequential))
    ]
    repeated = [blocks for blocks in lists if len(blocks) > 1 and len({*map(type, blocks)}) == 1]
    if not repeated:
        raise ValueError(
            f"`{type(model).__name__}` has no `ModuleList` or `Sequential` of two or more modules "
            f"of one class, so its blocks are not known. {REMEDY}"
        )
    return max(
        repeated, key=lambda blocks: sum(w.numel() for one in blocks for w in one.parameters())
    )


def _is_wrapped(block: torch.nn.Module) -> bool:
    forward = vars(block).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    block = forward.__self__
    before = {name: (buffer, buffer._version) for name, buffer in block.named_buffers()}
    output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
    for name, buffer in block.named_buffers():
        known, version = before.get(name, (None, 0))
        if buffer is not known or buffer._version != version:
            raise RuntimeError(
                f"`{type(block).__name__}` changes its buffer `{name}` in its forward pass, which "
                "activation checkpointing makes twice. Pass `blocks=` without it, or replace it."
            )
    return output
