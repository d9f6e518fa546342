"""The samples of a `Trainer`: their lengths, their columns, their collate function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from odb_nodes._compat import transformers as compat
from odb_nodes._support.checks import MAX_COUNT, describe
from odb_nodes._support.seeds import declares_draws
from odb_nodes.core.collate import PackedCollate, PaddingCollate
from odb_nodes.core.collate.for_budget import collate_for
from odb_nodes.core.collate.protocol import collate_group
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.core.planning import StepTime, TokenBudget
from odb_nodes.core.planning.step_time import step_time_of
from odb_nodes.core.sample import CLASS_KEYS, Observation, Skipped
from odb_nodes.core.step_info import StepInfo
from odb_nodes.core.token_values import flatten_row
from odb_nodes.errors import SampleError
from odb_nodes.integrations.huggingface.config import ODBConfig

logger = logging.getLogger("odb_nodes")

OUR_COLLATES = (PaddingCollate, PackedCollate)  # They keep all keys of the samples.

PAIRS = (
    ("chosen_ids", "rejected_ids", "prompt_ids"),
    ("chosen_input_ids", "rejected_input_ids", "prompt_input_ids"),
    ("input_ids_chosen", "input_ids_rejected", None),
)
"""Columns of TRL's preference trainers, by version: chosen, rejected, and the prompt of both."""


def loader_options(trainer: Any) -> LoaderOptions:
    """Return the options of the loader, from the config and the trainer's arguments."""
    config, args = trainer.odb, trainer.args
    observe = config.observe
    if observe is None and "input_ids" not in compat.collator_columns(trainer):
        observe = ObserveTokens(type(trainer).__name__)
    options: LoaderOptions = config.loader_options(
        token_budget=loader_budget(trainer),
        collate_fn=training_collate(trainer),
        observe=observe,
        shuffle=None if compat.sampling_strategy(args) == "random" else False,
        seed=int(args.seed if args.data_seed is None else args.data_seed),
        num_workers=args.dataloader_num_workers if config.workers is None else 0,
        pin_memory=args.dataloader_pin_memory,
        accumulate=args.gradient_accumulation_steps,
        step_time=config.step_time or _step_time_of_model(trainer),
    )
    return options


def _step_time_of_model(trainer: Any) -> StepTime | None:
    """Return the default step time: of the model, or a typical one for an unknown config."""
    typical = step_time_of(None, loader_budget(trainer))
    if not isinstance(typical, StepTime):
        return None
    model_config = getattr(trainer.model, "config", None)
    try:
        step_time = typical if model_config is None else StepTime.of_config(model_config)
    except (TypeError, ValueError) as error:
        logger.info("ranks are levelled by %s: %s", typical, error)
        return typical
    logger.info("ranks are levelled by %s", step_time)
    return step_time


def train_dataset(trainer: Any) -> Any:
    """Return the dataset to train on."""
    if trainer.train_dataset is None:
        raise ValueError("`train_dataset` must be given to train, but is None.")
    return trainer.train_dataset


def loader_budget(trainer: Any) -> TokenBudget:
    """Return the budget of the batches; before `"auto"` has found it, a budget without a limit."""
    budget: TokenBudget | None = trainer.odb_budget
    if budget is None:
        collate = user_collate(trainer)
        multiple = collate.pad_to_multiple_of if isinstance(collate, PaddingCollate) else 1
        budget = TokenBudget(MAX_COUNT // multiple * multiple, pad_to_multiple_of=multiple)
    return budget


# --- lengths --------------------------------------------------------------------------------------


def has_pairs(trainer: Any) -> bool:
    """Return whether the samples of a trainer are pairs of answers."""
    columns = compat.collator_columns(trainer)
    return any({chosen, rejected} <= columns for chosen, rejected, _ in PAIRS)


class ObserveTokens:
    """Counts the `input_ids` of a sample or a pair; without them, raises an error with a remedy."""

    def __init__(self, trainer_name: str) -> None:
        self._trainer_name = trainer_name

    def __call__(self, sample: Any) -> Observation:
        """Return the tokens of a sample; a pair has two rows."""
        keys = sorted(map(str, sample)) if isinstance(sample, Mapping) else []
        if "input_ids" in keys:
            return Observation(_tokens(sample, "input_ids"))
        for chosen, rejected, prompt in PAIRS:
            if chosen in keys and rejected in keys:
                answer = max(_tokens(sample, chosen), _tokens(sample, rejected))
                before = _tokens(sample, prompt) if prompt in keys else 0
                return Observation(2 * (before + answer))
        raise SampleError(
            f"a sample of `{self._trainer_name}` has no `input_ids`, so its tokens are unknown. "
            f"Its keys are {keys}. Give the `ODBConfig` an `observe`, which returns the padded "
            "tokens of such a sample: for frames of speech, one per 320 values, "
            '`observe=lambda s: len(s["input_values"]) // 320`; for patches of '
            'an image, `observe=lambda s: s["pixel_values"].shape[-2] * '
            's["pixel_values"].shape[-1] // 16**2`.'
        )


def _tokens(sample: Mapping[str, Any], key: Any) -> int:
    return len(flatten_row(key, sample[key]))


# --- evaluation -----------------------------------------------------------------------------------


def evaluated(trainer: Any, dataset: Any, name: str | None) -> Any:
    """Return a dataset that processes raw samples; `name` is its key in a dict of datasets."""
    process_fn = trainer.odb.process_fn
    if process_fn is None:
        return dataset
    if isinstance(process_fn, Mapping):
        process_fn = process_fn.get(name)
    processed_keys = {"input_ids", *compat.collator_columns(trainer)}
    processed_keys -= {*CLASS_KEYS, "labels", *(trainer.label_names or ())}
    if not processed_keys.isdisjoint(getattr(dataset, "column_names", None) or ()):
        return dataset  # The `Trainer` removes columns of a table.
    kind = ProcessedStream if isinstance(dataset, IterableDataset) else ProcessedSamples
    return kind(dataset, process_fn, processed_keys)


class ProcessedSamples(Dataset[Any]):
    """A map-style dataset for evaluation that processes samples without `processed_keys`."""

    def __init__(self, dataset: Any, process_fn: Any, processed_keys: set[str]) -> None:
        self._dataset, self._process_fn = dataset, process_fn
        self._processed_keys = processed_keys

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._process(self._dataset[index])

    def _process(self, sample: Any) -> Any:
        if isinstance(sample, Mapping) and not self._processed_keys.isdisjoint(sample):
            return sample
        processed = None if self._process_fn is None else self._process_fn(sample)
        if processed is None or isinstance(processed, Skipped):
            raise ValueError(
                "`process_fn` must process all raw samples of evaluation, but returned "
                f"{processed} for {describe(sample)}. Leave this sample out of `eval_dataset`; if "
                "`process_fn` is a dict, give `eval_dataset` as a dict with the same names."
            )
        return processed


class ProcessedStream(ProcessedSamples, IterableDataset[Any]):
    """An iterable dataset for evaluation that processes samples without `processed_keys`."""

    def __iter__(self) -> Iterator[Any]:
        return map(self._process, self._dataset)


# --- collating ------------------------------------------------------------------------------------


def user_collate(trainer: Any, config: ODBConfig | None = None) -> Any:
    """Return the user's collate function, of the config or else the trainer; `None` if none."""
    config = config or trainer.odb
    if config.collate_fn is not None:
        return config.collate_fn
    return None if isinstance(trainer.data_collator, TrainerPadding) else trainer.data_collator


def training_collate(trainer: Any) -> Any:
    """Return the collate function for training; `None` for the default of the budget."""
    collate = user_collate(trainer)
    if collate is not None:
        collate_for(loader_budget(trainer), collate)  # checks its layout
    if collate is None or type(collate) in OUR_COLLATES:
        return collate
    columns = compat.sample_columns(trainer)
    if columns is None and not compat.is_default_collator(collate):
        return collate
    return TrainerCollate(collate, columns, selects_before=trainer.odb.collate_fn is None)


class TrainerPadding:
    """The `data_collator` in place of transformers' default, which cannot pad."""

    def __init__(self, trainer: Any, config: ODBConfig) -> None:
        multiple = 1 if config.finds_budget else config.budget.pad_to_multiple_of
        self._collate = PaddingCollate(pad_to_multiple_of=multiple)
        self._model_inputs = compat.model_inputs(trainer.model)

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch of `samples`, for evaluation."""
        return rename_labels(self._collate(samples), self._model_inputs)


class TrainerCollate:
    """Calls a user's collate function, and drops unused columns before or after it."""

    def __init__(self, collate: Any, columns: set[str] | None, *, selects_before: bool) -> None:
        self._collate, self._columns = collate, columns
        self._selects_before = selects_before
        self._stacks = compat.is_default_collator(collate)
        self.draws_random_numbers = False if self._stacks else declares_draws(collate)

    def __call__(self, samples: list[Any], info: StepInfo | None = None) -> Any:
        """Return the batch of `samples`; a collate function may also take the `StepInfo`."""
        dropped: set[str] = set()
        if self._columns is not None:
            if self._selects_before:
                samples = [
                    {key: sample[key] for key in sample if key in self._columns}
                    if isinstance(sample, Mapping)
                    else sample
                    for sample in samples
                ]
            else:  # The function may remove keys from the samples.
                for sample in samples:
                    if isinstance(sample, Mapping):
                        dropped.update(sample)
                dropped -= self._columns
        try:
            batch = collate_group(self._collate, samples, info)  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError) as error:
            if not self._stacks:
                raise
            raise ValueError(
                "samples without `input_ids` must have the same size, since the default collator "
                f"stacks them, but: {error}. Give the trainer a `data_collator` that pads them."
            ) from error
        for key in dropped:
            batch.pop(key, None)
        return batch

    collate_step = __call__


def model_batch(trainer: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that keeps the keys of a batch that `compute_loss` takes."""
    collate, columns = user_collate(trainer), compat.sample_columns(trainer)
    if collate is not None and type(collate) not in OUR_COLLATES:
        return dict

    def select(batch: Mapping[str, Any]) -> dict[str, Any]:
        kept = dict(batch)
        inputs = compat.model_inputs(trainer.model)  # Not before: `model_init` makes models late.
        if collate is None:
            kept = rename_labels(kept, inputs)
        if columns is None:
            return kept
        selected = {key: kept[key] for key in kept if key in columns or key in inputs}
        if "position_ids" in kept and not {"position_ids", "attention_mask"} & {*selected}:
            raise ValueError(
                "the samples of a packed row must not see each other, but in a "
                f"`{type(compat.base_model(trainer.model)).__name__}` they do: its `forward` names "
                'no `position_ids`, so the `Trainer` leaves them out. Take `layout="padded"`; or '
                "`remove_unused_columns=False`, if it takes them by `**kwargs`."
            )
        return selected

    return select


def rename_labels(batch: dict[str, Any], model_inputs: set[str]) -> dict[str, Any]:
    """Rename `label` or `label_ids` of a batch to `labels`, as the default collator does."""
    for key in ("label", "label_ids"):
        if key not in batch or key in model_inputs or "labels" in batch:
            continue
        renamed = {name: value for name, value in batch.items() if name != key}
        try:
            labels = torch.as_tensor(batch[key])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{key}` of each sample must be a number, or lists of one length, to become the "
                f"`labels` of a batch, but is {batch[key]!r:.100}. Give one label per token as "
                "`labels`, or pass a `data_collator`."
            ) from error
        # As the default collator does: losses of fp32 models take no fp64.
        renamed["labels"] = labels.float() if labels.dtype == torch.float64 else labels
        return renamed
    return batch
