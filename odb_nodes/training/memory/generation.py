"""Generation that survives out-of-memory errors, and batches for generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from odb_nodes._support.checks import check_callable, check_count, check_type, describe
from odb_nodes._support.processes import resolve_rank
from odb_nodes._support.progress import Bar
from odb_nodes.core.collate import PaddingCollate
from odb_nodes.core.collate.protocol import Collate
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.planning.runs import LengthRuns
from odb_nodes.core.processing.observation import sample_of
from odb_nodes.core.sample import Observe, Sample
from odb_nodes.core.sample_block import naming_samples
from odb_nodes.errors import SampleError
from odb_nodes.training.memory.gradients import has_collectives
from odb_nodes.training.memory.meter import free_memory, is_out_of_memory


def generate_in_parts(
    model: Any, batch: Mapping[str, Any], *, pad_token_id: int | None = None, **options: Any
) -> tuple[torch.Tensor, int]:
    """Generate for a batch; if memory runs out, generate for its halves, recursively.

    Args:
        model: has a `generate` method, like the models of transformers. If its ranks compute
            together (FSDP, tensor parallelism), the out-of-memory error is raised.
        batch: arguments of `generate`: tensors with the first dimension of `input_ids`, (B, T), and
            values that are not tensors, which every part gets whole.
        pad_token_id: fills the rows of shorter parts, on the right. Default: the padding token of
            the model's `generation_config`, or else its first end-of-sequence token.
        options: further arguments of `generate`, the same for all rows.

    Returns:
        The result of `generate` for the whole batch, (B, S), or (B * `num_return_sequences`, S);
        and the number of parts.

    Raises:
        TypeError: the model has no `generate`, the batch is no mapping or has no `input_ids`, or
            `generate` returns no tensor.
        ValueError: the batch has no rows; a tensor has another first dimension; an option has a row
            for each row of the batch; or there is no padding token.
        torch.OutOfMemoryError: a single row does not fit.
    """
    if not callable(getattr(model, "generate", None)):
        raise TypeError(
            f"`model` must have a `generate`, but is {describe(model)} instead. Pass the "
            "module inside a wrapper."
        )
    check_type("batch", batch, Mapping, "Pass the arguments of `generate`, in a dict.")
    ids = batch.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim == 0:
        raise TypeError("`batch` must have `input_ids`, a tensor of shape (B, T).")
    if not len(ids):
        raise ValueError("`input_ids` must have one row or more, but is empty.")
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (value.ndim == 0 or len(value) != len(ids)):
            raise ValueError(
                f"`{name}` must have the {len(ids)} rows of `input_ids`, but has the shape "
                f"{tuple(value.shape)}: the batch cannot be halved. Generate with smaller batches."
            )
    for name, value in options.items():
        if isinstance(value, torch.Tensor) and value.ndim > 1 and len(value) == len(ids) > 1:
            raise ValueError(
                f"`{name}` has a row for each row of `input_ids`: put it into `batch`."
            )
    parts: list[torch.Tensor] = []
    waiting = [range(len(ids))]
    while waiting:
        rows = waiting.pop(0)
        part = _generate(model, batch, rows, options)
        if part is None:
            middle = (len(rows) + 1) // 2
            waiting[:0] = [rows[:middle], rows[middle:]]
        else:
            parts.append(part)
    width = max(part.shape[1] for part in parts)
    if any(part.shape[1] < width for part in parts):
        fill = _padding_of(model) if pad_token_id is None else pad_token_id
        parts = [pad(part, (0, width - part.shape[1]), value=fill) for part in parts]
    return torch.cat(parts), len(parts)


def _generate(
    model: Any, batch: Mapping[str, Any], rows: range, options: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the generated rows of a part; `None` if memory ran out."""
    part = {
        name: value[rows.start : rows.stop] if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
    try:
        generated = model.generate(**part, **options)
    except (RuntimeError, MemoryError) as error:
        computes_together = isinstance(model, torch.nn.Module) and has_collectives(model)
        if len(rows) < 2 or computes_together or not is_out_of_memory(error):
            raise
        free_memory(error)
        return None
    if not isinstance(generated, torch.Tensor) or generated.ndim != 2:
        shape = f" of shape {tuple(generated.shape)}" if hasattr(generated, "shape") else ""
        raise TypeError(
            "`generate` must return a tensor (B, T), but returned "
            f"`{type(generated).__name__}`{shape}. Leave out `return_dict_in_generate`."
        )
    return generated


def _padding_of(model: Any) -> int:
    config = getattr(model, "generation_config", None)
    for name in ("pad_token_id", "eos_token_id"):
        value: Any = getattr(config, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if value is not None:
            return int(value)
    raise ValueError("the model has no padding token: pass `pad_token_id`.")


class LongestFirst:
    """Batches for inference, longest samples first: if a batch does not fit, the first one fails.

        batches = LongestFirst(prompts, 16_384, new_tokens=256, process_fn=tokenize)
        results = [None] * len(batches.dataset)
        for batch, indices in batches:
            rows, _ = generate_in_parts(model, batch, max_new_tokens=256)
            for index, row in zip(indices, rows):
                results[index] = row

    The constructor processes all samples and keeps them. Each rank gets a share of the batches; the
    shares differ by at most one batch.

    Args:
        dataset: a sequence of items.
        token_budget: padded tokens of a batch, generated tokens included; or a `TokenBudget`. A
            sample that exceeds the budget forms a batch alone; `oversize` is ignored.
        new_tokens: most tokens to generate for each sample.
        process_fn: item -> processed sample. Default: the items are processed samples.
        observe: processed sample -> its tokens, see `LengthObserver`.
        collate_fn: list of processed samples -> batch. Default: a `PaddingCollate` that pads on the
            left, so that generation continues from the last token.
        rank, world_size: this rank and the number of ranks. Default: from torch.distributed.

    Raises:
        TypeError, ValueError: an argument is not valid, such as an empty `dataset`.
        SampleError: processing or collating raised, or a sample has no length or is `Skipped`.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        token_budget: int | TokenBudget,
        *,
        new_tokens: int = 0,
        process_fn: Callable[[Any], Any] | None = None,
        observe: Observe | None = None,
        collate_fn: Collate | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        check_callable("process_fn", process_fn)
        budget = TokenBudget.of(token_budget, "token_budget")
        if budget.layout != "padded":
            raise ValueError(
                'the `layout` of `token_budget` must be "padded": each row generates alone.'
            )
        is_sequence = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if not is_sequence or isinstance(dataset, Mapping) or not len(dataset):
            raise TypeError(
                "`dataset` must be a sequence of one item or more, read by index, but is "
                f"{describe(dataset)} instead. Pass a list of its items."
            )
        self.dataset = dataset
        new_tokens = check_count("new_tokens", new_tokens, 0)
        multiple = budget.pad_to_multiple_of
        new_tokens += -new_tokens % multiple  # beyond the padding of the prompts
        ladder = budget.shape_ladder()
        shapes = tuple((rows, width - new_tokens) for rows, width in ladder if width > new_tokens)
        default = PaddingCollate(side="left", pad_to_multiple_of=multiple, shapes=shapes)
        self._collate = default if collate_fn is None else collate_fn
        rank, ranks = resolve_rank(rank, world_size)
        self._samples: list[Sample] = []
        for index in Bar(range(len(dataset)), "processing", len(dataset)):
            sample = sample_of(dataset.__getitem__, index, process_fn, observe)
            if not isinstance(sample, Sample):
                raise SampleError(f"item {index} is skipped {sample.why}")
            self._samples.append(sample)
        tokens = np.array([sample.tokens + new_tokens for sample in self._samples], np.int64)
        patches = np.array([sample.patches for sample in self._samples], np.int64)
        table = np.stack((tokens, np.arange(len(tokens)), patches))
        groups = LengthRuns(budget).partition(table[:, tokens.argsort(kind="stable")])
        self._groups = [
            sorted(indices.tolist(), key=lambda index: (-tokens[index], index))
            for indices in groups[rank::ranks]
        ]

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        return len(self._groups)

    def __iter__(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield each batch with the indices of its samples in `dataset`, in row order."""
        for indices in self._groups:
            samples = [self._samples[index] for index in indices]
            with naming_samples("collate_fn", samples, f" for items {indices!s:.200}"):
                batch = self._collate([sample.data for sample in samples])
            yield batch, indices
