"""Dynamic batches by the arguments of LLaMA-Factory, and of what is configured like it.

    batches = DynamicBatches.of(data_args, training_args, finetuning_args)
    ...  # load the dataset with `batches.data_args`, make the trainer
    batches.configure(trainer)

Neither package nor trainer class is imported: what counts is the names of the arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from odb_nodes._core.checks import check_bool, check_count
from odb_nodes.collate import PackedCollate
from odb_nodes.planning import TokenBudget

__all__ = ["DynamicBatches"]

_ABSENT = object()
_MEDIA = ("images", "videos", "audios")
_STAGES = ("pt", "sft")


@dataclass(frozen=True, kw_only=True)
class DynamicBatches:
    """Dynamic batches as a set of arguments asks for them.

    Attributes:
        budget: of a batch on one rank: `cutoff_len` x `per_device_train_batch_size` tokens, so at
            most the memory of the fixed batches. Packed, if `neat_packing` is.
        accumulate: batches of an optimizer step.
        shuffle: the training data.
        data_args: to load the dataset with: a copy in which nothing is packed, since packing is
            done online here.
    """

    budget: TokenBudget
    accumulate: int
    shuffle: bool
    data_args: Any

    @classmethod
    def of(cls, *arguments: Any, token_budget: int | None = None) -> DynamicBatches:
        """Return what these arguments come to.

        Args:
            arguments: objects or mappings with `cutoff_len`, `per_device_train_batch_size`,
                `gradient_accumulation_steps`, `packing`, `neat_packing`, `stage`,
                `disable_shuffling`, `group_by_length`, `dataloader_drop_last`, as `data_args`,
                `training_args` and `finetuning_args` have them, or one mapping as a YAML file has
                them. Those without a default must be among them.
            token_budget: tokens of a batch on one rank, in place of the product.

        Raises:
            TypeError, ValueError: an argument is missing, is not what it must be, contradicts
                another one, or does not go with dynamic batches; names it and what to do.
        """
        given = _Arguments(arguments)
        cutoff = check_count("cutoff_len", given.required("cutoff_len"))
        if token_budget is not None:
            tokens = check_count("token_budget", token_budget)
            if tokens < cutoff:
                raise ValueError(
                    f"`token_budget` must be at least `cutoff_len` ({cutoff}), but is {tokens}: "
                    "the longest samples would exceed it on their own."
                )
        else:
            name = "per_device_train_batch_size"
            tokens = cutoff * check_count(name, given.required(name))
        _check_kind(given)
        is_packed = _is_packed(given)
        return cls(
            budget=TokenBudget(tokens, layout="packed" if is_packed else "padded"),
            accumulate=check_count(
                "gradient_accumulation_steps", given.get("gradient_accumulation_steps", 1)
            ),
            shuffle=not given.flag("disable_shuffling"),
            data_args=_without_packing(given.holder_of("cutoff_len")),
        )

    def configure(self, trainer: Any, **options: Any) -> Any:
        """Give these dynamic batches to a trainer of transformers, of any class; returns it.

        Args:
            trainer: made with the same arguments, and not training.
            options: further fields of `ODBConfig`.

        Raises:
            ImportError: transformers is not installed.
            ValueError: the trainer has other arguments, or a packed dataset.
        """
        integration = import_module("odb_nodes.integrations.huggingface")  # late: it is heavy
        accumulate = trainer.args.gradient_accumulation_steps
        if accumulate != self.accumulate:
            raise ValueError(
                f"`gradient_accumulation_steps` of the trainer must be {self.accumulate}, as in "
                f"the arguments, but is {accumulate} instead."
            )
        _check_not_packed(trainer.train_dataset)
        if not self.shuffle:
            trainer.args.train_sampling_strategy = "sequential"
        budget = self._padded_as(trainer.data_collator)
        if budget.layout == "packed":
            options.setdefault("collate_fn", _PackedText(PackedCollate.of(budget)))
        return integration.configure_trainer(trainer, token_budget=budget, **options)

    def _padded_as(self, collator: Any) -> TokenBudget:
        """Return the budget, in multiples of what the collator pads to."""
        multiple = getattr(collator, "pad_to_multiple_of", None) or 1
        if self.budget.layout == "packed" or multiple == 1:
            return self.budget
        tokens = -(-self.budget.tokens // multiple) * multiple
        return replace(self.budget, tokens=tokens, pad_to_multiple_of=multiple)


class _PackedText:
    """Packs the rows of its datasets, which have columns for media: empty ones, in text.

    Args:
        collate: of samples without them.
    """

    def __init__(self, collate: PackedCollate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`.

        Raises:
            ValueError: a sample has media.
        """
        for name in _MEDIA:
            if any(sample.get(name) for sample in samples):
                raise ValueError(
                    f"`neat_packing` must be False where samples have `{name}`: what is packed "
                    "here is text. Without it, short samples share a batch anyway."
                )
        rows = ({key: row[key] for key in row if key not in _MEDIA} for row in samples)
        return self._collate(list(rows))


class _Arguments:
    """Several objects or mappings, looked at as one."""

    def __init__(self, holders: tuple[Any, ...]) -> None:
        self._holders = holders

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument; all that have it must agree."""
        found = [value for one in self._holders if (value := _read(one, name)) is not _ABSENT]
        for value in found[1:]:
            if value != found[0]:
                raise ValueError(f"`{name}` is given twice, as {found[0]!r} and as {value!r}.")
        return found[0] if found else default

    def required(self, name: str) -> Any:
        value = self.get(name, _ABSENT)
        if value is _ABSENT:
            raise ValueError(
                f"`{name}` must be given: pass all of `data_args`, `training_args` and "
                "`finetuning_args`, or one mapping with their fields."
            )
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        return False if value is None else check_bool(name, value)

    def holder_of(self, name: str) -> Any:
        """Return the object or mapping that has an argument."""
        return next(one for one in self._holders if _read(one, name) is not _ABSENT)


def _read(holder: Any, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name, _ABSENT)
    return getattr(holder, name, _ABSENT)


def _check_kind(given: _Arguments) -> None:
    """Refuse training and batches that cannot be dynamic."""
    stage = given.get("stage", "sft")
    if stage not in _STAGES:
        raise ValueError(
            f"`stage` must be one of {_STAGES}, but is {stage!r} instead: its batches hold several "
            "sequences per sample, which a budget per sample does not count."
        )
    if given.flag("group_by_length"):
        raise ValueError(
            "`group_by_length` must be False: samples of like length are grouped here already."
        )
    if given.flag("dataloader_drop_last"):
        raise ValueError(
            "`dataloader_drop_last` must be False: every sample comes once per epoch, and there is "
            "no last batch that is smaller than the others."
        )


def _is_packed(given: _Arguments) -> bool:
    """Tell whether batches are to be packed."""
    is_neat = given.flag("neat_packing")
    packing = given.get("packing")
    if packing is not None:
        check_bool("packing", packing)
    if is_neat:
        if packing is False:
            raise ValueError(
                "`packing` must not be False where `neat_packing` is True. Drop one of them."
            )
        return True
    if packing:
        raise ValueError(
            "`packing` must be False, or `neat_packing` True: with `packing` alone, samples of a "
            "row attend to each other. Without either, short samples share a batch anyway."
        )
    if packing is None and given.get("stage", "sft") == "pt":
        raise ValueError(
            '`packing` must be given where `stage` is "pt", since it is True by default there: '
            "set it to False for dynamic batches, or `neat_packing` to True for packed ones."
        )
    return False


def _without_packing(data_args: Any) -> Any:
    """Return a copy of arguments with which a dataset is loaded sample by sample."""
    is_mapping = isinstance(data_args, Mapping)
    changed = dict(data_args) if is_mapping else copy.copy(data_args)
    for name in ("packing", "neat_packing"):
        if is_mapping:
            changed[name] = False
        else:
            setattr(changed, name, False)
    return changed


def _check_not_packed(dataset: Any) -> None:
    """Refuse rows that hold several samples already, which their masks number from 1."""
    if not hasattr(dataset, "__getitem__") or not len(dataset):
        return
    row = dataset[0]
    mask = row.get("attention_mask") if isinstance(row, Mapping) else None
    if mask is not None and len(mask) and max(mask) > 1:
        raise ValueError(
            "the dataset of the trainer is packed already. Load it with `data_args` of "
            "`DynamicBatches`, in which packing is off, and without an old `tokenized_path`."
        )
