"""An object of a store: ranged reads, which are tried again within limits, and kept."""

from __future__ import annotations

import hashlib
import io
import logging
import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from odb_nodes._support.checks import import_extra
from odb_nodes.core.sources.data_file import REMEDY
from odb_nodes.core.sources.range_cache import kept_range

T = TypeVar("T")
logger = logging.getLogger("odb_nodes")

TRIES = 6  # to read from a store
WAIT_S = 0.5  # before the second try, and twice as long before each further one
TRY_S = 60.0  # of a try
READ_BYTES = 8 << 20  # at a time, of an object that is read from its beginning
_MOST_BYTES = 32 << 20  # of a request
_VERSIONS = (
    *("ETag", "etag", "generation", "VersionId", "version_id", "Content-MD5", "mtime"),
    *("LastModified", "last_modified", "Last-Modified", "created"),
)
_NO_CREDENTIALS = (
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"),  # of botocore
    "DefaultCredentialsError",  # of Google
)


class StoredFile:
    """An object of a store that fsspec opens, as of `"s3://bucket/a.jsonl"`.

    Failures are tried again, within limits, and each is logged. What is read stays on the local
    disk, see `kept_range`. An object of another version is an `OSError`.
    """

    is_stored = True

    def __init__(self, path: str) -> None:
        self.path: str | Path = path
        # What follows signs the request, and changes.
        self.place = path.partition("?")[0] if path.startswith("http") else path
        self.name = self.place.rsplit("/", 1)[-1]
        self.size, self.version = _tried(path, partial(_look_up, path))
        content = f"{self.place}\n{self.size}\n{self.version}"
        self._digest = hashlib.sha1(content.encode()).hexdigest()
        self.stamp = (self.size, int(self._digest[:12], 16))

    def __str__(self) -> str:
        return str(self.path)

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
                    f"{url} could not be read in {TRIES} tries: {seen}. Try again once the store "
                    "answers. A loader that iterated has lost no sample: iterate again, or resume."
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
