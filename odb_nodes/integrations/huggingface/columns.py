"""Which keys of the samples reach the collator and the model, as under a stock `Trainer`."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import cached_property
from typing import Any

from odb_nodes._compat import transformers as compat
from odb_nodes._core.checks import MAX_COUNT
from odb_nodes._core.seeds import declares_draws
from odb_nodes.collate import PackedCollate, PaddingCollate
from odb_nodes.collate.for_budget import collate_for
from odb_nodes.collate.protocol import collate_group
from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.integrations.huggingface.labels import rename_labels
from odb_nodes.planning import TokenBudget
from odb_nodes.step_info import StepInfo

OURS = (PaddingCollate, PackedCollate)  # They pass on all keys of the samples.


def loader_budget(trainer: Any) -> TokenBudget:
    """Return the budget of the batches; while none is found, one like it without a limit."""
    budget: TokenBudget | None = trainer.odb_budget
    if budget is None:
        given = given_collate(trainer)
        multiple = given.pad_to_multiple_of if isinstance(given, PaddingCollate) else 1
        budget = TokenBudget(MAX_COUNT // multiple * multiple, pad_to_multiple_of=multiple)
    return budget


def training_collate(trainer: Any) -> Any:
    """Return the collate function for training, or None for the one that fits the budget.

    The trainer's own gets the columns that the stock `Trainer` gives it; one of the `ODBConfig`
    gets all of a sample. What either makes of them stays in the batch.
    """
    config, columns = trainer.odb, compat.sample_columns(trainer)
    given = given_collate(trainer)
    if config.collate_fn is not None:
        collate_for(loader_budget(trainer), config.collate_fn)
    if compat.is_default_collator(given):
        given = Stacking(given)
    if type(given) in OURS or given is None or columns is None:
        return given
    kind = KeepBefore if config.collate_fn is None else KeepAfter
    return kind(given, columns)


def given_collate(trainer: Any, config: ODBConfig | None = None) -> Any:
    """Return the collate function that a config, or else its trainer, was given; `None` if none."""
    config = config or trainer.odb
    if config.collate_fn is not None:
        return config.collate_fn
    return None if compat.pads_by_default(trainer) else trainer.data_collator


class Stacking:
    """The collate function that a `Trainer` has by default, for samples without `input_ids`."""

    draws_random_numbers = False

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of `samples`."""
        try:
            return self._collate(samples)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                "samples without `input_ids` must have one size, to be stacked by the default "
                f"collator of the trainer, but: {error}. Give it a `data_collator` that pads them."
            ) from error


class _KeepColumns:
    """A collate function that is somebody else's, which may draw random numbers."""

    def __init__(self, collate: Any, columns: set[str]) -> None:
        self._collate, self._columns = collate, columns
        self.draws_random_numbers = declares_draws(collate)


class KeepBefore(_KeepColumns):
    """A collate function that sees only the columns of its samples, which may be any mappings."""

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of `samples`."""
        return self._collate([self._kept(sample) for sample in samples])

    def collate_step(self, samples: list[Any], info: StepInfo) -> Any:
        """Return the batch of `samples`; `collate` may take the step too."""
        return collate_group(self._collate, [self._kept(sample) for sample in samples], info)

    def _kept(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        return {key: sample[key] for key in sample if key in self._columns}


class KeepAfter(_KeepColumns):
    """A collate function that sees all of its samples, and whose batches lose other columns.

    What it makes of them stays.
    """

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of `samples`."""
        given = self._unused(samples)  # before the function takes keys out
        return _without(self._collate(samples), given)

    def collate_step(self, samples: list[Any], info: StepInfo) -> Any:
        """Return the batch of `samples`; `collate` may take the step too."""
        given = self._unused(samples)
        return _without(collate_group(self._collate, samples, info), given)

    def _unused(self, samples: list[Any]) -> set[str]:
        keys = {key for sample in samples if isinstance(sample, Mapping) for key in sample}
        return keys - self._columns


def _without(batch: MutableMapping[str, Any], keys: set[str]) -> MutableMapping[str, Any]:
    for key in keys & {*batch}:
        del batch[key]
    return batch


class ModelKeys:
    """What a model gets of a batch of our own collate functions, which pass on all columns."""

    def __init__(self, trainer: Any) -> None:
        given = given_collate(trainer)
        self._trainer = trainer
        self._is_ours = given is None or type(given) in OURS
        self._is_default = given is None
        self._columns = compat.sample_columns(trainer)

    def of(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch for the trainer's `compute_loss`."""
        if not self._is_ours:
            return dict(batch)
        kept = dict(batch)
        if self._is_default:
            kept = rename_labels(kept, self._taken)
        if self._columns is None:
            return kept
        return {key: kept[key] for key in kept if key in self._columns or key in self._taken}

    @cached_property
    def _taken(self) -> set[str]:
        return compat.model_inputs(self._trainer.model)
