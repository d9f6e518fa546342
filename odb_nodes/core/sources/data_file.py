"""A file of data, on a local disk or in an object store: its size, its version, its bytes."""

from __future__ import annotations

import hashlib
import io
import logging
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np

from odb_nodes._support.arrays import IntArray
from odb_nodes._support.checks import import_extra
from odb_nodes.core.sources.range_cache import kept_range

T = TypeVar("T")
logger = logging.getLogger("odb_nodes")

TRIES = 6  # to read from a store
WAIT_S = 0.5  # before the second try, and twice as long before each further one
TRY_S = 60.0  # of a try
READ_BYTES = 8 << 20  # at a time, of an object that is read from its beginning
BLOCK_BYTES = 4 << 20  # of neighbouring records that are read at once
_MOST_BYTES = 32 << 20  # of a request
_AT_ONCE = 16  # objects that are looked up, or searched
_VERSIONS = (
    *("ETag", "etag", "generation", "VersionId", "version_id", "Content-MD5", "mtime"),
    *("LastModified", "last_modified", "Last-Modified", "created"),
)
_NO_CREDENTIALS = (
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),  # of botocore
    "DefaultCredentialsError",  # of Google
)
REMEDY = "Put it back, or make the dataset anew."
CHANGED = (
    f"the file was cut or replaced since the dataset was made, or its time was changed. {REMEDY}"
)


def is_url(file: str | os.PathLike[str]) -> bool:
    """Tell whether fsspec opens a file."""
    return isinstance(file, str) and "://" in file


class LocalFile:
    """A file of a local disk."""

    is_stored = False
    version = ""  # A copy of a file has another time, and the same data.

    def __init__(self, path: str | Path) -> None:
        self.path: str | Path = Path(path)
        self.place = str(self.path.resolve())
        """Where the file is, whatever the path to it."""
        self.name = self.path.name
        self.stamp = stamp_of(self.path.stat())
        """Size and time, which change with the content."""
        self.size = self.stamp[0]

    def __str__(self) -> str:
        return str(self.path)

    def is_unchanged(self) -> bool:
        """Tell whether the file has the content that it had when this object was made."""
        return stamp_of(os.stat(self.path)) == self.stamp

    def open(self, *, keeps: bool = False) -> BinaryIO:
        """Open the file, to read it from its beginning. keeps: see `StoredFile`."""
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


class StoredFile(LocalFile):
    """An object of a store that fsspec opens, as of `"s3://bucket/a.jsonl"`.

    Failures are tried again, within limits, and each is logged. What is read stays on the local
    disk, see `kept_range`. An object of another version is an `OSError`.
    """

    is_stored = True

    def __init__(self, path: str) -> None:
        self.path = path
        # What follows signs the request, and changes.
        self.place = path.partition("?")[0] if path.startswith("http") else path
        self.name = self.place.rsplit("/", 1)[-1]
        self.size, self.version = _tried(path, partial(_look_up, path))
        content = f"{self.place}\n{self.size}\n{self.version}"
        self._digest = hashlib.sha1(content.encode()).hexdigest()
        self.stamp = (self.size, int(self._digest[:12], 16))

    def is_unchanged(self) -> bool:
        """Return True: each `read` checks the version."""
        return True

    def open(self, *, keeps: bool = False) -> BinaryIO:
        """Open the object, to read it from its beginning. keeps: whether to keep what is read."""
        return cast(BinaryIO, io.BufferedReader(_Ranges(self, keeps=keeps), READ_BYTES))

    def open_places(self) -> BinaryIO:
        """Open the object, to read some places of it, which are kept."""
        return cast(BinaryIO, _Ranges(self, keeps=True))

    def read(self, start: int, stop: int) -> bytes | mmap.mmap:
        """Return the bytes `start`..`stop - 1`, which are kept on the local disk."""
        if stop - start > _MOST_BYTES:
            cuts = [*range(start, stop, _MOST_BYTES), stop]
            return b"".join(self.read(*span)[:] for span in pairwise(cuts))
        fetch = partial(self.fetch, start, stop)
        if not self.version or start >= stop:  # Without a version, kept bytes may be of another.
            return fetch()
        return kept_range(f"{self._digest[:24]}.{start}-{stop}", stop - start, fetch)

    def fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes `start`..`stop - 1` from the store."""
        return _tried(str(self), partial(self._fetch, start, stop)) if start < stop else b""

    def _fetch(self, start: int, stop: int) -> bytes:
        try:
            data: bytes = _call("cat_file", str(self), start=start, end=stop)
        except Exception as error:
            if _http_status(error) != 416:  # of a range beyond the end
                raise
            data = b""
        size, version = _look_up(str(self))  # after it was read
        if (size, version) != (self.size, self.version):
            raise _Refused(
                OSError,
                f"{self} was replaced since the dataset was made: it was {_shown(self.version)} "
                f"of {self.size} bytes, and is {_shown(version)} of {size} bytes now. {REMEDY}",
            )
        if len(data) == size > stop - start:
            raise _Refused(
                OSError,
                f"{self} cannot be read in parts: the server returns the whole file for a range. "
                "Copy it to a local disk.",
            )
        if len(data) != stop - start:
            raise OSError(f"{len(data)} of {stop - start} bytes came")
        return data


DataFile = LocalFile
"""A `LocalFile`, or a `StoredFile`."""


class _Ranges(io.RawIOBase):
    """The bytes of an object, as a file; each read is a request, or several."""

    def __init__(self, file: StoredFile, *, keeps: bool) -> None:
        self._read = file.read if keeps else file.fetch
        self._size, self._position = file.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._size)
        if (count := stop - self._position) <= 0:
            return 0
        buffer[:count] = self._read(self._position, stop)[:]
        self._position = stop
        return count


def stamp_of(status: os.stat_result) -> tuple[int, int]:
    """Return size and time of a file, which change with its content."""
    return status.st_size, status.st_mtime_ns


def data_file(path: str | Path) -> DataFile:
    """Return the file of a path or URL."""
    return StoredFile(path) if isinstance(path, str) and is_url(path) else LocalFile(path)


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


# --- records --------------------------------------------------------------------------------------


class RecordBlocks:
    """The records of files; of objects in blocks of neighbours, which are read at once.

    Args:
        files: the files.
        starts: of each file, the byte at which each record begins, ascending, (n,).
    """

    mixed_blocks = 8

    def __init__(self, files: Sequence[DataFile], starts: Sequence[IntArray]) -> None:
        self._files, self._bounds = files, list[IntArray]()
        first, blocks = 0, list[int]()
        for file, begins in zip(files, starts, strict=True):
            # The first record that begins in each 4 MiB.
            begin_block = np.flatnonzero(np.diff(begins // BLOCK_BYTES, prepend=-1))
            blocks += (first + begin_block).tolist()
            self._bounds.append(np.append(begins[begin_block], file.size))
            first += len(begins)
        self._size = first
        are_stored = any(file.is_stored for file in files)
        self.shuffle_blocks = blocks if are_stored and blocks else None
        self.file_versions = file_versions(files)
        self._read_last: dict[tuple[int, int], bytes | mmap.mmap] = {}

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read_last": {}}

    def read(self, file: int, start: int, stop: int) -> bytes:
        """Return bytes within a record of a file, by its number."""
        if not self._files[file].is_stored:
            return self._files[file].read(start, stop)[:]
        bounds = self._bounds[file]
        block = int(np.searchsorted(bounds, start, "right")) - 1
        begin = int(bounds[block])
        if (data := self._read_last.pop((file, block), None)) is None:
            data = self._files[file].read(begin, int(bounds[block + 1]))
        self._read_last[file, block] = data  # at the end, as the last block used
        for old in [*self._read_last][: -self.mixed_blocks - 1]:
            self._read_last.pop(old, None)
        return data[start - begin : stop - begin]


# --- stores ---------------------------------------------------------------------------------------


class _Refused(Exception):
    """An error that no further try can help, and the type of the error for the user."""

    def __init__(self, kind: type[Exception], message: str) -> None:
        super().__init__(message)
        self.kind = kind


def matching(pattern: str) -> list[str]:
    """Return the URLs of the objects that match a pattern, sorted."""
    if "::" in pattern:
        raise ValueError(f"`paths` must name each file behind `::`, but has {pattern!r}.")
    names = _tried(pattern, partial(_call, "glob", pattern))
    store, _ = _store_of(pattern)
    return sorted(store.unstrip_protocol(name) for name in names)


def _store_of(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it; cheap after the first call."""
    fsspec, options = import_extra("fsspec.core", "s3"), {}
    is_s3 = url.startswith(("s3://", "s3a://"))
    if is_s3:  # Retries of botocore and s3fs are silent, and would multiply ours.
        config = import_extra("fsspec.config", "s3").conf.get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {**config, "retries": {"total_max_attempts": 1}}
    store, path = fsspec.url_to_fs(url, **options)
    if is_s3:
        store.retries = 1
    return store, path


def _call(method: str, url: str, **arguments: Any) -> Any:
    """Call a method of a file system with a path; where that can be interrupted, for `TRY_S`."""
    asyn = import_extra("fsspec.asyn", "s3")
    store, path = _store_of(url)
    if method != "cat_file":
        store.invalidate_cache(path)  # of listings
    if isinstance(store, asyn.AsyncFileSystem):
        call = getattr(store, f"_{method}")
        return asyn.sync(store.loop, call, path, timeout=TRY_S, **arguments)
    return getattr(store, method)(path, **arguments)


def _look_up(url: str) -> tuple[int, str]:
    """Return size and version of an object; "" if the store tells no version."""
    info = _call("info", url)
    if info.get("type") == "directory":
        raise _Refused(
            ValueError,
            f"`paths` must name files, but {url} is a folder. Pass {url.rstrip('/') + '/*'!r}.",
        )
    if info.get("size") is None:
        raise _Refused(ValueError, f"{url} has no size that the server tells. Copy it.")
    return info["size"], next(
        (f"{name} {info[name]}".replace('"', "") for name in _VERSIONS if info.get(name)), ""
    )


def _shown(version: str) -> str:
    return version or "of no known version,"


def _tried(url: str, call: Callable[[], T]) -> T:
    """Return `call()`, which is tried again where that may help; each failure is logged."""
    for attempt in range(1, TRIES + 1):
        try:
            return call()
        except Exception as error:  # of fsspec, or of the library of the store
            if (refusal := _refusal(url, error)) is not None:
                raise refusal from error
            seen = f"{type(error).__name__}: {error}".rstrip(": ")
            if attempt == TRIES:
                raise OSError(
                    f"{url} could not be read in {TRIES} tries: {seen}. No sample is lost: once "
                    "the store answers, iterate again, or resume."
                ) from error
        wait_s = WAIT_S * 2 ** (attempt - 1)
        logger.warning(
            "%s could not be read (%s): try %d of %d is in %g s",
            *(url, seen, attempt + 1, TRIES, wait_s),
        )
        time.sleep(wait_s)
    raise AssertionError("there is a last try")


def _refusal(url: str, error: Exception) -> Exception | None:
    """Return the error for the user where another try cannot help, else `None`."""
    status, cause = _http_status(error), error.__cause__
    if isinstance(error, _Refused):
        return error.kind(str(error))
    if type(error).__name__ in _NO_CREDENTIALS:
        return PermissionError(
            f"{url} cannot be read: there are no credentials ({error}). Set those of the store in "
            "the environment, such as `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or "
            "`FSSPEC_S3_ANON=true` for a public bucket."
        )
    if isinstance(error, ImportError):
        return ImportError(f"{url} cannot be read: {error}. For S3: pip install 'odb-nodes[s3]'.")
    if isinstance(error, TimeoutError) or (status or 0) >= 500 or status in (408, 425, 429):
        return None
    if isinstance(error, PermissionError) or status in (401, 403):
        return PermissionError(
            f"{url} cannot be read: the store refuses it ({error}). Give the credentials of the "
            "environment the right to read it, and check bucket and path."
        )
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        # `fsspec` says so of an HTTP server that it cannot reach, too.
        is_missing = status is not None or cause is None or isinstance(cause, FileNotFoundError)
        message = f"{url} does not exist, or is gone ({error}). Check bucket and path."
        return FileNotFoundError(message) if is_missing else None
    if status is not None or isinstance(error, (TypeError, ValueError, NotImplementedError)):
        return OSError(f"{url} cannot be read: {type(error).__name__}: {error}")
    return None


def _http_status(error: BaseException) -> int | None:
    """Return the status of the answer that caused an error."""
    for cause in (error, error.__cause__):
        answer = getattr(cause, "response", None)  # of botocore
        metadata = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
        status = metadata.get("HTTPStatusCode") or getattr(cause, "status", None)  # of aiohttp
        if type(cause).__name__ == "HttpError":  # of gcsfs
            status = getattr(cause, "code", None)
        if str(status).isdigit():
            return int(str(status))
    return None
