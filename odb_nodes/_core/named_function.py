"""Functions that a command line names."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["file_of", "is_function_name", "load_function"]

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


def is_function_name(text: str) -> bool:
    """Tell whether a text has the form `module:function`."""
    return _NAME.fullmatch(text) is not None


def load_function(name: str, *takes: str) -> Any:
    """Import and return what `module:function` names, also from the current folder.

    Args:
        name: `module:function`.
        takes: names of the arguments that it is to be called with.

    Raises:
        ValueError: it has another form, there is no such module or function, or it cannot be
            called with these arguments.
    """
    if not is_function_name(name):
        raise ValueError(f"`{name}` must be `module:function`, such as `train:make_loader`.")
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module is there, and needs another one that is not.
        if module.endswith(".py"):
            meant = f"{module.removesuffix('.py')}:{function}"
            raise ValueError(f"`{name}` must be `{meant}`, without .py.") from error
        raise ValueError(
            f"there is no module `{module}` here. Call this in the folder of `{module}.py`."
        ) from error
    if not callable(found := getattr(imported, function, None)):
        raise ValueError(f"module `{module}` has no function `{function}`.")
    try:
        signature = inspect.signature(found)
    except ValueError:  # of a few builtins, which have none
        return found
    try:
        signature.bind(*takes)
    except TypeError as error:
        code = getattr(found, "__code__", None)
        place = f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""
        raise ValueError(
            f"`{name}` must be callable as `{function}({', '.join(takes)})`, but is "
            f"`{function}{signature}`{place}."
        ) from error
    return found


def file_of(name: str) -> Path | None:
    """Return the file of the module of a function that was loaded; `None` where it has none."""
    file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
    return None if file is None else Path(file)
