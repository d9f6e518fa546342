"""Plain data and tensors as bytes, in torch's format, in which no code can hide."""

from __future__ import annotations

import io
from typing import Any

import torch


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes that `from_bytes` can read."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` was given.

    Raises:
        Exception: `data` is damaged, or holds something else than plain data and tensors.
    """
    return torch.load(io.BytesIO(data), weights_only=True)
