"""The index of a large file's records, kept beside the file so that it is searched once."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odb_nodes._support.files import replacing
from odb_nodes.core.sources.data_file import DataFile
from odb_nodes.core.sources.range_cache import cache_folder, one_at_a_time

Index = dict[str, npt.NDArray[Any]]

KEPT_FROM_BYTES = 64 << 20  # of a file whose index is kept
_STAMP = "stamp"
_TURN_S = 3600.0  # that a rank waits for another one that searches the same object


def index_of(
    file: DataFile, kind: str, names: Collection[str], search: Callable[[DataFile], Index]
) -> Index:
    """Return the index of a file; the index of a large file, or of an object, is kept.

    It is in a hidden file beside the data or, if that cannot be written, in `~/.cache/odb_nodes`,
    and is used until size or time of the data file change, or the version of an object.

    Args:
        file: the data file.
        kind: name and version of the index.
        names: names of its integer arrays.
        search: makes the index.
    """
    if file.size < KEPT_FROM_BYTES if not file.is_stored else not file.version:
        return search(file)
    places = [] if file.is_stored else [Path(file.path).with_name(f".{file.name}.{kind}")]
    if (cache := cache_folder()) is not None:
        digest = hashlib.sha1(os.fsencode(file.place)).hexdigest()[:16]
        places.append(cache / f"{file.name}.{digest}.{kind}")
    turn = None
    if file.is_stored and cache is not None:  # Ranks search local files at once.
        turn = one_at_a_time(cache, file.place, _TURN_S)
    with turn or nullcontext():
        for place in places:
            if (kept := _kept(place, file.stamp, names)) is not None:
                return kept
        index = search(file)
        if file.is_unchanged():  # else somebody is still writing
            _keep(index, file.stamp, places)
    return index


def _keep(index: Index, stamp: tuple[int, int], places: Collection[Path]) -> None:
    content = io.BytesIO()
    arrays: dict[str, Any] = {_STAMP: np.array(stamp), **index}
    np.savez(content, **arrays)
    for place in places:
        with suppress(OSError):  # The folder may be read-only, or the disk full.
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place) as file:
                file.write(content.getbuffer())
            break


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
