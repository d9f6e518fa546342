"""Ranges kept on a local disk: read once by all processes of a machine, and bounded."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from odb_nodes.core.sources import range_cache
from odb_nodes.core.sources.range_cache import kept_range

SIZE = 1000


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "odb_nodes" / "ranges"


def content(number):
    return bytes([number]) * SIZE


def fetched(number):
    with (Path(range_cache.cache_folder()) / "fetched").open("a") as file:
        file.write(f"{number}\n")
    time.sleep(0.01)  # in which others may want it
    return content(number)


def read(number):
    return kept_range(f"{number}.0-{SIZE}", SIZE, lambda: fetched(number))[:]


def fetches(folder):
    return [*map(int, (folder.parent / "fetched").read_text().split())]


def kept(folder):
    return sorted(int(path.name.partition(".")[0]) for path in folder.glob("[0-9]*"))


def test_a_range_is_fetched_once(folder):
    folder.mkdir(parents=True)
    assert [read(number) for number in (1, 2, 1, 2)] == [*map(content, (1, 2, 1, 2))]
    assert fetches(folder) == [1, 2] and kept(folder) == [1, 2]


def test_the_ranges_used_longest_ago_are_deleted(folder, monkeypatch):
    folder.mkdir(parents=True)
    monkeypatch.setenv(range_cache.LIMIT, f"{3 * SIZE + 20}")
    held = kept_range("0.a", SIZE, lambda: content(0))
    held = kept_range("0.a", SIZE, lambda: pytest.fail("it is kept"))
    for number in (1, 2, 1, 3, 1, 4, 1):
        assert read(number) == content(number)
    assert kept(folder) == [1, 3, 4]
    assert held[:] == content(0)  # also after its file is deleted
    assert read(2) == content(2) and fetches(folder) == [1, 2, 3, 4, 2]


@pytest.mark.parametrize("damage", [b"", b"1" * 10, b"1" * SIZE, bytes(SIZE + 4)], ids=len)
def test_a_range_that_is_cut_or_damaged_is_fetched_again(damage, folder):
    folder.mkdir(parents=True)
    read(1)
    (folder / f"1.0-{SIZE}").write_bytes(damage)
    assert [read(1), read(1)] == [content(1)] * 2 and fetches(folder) == [1, 1]


def test_a_folder_that_cannot_be_written_keeps_nothing(folder):
    folder.parent.mkdir()
    folder.write_text("a file")
    assert [read(1), read(1)] == [content(1)] * 2 and fetches(folder) == [1, 1]


def test_a_limit_of_0_keeps_nothing_and_others_must_be_numbers(folder, monkeypatch):
    folder.parent.mkdir()
    monkeypatch.setenv(range_cache.LIMIT, "0")
    assert [read(1), read(1)] == [content(1)] * 2 and not folder.exists()
    monkeypatch.setenv(range_cache.LIMIT, "1e9")
    with pytest.raises(ValueError, match="`ODB_NODES_CACHE_BYTES` must be a number .* '1e9'"):
        read(1)


def test_an_error_of_a_fetch_keeps_nothing(folder):
    folder.mkdir(parents=True)
    with pytest.raises(OSError, match="the store is down"):
        kept_range(f"1.0-{SIZE}", SIZE, lambda: (_ for _ in ()).throw(OSError("the store is down")))
    assert kept(folder) == [] and read(1) == content(1)


def many(seed):
    draw = random.Random(seed)
    numbers = [draw.randrange(20) for _ in range(150)]
    return [number for number in numbers if read(number) != content(number)]


def test_threads_that_want_a_range_at_once_fetch_it_once(folder):
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(many, [1] * 8)] == [[]] * 8
    assert len(fetches(folder)) == len({*fetches(folder)}) > 15


@pytest.mark.slow
def test_processes_share_a_small_cache(folder, monkeypatch):
    folder.mkdir(parents=True)
    monkeypatch.setenv(range_cache.LIMIT, f"{6 * SIZE + 50}")
    with get_context("fork").Pool(4) as pool:
        assert pool.map_async(many, range(8)).get(200) == [[]] * 8
    assert len(kept(folder)) <= 6 and len([*folder.glob("*.part")]) == 0
