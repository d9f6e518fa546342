"""Whether a file can be written, before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["check_is_writable"]


def check_is_writable(path: str | os.PathLike[str]) -> None:
    """Raise an `OSError` unless `path` is a file, or none yet, in a folder that exists."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder `{path.parent}`: make that folder first.")
    if path.is_dir():
        raise IsADirectoryError(f"`{path}` is a folder: name a file in it.")
