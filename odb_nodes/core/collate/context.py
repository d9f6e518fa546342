"""The part of a batch that one rank of a context-parallel group computes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch

from odb_nodes._support.checks import check_choice, check_count
from odb_nodes.core.sample import IGNORE_INDEX

ContextOrder = Literal["zigzag", "contiguous"]

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")


def shard_context(
    batch: Mapping[str, Any], rank: int, world_size: int, *, order: ContextOrder = "zigzag"
) -> dict[str, Any]:
    """Return the tokens of a batch that a rank of a context-parallel group computes.

    All ranks of the group have the same batch. Each row, or each sample of a packed row, is cut
    into equal parts. `"zigzag"`, the order of torch's context parallelism, cuts 2 * `world_size`
    parts and gives a rank one from each end, so that causal attention costs all ranks the same.
    `"contiguous"` cuts `world_size` parts, one for each rank.

    `labels` become `shift_labels`, the label of the next token, before they are cut, for a loss
    that does not shift. `position_ids` are added, so that a token keeps its position; if they have
    several dimensions, (k, n, T), they are cut, too. Values with an entry for each token are cut.
    All other values are kept: each rank has all images, and a model must insert them before tokens
    are cut. `cu_seq_lens` and the longest lengths of a packed row describe the parts.

    Args:
        batch: batch of a `PaddingCollate`, (n, T), or a `PackedCollate`, (1, T), without its
            `StepInfo`.
        rank: rank of this process in the group.
        world_size: number of ranks of the group.
        order: which tokens a rank computes.

    Raises:
        ValueError: the length of a row, or of a sample of a packed row, is no multiple of the
            number of parts; a packed row has no `cu_seq_lens_q`; or the batch has a (T, T) mask.
    """
    world_size = check_count("world_size", world_size)
    rank = check_count("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"`rank` must be in range({world_size}), but is {rank} instead.")
    check_choice("order", order, get_args(ContextOrder))
    rows, width = batch["input_ids"].shape
    bounds = batch[_BOUNDS[0]].tolist() if _BOUNDS[0] in batch else [0, width]
    if world_size > 1 and _BOUNDS[0] not in batch and _is_packed(batch):
        raise ValueError(
            "a packed row is cut sample by sample, by its `cu_seq_lens_q`, but has none, and its "
            "`position_ids` begin more than once. Leave `model_arguments` of `PackedCollate` on, "
            "and give `max_samples` with `shapes`."
        )
    parts = world_size if order == "contiguous" else 2 * world_size
    if any(bound % parts for bound in bounds):
        unit = "each sample of a packed row" if len(bounds) > 2 else "each row"
        raise ValueError(
            f"{unit} must have a multiple of {parts} tokens to be cut for {world_size} ranks, but "
            f"they end at {bounds[1:9]}. Pass `PackedCollate(sample_multiple={parts})`, or a "
            f"`TokenBudget(pad_to_multiple_of={parts})` for padded rows."
        )
    mine = {rank} if order == "contiguous" else {rank, parts - 1 - rank}
    pieces = [
        np.arange(start, end).reshape(parts, (end - start) // parts)[sorted(mine)].ravel()
        for start, end in pairwise(bounds)
    ]
    kept = torch.from_numpy(np.concatenate(pieces))

    whole = dict(batch)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(width).expand(rows, width)
    labels: Any = whole.get("labels")
    if getattr(labels, "shape", None) == (rows, width):
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        whole["shift_labels"] = shifted
        del whole["labels"]
    for key, value in whole.items():
        shape = getattr(value, "shape", ())
        if len(shape) == 4 and tuple(shape[-2:]) == (width, width):
            raise ValueError(
                f"`{key}` is a mask of all tokens, {tuple(shape)}: no rank has them all."
            )
        if key == "position_ids":  # (rows, width) or (dimensions, rows, width)
            whole[key] = value[..., kept]
        elif tuple(shape[:2]) == (rows, width):
            whole[key] = value[:, kept]
    whole.update({key: whole[key] // world_size for key in (*_BOUNDS, *_LONGEST) if key in whole})
    return whole


def _is_packed(batch: Mapping[str, Any]) -> bool:
    """Tell whether a row has several tokens at position 0, in all dimensions, besides padding.

    A row with a single sample has one such token.
    """
    if (positions := batch.get("position_ids")) is None:
        return False
    rows, width = batch["input_ids"].shape
    starts = (positions.reshape(-1, positions.shape[-2], width) == 0).all(dim=0).expand(rows, width)
    mask: Any = batch.get("attention_mask")
    if getattr(mask, "shape", None) == (rows, width):
        starts = starts & mask.bool()
    return bool((starts.sum(dim=1) > 1).any())
