"""Activation checkpointing: less memory for a second forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from odb_nodes._support.checks import check_type

METHOD_NAMES = ("activation_checkpointing", "gradient_checkpointing")
"""Methods of transformers 5 and 4: `<name>_enable`, `<name>_disable`, `is_<name>`."""
REMEDY = "Pass `blocks=`, the modules to checkpoint."


class Checkpointing:
    """Activation checkpointing of a model, which `disable` turns off.

    Attributes:
        blocks: the checkpointed modules; empty if the model's own method chose them.
    """

    def __init__(self, blocks: Sequence[torch.nn.Module], disable: Callable[[], Any]) -> None:
        self.blocks = tuple(blocks)
        self._disable: Callable[[], Any] | None = disable

    def disable(self) -> None:
        """Turn checkpointing off. Idempotent."""
        if self._disable is not None:
            self._disable()
            self._disable = None


def enable_checkpointing(
    model: torch.nn.Module, *, blocks: Sequence[torch.nn.Module] | None = None
) -> Checkpointing:
    """Let a model keep only the inputs of its blocks, and recompute the activations in backward.

    Loss and gradients stay bitwise the same, dropout included, if the blocks are deterministic. The
    names in `state_dict` do not change. Models of transformers use their own method. For any other
    model, the blocks are wrapped in `torch.utils.checkpoint`; the default blocks are the modules of
    the `ModuleList` or `Sequential` with the most weights, among those with two or more modules,
    all of one class. A forward pass that changes a buffer of a wrapped block, as batch norm does in
    training, then raises a `RuntimeError`: the second forward pass would change it again.

    Args:
        model: the model.
        blocks: the modules to checkpoint, each called as a module in the forward pass.

    Returns:
        A `Checkpointing`, whose `disable` turns it off.

    Raises:
        TypeError: `model` is no module, or `blocks` are no list.
        ValueError: `model` has no such blocks, does not support checkpointing, or is checkpointed
            already.
    """
    check_type("model", model, torch.nn.Module)
    name = next((name for name in METHOD_NAMES if hasattr(model, f"{name}_enable")), None)
    chosen = list(model.modules())
    if blocks is not None:
        check_type("blocks", blocks, Iterable, "Pass a list of modules.")
        chosen = list(blocks)
        ids = {id(module) for module in model.modules()}
        is_listed_twice = len({*map(id, chosen)}) < len(chosen)
        if not chosen or is_listed_twice or any(id(block) not in ids for block in chosen):
            raise ValueError(
                "`blocks` must be one or more different modules of `model`, but are "
                f"{[type(block).__name__ for block in chosen]} instead."
            )
    if getattr(model, f"is_{name}", False) or any(map(_is_wrapped, chosen)):
        raise ValueError(
            f"`{type(model).__name__}` is checkpointed already: two callers cannot "
            "enable and disable it independently. Disable it first, or leave out this call."
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
        # A `partial` is copied together with its module; a closure is not.
        vars(block)["forward"] = partial(_forward, block, block.forward)

    def disable() -> None:
        for block, forward in zip(chosen, before, strict=True):
            del vars(block)["forward"]
            if forward is not None:
                vars(block)["forward"] = forward

    return Checkpointing(chosen, disable)


def _repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the children of the largest list of modules of one class."""
    lists = [
        list(module.children())
        for module in model.modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
    ]
    repeated = [blocks for blocks in lists if len(blocks) > 1 and len({*map(type, blocks)}) == 1]
    if not repeated:
        raise ValueError(
            f"`{type(model).__name__}` has no `ModuleList` or `Sequential` of two or more modules "
            f"of one class, so its blocks cannot be chosen. {REMEDY}"
        )
    return max(repeated, key=lambda blocks: sum(map(_num_weights, blocks)))


def _num_weights(block: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in block.parameters())


def _is_wrapped(block: torch.nn.Module) -> bool:
    forward = vars(block).get("forward")
    return isinstance(forward, partial) and forward.func is _forward


def _forward(block: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    before = {name: (buffer, buffer._version) for name, buffer in block.named_buffers()}
    output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
    for name, buffer in block.named_buffers():
        earlier, version = before.get(name, (None, 0))
        if buffer is not earlier or buffer._version != version:
            raise RuntimeError(
                f"`{type(block).__name__}` changes its buffer `{name}` in its forward pass, which "
                "activation checkpointing runs twice. Pass `blocks=` without it, or replace it."
            )
    return output
