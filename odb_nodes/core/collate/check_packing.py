"""Test by computation whether a model keeps the samples of a packed row apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from odb_nodes.core.token_values import is_mapping

MOST_LEAK = 0.02
"""Largest change of other samples, relative to the change of the first sample; ideally 0.

Allows for experts, whose kernels round depending on the number of tokens. With attention between
samples, it is 0.15 and more."""


def check_packing(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise an error if a model lets the samples of a packed row see each other.

    The model computes the batch twice, in evaluation mode and without gradients, the second time
    with other embeddings for the text of the first sample. The outputs of all other samples must
    stay the same. In a distributed run, call it on all ranks. Position ids are not checked.

    Args:
        model: a model of transformers, in any wrapper.
        batch: the arguments of the model, on its device, for a packed group of at least two
            samples.

    Raises:
        TypeError: `model` contains no model of transformers.
        ValueError: samples see each other, or `batch` is not a packed row of several samples.
    """
    if pretrained(model) is None:
        raise TypeError(
            f"`model` must be a model of transformers, but is a `{type(model).__name__}` instead."
        )
    change = leak(model, batch, lambda: model(**batch))
    if change is None:
        raise ValueError(
            "`batch` must be a packed row of two samples or more, with `cu_seq_lens_q` or "
            "`position_ids`, and go through the embeddings of the model. Try the next batch."
        )
    if not change <= MOST_LEAK:  # NaN is an error, too
        raise mixing_error(model)


def mixing_error(model: Any) -> ValueError:
    """Return the error that names a model which mixes samples."""
    name = type(pretrained(model) or model).__name__
    return ValueError(
        "the samples of a packed row must not see each other, but in a "
        f"`{name}` they do: it ignores `position_ids` and `cu_seq_lens_q`, has a cache "
        "(`use_cache`) or recurrent layers, or attention that looks ahead. Take "
        '`layout="padded"`; or, for text, `PackedCollate(mask_dtype=torch.bool)` with "sdpa", and '
        'the dtype of the model with "eager".'
    )


def leak(model: Any, batch: Mapping[str, Any], compute: Callable[[], Any]) -> float | None:
    """Return how much a change of the first sample changes the others; `None` if not measurable.

    Always calls `compute`, which runs the model on the batch, twice.
    """
    inner = pretrained(model)
    _check_takes_mask(inner, batch)
    start, end = _first_part(batch)
    is_flipped = False
    hidden: list[torch.Tensor] = []

    def flip_first_sample(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if not is_flipped or end is None:
            return output
        return torch.cat((output[:, :start], output[:, start:end].flip(-1), output[:, end:]), dim=1)

    def record_hidden(_module: Any, _args: Any, output: Any) -> None:
        if is_mapping(output):
            states = output.get("last_hidden_state", output.get("logits"))
        else:
            states = output[0]
        if isinstance(states, torch.Tensor) and states.ndim == 3:
            hidden.append(states.detach().float())

    modes = [(module, module.training) for module in inner.modules()]
    hooks = [inner.base_model.register_forward_hook(record_hidden)]
    with suppress(NotImplementedError):
        embeddings = inner.get_input_embeddings()
        hooks.append(embeddings.register_forward_hook(flip_first_sample))
    inner.eval()
    try:
        with torch.no_grad():
            compute()
            is_flipped = True
            compute()
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    if end is None or len(hidden) != 2:
        return None
    differences = (hidden[0] - hidden[1]).abs()[0]
    difference_of_first = differences[start:end].max()
    if not difference_of_first:
        return None
    return float(differences[end:].max() / difference_of_first)


def pretrained(model: Any) -> Any:
    """Return the model of transformers inside a model; `None` if there is none."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((module for module in modules if hasattr(type(module), "base_model_prefix")), None)


def _check_takes_mask(model: Any, batch: Mapping[str, Any]) -> None:
    """Reject a mask of all pairs of tokens for kernels without one, and windows that it undoes."""
    mask: Any = batch.get("attention_mask")
    if getattr(mask, "ndim", 0) != 4:
        return
    config = model.config.get_text_config()
    if "flash" in (attention := str(config._attn_implementation)):
        raise ValueError(
            "the `attn_implementation` of a model must take a mask of shape (1, 1, T, T), as a "
            f"packed row with `mask_dtype` has, but is {attention!r} instead, which takes none. "
            'Load the model with `attn_implementation="sdpa"`.'
        )
    window = getattr(config, "sliding_window", None)
    positions = batch.get("position_ids")
    if window is not None and positions is not None and positions.max() >= window:
        raise ValueError(
            f"samples must have at most {window} tokens, the `sliding_window` of the model, but "
            f"one has {int(positions.max()) + 1}: transformers takes the mask of a packed row with "
            "`mask_dtype` in place of the window's. Leave out longer samples, or the mask."
        )


def _first_part(batch: Mapping[str, Any]) -> tuple[int, int | None]:
    """Return the span (start, end) of tokens that only the first sample has.

    If the second row shares a prefix with the first, `start` is after the prefix. `end` is `None`
    if no sample follows.
    """
    if not isinstance(ids := batch.get("input_ids"), torch.Tensor):
        return 0, None
    width = ids.shape[-1]
    start = 0
    if (bounds := batch.get("cu_seq_lens_q")) is not None:
        end = int(bounds[1])
    elif (positions := batch.get("position_ids")) is not None:
        positions = positions.reshape(-1, width)
        begins = (positions == 0).all(dim=0)
        if len(positions) == 1:  # The positions of a row that shares tokens continue after them.
            begins[1:] |= positions[0].diff() != 1
        starts = begins.nonzero().flatten().tolist()
        end = starts[1] if len(starts) > 1 else width
        if len(positions) == 1 and end < width:
            start = int(positions[0, end])
    else:
        end = width
    return start, end if end < width else None
