"""Keys of samples that a run leaves out."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from odb_nodes._core.checks import MAX_KEY, check_count, describe
from odb_nodes.sample import LeftOut, Sample, Skipped

ExcludedState = dict[str, bytes | None]
"""`ExcludedKeys` as the field of a state: the keys of each source, 8 bytes a key."""

_SHOWN = 5
_ALLOWED = "integers, a mapping of source to integers, or the path of a file of them"


class ExcludedKeys:
    """Keys of samples by source. It does not change.

    Args:
        keys: name of the source, "" where sources have no names -> keys of its samples.
    """

    def __init__(self, keys: Mapping[str, Iterable[int]] | None = None) -> None:
        found = {source: frozenset(some) for source, some in (keys or {}).items()}
        self._keys = {source: found[source] for source in sorted(found) if found[source]}
        self._state = {source: _to_bytes(some) for source, some in self._keys.items()}

    @classmethod
    def of(cls, exclude: Exclude) -> ExcludedKeys:
        """Return the keys that an `exclude` argument names.

        Args:
            exclude: keys of source ""; a mapping of source to keys; or the path of a file in JSON
                Lines, each line a key or `{"source": ..., "key": ...}`. `None` for none.

        Raises:
            TypeError, ValueError: it is none of these; of a file, names file and line.
        """
        if isinstance(exclude, cls):
            return exclude
        if isinstance(exclude, (str, os.PathLike)):
            return cls(_read(Path(exclude)))
        if exclude is None or isinstance(exclude, Mapping):
            return cls(
                {
                    _source("a source in `exclude`", source): _keys(f"exclude[{source!r}]", some)
                    for source, some in (exclude or {}).items()
                }
            )
        return cls({"": _keys("exclude", exclude)})

    @classmethod
    def from_state(cls, state: ExcludedState) -> ExcludedKeys:
        """Return what `to_state` was called on."""
        return cls({source: _from_bytes(some) for source, some in state.items()})

    @property
    def sources(self) -> list[str]:
        """Names of the sources that have keys."""
        return [*self._keys]

    def to_state(self) -> ExcludedState:
        """Return the keys as plain data."""
        return {**self._state}

    def __contains__(self, sample: Sample | Skipped | LeftOut) -> bool:
        """Tell whether a sample is excluded; one without a key never is."""
        return bool(self._keys) and sample.key in self._keys.get(sample.source, ())

    def __or__(self, other: ExcludedKeys) -> ExcludedKeys:
        if not other._keys or other._keys == self._keys:
            return self
        sources = {*self._keys, *other._keys}
        none: frozenset[int] = frozenset()
        return ExcludedKeys(
            {one: self._keys.get(one, none) | other._keys.get(one, none) for one in sources}
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExcludedKeys) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(frozenset(self._keys.items()))

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def __repr__(self) -> str:
        named = [
            f"{source}/{key}" if source else str(key)
            for source, some in self._keys.items()
            for key in sorted(some)
        ]
        if len(named) <= _SHOWN:
            return f"[{', '.join(named)}]"
        digest = zlib.crc32(", ".join(named).encode())
        return f"[{', '.join(named[:_SHOWN])}, ...: {len(named)} keys, CRC-32 {digest:08x}]"


Exclude = ExcludedKeys | Iterable[int] | Mapping[str, Iterable[int]] | str | os.PathLike[str] | None
"""What an `exclude` argument may be; see `ExcludedKeys.of`."""


def _keys(name: str, keys: Any) -> list[int]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"`{name}` must be {_ALLOWED}, but is {describe(keys)} instead.")
    return [check_count(f"{name}[{at}]", key, 0, MAX_KEY) for at, key in enumerate(keys)]


def _source(name: str, source: Any) -> str:
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a string, but is {describe(source)} instead.")
    return source


def _read(path: Path) -> dict[str, list[int]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`exclude` must name a file in JSON Lines, but {str(path)!r} cannot be read: {error}."
        ) from error
    found: dict[str, list[int]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            source, key = _parsed(line, f"line {number} of {str(path)!r}")
            found.setdefault(source, []).append(key)
    return found


def _parsed(line: str, where: str) -> tuple[str, int]:
    try:
        record = json.loads(line)
        if not isinstance(record, dict):
            return "", check_count("key", record, 0, MAX_KEY)
        source = _source("`source`", record.get("source", ""))
        return source, check_count("key", record.get("key"), 0, MAX_KEY)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'`exclude`, {where}: must be a key, or `{{"source": "name", "key": 17}}`, but is '
            f"{line!r:.80}: {error}"
        ) from error


def _to_bytes(keys: Iterable[int]) -> bytes:
    return np.array(sorted(keys), "<i8").tobytes()


def _from_bytes(keys: bytes | None) -> list[int]:
    found: list[int] = np.frombuffer(keys or b"", "<i8").tolist()
    return found
