"""Whether a model keeps the samples of a packed row apart: tried out, not looked up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from odb_nodes._core.content import is_mapping

MOST_LEAK = 0.02
"""Change of a sample that another one causes, relative to that one's own; without any, it is 0.

Room for experts, whose kernels round by how many tokens each gets. Attention has 0.15 and more."""


def check_packing(model: Any, batch: Mapping[str, Any]) -> None:
    """Raise an error where a model lets the samples of a packed row see each other.

    The model computes the batch twice, in evaluation mode and without gradients, the second time
    with other embeddings for the text of the first sample. Nothing else of the row may change. In a
    distributed run, call it on all ranks. It does not compare position ids with a padded batch.

    Args:
        model: a model of transformers, in any wrapper.
        batch: the arguments of the model, on its device, from a packed group of two samples or
            more.

    Raises:
        TypeError: `model` has no model of transformers in it.
        ValueError: samples see each other, or `batch` is not a row of several.
    """
    if pretrained(model) is None:
        raise TypeError(
            f"`model` must be a model of transformers, but is a `{type(model).__name__}` instead."
        )
    found = leak(model, batch, lambda: model(**batch))
    if found is None:
        raise ValueError(
            "`batch` must be a packed row of two samples or more, with `cu_seq_lens_q` or "
            "`position_ids`, and go through the embeddings of the model. Try the next batch."
        )
    if not found <= MOST_LEAK:  # also where it is NaN
        raise mixing_error(model)


def mixing_error(model: Any) -> ValueError:
    """Return the error that names a model which mixes samples."""
    name = type(pretrained(model) or model).__name__
    return ValueError(
        "the samples of a packed row must not see each other, but in a "
        f"`{name}` they do: it ignores `position_ids` and `cu_seq_lens_q`, has a cache "
        "(`use_cache`) or recurrent layers, or attention that looks ahead. Take "
        '`layout="padded"`; or, for text, `PackedCollate(mask_dtype=torch.bool)`.'
    )


def leak(model: Any, batch: Mapping[str, Any], compute: Callable[[], Any]) -> float | None:
    """Return how much others change by a change of the first sample; `None` if it is not known.

    Calls `compute`, which has the model compute the batch, twice whatever it finds.
    """
    inner, end = pretrained(model), _end_of_first(batch)
    changes, hidden = False, []

    def change(_module: Any, _given: Any, made: torch.Tensor) -> torch.Tensor:
        if not changes or end is None:
            return made
        return torch.cat((made[:, :end].flip(-1), made[:, end:]), dim=1)

    def keep(_module: Any, _given: Any, made: Any) -> None:
        found = made.get("last_hidden_state", made.get("logits")) if is_mapping(made) else made[0]
        if isinstance(found, torch.Tensor) and found.ndim == 3:
            hidden.append(found.detach().float())

    modes = [(module, module.training) for module in inner.modules()]
    hooks = [inner.base_model.register_forward_hook(keep)]
    with suppress(NotImplementedError):
        hooks.append(inner.get_input_embeddings().register_forward_hook(change))
    inner.eval()
    try:
        with torch.no_grad():
            compute()
            changes = True
            compute()
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
    if end is None or len(hidden) != 2:
        return None
    changed = (hidden[0] - hidden[1]).abs()[0]
    own = changed[:end].max()
    return float(changed[end:].max() / own) if own else None


def pretrained(model: Any) -> Any:
    """Return the model of transformers in a model and its wrappers; `None` if there is none."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    return next((one for one in modules if hasattr(type(one), "base_model_prefix")), None)


def _end_of_first(batch: Mapping[str, Any]) -> int | None:
    """Return where the first sample of a row ends, if another one follows."""
    if not isinstance(ids := batch.get("input_ids"), torch.Tensor):
        return None
    width = ids.shape[-1]
    if (bounds := batch.get("cu_seq_lens_q")) is not None:
        end = int(bounds[1])
    elif (positions := batch.get("position_ids")) is not None:
        starts = (positions.reshape(-1, width) == 0).all(dim=0).nonzero().flatten().tolist()
        end = starts[1] if len(starts) > 1 else width
    else:
        end = width
    return end if end < width else None
