"""A map-style dataset of the samples of tar files, as WebDataset has them."""

from __future__ import annotations

import operator
import os
import tarfile
import zlib
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from odb_nodes._core.progress import SlowProgress
from odb_nodes.sources.jsonl_source import Paths, files_of, listed
from odb_nodes.sources.kept_index import Index, index_of, stamp_of

KEY = "__key__"
_BLOCK_BYTES = 512  # of a tar file
_READ_BYTES = 1 << 20  # at a time


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
        paths: a file, a folder, or a pattern such as `"data/*.tar"`; or several of these, in order.
            A folder stands for its `.tar` files. They must not be compressed.

    Raises:
        FileNotFoundError: a file does not exist, or a folder or pattern has none.
        ValueError: a file is no tar file, is compressed, damaged or cut, or has a member twice in
            one sample, as a link, or with holes.
    """

    def __init__(self, paths: Paths) -> None:
        self._files = [file for path in listed(paths) for file in files_of(path, ".tar")]
        if not self._files:
            raise ValueError("`paths` must name at least 1 file, but is empty.")
        self._stamps = [stamp_of(file.stat()) for file in self._files]
        self._indices = [index_of(file, "tar1", _search) for file in self._files]
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
        if not 0 <= operator.index(index) < len(self):
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
    size = path.stat().st_size
    progress = SlowProgress(f"bytes of {path} read, to find its samples", size)
    before, of_sample, end = None, set[str](), 0
    try:
        with open(path, "rb") as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # else it keeps all of them
                end = member.offset_data + member.size
                key, extension = _split(member.name)
                if not extension or key.endswith("/") or not key:  # hidden, as those of macOS
                    continue
                if member.islnk() or member.issym() or member.issparse():
                    raise ValueError(
                        f"{path} has {member.name} as a link, or with holes, which cannot be read "
                        "by itself. Write it anew, with `--hard-dereference` and without `-S`."
                    )
                if not member.isreg():
                    continue
                if key != before:
                    firsts.append(len(starts))
                    before, of_sample = key, set[str]()
                if extension in of_sample:
                    raise ValueError(
                        f"{path} has {member.name} twice in one sample. Write it anew."
                    )
                of_sample.add(extension)
                starts.append(member.offset_data)
                sizes.append(member.size)
                names += member.name.encode("utf-8", "surrogateescape")
                name_ends.append(len(names))
                progress.update(end)
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is no tar file, or is compressed or cut: {error}.") from error
    end += -end % _BLOCK_BYTES
    _check_end(path, end, size)
    found = {"firsts": firsts, "starts": starts, "sizes": sizes, "name_ends": name_ends}
    index = {name: np.frombuffer(values, np.int64) for name, values in found.items()}
    return {**index, "names": np.frombuffer(bytes(names), np.uint8)}


def _check_end(path: Path, end: int, size: int) -> None:
    """Raise a `ValueError` unless nothing but zeros, the mark of the end, follows the members."""
    with open(path, "rb") as opened:
        opened.seek(end)
        rest = opened.read(_BLOCK_BYTES)
        is_cut = len(rest) < _BLOCK_BYTES
        while rest and not rest.strip(b"\0"):
            rest = opened.read(_READ_BYTES)
    if is_cut or rest:
        raise ValueError(
            f"{path} is {'cut' if is_cut else 'damaged'} at byte {end} of {size}, or several files "
            "are joined: there is neither a member nor the end. Put it back whole."
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
