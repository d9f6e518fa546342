"""The index of a large file's records, kept beside the file so that it is searched once."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._support.files import replacing

Index = dict[str, npt.NDArray[Any]]

KEPT_FROM_BYTES = 64 << 20  # of a file whose index is kept
_STAMP = "stamp"


def index_of(
    path: Path, kind: str, names: Collection[str], search: Callable[[Path], Index]
) -> Index:
    """Return the index of a file; the index of a large file is kept.

    It is in a hidden file beside the data or, if that cannot be written, in `~/.cache/odb_nodes`,
    and is used until size or time of the data file change.

    Args:
        path: the data file.
        kind: name and version of the index.
        names: names of its integer arrays.
        search: makes the index.
    """
    stamp = stamp_of(path.stat())
    if stamp[0] < KEPT_FROM_BYTES:
        return search(path)
    digest = hashlib.sha1(os.fsencode(path.resolve())).hexdigest()[:16]
    places = [path.with_name(f".{path.name}.{kind}")]
    with suppress(RuntimeError):  # A user may have no home.
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "odb_nodes"
        places.append(cache / f"{path.name}.{digest}.{kind}")
    for place in places:
        if (kept := _kept(place, stamp, names)) is not None:
            return kept
    index = search(path)
    if stamp_of(path.stat()) == stamp:  # else somebody is still writing
        content = io.BytesIO()
        arrays: dict[str, Any] = {_STAMP: np.array(stamp), **index}
        np.savez(content, **arrays)
        for place in places:
            with suppress(OSError):  # The folder may be read-only, or the disk full.
                place.parent.mkdir(parents=True, exist_ok=True)
                with replacing(place) as file:
                    file.write(content.getbuffer())
                break
    return index


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and time of a file, which change with its content."""
    return status.st_size, status.st_mtime_ns


def _kept(place: Path, stamp: tuple[int, int], names: Collection[str]) -> Index | None:
    """Return the kept index; `None` if it is of another file, or damaged."""
    try:
        with open(place, "rb") as file, np.load(file, allow_pickle=False) as kept:
            arrays = dict(kept)  # The archive has a checksum of each.
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    is_of_file = arrays.pop(_STAMP, np.zeros(0)).tolist() == [*stamp]
    has_names = arrays.keys() == {*names}
    is_whole = all(array.dtype.kind in "iu" for array in arrays.values())
    return arrays if is_of_file and has_names and is_whole else None
