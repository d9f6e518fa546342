"""States as files: written whole or not at all, read as plain data."""

from __future__ import annotations

import io
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from odb_nodes.errors import StateError

__all__ = ["load_state", "save_state"]


def save_state(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file, atomically: a reader finds the old file or the new one, whole.

    Args:
        state: what `Loader.state_dict()` returned, alone or in a dict with other plain data and
            tensors (a model's `state_dict()`, a step count).
        path: the file; its folder must exist.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: the folder does not exist.
        StateError: `state` holds something else than plain data and tensors. A file that was at
            `path` before is kept.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`path` must be a path, but is a `{type(path).__name__}` instead. The state comes "
            "first: `save_state(state, path)`."
        )
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`{path.parent}` is no folder: make it before saving into it.")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        check_readable(temporary)
        os.chmod(temporary, _mode_of(path))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def check_readable(file: str | io.BytesIO) -> None:
    """Raise a `StateError` if what was saved cannot be read: it must not replace what can."""
    try:
        torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    except pickle.UnpicklingError as error:
        raise StateError(
            "`state` must hold plain data and tensors only (numpy's are not: use `float(x)` and "
            f"`torch.from_numpy(x)`), but holds {_refused(error)}."
        ) from error


def _refused(error: pickle.UnpicklingError) -> str:
    """Return what torch refused to load, out of its long message."""
    found = re.search(r"Unsupported \w+: (?:GLOBAL )?(\S+)", str(error))
    return f"`{found[1]}`" if found else type(error).__name__


def _mode_of(path: Path) -> int:
    """Return the permissions that a file has, or would have if it were made."""
    if path.exists():
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def load_state(path: str | os.PathLike[str]) -> Any:
    """Read a file that `save_state` wrote, with `torch.load(weights_only=True)`.

    Raises:
        FileNotFoundError: there is no such file.
        StateError: the file is truncated, or holds something else than plain data and tensors.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder, not a state file.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at the checksums
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"checksum of {damaged}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        raise StateError(
            f"`{path}` is not a state file: it holds something else than plain data and tensors "
            f"(numpy's are not): {_refused(error)}."
        ) from error
    except Exception as error:
        raise StateError(
            f"`{path}` ({path.stat().st_size} bytes) is truncated or not a state file "
            f"({type(error).__name__}). Use an earlier checkpoint."
        ) from error
