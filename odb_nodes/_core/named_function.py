"""Functions that a command line names."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

__all__ = ["is_function_name", "load_function"]

_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


def is_function_name(text: str) -> bool:
    """Tell whether a text has the form `module:function`."""
    return _NAME.fullmatch(text) is not None


def load_function(name: str) -> Any:
    """Import and return what `module:function` names, also from the current folder.

    Raises:
        ValueError: it has another form, or there is no such module or function.
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
        raise ValueError(
            f"there is no module `{module}` here. Call this in the folder of `{module}.py`."
        ) from error
    if not callable(found := getattr(imported, function, None)):
        raise ValueError(f"module `{module}` has no function `{function}`.")
    return found
