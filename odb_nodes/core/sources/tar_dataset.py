"""A map-style dataset of the samples of tar files in the format of WebDataset."""

from __future__ import annotations

import mmap
import operator
import re
import tarfile
import zlib
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO, ClassVar

import numpy as np

from odb_nodes._support.progress import SlowProgress
from odb_nodes.core.sources.data_file import DataFile, data_id_of, of_each
from odb_nodes.core.sources.data_files import TAR, Paths, open_files
from odb_nodes.core.sources.kept_index import Index, index_of
from odb_nodes.core.sources.record_blocks import RecordBlocks

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
    whose file name begins with a dot, are no samples. Each sample is read alone, so an
    `ODBDataLoader` shuffles all samples, and a resume reads only its pool again.

    The files are read once when the dataset is made, to find their members. Of a file of 64 MiB or
    more that is kept in a hidden file beside it, or else in `~/.cache/odb_nodes`.

    Of an object store, neighbouring samples are read together, 4 MiB at a time. So an
    `ODBDataLoader` shuffles these blocks, and then the samples of 8 of them at a time.

    Args:
        paths: a file, a folder, or a pattern such as `"data/*.tar"` or `"{00..99}.tar"`; or several
            of these, in order. A folder stands for its `.tar` files, `"data/**"` for those
            below it too. Or URLs that fsspec opens, as `"s3://bucket/{00..99}.tar"`. They must not
            be compressed.

    Raises:
        FileNotFoundError: a file does not exist, or a folder or pattern has none.
        ValueError: a file comes twice, is no tar file, is compressed, damaged or cut, or has a
            member twice in one sample, members of one sample apart from each other, links, or
            holes; or a folder has further tar files, in subfolders or compressed.
    """

    draws_random_numbers: ClassVar[bool] = False

    def __init__(self, paths: Paths) -> None:
        self._files = open_files(paths, TAR)
        self._indices = of_each(lambda file: index_of(file, "tar1", _ARRAYS, _search), self._files)
        self._ends = np.cumsum([len(index["firsts"]) for index in self._indices])
        begins = [index["starts"][index["firsts"]] for index in self._indices]
        self._record_blocks = RecordBlocks(self._files, begins)
        self.mixed_blocks = self._record_blocks.mixed_blocks
        self.shuffle_blocks = self._record_blocks.shuffle_blocks
        self.file_versions = self._record_blocks.file_versions
        self.data_id = data_id_of(self._files)
        """Identity of the data, for states: the files and their sizes, and versions of objects."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            IndexError: there is none.
            OSError: its file was cut or replaced, or its store does not answer.
        """
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index}: the files have {len(self)}.")
        file = int(np.searchsorted(self._ends, index, "right"))
        members = self._indices[file]
        sample = index - int(self._ends[file]) + len(members["firsts"])
        first = int(members["firsts"][sample])
        is_last = sample + 1 == len(members["firsts"])
        end = len(members["starts"]) if is_last else int(members["firsts"][sample + 1])
        begin = int(members["starts"][first])
        try:
            stop = int(members["starts"][end - 1] + members["sizes"][end - 1])
            content = self._record_blocks.read(file, begin, stop)
        except OSError as error:
            raise type(error)(
                f"{_name(members, first)} of {self._files[file]} cannot be read: {error}"
            ) from error
        data = dict[str, Any]()
        for member in range(first, end):
            key, extension = _split(_name(members, member))
            start = int(members["starts"][member]) - begin
            data |= {KEY: key, extension: content[start : start + int(members["sizes"][member])]}
        return data


def _search(path: DataFile) -> Index:
    """Return the index of a file: its members, and which of them begin a sample."""
    firsts, starts, sizes, name_ends = (array("q") for _ in range(4))
    names = bytearray()
    keys = set[int]()  # hashes of the keys of all samples so far
    last_key: str | None = None
    extensions = set[str]()  # of the last sample
    try:
        for name, start, size in _members(path):
            key, extension = _split(name)
            if not extension or key.endswith("/") or not key:  # hidden, as macOS writes them
                continue
            if size is None:
                raise ValueError(
                    f"{path} has {name} as a link, or with holes, which cannot be read alone. "
                    "Write it anew, with `--dereference --hard-dereference` and without `-S`."
                )
            if key != last_key:
                firsts.append(len(starts))
                last_key = key
                extensions = {KEY}
                if (hashed := hash(key)) in keys:
                    raise ValueError(
                        f"{path} has {name} behind other samples than its own: members of one "
                        "sample must be neighbours. Write it anew, sorted by name."
                    )
                keys.add(hashed)
            if extension in extensions:
                raise ValueError(
                    f"{path} has {name} twice in one sample, or as its key. Write it anew."
                )
            extensions.add(extension)
            starts.append(start)
            sizes.append(size)
            names += name.encode("utf-8", "surrogateescape")
            name_ends.append(len(names))
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is no tar file, or is compressed or cut: {error}.") from error
    lists = {"firsts": firsts, "starts": starts, "sizes": sizes, "name_ends": name_ends}
    index = {name: np.frombuffer(values, np.int64) for name, values in lists.items()}
    return {**index, "names": np.frombuffer(bytes(names), np.uint8)}


def _members(path: DataFile) -> Iterator[tuple[str, int, int | None]]:
    """Yield name, place and size of each file; no size where it is a link, or has holes.

    `tarfile` takes 40 us a header, so it reads only the headers that are not plain.
    """
    with (
        path.open() as opened,
        tarfile.open(fileobj=opened, mode="r:") as tar,
        _slices(path, opened) as whole,
    ):
        progress = SlowProgress(f"bytes of {path} read, to find its samples", len(whole))
        offset, all_plain = 0, True
        while any(header := whole[offset : offset + _BLOCK_BYTES]):
            progress.update(offset)
            start, kind = offset + _BLOCK_BYTES, header[156:157]
            size = _plain_size(header) if all_plain else None
            if size is not None and kind == tarfile.REGTYPE:
                name = header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
                yield name, start, size
                offset = start + size + -size % _BLOCK_BYTES
            elif size is not None and not _OF_MEMBER.search(whole[start : start + size]):
                offset = start + size + -size % _BLOCK_BYTES
            else:
                opened.seek(offset)
                try:
                    member = tarfile.TarInfo.fromtarfile(tar)
                except tarfile.HeaderError:
                    break
                if member.islnk() or member.issym() or member.issparse():
                    yield member.name, member.offset_data, None
                elif member.isreg():
                    yield member.name, member.offset_data, member.size
                offset = tar.offset
                all_plain = all_plain and not tar.pax_headers
        _check_end(path, whole, offset)


class _Slices:
    """The slices of a file that has no memory map."""

    def __init__(self, opened: BinaryIO, size: int) -> None:
        self._opened, self._size = opened, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, span: slice) -> bytes:
        self._opened.seek(span.start)
        return self._opened.read(span.stop - span.start)


def _slices(path: DataFile, opened: BinaryIO) -> AbstractContextManager[mmap.mmap | _Slices]:
    if path.is_stored:
        return nullcontext(_Slices(opened, path.size))
    return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def _plain_size(header: bytes) -> int | None:
    """Return the size of a plain file, or of a block that describes the next file."""
    kind, size, check = header[156:157], header[124:136], header[148:156]
    if kind not in (tarfile.REGTYPE, tarfile.XHDTYPE) or any(header[345:346]) or size[0] & 0x80:
        return None
    try:
        total, size_bytes = int(check.strip(b" \0"), 8), int(size.strip(b" \0"), 8)
    except ValueError:
        return None
    # The check is the sum of all bytes of the header, with spaces for the check itself. Adler-32
    # contains 1 + the sum of all bytes.
    off = (zlib.adler32(header) & 0xFFFF) - 1 - sum(check) + sum(b" " * 8) - total
    return size_bytes if off % _ADLER_MODULUS == 0 else None


def _check_end(path: DataFile, whole: mmap.mmap | _Slices, end: int) -> None:
    """Raise a `ValueError` unless nothing but zeros, the mark of the end, follows the members."""
    for offset in range(end, max(len(whole), end + 1), _READ_BYTES):
        data = whole[offset : offset + _READ_BYTES]
        is_cut = offset == end and len(data) < _BLOCK_BYTES
        if is_cut or data.strip(b"\0"):
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


def _name(index: Index, member: int) -> str:
    """Return the name of a member."""
    begin = int(index["name_ends"][member - 1]) if member else 0
    text = index["names"][begin : int(index["name_ends"][member])].tobytes()
    return text.decode("utf-8", "surrogateescape")


def _split(name: str) -> tuple[str, str]:
    """Return the key and the extension of a member, as WebDataset does."""
    folder, slash, base = name.rpartition("/")
    key, _, extension = base.partition(".")
    return folder + slash + key, extension.lower()
