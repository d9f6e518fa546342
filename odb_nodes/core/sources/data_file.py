"""A file of data: its size, its version, its bytes."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

T = TypeVar("T")

_AT_ONCE = 16  # objects that are looked up, or searched
REMEDY = "Put it back, or make the dataset anew."
CHANGED = (
    f"the file was cut or replaced since the dataset was made, or its time was changed. {REMEDY}"
)


def is_url(file: str | os.PathLike[str]) -> bool:
    """Tell whether fsspec opens a file."""
    return isinstance(file, str) and "://" in file


class DataFile(Protocol):
    """A `LocalFile`, or a `StoredFile`.

    Attributes:
        path: as the user gave it.
        place: where the file is, whatever the path to it.
        name: last part of the path.
        size: bytes.
        version: of an object of a store; "" of a local file, or if the store tells none.
        stamp: two numbers that change with the content.
        is_stored: whether the file is an object of a store.
    """

    path: str | Path
    place: str
    name: str
    size: int
    version: str
    stamp: tuple[int, int]
    is_stored: bool

    def is_unchanged(self) -> bool:
        """Tell whether the file has the content that it had when this object was made."""

    def open(self, *, keeps: bool = False) -> BinaryIO:
        """Open the file, to read it from its beginning.

        Args:
            keeps: whether the bytes of an object that are read stay on the local disk.
        """

    def open_places(self) -> BinaryIO:
        """Open the file, to read some places of it."""

    def read(self, start: int, stop: int) -> bytes | mmap.mmap:
        """Return the bytes `start`..`stop - 1`; raise an `OSError` if the file has changed."""


class LocalFile:
    """A file of a local disk."""

    is_stored = False
    version = ""  # A copy of a file has another time, and the same data.

    def __init__(self, path: str | Path) -> None:
        self.path: str | Path = Path(path)
        self.place = str(self.path.resolve())
        self.name = self.path.name
        self.stamp = stamp_of(self.path.stat())
        self.size = self.stamp[0]

    def __str__(self) -> str:
        return str(self.path)

    def is_unchanged(self) -> bool:
        """Tell whether the file has the content that it had when this object was made."""
        return stamp_of(os.stat(self.path)) == self.stamp

    def open(self, *, keeps: bool = False) -> BinaryIO:
        """Open the file, to read it from its beginning."""
        del keeps
        return open(self.path, "rb")

    def open_places(self) -> BinaryIO:
        """Open the file, to read some places of it."""
        return open(self.path, "rb")

    def read(self, start: int, stop: int) -> bytes | mmap.mmap:
        """Return the bytes `start`..`stop - 1`; raise an `OSError` if the file has changed."""
        with open(self.path, "rb") as opened:
            opened.seek(start)
            content = opened.read(stop - start)
            is_same = stamp_of(os.fstat(opened.fileno())) == self.stamp
        if not is_same or len(content) < stop - start:
            raise OSError(CHANGED)
        return content


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and time of a file, which change with its content."""
    return status.st_size, status.st_mtime_ns


def of_each(call: Callable[[Any], T], files: Iterable[Any]) -> list[T]:
    """Return `call` of each file; of objects of a store, several at once."""
    files = [*files]
    if not any(is_url(getattr(file, "path", file)) for file in files):
        return [*map(call, files)]
    with ThreadPoolExecutor(_AT_ONCE, "odb_nodes-store") as pool:
        return [*pool.map(call, files)]


def data_id_of(files: Sequence[DataFile], *more: object) -> str:
    """Return the identity of the data, for states: names, sizes, and versions of objects."""
    content = repr(([file.name for file in files], [file.size for file in files], *more))
    content += "".join(file.version for file in files)
    return f"{len(files)} files, CRC-32 {zlib.crc32(content.encode())}"


def file_versions(files: Sequence[DataFile]) -> dict[str, str]:
    """Return the versions of objects, by their paths below the folder of all of them."""
    versions = {file.place: file.version for file in files if file.is_stored}
    alike = os.path.commonprefix([*versions])  # noqa: RUF071 - URLs are no paths
    folder, slash, _ = alike.rpartition("/")
    return {f"version of {url.removeprefix(folder + slash)}": versions[url] for url in versions}
