"""The numbers that a monitor is told: plain ones, those of numpy, and tensors of one element."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from odb_nodes._core.checks import check_named, check_type, describe

Number = float | int | torch.Tensor

_OWN_NAMES = {"grad_norm", "lr", "memory_allocated_bytes", "memory_reserved_bytes"}
"""Names of the values of the last step that a record has anyway."""


class Told(NamedTuple):
    """What `Monitor.step` is told of a batch; tensors are without their graphs, and not read.

    Attributes:
        loss: mean over `weight`.
        weight: what the loss is a mean over.
        losses: name of the task -> sum of its losses, and its targets.
        grad_norm: norm of the gradient.
        last: further values of the optimizer step.
    """

    loss: Number | None
    weight: float
    losses: dict[str, tuple[Number, float]]
    grad_norm: Number | None
    last: dict[str, Number]

    @classmethod
    def of(cls, loss: Any, weight: Any, losses: Any, grad_norm: Any, lr: Any, values: Any) -> Told:
        """Return what the arguments of `Monitor.step` tell."""
        return cls(
            None if loss is None else _number("loss", loss),
            not_negative("loss_weight", weight),
            _losses(losses),
            None if grad_norm is None else _number("grad_norm", grad_norm),
            ({} if lr is None else {"lr": _number("lr", lr)}) | _values(values),
        )


def _number(name: str, value: Any) -> Number:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"`{name}` must be one number, but has the shape {shape}.")
        return value.detach()
    if not isinstance(value, Real):
        rule = "must be a number or a tensor of one element"
        raise TypeError(f"`{name}` {rule}, but is {describe(value)} instead.")
    return float(value)


def not_negative(name: str, value: Any) -> float:
    """Return a number, as an integer where it is whole; raise unless it is 0 or more."""
    if not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number, but is {describe(value)} instead.")
    weight = float(value)
    if not 0 <= weight < math.inf:
        raise ValueError(f"`{name}` must be 0 or more, and finite, but is {weight:g} instead.")
    return int(weight) if weight.is_integer() else weight


def _losses(losses: Any) -> dict[str, tuple[Number, float]]:
    remedy = 'Pass names with (sum of losses, targets), such as {"chat": (12.5, 40)}.'
    check_type("loss_by_source", losses, Mapping | None, remedy)
    check_named("loss_by_source", losses or {})
    found = {}
    for name, pair in (losses or {}).items():
        entry = f"loss_by_source[{name!r}]"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"`{entry}` must be a pair, but is {describe(pair)} instead. {remedy}")
        found[name] = (_number(f"{entry}[0]", pair[0]), not_negative(f"{entry}[1]", pair[1]))
    return found


def _values(values: Any) -> dict[str, Number]:
    check_type("values", values, Mapping | None, 'Pass numbers by name, such as {"weight": 0.5}.')
    check_named("values", values or {})
    if own := _OWN_NAMES & {*(values or {})}:
        raise ValueError(
            f"`values` must not have names that records use themselves, but has {sorted(own)}. "
            "Pass `lr` and `grad_norm` as arguments, or choose another name."
        )
    return {name: _number(f"values[{name!r}]", value) for name, value in (values or {}).items()}


def to_floats(values: Sequence[Number]) -> list[float]:
    """Return numbers and tensors of one element as floats; waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append(index)
    found: list[Any] = list(values)
    for indices in by_device.values():
        parts = [values[index].reshape(1).double() for index in indices]  # type: ignore[union-attr]
        for index, number in zip(indices, torch.cat(parts).tolist(), strict=True):
            found[index] = number
    return list(map(float, found))
