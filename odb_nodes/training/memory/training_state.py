"""What trial steps change: copied before them, and restored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from odb_nodes._compat.torch import forget_step
from odb_nodes._support.checks import check_type, describe
from odb_nodes._support.seeds import GENERATORS, load_rngs, put_back, save_rngs, state_of


class TrainingState:
    """CPU copies of everything that steps change in `states`, and of the generators."""

    def __init__(self, states: Sequence[Any]) -> None:
        check_type(
            "states", states, list | tuple, "Pass a list of models, optimizers and the like."
        )
        self._optimizers: list[tuple[Optimizer, Any]] = []
        self._groups: list[tuple[dict[str, Any], Any]] = []
        self._loaders: list[tuple[Callable[[Any], Any], Any]] = []
        self._scalers = [state for state in states if isinstance(state, torch.amp.GradScaler)]
        modules: dict[nn.Module, None] = {}
        for holder in states:
            if isinstance(holder, nn.Module):
                modules |= dict.fromkeys(holder.modules())
            elif isinstance(holder, Optimizer):
                self._optimizers.append((holder, _copied(dict(holder.state))))
                options = ({**group, "params": None} for group in holder.param_groups)
                self._groups += zip(holder.param_groups, map(_copied, options), strict=True)
            elif isinstance(holder, GENERATORS):
                self._loaders.append((partial(put_back, holder), _copied(state_of(holder))))
            elif hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict"):
                self._loaders.append((holder.load_state_dict, _copied(holder.state_dict())))
            else:
                raise TypeError(
                    "`states` must be models, optimizers, random generators and objects with "
                    f"`state_dict` and `load_state_dict`, but one is {describe(holder)} instead."
                )
        self._loaders.append((load_rngs, _copied(save_rngs())))
        weights = [weight for module in modules for weight in module.parameters(recurse=False)]
        weights += [weight for group, _ in self._groups for weight in group["params"]]
        self._values = {weight: (_copied(weight.data), _copied(weight.grad)) for weight in weights}
        self._buffers = [
            (module._buffers, name, _copied(buffer))
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        self.weights = [weight for weight in self._values if weight.requires_grad]

    def check_saved(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raise an error if an optimizer is about to change weights that are not saved here."""
        is_saved = any(saved.state is optimizer.state for saved, _ in self._optimizers)
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        if not is_saved or any(weight not in self._values for weight in weights):
            raise RuntimeError(
                f"`train_step` makes a step of an `{type(optimizer).__name__}` that is not in "
                "`states`, so its weights could not be restored. Pass `states=[model, optimizer]`, "
                "and everything else that the steps change."
            )

    def restore_values(self) -> None:
        """Restore all but gradients and optimizer states, which keep their memory."""
        for weight, (value, _) in self._values.items():
            weight.data.copy_(value.data)
        for buffers, name, saved in self._buffers:
            buffers[name] = _put_back(buffers.get(name), saved)
        for load, state in self._loaders:
            load(_copied(state))
        for scaler in self._scalers:
            forget_step(scaler)

    def restore(self) -> None:
        """Restore everything."""
        for weight, (_, gradient) in self._values.items():
            weight.grad = _put_back(weight.grad, gradient)
        for optimizer, state in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update(_copied(state))
        for group, options in self._groups:
            weights = group["params"]
            group.clear()
            group.update(_copied(options), params=weights)
        self.restore_values()


class _Tensor(NamedTuple):
    """A copy of a tensor on the CPU, and the device of the tensor."""

    data: torch.Tensor
    device: torch.device


def _copied(value: Any) -> Any:
    """Return a copy with a `_Tensor` for each tensor; from such a copy, return tensors again."""
    if isinstance(value, _Tensor):
        return value.data.to(value.device, copy=True)
    if isinstance(value, torch.Tensor):
        return _Tensor(value.detach().to("cpu", copy=True), value.device)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


def _put_back(current: torch.Tensor | None, saved: _Tensor | None) -> Any:
    """Return the saved value, in the current tensor if shape, dtype and device match."""
    if current is None or saved is None:
        return None if saved is None else _copied(saved)
    kept, device = saved
    if (current.shape, current.dtype, current.device) != (kept.shape, kept.dtype, device):
        return _copied(saved)
    current.data.copy_(kept)
    return current
