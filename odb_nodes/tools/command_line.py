"""Command lines: the functions that they name, and the files that they write."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

AnyPath = str | os.PathLike[str]


def is_function_name(text: str) -> bool:
    """Tell whether a text has the form `module:function`."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", text) is not None


def load_function(name: str, *takes: str) -> Any:
    """Return what `module:function` names, in the current folder too; it takes these arguments."""
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


def check_is_writable(path: AnyPath, inputs: Iterable[AnyPath] = (), *, force: bool) -> None:
    """Raise an `OSError` unless writing `path` loses nothing: no file without `force`, no input.

    What is in a folder of `inputs` counts as an input, by whatever name.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder `{path.parent}`: make that folder first.")
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder: name a file in it.")
    if any(_is_of(path, Path(one)) for one in inputs):
        raise FileExistsError(
            f"`{path}` is also read, or written twice: name another file, outside the folders that "
            "are read."
        )
    if path.is_file() and not force:
        raise FileExistsError(f"`{path}` exists: name another file, or pass --force to replace it.")


def _is_of(path: Path, other: Path) -> bool:
    """Tell whether a path is an input or, where that is a folder, a file in it."""
    if not (path.exists() and other.exists()):
        return path.resolve() == other.resolve()
    if not other.is_dir():
        return path.samefile(other)  # a hard link, too
    named = path.parent.resolve() / path.name  # in the folder, if only as a link to elsewhere
    if other.resolve() in (*path.resolve().parents, *named.parents):
        return True
    return any(one.exists() and path.samefile(one) for one in other.iterdir())
