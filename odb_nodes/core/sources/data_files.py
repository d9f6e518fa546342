"""Data files: from a path, a folder, a pattern or a list of these to the files."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from odb_nodes._support.text import counted
from odb_nodes._support.user_warning import warn_user
from odb_nodes.core.sources.data_file import DataFile, LocalFile, is_url, of_each
from odb_nodes.core.sources.stored_file import StoredFile, matching

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]*(?:,[^{},]*)+))\}")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".br")
_SHOWN = 3  # files that an error names


class FileKind(NamedTuple):
    """The files of one format, by the ends of their names in lower case."""

    ends: tuple[str, ...]  # what a folder stands for
    unread: tuple[str, ...] = ()  # further ends of such data, beside `ends` with a compression
    doubtful: tuple[str, ...] = ()  # ends of files that may be such data, or something else
    partitioned: bool = False  # whether a folder includes its subfolders named `key=value`

    def is_read(self, name: str) -> bool:
        """Tell whether a folder stands for a file of this name."""
        return name.lower().endswith(self.ends)

    def joins(self, folder: str, file: Path) -> bool:
        """Tell whether a file below a folder counts as a file of the folder."""
        below = file.relative_to(folder).parts[:-1]
        return all(self.partitioned and "=" in name for name in below)

    def is_data(self, name: str) -> bool:
        """Tell whether a file of this name has data of this format, readable or not."""
        stem, end = os.path.splitext(name.lower())
        ends = self.ends + self.unread
        return name.lower().endswith(ends) or (end in _COMPRESSED and stem.endswith(ends))


JSON_LINES = FileKind(ends=(".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), doubtful=(".json",))
PARQUET = FileKind(ends=(".parquet", ".parq", ".pq"), partitioned=True)
TAR = FileKind(ends=(".tar",), unread=(".tgz", ".tbz2", ".txz", ".tzst"))


def listed(paths: Paths) -> list[str]:
    """Return the paths as a list, with braces expanded: `"{00..99}"`, `"{a,b}"`."""
    several = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else paths
    is_list = isinstance(several, Sequence)
    if not is_list or not all(isinstance(path, (str, os.PathLike)) for path in several):
        raise TypeError(
            "`paths` must be a path, a string or `pathlib.Path`, or a list of them, but is "
            f"{paths!r:.200} instead."
        )
    if not several:
        raise ValueError("`paths` must name at least 1 file, but is empty.")
    return [name for path in several for name in _expanded(os.fspath(path))]


def _expanded(path: str) -> list[str]:
    folder, pattern = _split(path)
    if not _BRACES.search(pattern) or os.path.exists(path):
        return [path]
    names = [pattern]
    while (braces := _BRACES.search(names[0])) is not None:
        first, last, words = braces.groups()
        several = words.split(",") if words else range(int(first), int(last) + 1)
        width = len(first or "")
        names = [
            _BRACES.sub(f"{word:0>{width}}", name, count=1) for name in names for word in several
        ]
        if len({*names}) < len(names) or not names or re.search(r"\{[^{}]*\{", pattern):
            raise ValueError(
                f"`paths` must have braces that count up or list names, each once and none within "
                f"others, but has {path!r}. Write `{{00..99}}` or `{{a,b}}`, or list the files."
            )
    return [folder + name for name in names]


def _split(path: str) -> tuple[str, str]:
    """Return the longest part of a path that is an existing folder, and the remaining text."""
    folder = path
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder, path[len(folder) :]


def matches(path: str | os.PathLike[str]) -> list[str]:
    """Return the paths that match a pattern; existing folders in it are taken literally."""
    folder, pattern = _split(os.fspath(path))
    return sorted(glob.glob(glob.escape(folder) + pattern, recursive=True))


def open_files(paths: Paths, kind: FileKind) -> list[DataFile]:
    """Return the files of paths, each of which exists, and comes once."""
    files: list[Path | str] = []
    for path in listed(paths):
        if not is_url(path):
            files += files_of(path, kind)
        elif "*" not in path:
            files.append(path)
        elif urls := matching(path):
            files += urls
        else:
            raise FileNotFoundError(
                f"`paths` must name files, but {path!r} has none. Check bucket and path."
            )
    check_files(files)
    return of_each(lambda path: (StoredFile if is_url(path) else LocalFile)(path), files)


def files_of(path: str | os.PathLike[str], kind: FileKind) -> list[Path]:
    """Return the files of a path: a file itself, or the files of a pattern or a folder.

    `folder/**` is the folder with all its subfolders.
    """
    folder, pattern = _split(os.fspath(path))
    below = pattern.strip("/") == "**"
    if below or not pattern:
        folder = folder or os.curdir * below
        every = [*_walk(folder, kind)]
        files = [file for file in every if kind.is_read(file.name)]
        files = [file for file in files if below or kind.joins(folder, file)]
        visible = glob.glob("**/*" if below else "*", root_dir=folder, recursive=True)
        if names := [name for name in visible if name.lower().endswith(kind.doubtful)]:
            warn_user(
                f"`paths`: the folder {folder!r} stands for its `{kind.ends[0]}` files, without "
                f"{counted(len(names), 'file')}: {_shown(names)}. Where they are meant, name them "
                "by a pattern."
            )
    elif glob.has_magic(pattern) and not os.path.exists(path):
        matched = [*map(Path, matches(path))]
        files = [match for match in matched if not match.is_dir()]
        every = [file for match in matched if match.is_dir() for file in _walk(match, kind)]
    else:
        return [Path(path)]
    if lost := sorted(str(file) for file in files if file.is_symlink() and not file.exists()):
        raise FileNotFoundError(
            f"`paths`: {os.fspath(path)!r} has a link to a file that does not exist, {lost[0]}. "
            "Mount its disk, or remove the link."
        )
    unread = {*every} - {*files}
    read = {*map(os.path.realpath, files if unread else ())}
    if left_out := [file for file in unread if os.path.realpath(file) not in read]:
        raise ValueError(
            f"`paths` must name what is meant where {os.fspath(path)!r} would leave out "
            f"{counted(len(left_out), 'file')} of data: {_shown(left_out)}. Pass "
            f"{os.path.join(folder, '**')!r} to read all subfolders too, or a pattern for each "
            "kind of name that is meant; decompress what is compressed."
        )
    if not files:
        raise FileNotFoundError(
            f"`paths` must name files, but {os.fspath(path)!r} has none (of a folder, those that "
            f"end in `{'` or `'.join(kind.ends)}` are taken)."
        )
    return sorted(files)


def has_files(folder: str | Path, kind: FileKind) -> bool:
    """Tell whether a folder or its subfolders have files of this format."""
    return any(_walk(folder, kind))


def _walk(folder: str | Path, kind: FileKind) -> Iterator[Path]:
    """Yield the visible files of a format in a folder and its subfolders."""
    walked = set[str]()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(parent)) in walked:  # a link, perhaps to a folder above
            folders.clear()
            continue
        walked.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in sorted(names):
            if kind.is_data(name) and not name.startswith("."):
                yield Path(parent, name)


def _shown(files: Iterable[str | Path]) -> str:
    names = sorted(map(str, files))
    return ", ".join(names[:_SHOWN]) + " and so on" * (len(names) > _SHOWN)


def check_files(files: Sequence[str | Path]) -> None:
    """Raise a `ValueError` for a file that is named twice, or a local file that is not regular."""
    names: dict[object, list[str]] = {}  # of each file
    for file in files:
        status = None if is_url(file) else os.stat(file)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"`paths` must be regular files, but {file} is a folder, pipe or device. Write its "
                "data to a file."
            )
        identity: object = file if is_url(file) else os.path.realpath(file)
        if status is not None and status.st_ino:  # hard links share it; some disks have none
            identity = (status.st_dev, status.st_ino)
        names.setdefault(identity, []).append(str(file))
    for names_of_file in names.values():
        if len(names_of_file) > 1:
            raise ValueError(
                f"`paths` must name each file once, but {names_of_file[0]} comes "
                f"{len(names_of_file)} times, as {_shown({*names_of_file})}: by its name, a (hard) "
                "link or a pattern. To read a file more often, mix sources by `weights`."
            )
