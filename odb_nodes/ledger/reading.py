"""Read the file of one rank, and say where it was torn or changed."""

from __future__ import annotations

import mmap
import os
import re
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from odb_nodes.ledger.records import (
    END,
    ENDED_MAGIC,
    HEAD,
    HEADER_BYTES,
    KINDS,
    MAGIC,
    NAME,
    RESUMED,
    STEP,
    VERSION,
    Header,
    record_bytes,
    unpack_header,
)

HEAD_DTYPE = np.dtype(
    [(name, "=u4") for name in ("kind", "code", "samples", "left_out", "epoch", "step")]
)
FARTHEST_STEPS = 1 << 16
"""A record that does not continue the one before it, and is so much later, is not believed."""
NO_HEAD = (0,) * 7
LONGEST_SOUGHT_BYTES = 1 << 20
"""Records of more bytes are not looked for behind damage, which would take long."""


@dataclass(kw_only=True)
class Attempt:
    """The records of one attempt of one rank.

    Attributes:
        header: where it begins, and of which rank it is.
        number: in the file, from 1.
        names: number -> (text, flags) of sources and reasons.
        offsets: places of the step records in the file, (n,) int64.
        heads: their fields, (n,) of `HEAD_DTYPE`.
        is_closed: whether its end was recorded, and no other attempt has gone on.
        is_resumed: whether its end was recorded, and another attempt has gone on.
        data: the bytes of the file.
    """

    header: Header
    number: int
    names: dict[int, tuple[str, int]]
    offsets: npt.NDArray[np.int64]
    heads: npt.NDArray[np.void]
    is_closed: bool
    is_resumed: bool
    data: memoryview

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Epoch and step of each record as one number that grows, (n,) int64."""
        return position(self.heads["epoch"].astype(np.int64), self.heads["step"])


def position(epoch: npt.ArrayLike, step: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return epoch and step as one number that grows with both."""
    return (np.asarray(epoch, np.int64) << 32) + np.asarray(step, np.int64)


def place(at: int) -> str:
    """Return the epoch and step of a `position` as text."""
    return f"epoch {at >> 32} step {at & 0xFFFFFFFF}"


def rank_files(folder: str | os.PathLike[str]) -> list[RankFile]:
    """Return the files of a ledger, in the order of the ranks."""
    if os.path.isfile(folder):
        raise ValueError(f"`folder` must be a folder, but `{folder}` is a file.")
    paths = sorted(Path(folder).glob("rank-*.ledger"))
    if not paths:
        missing = "no file `rank-00000.ledger`" if os.path.isdir(folder) else "no such folder"
        raise FileNotFoundError(
            f"`{folder}` has no ledger: there is {missing}. Give the folder of a `Ledger`."
        )
    return [RankFile(path) for path in paths]


class RankFile:
    """What the file of one rank says.

    Attributes:
        rank: whose file it is, by its name.
        data: its bytes.
        attempts: in the order in which they were written.
        problems: where it was changed or damaged.
        notes: where a record was torn by the end of the process that wrote it.
    """

    def __init__(self, path: Path) -> None:
        match = re.fullmatch(r"rank-([0-9]+)\.ledger", path.name)
        if match is None:
            name = str(path).encode("utf-8", "backslashreplace").decode()
            raise ValueError(
                f"`{name}` must be named as `rank-00000.ledger`, but is not. Rename it, or move it "
                "out of the folder."
            )
        self.rank = int(match[1])
        self.attempts: list[Attempt] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._map: mmap.mmap | None = None
        if path.stat().st_size:  # what is empty cannot be mapped
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = memoryview(b"" if self._map is None else self._map)
        self._read()
        self.forget_pages()

    def forget_pages(self) -> None:
        """Let the system take back the memory of what was read; it is read again if need be."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read(self) -> None:
        magic = b"|".join(map(re.escape, (MAGIC, ENDED_MAGIC)))
        starts = [match.start() for match in re.finditer(magic, self.data)]
        found = [(at, *read) for at in starts if (read := unpack_header(self.data, at))]
        ends = [*(at for at, *_ in found), len(self.data)]
        if ends[0] and not self._is_torn(0, ends[0]):
            self._problem(f"the first {ends[0]} bytes belong to no attempt: they are damaged")
        shift = 0
        for (at, header, crc), end in zip(found, ends[1:], strict=True):
            if header.version != VERSION:
                raise ValueError(
                    f"rank {self.rank}: the ledger is of version {header.version}, but this "
                    f"library reads version {VERSION}. Use the library that wrote it."
                )
            self._check_header(header, at, shift)
            shift = at - header.offset
            self._read_attempt(header, crc, at + HEADER_BYTES, end)
        if self.attempts and self.attempts[-1].is_resumed:
            self._problem("another attempt has gone on, but is missing: the file was cut")

    def _check_header(self, header: Header, at: int, shift: int) -> None:
        where = f"attempt {len(self.attempts) + 1} ({place(_start(header))})"
        if header.rank != self.rank:
            self._problem(f"{where} was written by rank {header.rank}: the file was renamed")
        if at - header.offset != shift:
            moved = at - header.offset - shift
            self._problem(
                f"before {where} the file was changed: {abs(moved)} bytes "
                f"{'too many' if moved > 0 else 'are missing'}"
            )

    def _read_attempt(self, header: Header, crc: int | None, at: int, end: int) -> None:
        number, names, kind = len(self.attempts) + 1, {0: ("", 0)}, 0
        offsets, heads = array("q"), array("I")
        was_ended = self.data[at - HEADER_BYTES :][: len(MAGIC)] == ENDED_MAGIC
        where = f"attempt {number}, at its beginning"
        epoch, step = header.epoch, header.step
        data, unpack = self.data, HEAD.unpack_from
        while at < end:
            head = unpack(data, at) if at + HEAD.size <= end else NO_HEAD
            stop = at + record_bytes(*head[1:5])
            if stop > end:
                at, crc = self._skip(where, at, end, crc)
                continue
            continues = crc is None or zlib.crc32(data[at + 4 : stop], crc) == head[0]
            if not continues:
                self._problem(
                    f"{where}: {_what(head)} does not continue the record before it: one of them "
                    "was changed, removed, doubled or moved"
                )
            crc, kind = head[0], head[1]
            if kind == NAME and (continues or head[3] <= len(names)):  # they are numbered in turn
                text = bytes(data[at + HEAD.size : stop])
                names[head[3]] = (text.decode("utf-8", "replace"), head[5])
            elif kind >= STEP and (continues or _is_near(head, epoch, step)):
                epoch, step = head[5:]
                offsets.append(at)
                heads.extend(head[1:])
                where = f"attempt {number}, after {place(head[5] << 32 | head[6])}"
            at = stop
        if was_ended and kind not in (END, RESUMED):
            self._problem(f"{where}: the end of the run is missing: the file was cut")
        attempt = Attempt(
            header=header,
            number=number,
            names=names,
            offsets=np.frombuffer(offsets, np.int64),
            heads=np.frombuffer(heads, HEAD_DTYPE),
            is_closed=kind == END,
            is_resumed=kind == RESUMED,
            data=data,
        )
        self.attempts.append(attempt)

    def _skip(self, where: str, at: int, end: int, crc: int | None) -> tuple[int, int | None]:
        """Return where the next record is after bytes that are none, and the CRC it continues.

        That CRC is `None` where the record is known only by the one that follows it.
        """
        before = [int.from_bytes(self.data[at : at + 4], "little")]
        before += [] if crc is None else [crc]
        for there in range(at + 1, end - HEAD.size + 1):
            if not self._size(there, end):
                continue
            known = [one for one in before if self._continues(there, end, one)]
            follower = there + self._size(there, end)
            stored = int.from_bytes(self.data[there : there + 4], "little")
            if known or self._continues(follower, end, stored):
                self._problem(f"{where}: {there - at} bytes are damaged")
                return there, known[0] if known else None
        if self._is_torn(at, end):
            self.notes.append(
                f"rank {self.rank}: {where}: a torn record of {end - at} bytes is ignored."
            )
        else:
            self._problem(f"{where}: {end - at} bytes are damaged")
        return end, crc

    def _size(self, at: int, end: int) -> int:
        """Return the size of the record that may be at a place, 0 where there is none."""
        if at + HEAD.size > end or self.data[at + 4] not in KINDS:
            return 0
        size = record_bytes(*HEAD.unpack_from(self.data, at)[1:5])
        return size if size <= min(end - at, LONGEST_SOUGHT_BYTES) else 0

    def _continues(self, at: int, end: int, crc: int) -> bool:
        """Tell whether there is a record at a place that continues one with this CRC."""
        size = self._size(at, end)
        stored = int.from_bytes(self.data[at : at + 4], "little")
        return bool(size) and zlib.crc32(self.data[at + 4 : at + size], crc) == stored

    def _is_torn(self, at: int, end: int) -> bool:
        """Tell whether bytes can be the beginning of a record, or zeros after a loss of power."""
        rest = bytes(self.data[at : min(end, at + HEADER_BYTES)])
        if not any(self.data[at:end]):
            return True
        if MAGIC.startswith(rest[: len(MAGIC)]):
            return len(rest) < HEADER_BYTES
        if len(rest) < HEAD.size:
            return True
        head = HEAD.unpack_from(rest, 0)
        return head[1] in KINDS and at + record_bytes(*head[1:5]) > end

    def _problem(self, text: str) -> None:
        self.problems.append(f"rank {self.rank}: {text}.")


def _what(head: tuple[int, ...]) -> str:
    if head[1] in (NAME, END, RESUMED):
        return "a name" if head[1] == NAME else "the end of the attempt"
    return f"the record of {place(head[5] << 32 | head[6])}"


def _is_near(head: tuple[int, ...], epoch: int, step: int) -> bool:
    """Tell whether the place of a record, which may be damaged, is a likely one after another."""
    return head[6] < FARTHEST_STEPS + step * (head[5] == epoch) and 0 <= head[5] - epoch <= 1


def _start(header: Header) -> int:
    return header.epoch << 32 | header.step
