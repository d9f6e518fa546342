"""Ranges of objects of a store, kept on a local disk for all processes of the machine."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from odb_nodes._support.files import taking_turns

LIMIT = "ODB_NODES_CACHE_BYTES"  # a variable of the environment; 0: nothing is kept
_DEFAULT_BYTES = 16 << 30
_LOCKS = 64
_CRC_BYTES = 4
_TURN_S = 30.0  # that a process waits for another one that may read the same range
_SLACK = 64  # A process looks for what to delete once it has kept this part of the limit.

_kept_bytes: dict[Path, int] = {}  # since the folder was last searched


def cache_folder() -> Path | None:
    """Return the folder for what can be made again; `None` if the user has no home."""
    with suppress(RuntimeError):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return cache / "odb_nodes"
    return None


def one_at_a_time(folder: Path, name: str, limit_s: float) -> AbstractContextManager[None]:
    """Return a context for one of those that make what a folder keeps under a name."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return taking_turns(folder / f".lock{zlib.crc32(name.encode()) % _LOCKS}", limit_s)


def kept_range(name: str, size: int, fetch: Callable[[], bytes]) -> bytes | mmap.mmap:
    """Return the bytes that are kept under a name, or fetch and keep them.

    The processes of a machine share the folder `ranges` of `cache_folder()`. Of those that want the
    same bytes at a time, one fetches them. The ranges used longest ago are deleted beyond
    `ODB_NODES_CACHE_BYTES` (16 GiB), or half of the room on the disk.

    Args:
        name: a name that no other bytes have.
        size: number of the bytes.
        fetch: reads them.
    """
    limit, cache = _limit_bytes(), cache_folder()
    if not limit or cache is None:
        return fetch()
    folder = cache / "ranges"
    if (kept := _mapped(folder / name, size)) is not None:
        return kept
    with one_at_a_time(folder, name, _TURN_S):
        if (kept := _mapped(folder / name, size)) is not None:
            return kept
        data = fetch()
        with suppress(OSError):  # The folder may be read-only, or the disk full.
            _keep(folder / name, data)
            _make_room(folder, size, limit)
    kept = _mapped(folder / name, size)  # in memory that the processes share
    return data if kept is None else kept


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT, f"{_DEFAULT_BYTES}")
    if not text.isdecimal():
        raise ValueError(
            f"the environment variable `{LIMIT}` must be a number of bytes, or 0 to keep nothing, "
            f"but is {text!r} instead."
        )
    return int(text)


def _keep(path: Path, data: bytes) -> None:
    """Write a range and its CRC-32: after a loss of power, the file may have other bytes."""
    part = path.with_name(f"{secrets.token_hex(8)}.part")
    try:
        with open(part, "xb") as file:
            file.write(data)
            file.write(zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _mapped(path: Path, size: int) -> mmap.mmap | None:
    """Return the bytes of a kept range, which stay even if the file is deleted."""
    with suppress(OSError, ValueError), open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        file.seek(size)
        if file.read() == zlib.crc32(data).to_bytes(_CRC_BYTES, "little"):
            os.utime(file.fileno())  # It was used now.
            return data
    return None


def _make_room(folder: Path, added: int, limit: int) -> None:
    """Delete the ranges used longest ago, beyond the limit."""
    kept = _kept_bytes.get(folder, limit) + added
    _kept_bytes[folder] = kept
    if kept < limit // _SLACK:
        return
    with os.scandir(folder) as entries:
        files = [(entry.stat(), entry.path) for entry in entries if ".lock" not in entry.name]
    held = sum(status.st_size for status, _ in files)
    limit = min(limit, (held + shutil.disk_usage(folder).free) // 2)
    for status, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
        if held > limit:
            with suppress(FileNotFoundError):
                os.unlink(path)
            held -= status.st_size
    _kept_bytes[folder] = 0
