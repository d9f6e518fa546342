"""Internals of LLaMA-Factory that we rely on: its argument parser and its trainer classes.

Read in llamafactory 0.9.5. Its canary is `tests/integrations/llama_factory/test_package.py`, which
runs where the package is, since it needs versions of other packages that are not ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

TRAINERS = {
    "llamafactory.train.sft.workflow": "CustomSeq2SeqTrainer",
    "llamafactory.train.pt.workflow": "CustomTrainer",
}
"""Training module -> the class of its trainer."""

OTHER_VERSION = (
    "This version of LLaMA-Factory is not supported. Install "
    "llamafactory==0.9.5, or call `DynamicBatches.configure` in a workflow of your own."
)


def import_tuner() -> Any:
    """Return `llamafactory.train.tuner`, whose `run_exp` is `llamafactory-cli train`."""
    try:
        return import_module("llamafactory.train.tuner")
    except ImportError as error:
        raise ImportError(
            f"LLaMA-Factory cannot be imported ({error}). Install it, with its dependencies: "
            "pip install llamafactory"
        ) from error


@contextmanager
def patched_training(
    change_arguments: Callable[[Any], Any], change_trainer: Callable[[Any], Any]
) -> Iterator[None]:
    """Within the block, LLaMA-Factory trains with the arguments and trainers that these return.

    Relies on `tuner._training_function` to call `get_train_args` of its module once, and on the
    modules in `TRAINERS` to make one trainer each, by the name of its class.
    """
    with ExitStack() as stack:
        stack.enter_context(_wrapped(import_tuner(), "get_train_args", change_arguments))
        for module, name in TRAINERS.items():
            stack.enter_context(_wrapped(import_module(module), name, change_trainer))
        yield


@contextmanager
def _wrapped(module: Any, name: str, change_result: Callable[[Any], Any]) -> Iterator[None]:
    if (original := getattr(module, name, None)) is None:
        raise RuntimeError(f"`{module.__name__}` has no `{name}`. {OTHER_VERSION}")
    setattr(module, name, lambda *args, **kwargs: change_result(original(*args, **kwargs)))
    try:
        yield
    finally:
        setattr(module, name, original)
