"""What we rely on inside of LLaMA-Factory: the two places where its training can be changed.

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
"""Module that trains -> the class of the trainer that it makes."""

OTHER_VERSION = (
    "This is another version of LLaMA-Factory than the one that this is made for. Install "
    "llamafactory==0.9.5, or call `DynamicBatches.configure` in a workflow of your own."
)


def import_tuner() -> Any:
    """Return `llamafactory.train.tuner`, whose `run_exp` is `llamafactory-cli train`."""
    try:
        return import_module("llamafactory.train.tuner")
    except ImportError as error:
        raise ImportError(
            f"LLaMA-Factory cannot be imported ({error}). Install it, with what it needs: "
            "pip install llamafactory"
        ) from error


@contextmanager
def changed(parse: Callable[[Any], Any], make: Callable[[Any], Any]) -> Iterator[None]:
    """Let LLaMA-Factory train with other arguments and trainers within the block.

    Relies on `tuner._training_function` to call `get_train_args` of its module once, and on the
    modules in `TRAINERS` to make one trainer each, by the name of its class.
    """
    with ExitStack() as stack:
        stack.enter_context(_wrapped(import_tuner(), "get_train_args", parse))
        for module, name in TRAINERS.items():
            stack.enter_context(_wrapped(import_module(module), name, make))
        yield


@contextmanager
def _wrapped(module: Any, name: str, result: Callable[[Any], Any]) -> Iterator[None]:
    if (original := getattr(module, name, None)) is None:
        raise RuntimeError(f"`{module.__name__}` has no `{name}`. {OTHER_VERSION}")
    setattr(module, name, lambda *args, **kwargs: result(original(*args, **kwargs)))
    try:
        yield
    finally:
        setattr(module, name, original)
