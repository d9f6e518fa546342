"""States as files: written atomically, read as plain data."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from odb_nodes._support.files import replacing
from odb_nodes.errors import StateError, TornStateError


def save_state(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state to a file, atomically: a reader sees the whole old file or the whole new file.

    Args:
        state: the result of `Loader.state_dict()`; or a dict of this state, other plain data and
            tensors, such as a model's `state_dict()` and a step count.
        path: the file; its folder must exist.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: the folder does not exist.
        OSError: the file cannot be written, for example because the disk is full.
        StateError: `state` holds an object that is neither plain data nor a tensor, or is nested
            too deeply.

    After any error, Ctrl-C included, an earlier file at `path` is kept and no temporary file stays.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`path` must be a path, but is a `{type(path).__name__}` instead. The state comes "
            "first: `save_state(state, path)`."
        )
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"`{path.parent}` is no folder: make it before saving into it.")
    if path.exists():
        _check_regular(path)
    with replacing(path) as file:
        _write(state, file)
        check_readable(file.name)


def _write(state: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a state. Where torch hides the error that interrupted it, raise that error."""
    try:
        torch.save(state, file)
        file.flush()
    except RecursionError as error:
        raise StateError(f"`state` is nested too deeply to be saved: {error}.") from None
    except RuntimeError as error:
        cause: BaseException | None = error
        while isinstance(cause, RuntimeError) and "enforce fail" in str(cause):
            cause = cause.__cause__ or cause.__context__
        raise cause or error from None
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # all raised by pickle
        raise StateError(
            f"`state` must hold plain data and tensors only, but pickle refused a value: {error}."
        ) from error


def _check_regular(path: Path) -> None:
    """Check that a path is a file: reading from a pipe or a device may have no end."""
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder, not a state file.")
    if not stat.S_ISREG(path.stat().st_mode):
        raise StateError(f"`{path}` is a pipe, socket or device: a state is in a regular file.")


def check_readable(file: str | io.BytesIO) -> None:
    """Raise a `StateError` if a new file cannot be read: it must not replace a readable file."""
    try:
        torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, str))
    except pickle.UnpicklingError as error:
        raise StateError(
            "`state` must hold plain data and tensors only (numpy's are not: use `float(x)` and "
            f"`torch.from_numpy(x)`), but holds {_refused(error)}."
        ) from error


def _refused(error: pickle.UnpicklingError) -> str:
    """Return the name of the type that torch refused to load, out of its long message."""
    match = re.search(r"Unsupported \w+: (?:GLOBAL )?(\S+)", str(error))
    return f"`{match[1]}`" if match else type(error).__name__


def load_state(path: str | os.PathLike[str]) -> Any:
    """Read a file that `save_state` wrote, with `torch.load(weights_only=True)`.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: it is a folder.
        StateError: the file is truncated, holds an object that is neither plain data nor a tensor,
            or is no regular file.
    """
    path = Path(path)
    _check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not compare the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"checksum of {damaged}")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            f"`{path}` is not a state file: it must hold plain data and tensors only (numpy's are "
            f"not), but holds {_refused(error)}."
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a wrong offset
            raise
        raise TornStateError(
            f"`{path}` ({path.stat().st_size} bytes) is truncated or not a state file "
            f"({type(error).__name__}). Use an earlier checkpoint."
        ) from error
