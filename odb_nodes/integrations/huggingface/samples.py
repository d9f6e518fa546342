"""The samples of a `Trainer`: their cost, the keys that collator and model get, their loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from odb_nodes._compat import transformers as compat
from odb_nodes._core.checks import MAX_COUNT, describe
from odb_nodes._core.content import flatten_row
from odb_nodes._core.seeds import declares_draws
from odb_nodes.collate import PackedCollate, PaddingCollate
from odb_nodes.collate.for_budget import collate_for
from odb_nodes.collate.protocol import collate_group
from odb_nodes.errors import SampleError
from odb_nodes.integrations.huggingface.config import ODBConfig
from odb_nodes.loader.options import LoaderOptions
from odb_nodes.planning import StepTime, TokenBudget
from odb_nodes.planning.step_time import step_time_of
from odb_nodes.sample import CLASS_KEYS, Observation, Skipped
from odb_nodes.step_info import StepInfo

logger = logging.getLogger("odb_nodes")

OURS = (PaddingCollate, PackedCollate)  # They pass on all keys of the samples.

PAIRS = (
    ("chosen_ids", "rejected_ids", "prompt_ids"),
    ("chosen_input_ids", "rejected_input_ids", "prompt_input_ids"),
    ("input_ids_chosen", "input_ids_rejected", None),
)
"""Columns of the preference trainers of TRL, by version: two answers, and a prompt before both."""


def loader_options(trainer: Any) -> LoaderOptions:
    """Return the options of the loader: the config's, and what the `Trainer` decides."""
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
    """Return what steps of the model take, where ranks are levelled by it without being asked to.

    A model whose layers are not known is taken to be a typical one.
    """
    typical = step_time_of(None, loader_budget(trainer))
    if not isinstance(typical, StepTime):
        return None
    model_config = getattr(trainer.model, "config", None)
    try:
        found = typical if model_config is None else StepTime.of_config(model_config)
    except (TypeError, ValueError) as error:
        logger.info("ranks are levelled by %s: %s", typical, error)
        return typical
    logger.info("ranks are levelled by %s", found)
    return found


def given_dataset(trainer: Any) -> Any:
    """Return the dataset to train on."""
    if trainer.train_dataset is None:
        raise ValueError("`train_dataset` must be given to train, but is None.")
    return trainer.train_dataset


def loader_budget(trainer: Any) -> TokenBudget:
    """Return the budget of the batches; while none is found, one like it without a limit."""
    budget: TokenBudget | None = trainer.odb_budget
    if budget is None:
        given = given_collate(trainer)
        multiple = given.pad_to_multiple_of if isinstance(given, PaddingCollate) else 1
        budget = TokenBudget(MAX_COUNT // multiple * multiple, pad_to_multiple_of=multiple)
    return budget


# --- lengths --------------------------------------------------------------------------------------


def has_pairs(trainer: Any) -> bool:
    """Return whether the samples of a trainer are pairs of answers."""
    columns = compat.collator_columns(trainer)
    return any({chosen, rejected} <= columns for chosen, rejected, _ in PAIRS)


class ObserveTokens:
    """Counts `input_ids`, or those of a pair, and says what to do where samples have neither."""

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer

    def __call__(self, sample: Any) -> Observation:
        """Return the tokens of a sample; a pair takes two rows."""
        keys = sorted(map(str, sample)) if isinstance(sample, Mapping) else []
        if "input_ids" in keys:
            return Observation(_tokens(sample, "input_ids"))
        for chosen, rejected, prompt in PAIRS:
            if chosen in keys and rejected in keys:
                answer = max(_tokens(sample, chosen), _tokens(sample, rejected))
                before = _tokens(sample, prompt) if prompt in keys else 0
                return Observation(2 * (before + answer))
        raise SampleError(
            f"a sample of `{self._trainer}` has no `input_ids`, so that its tokens are unknown. "
            f"Its keys are {keys}. Give the `ODBConfig` an `observe`, a function of such a sample "
            "that returns the padded tokens that it takes in a batch: for frames of speech, one "
            'per 320 values, `observe=lambda s: len(s["input_values"]) // 320`; for patches of '
            'an image, `observe=lambda s: s["pixel_values"].shape[-2] * '
            's["pixel_values"].shape[-1] // 16**2`.'
        )


def _tokens(sample: Mapping[str, Any], key: Any) -> int:
    return len(flatten_row(key, sample[key]))


# --- evaluation -----------------------------------------------------------------------------------


def evaluated(trainer: Any, dataset: Any, name: str | None) -> Any:
    """Return a dataset whose raw samples are processed; `name`: its key in a dict of datasets."""
    process_fn = trainer.odb.process_fn
    if process_fn is None:
        return dataset
    if isinstance(process_fn, Mapping):
        process_fn = process_fn.get(name)
    made = {"input_ids", *compat.collator_columns(trainer)}
    made -= {*CLASS_KEYS, "labels", *(trainer.label_names or ())}
    if not made.isdisjoint(getattr(dataset, "column_names", None) or ()):
        return dataset  # The `Trainer` takes columns out of a table by itself.
    kind = ProcessedStream if isinstance(dataset, IterableDataset) else ProcessedSamples
    return kind(dataset, process_fn, made)


class ProcessedSamples(Dataset[Any]):
    """A map-style dataset for evaluation, whose samples are processed if they have none of `made`.

    `made`: keys of what processing makes.
    """

    def __init__(self, dataset: Any, process_fn: Any, made: set[str]) -> None:
        self._dataset, self._process_fn, self._made = dataset, process_fn, made

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._process(self._dataset[index])

    def _process(self, sample: Any) -> Any:
        if isinstance(sample, Mapping) and not self._made.isdisjoint(sample):
            return sample
        processed = None if self._process_fn is None else self._process_fn(sample)
        if processed is None or isinstance(processed, Skipped):
            raise ValueError(
                "`process_fn` must process all raw samples of evaluation, but has "
                f"{processed} for {describe(sample)}. Leave it out of `eval_dataset`; where "
                "`process_fn` is a dict, give `eval_dataset` as a dict with the same names."
            )
        return processed


class ProcessedStream(ProcessedSamples, IterableDataset[Any]):
    """An iterable for evaluation."""

    def __iter__(self) -> Iterator[Any]:
        return map(self._process, self._dataset)


# --- collating ------------------------------------------------------------------------------------


def given_collate(trainer: Any, config: ODBConfig | None = None) -> Any:
    """Return the collate function that a config, or else its trainer, was given; `None` if none."""
    config = config or trainer.odb
    if config.collate_fn is not None:
        return config.collate_fn
    return None if isinstance(trainer.data_collator, TrainerPadding) else trainer.data_collator


def training_collate(trainer: Any) -> Any:
    """Return the collate function for training, or None for the one that fits the budget."""
    config, given = trainer.odb, given_collate(trainer)
    if given is not None:
        collate_for(loader_budget(trainer), given)  # checks its layout
    if given is None or type(given) in OURS:
        return given
    columns = compat.sample_columns(trainer)
    if columns is None and not compat.is_default_collator(given):
        return given
    return TrainerCollate(given, columns, selects_before=config.collate_fn is None)


class TrainerPadding:
    """The `data_collator` in place of a trainer's own that cannot pad; training pads like it."""

    def __init__(self, trainer: Any, config: ODBConfig) -> None:
        multiple = 1 if config.finds_budget else config.budget.pad_to_multiple_of
        self._collate = PaddingCollate(pad_to_multiple_of=multiple)
        self._taken = compat.model_inputs(trainer.model)

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        """Return the batch of `samples`, as evaluation has it."""
        return rename_labels(self._collate(samples), self._taken)


class TrainerCollate:
    """A collate function that is not ours, which gets, or whose batch has, keys of some columns."""

    def __init__(self, collate: Any, columns: set[str] | None, *, selects_before: bool) -> None:
        self._collate, self._columns = collate, columns
        self._selects_before = selects_before
        self._stacks = compat.is_default_collator(collate)
        self.draws_random_numbers = False if self._stacks else declares_draws(collate)

    def __call__(self, samples: list[Any], info: StepInfo | None = None) -> Any:
        """Return the batch of `samples`; a collate function may take the step, too."""
        dropped: set[str] = set()
        if self._columns is not None:
            if self._selects_before:
                samples = [
                    {key: one[key] for key in one if key in self._columns}
                    if isinstance(one, Mapping)
                    else one
                    for one in samples
                ]
            else:  # known before the function takes keys out
                dropped = {key for one in samples if isinstance(one, Mapping) for key in one}
                dropped -= self._columns
        try:
            batch = collate_group(self._collate, samples, info)  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError) as error:
            if not self._stacks:
                raise
            raise ValueError(
                "samples without `input_ids` must have one size, to be stacked by the default "
                f"collator of the trainer, but: {error}. Give it a `data_collator` that pads them."
            ) from error
        for key in dropped:
            batch.pop(key, None)
        return batch

    collate_step = __call__


def model_batch(trainer: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what makes a batch that for `compute_loss`: ours pass on all keys of the samples."""
    given, columns = given_collate(trainer), compat.sample_columns(trainer)
    if given is not None and type(given) not in OURS:
        return dict

    def select(batch: Mapping[str, Any]) -> dict[str, Any]:
        kept, taken = dict(batch), compat.model_inputs(trainer.model)  # which may be made late
        if given is None:
            kept = rename_labels(kept, taken)
        if columns is None:
            return kept
        selected = {key: kept[key] for key in kept if key in columns or key in taken}
        if "position_ids" in kept and not {"position_ids", "attention_mask"} & {*selected}:
            raise ValueError(
                "the samples of a packed row must not see each other, but in a "
                f"`{type(compat.base_model(trainer.model)).__name__}` they do: its `forward` names "
                'no `position_ids`, so the `Trainer` leaves them out. Take `layout="padded"`; or '
                "`remove_unused_columns=False`, if it takes them by `**kwargs`."
            )
        return selected

    return select


def rename_labels(batch: dict[str, Any], taken: set[str]) -> dict[str, Any]:
    """Return a batch whose `label` or `label_ids` is `labels`, as the default collator has it."""
    for key in ("label", "label_ids"):
        if key not in batch or key in taken or "labels" in batch:
            continue
        rest = {name: value for name, value in batch.items() if name != key}
        try:
            labels = torch.as_tensor(batch[key])
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`{key}` of each sample must be a number, or lists of one length, to become the "
                f"`labels` of a batch, but is {batch[key]!r:.100}. Give one label per token as "
                "`labels`, or pass a `data_collator`."
            ) from error
        # As the stock collator makes them: the losses of models in fp32 take no fp64.
        rest["labels"] = labels.float() if labels.dtype == torch.float64 else labels
        return rest
    return batch
