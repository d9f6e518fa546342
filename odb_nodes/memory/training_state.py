"""Keep what training steps change, and put it back bitwise."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odb_nodes._compat.torch import forget_step
from odb_nodes._core.checks import describe
from odb_nodes._core.seeds import GENERATORS, load_rngs, put_back, save_rngs, state_of
from odb_nodes.memory.failures import free_memory
from odb_nodes.memory.stateful_objects import STATEFUL, find_stateful

__all__ = ["TrainingState", "unchanged_training"]


class _Tensor(NamedTuple):
    """A copy of a tensor, on the CPU, and where the tensor is."""

    data: torch.Tensor
    device: torch.device


class TrainingState:
    """Weights, buffers, gradients, states of optimizers and others, and the random generators.

    It is kept on the CPU, so that it takes no memory of the device whose memory is measured.
    """

    def __init__(self, roots: Iterable[Any], states: Sequence[Any] = ()) -> None:
        for one in states:
            if not isinstance(one, (*STATEFUL, torch.Tensor)) and not hasattr(one, "state_dict"):
                raise TypeError(
                    "`states` must be models, optimizers and others with `state_dict` and "
                    f"`load_state_dict`, but one is {describe(one)} instead."
                )
        found = find_stateful((*states, *roots))
        self._modules = [one for one in found if isinstance(one, torch.nn.Module)]
        self._optimizers = [one for one in found if isinstance(one, Optimizer)]
        self._parameters = list(_parameters(found))
        self._own = {id(one) for one in self._parameters}
        self._weights = [_copied(one) for one in self._parameters]
        self._gradients = [_copied(one.grad) for one in self._parameters]
        self._buffers = [
            (module, name, _copied(buffer))
            for module in _submodules(self._modules)
            for name, buffer in module._buffers.items()
        ]
        self._states = [_copied(dict(one.state)) for one in self._optimizers]
        self._groups = [[_options(g) for g in one.param_groups] for one in self._optimizers]
        self._generators = [(one, state_of(one)) for one in found if isinstance(one, GENERATORS)]
        tensors = (torch.nn.Module, Optimizer, torch.Tensor)
        self._others = [
            (one, copy.deepcopy(one.state_dict()))
            for one in {id(one): one for one in (*states, *found)}.values()
            if hasattr(one, "load_state_dict") and not isinstance(one, tensors)
        ]
        self._global_generators = save_rngs()

    def knows(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer's state, and all weights that it changes, are kept."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        return any(one is optimizer for one in self._optimizers) and all(
            id(weight) in self._own for weight in weights
        )

    def with_gradients(self) -> set[int]:
        """Return the ids of the weights that have gradients now."""
        return {id(weight) for weight in self._parameters if weight.grad is not None}

    def drop_gradients_but(self, weights: set[int]) -> None:
        """Drop the gradients that a failed step has left, of all weights but these."""
        for weight in self._parameters:
            if id(weight) not in weights:
                weight.grad = None

    @contextmanager
    def computed_gradients(self) -> Iterator[dict[int, bool]]:
        """Tell, of each weight that requires one, whether a gradient is computed in this block."""
        weights = {id(weight): weight for weight in self._parameters if weight.requires_grad}
        computed = dict.fromkeys(weights, False)

        def note(key: int, _gradient: torch.Tensor) -> None:
            computed[key] = True

        with ExitStack() as stack:
            for key, weight in weights.items():
                stack.callback(weight.register_hook(partial(note, key)).remove)
            yield computed

    def restore_values(self) -> None:
        """Put back what decides the next step, but leave gradients and the optimizers' states.

        So it takes as much memory as in the middle of a run.
        """
        for weight, saved in zip(self._parameters, self._weights, strict=True):
            weight.data.copy_(saved.data)
        for module, name, saved in self._buffers:
            module._buffers[name] = _put_back(module._buffers.get(name), saved)
        for other, state in self._others:
            other.load_state_dict(copy.deepcopy(state))
            if isinstance(other, torch.amp.GradScaler):
                forget_step(other)
        for generator, state in self._generators:
            put_back(generator, state)
        load_rngs(self._global_generators)

    def restore(self) -> None:
        """Put everything back."""
        for weight, gradient in zip(self._parameters, self._gradients, strict=True):
            weight.grad = _put_back(weight.grad, gradient)
        for optimizer, state, groups in zip(
            self._optimizers, self._states, self._groups, strict=True
        ):
            _put_back(optimizer.state, state)
            for group, options in zip(optimizer.param_groups, groups, strict=False):
                weights = group["params"]
                _put_back(group, {**options, "params": None})
                group["params"] = weights
        self.restore_values()


@contextmanager
def unchanged_training(roots: Iterable[Any], states: Sequence[Any] = ()) -> Iterator[TrainingState]:
    """Keep what the steps in this block change, and put it back at its end, however it ends."""
    kept = TrainingState(roots, states)

    def check_known(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not kept.knows(optimizer):
            raise RuntimeError(
                f"`train_step` makes a step of an `{type(optimizer).__name__}` that cannot be "
                "found from it, so its weights could not be put back. Pass "
                "`states=(model, optimizer)`."
            )

    handle = register_optimizer_step_pre_hook(check_known)
    try:
        yield kept
    finally:
        handle.remove()
        free_memory()
        kept.restore()


def _parameters(found: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Yield the weights of modules and of optimizers, and those that stand alone, each once."""
    seen: set[int] = set()
    for one in found:
        weights: Iterable[Any] = ()
        if isinstance(one, torch.nn.Module):
            weights = one.parameters()
        elif isinstance(one, Optimizer):
            weights = (weight for group in one.param_groups for weight in group["params"])
        elif isinstance(one, torch.Tensor):
            weights = (one,)
        for weight in weights:
            if id(weight) not in seen:
                seen.add(id(weight))
                yield weight


def _submodules(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    return iter({id(one): one for module in modules for one in module.modules()}.values())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def _copied(value: Any) -> Any:
    """Return a copy of a value, with a `_Tensor` for each tensor in it."""
    if isinstance(value, torch.Tensor):
        return _Tensor(value.detach().to("cpu", copy=True), value.device)
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(one) for one in value)
    return copy.deepcopy(value)


def _put_back(current: Any, saved: Any) -> Any:
    """Return what was saved: the current object with its former content where that can be."""
    if isinstance(saved, _Tensor):
        fits = isinstance(current, torch.Tensor) and (
            current.shape == saved.data.shape
            and current.dtype == saved.data.dtype
            and current.device == saved.device
        )
        if not fits:
            return saved.data.to(saved.device, copy=True)
        current.data.copy_(saved.data)
    elif isinstance(saved, dict):
        current = current if isinstance(current, dict) else {}
        for key in [key for key in current if key not in saved]:
            del current[key]
        for key, one in saved.items():
            current[key] = _put_back(current.get(key), one)
    elif type(saved) in (list, tuple):
        known = current if isinstance(current, (list, tuple)) else ()
        parts = [_put_back(one, kept) for one, kept in zip_longest(known[: len(saved)], saved)]
        if type(saved) is not type(current) or isinstance(saved, tuple):
            return type(saved)(parts)
        current[:] = parts
    else:
        return copy.deepcopy(saved)
    return current
