"""A map-style dataset of the samples of tar files, as WebDataset has them."""

from __future__ import annotations

import mmap
import operator
import os
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from odb_nodes._core.progress import SlowProgress
from odb_nodes.sources.data_files import TAR, Paths, check_files, files_of, listed
from odb_nodes.sources.kept_index import Index, index_of, stamp_of

KEY = "__key__"
_ARRAYS = ("firsts", "starts", "sizes", "name_ends", "names")  # of the index
_BLOCK_BYTES = 512  # of a tar file
_ADLER_MODULUS = 65521
_OF_MEMBER = re.compile(rb"(path|size|charset)=|sparse")  # what changes how it is read
_READ_BYTES = 1 << 20  # at a time
_MOST_ZEROS = 1 << 20  # at the end; by default `tar` writes up to 11 KiB


class TarDataset:
    """The samples of tar files, as dicts of bytes: a map-style dataset.

    Members that follow each other, and whose names are equal up to the first dot of the file name,
    are one sample, as in WebDataset: `"a/7.jpg"` and `"a/7.json"` are
    `{"__key__": "a/7", "jpg": b"...", "json": b"..."}`. Members without an extension, and those
    whose file name begins with a dot, are no samples. A sample is read by itself, so an
    `ODBDataLoader` shuffles all samples, and resumes without reading any again but its pool.

    The files are read once when the dataset is made, to find their members. Of a file of 64 MiB or
    more that is kept in a hidden file beside it, or else in `~/.cache/odb_nodes`.

    Args:
        paths: a file, a folder, or a pattern such as `"data/*.tar"` or `"{00..99}.tar"`; or several
            of these, in order. A folder stands for its `.tar` files, `"data/**"` for those
            below it too. They must not be compressed.

    Raises:
        FileNotFoundError: a file does not exist, or a folder or pattern has none.
        ValueError: a file comes twice, is no tar file, is compressed, damaged or cut, or has a
            member twice in one sample, members of one sample apart from each other, links, or
            holes; or a folder has further tar files, in subfolders or compressed.
    """

    draws_random_numbers: ClassVar[bool] = False

    def __init__(self, paths: Paths) -> None:
        self._files = [file for path in listed(paths) for file in files_of(path, TAR)]
        check_files(self._files)
        self._stamps = [stamp_of(file.stat()) for file in self._files]
        self._indices = [index_of(file, "tar1", _ARRAYS, _search) for file in self._files]
        self._ends = np.cumsum([len(index["firsts"]) for index in self._indices])

    @property
    def data_id(self) -> str:
        """What a state is compared by: the files and their sizes."""
        sizes = [size for size, _ in self._stamps]
        content = repr(([file.name for file in self._files], sizes))
        return f"{len(self._files)} files, CRC-32 {zlib.crc32(content.encode())}"

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            IndexError: there is none.
            OSError: its file was cut or replaced.
        """
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index}: the files have {len(self)}.")
        file = int(np.searchsorted(self._ends, index, "right"))
        found = self._indices[file]
        sample = index - int(self._ends[file]) + len(found["firsts"])
        first = int(found["firsts"][sample])
        is_last = sample + 1 == len(found["firsts"])
        end = len(found["starts"]) if is_last else int(found["firsts"][sample + 1])
        data = dict[str, Any]()
        with open(self._files[file], "rb") as opened:
            for member in range(first, end):
                opened.seek(int(found["starts"][member]))
                size, name = int(found["sizes"][member]), _text(found, member)
                content = opened.read(size)
                is_same = stamp_of(os.fstat(opened.fileno())) == self._stamps[file]
                if not is_same or len(content) < size:
                    raise OSError(
                        f"{name} of {self._files[file]} cannot be read: the file was cut or "
                        "replaced since the dataset was made, or its time was changed. Put it "
                        "back, or make the dataset anew."
                    )
                key, extension = _split(name)
                data |= {KEY: key, extension: content}
        return data


def _search(path: Path) -> Index:
    """Return where the members of a file are, and which of them begin a sample."""
    firsts, starts, sizes = array("q"), array("q"), array("q")
    names, name_ends = bytearray(), array("q")
    before, of_sample, keys = None, set[str](), set[int]()
    try:
        for name, start, size in _members(path):
            key, extension = _split(name)
            if not extension or key.endswith("/") or not key:  # hidden, as those of macOS
                continue
            if size is None:
                raise ValueError(
                    f"{path} has {name} as a link, or with holes, which cannot be read by itself. "
                    "Write it anew, with `--dereference --hard-dereference` and without `-S`."
                )
            if key != before:
                firsts.append(len(starts))
                before, of_sample = key, {KEY}
                if (hashed := hash(key)) in keys:
                    raise ValueError(
                        f"{path} has {name} behind other samples than its own: members of one "
                        "sample must be neighbours. Write it anew, sorted by name."
                    )
                keys.add(hashed)
            if extension in of_sample:
                raise ValueError(
                    f"{path} has {name} twice in one sample, or as its key. Write it anew."
                )
            of_sample.add(extension)
            starts.append(start)
            sizes.append(size)
            names += name.encode("utf-8", "surrogateescape")
            name_ends.append(len(names))
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is no tar file, or is compressed or cut: {error}.") from error
    found = {"firsts": firsts, "starts": starts, "sizes": sizes, "name_ends": name_ends}
    index = {name: np.frombuffer(values, np.int64) for name, values in found.items()}
    return {**index, "names": np.frombuffer(bytes(names), np.uint8)}


def _members(path: Path) -> Iterator[tuple[str, int, int | None]]:
    """Yield name, place and size of each file; no size where it is a link, or has holes.

    `tarfile` takes 40 us for each header; so it is left those that are not plain.
    """
    with (
        open(path, "rb") as opened,
        tarfile.open(fileobj=opened, mode="r:") as tar,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as whole,
    ):
        progress = SlowProgress(f"bytes of {path} read, to find its samples", len(whole))
        at, all_plain = 0, True
        while any(header := whole[at : at + _BLOCK_BYTES]):
            progress.update(at)
            start, kind = at + _BLOCK_BYTES, header[156:157]
            size = _plain_size(header) if all_plain else None
            if size is not None and kind == tarfile.REGTYPE:
                name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
                yield name, start, size
                at = start + size + -size % _BLOCK_BYTES
            elif size is not None and not _OF_MEMBER.search(whole[start : start + size]):
                at = start + size + -size % _BLOCK_BYTES
            else:
                opened.seek(at)
                try:
                    member = tarfile.TarInfo.fromtarfile(tar)
                except tarfile.HeaderError:
                    break
                if member.islnk() or member.issym() or member.issparse():
                    yield member.name, member.offset_data, None
                elif member.isreg():
                    yield member.name, member.offset_data, member.size
                at, all_plain = tar.offset, all_plain and not tar.pax_headers
        _check_end(path, whole, at)


def _plain_size(header: bytes) -> int | None:
    """Return the bytes after the header of a plain file, or of what is said about the next one."""
    kind, size, check = header[156:157], header[124:136], header[148:156]
    if kind not in (tarfile.REGTYPE, tarfile.XHDTYPE) or any(header[345:346]) or size[0] & 0x80:
        return None
    try:
        total, size_bytes = int(check.strip(b" \0"), 8), int(size.strip(b" \0"), 8)
    except ValueError:
        return None
    # Of a header all bytes are summed, the sum itself as spaces. Adler-32 has 1 + the sum of all.
    off = (zlib.adler32(header) & 0xFFFF) - 1 - sum(check) + sum(b" " * 8) - total
    return size_bytes if off % _ADLER_MODULUS == 0 else None


def _check_end(path: Path, whole: mmap.mmap, end: int) -> None:
    """Raise a `ValueError` unless nothing but zeros, the mark of the end, follows the members."""
    for at in range(end, max(len(whole), end + 1), _READ_BYTES):
        rest = whole[at : at + _READ_BYTES]
        is_cut = at == end and len(rest) < _BLOCK_BYTES
        if is_cut or rest.strip(b"\0"):
            raise ValueError(
                f"{path} is {'cut' if is_cut else 'damaged'} at byte {end} of {len(whole)}, or "
                "several files are joined: there is neither a member nor the end. Put it back "
                "whole."
            )
    if (zeros := len(whole) - end) > _MOST_ZEROS:
        raise ValueError(
            f"{path} has {zeros} zeros from byte {end} on, as a file that was not copied to its "
            "end. Put it back whole, or write it anew with fewer zeros at its end."
        )


def _text(index: Index, member: int) -> str:
    """Return the name of a member."""
    begin = int(index["name_ends"][member - 1]) if member else 0
    text = index["names"][begin : int(index["name_ends"][member])].tobytes()
    return text.decode("utf-8", "surrogateescape")


def _split(name: str) -> tuple[str, str]:
    """Return the key and the extension of a member, as WebDataset does."""
    folder, slash, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder + slash + key, extension.lower()
