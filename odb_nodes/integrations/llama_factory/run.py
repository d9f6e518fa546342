"""Runs LLaMA-Factory's own training with dynamic batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from odb_nodes._compat import llama_factory as compat
from odb_nodes._core.checks import check_type
from odb_nodes.integrations.learning_rate import LrScaling
from odb_nodes.integrations.llama_factory.arguments import DynamicBatches
from odb_nodes.processing import WorkerOptions

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
    given = tuner.read_args(args)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"the first argument must be a YAML file, but the arguments are {given}. Run: "
            "python -m odb_nodes.integrations.llama_factory run.yaml [name=value ...]"
        )
    rest = {name: value for name, value in given.items() if name != ODB_KEY}
    if tuner.get_ray_args(rest).use_ray:
        raise ValueError(
            "`USE_RAY` must not be set: the processes of Ray would train with fixed batches. Start "
            "one process per GPU with torchrun."
        )
    run = _DynamicRun(given.get(ODB_KEY))
    with compat.changed(run.parsed, run.configured):
        tuner.run_exp(rest, callbacks=[run.check()])


class _DynamicRun:
    """What is changed of a run of LLaMA-Factory."""

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
        self._made = False  # a trainer, where 0.9.5 makes one

    def parsed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments to train with, before anything is loaded."""
        model_args, data_args, training_args, finetuning_args, generating_args = arguments
        for name in ("use_mca", "use_hyper_parallel"):
            if getattr(finetuning_args, name, False):
                raise ValueError(f"`{name}` must be False: its trainer is not one of transformers.")
        self._batches = batches = DynamicBatches.of(
            data_args, training_args, finetuning_args, token_budget=self._token_budget
        )
        self._config(token_budget=batches.budget, **self._options)  # says what is wrong with them
        return model_args, batches.data_args, training_args, finetuning_args, generating_args

    def configured(self, trainer: Any) -> Any:
        """Return the trainer with dynamic batches."""
        assert self._batches is not None
        self._made = True
        return self._batches.configure(trainer, **self._options)

    def check(self) -> Any:
        """Return a callback that raises where training begins with another trainer."""
        run = self

        class Check(import_module("transformers").TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                if not run._made:
                    raise RuntimeError(f"Training would have fixed batches. {compat.OTHER_VERSION}")

        return Check()


def _check_names(where: str, given: Mapping[str, Any], kind: Any) -> None:
    names = sorted(field.name for field in fields(kind))
    if unknown := sorted(map(str, {*given}.difference(names))):
        raise ValueError(
            f"`{where}` must have fields of `{kind.__name__}` alone, but has {unknown}. There are: "
            f"{', '.join(names)}."
        )
