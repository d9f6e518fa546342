"""Dynamic batches for LLaMA-Factory: for its trainer, or for a whole run.

    batches = DynamicBatches.of(data_args, training_args, finetuning_args)
    ...  # load the dataset with `batches.data_args`, make the trainer
    batches.configure(trainer)

`DynamicBatches` reads arguments by name: it does not import LLaMA-Factory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any

from odb_nodes._compat import llama_factory as compat
from odb_nodes._support.checks import check_bool, check_choice, check_count, check_type
from odb_nodes.core.collate import PackedCollate
from odb_nodes.core.planning import TokenBudget
from odb_nodes.core.processing import WorkerOptions
from odb_nodes.integrations.learning_rate import LrScaling

_ARGUMENTS = (
    "cutoff_len",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "packing",
    "neat_packing",
    "stage",
    "disable_shuffling",
    "group_by_length",
    "dataloader_drop_last",
)
_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, kw_only=True)
class DynamicBatches:
    """Dynamic batches for LLaMA-Factory's arguments; made by `of`.

    Attributes:
        budget: the budget of a batch on one rank: `cutoff_len` x `per_device_train_batch_size`
            tokens, which need at most the memory of the fixed batches. Packed with `neat_packing`.
        accumulate: batches per optimizer step.
        shuffle: whether to shuffle the training data.
        data_args: a copy of the arguments to load the dataset with, without packing: the loader
            packs during training.
    """

    budget: TokenBudget
    accumulate: int
    shuffle: bool
    data_args: Any

    @classmethod
    def of(cls, *arguments: Any, token_budget: int | None = None) -> DynamicBatches:
        """Return the dynamic batches for LLaMA-Factory's arguments.

        Args:
            arguments: `data_args`, `training_args` and `finetuning_args`, or one mapping of a YAML
                file. Read are `cutoff_len`, `per_device_train_batch_size`,
                `gradient_accumulation_steps`, `packing`, `neat_packing`, `stage`,
                `disable_shuffling`, `group_by_length` and `dataloader_drop_last`. The first is
                required; so is the second without `token_budget`.
            token_budget: tokens of a batch on one rank, in place of the product.

        Raises:
            TypeError, ValueError: an argument is missing or not valid, contradicts another
                argument, or cannot be used with dynamic batches.
        """
        options = _merged(arguments)
        cutoff = check_count("cutoff_len", _required(options, "cutoff_len"))
        if token_budget is not None:
            tokens = check_count("token_budget", token_budget)
            if tokens < cutoff:
                raise ValueError(
                    f"`token_budget` must be at least `cutoff_len` ({cutoff}), but is {tokens}: "
                    "a sample of that length would exceed it."
                )
        else:
            name = "per_device_train_batch_size"
            tokens = cutoff * check_count(name, _required(options, name))
        _check_kind(options)
        name = "gradient_accumulation_steps"
        return cls(
            budget=TokenBudget(tokens, layout="packed" if _is_packed(options) else "padded"),
            accumulate=check_count(name, options.get(name, 1)),
            shuffle=not _flag(options, "disable_shuffling"),
            data_args=_without_packing(arguments),
        )

    def configure(self, trainer: Any, **options: Any) -> Any:
        """Configure a trainer of transformers with these dynamic batches, and return it.

        Args:
            trainer: a trainer of any class, made with the same arguments, before it trains.
            options: further fields of `ODBConfig`.

        Raises:
            ImportError: transformers is not installed.
            ValueError: the trainer was made with other arguments, or has a packed dataset.
        """
        integration = import_module("odb_nodes.integrations.huggingface")  # imports transformers
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
        """Return the budget, rounded up to the multiple that the collator pads to."""
        multiple = getattr(collator, "pad_to_multiple_of", None) or 1
        if self.budget.layout == "packed" or multiple == 1:
            return self.budget
        tokens = -(-self.budget.tokens // multiple) * multiple
        return replace(self.budget, tokens=tokens, pad_to_multiple_of=multiple)


class _PackedText:
    """Packs text, whose rows have empty columns for media."""

    draws_random_numbers = False

    def __init__(self, collate: PackedCollate) -> None:
        self._collate = collate

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of `samples`."""
        for name in _MEDIA:
            if any(sample.get(name) for sample in samples):
                raise ValueError(
                    f"`neat_packing` must be False if samples have `{name}`: only text is "
                    "packed. Without it, short samples share a batch anyway."
                )
        rows = ({key: row[key] for key in row if key not in _MEDIA} for row in samples)
        return self._collate(list(rows))


def _fields(arguments: Any) -> Mapping[str, Any]:
    if isinstance(arguments, Mapping):
        return arguments
    return {name: getattr(arguments, name) for name in _ARGUMENTS if hasattr(arguments, name)}


def _merged(all_arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of several objects or mappings, which must agree."""
    merged: dict[str, Any] = {}
    for arguments in map(_fields, all_arguments):
        for name in _ARGUMENTS:
            if name in arguments and merged.setdefault(name, arguments[name]) != arguments[name]:
                values = f"{merged[name]!r} and as {arguments[name]!r}"
                raise ValueError(f"`{name}` is given twice, as {values}.")
    return merged


def _required(options: Mapping[str, Any], name: str) -> Any:
    if name not in options:
        raise ValueError(
            f"`{name}` must be given: pass all of `data_args`, `training_args` and "
            "`finetuning_args`, or one mapping with their fields."
        )
    return options[name]


def _flag(options: Mapping[str, Any], name: str) -> bool:
    value = options.get(name)
    return False if value is None else check_bool(name, value)


def _check_kind(options: Mapping[str, Any]) -> None:
    """Reject kinds of training and of batches that cannot be dynamic."""
    check_choice(
        "stage",
        options.get("stage", "sft"),
        ("pt", "sft"),
        "In other stages a sample has several sequences, which a token budget does not count.",
    )
    for name, reason in (
        ("group_by_length", "dynamic batches already group samples of similar length"),
        ("dataloader_drop_last", "batches have no fixed size, and every sample is used"),
    ):
        if _flag(options, name):
            raise ValueError(f"`{name}` must be False, but is True: {reason}.")


def _is_packed(options: Mapping[str, Any]) -> bool:
    packing = options.get("packing")
    is_neat = _flag(options, "neat_packing")
    if is_neat and packing is False:
        raise ValueError("`packing` must not be False if `neat_packing` is True. Drop one of them.")
    if not is_neat and _flag(options, "packing"):
        raise ValueError(
            "`packing` must be False, or `neat_packing` True: with `packing` alone, the samples of "
            "a row attend to each other. Without either, short samples share a batch anyway."
        )
    if not is_neat and packing is None and options.get("stage", "sft") == "pt":
        raise ValueError(
            '`packing` must be given if `stage` is "pt", where it is True by default: '
            "set it to False for dynamic batches, or `neat_packing` to True for packed ones."
        )
    return is_neat


def _without_packing(all_arguments: tuple[Any, ...]) -> Any:
    """Return a copy of the arguments of the data, with packing off."""
    data_args = next(arguments for arguments in all_arguments if "cutoff_len" in _fields(arguments))
    if isinstance(data_args, Mapping):
        return {**data_args, "packing": False, "neat_packing": False}
    changed = copy.copy(data_args)
    changed.packing = changed.neat_packing = False
    return changed


def _check_not_packed(dataset: Any) -> None:
    """Reject a dataset whose rows hold several samples."""
    if isinstance(dataset, Mapping):  # several to mix
        for part in dataset.values():
            _check_not_packed(part)
        return
    row = _first_row(dataset)
    names = getattr(dataset, "column_names", None) or [*row]
    mask = row.get("attention_mask")  # with `neat_packing`, it numbers the samples from 1
    if "position_ids" in names or (mask is not None and len(mask) and max(mask) > 1):
        raise ValueError(
            "`train_dataset` of the trainer must not be packed, but is packed already. Load it "
            "with `data_args` of `DynamicBatches`, and without an old `tokenized_path`."
        )


def _first_row(dataset: Any) -> Mapping[str, Any]:
    """Return the first row of a dataset or stream; an empty row if it cannot be read."""
    if isinstance(dataset, Sized):  # A stream of `datasets` has `__getitem__`, but no length.
        row = dataset[0] if len(dataset) and hasattr(dataset, "__getitem__") else {}
    else:
        can_repeat = isinstance(dataset, Iterable) and not isinstance(dataset, Iterator)
        row = next(iter(dataset), {}) if can_repeat else {}
    return row if isinstance(row, Mapping) else {}


# --- a run of LLaMA-Factory -----------------------------------------------------------------------

ODB_KEY = "odb"
_OF_MAPPING: Mapping[str, Any] = {"lr_scaling": LrScaling, "workers": WorkerOptions}


def main(args: Mapping[str, Any] | None = None) -> None:
    """Train as `llamafactory-cli train` does, with dynamic batches: stages `sft` and `pt`.

    Args:
        args: what the YAML file holds: the arguments of LLaMA-Factory, and `odb`, a mapping with
            fields of `ODBConfig`. Default: from the command line, `run.yaml [name=value ...]`.

    Raises:
        ImportError: LLaMA-Factory or transformers is not installed.
        RuntimeError: the version of LLaMA-Factory would train with fixed batches.
        TypeError, ValueError: an argument is not valid, or cannot be used with dynamic batches.
    """
    tuner = compat.import_tuner()
    arguments = tuner.read_args(args)
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"the first argument must be a YAML file, but the arguments are {arguments}. Run: "
            "python -m odb_nodes.integrations.llama_factory run.yaml [name=value ...]"
        )
    run = _DynamicRun(arguments.get(ODB_KEY))
    factory_arguments = {name: value for name, value in arguments.items() if name != ODB_KEY}
    if tuner.get_ray_args(factory_arguments).use_ray:
        raise ValueError(
            "`USE_RAY` must not be set: the processes of Ray would train with fixed batches. Start "
            "one process per GPU with torchrun."
        )
    with compat.patched_training(run.parsed, run.configured):
        tuner.run_exp(factory_arguments, callbacks=[run.check()])


class _DynamicRun:
    """Changes the arguments and the trainer of a run of LLaMA-Factory."""

    def __init__(self, odb: Any) -> None:
        check_type(ODB_KEY, odb, Mapping | None, "Give it fields of `ODBConfig`: `window: 1024`.")
        self._config = import_module("odb_nodes.integrations.huggingface").ODBConfig
        self._options = {**(odb or {})}
        _check_names(ODB_KEY, self._options, self._config)
        for name, kind in _OF_MAPPING.items():
            if isinstance(value := self._options.get(name), Mapping):
                _check_names(f"{ODB_KEY}.{name}", value, kind)
                self._options[name] = kind(**value)
        self._token_budget = self._options.pop("token_budget", None)
        self._batches: DynamicBatches | None = None
        self._has_trainer = False  # whether LLaMA-Factory has made its trainer through `configured`

    def parsed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments to train with, before anything is loaded."""
        model_args, data_args, training_args, finetuning_args, generating_args = arguments
        for name in ("use_mca", "use_hyper_parallel"):
            if getattr(finetuning_args, name, False):
                raise ValueError(f"`{name}` must be False: its trainer is not one of transformers.")
        self._batches = batches = DynamicBatches.of(
            data_args, training_args, finetuning_args, token_budget=self._token_budget
        )
        self._config(token_budget=batches.budget, **self._options)  # validates them
        return model_args, batches.data_args, training_args, finetuning_args, generating_args

    def configured(self, trainer: Any) -> Any:
        """Return the trainer with dynamic batches."""
        assert self._batches is not None
        self._has_trainer = True
        return self._batches.configure(trainer, **self._options)

    def check(self) -> Any:
        """Return a callback that raises if training begins with another trainer."""
        run = self

        class Check(import_module("transformers").TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                if not run._has_trainer:
                    raise RuntimeError(f"Training would have fixed batches. {compat.OTHER_VERSION}")

        return Check()


def _check_names(where: str, options: Mapping[str, Any], kind: Any) -> None:
    names = sorted(field.name for field in fields(kind))
    if unknown := sorted(map(str, {*options}.difference(names))):
        raise ValueError(
            f"`{where}` must have fields of `{kind.__name__}` alone, but has {unknown}. There are: "
            f"{', '.join(names)}."
        )
