"""Rows of Parquet and samples of tar files: each once, whoever reads them, resumed exactly."""

import gzip
import io
import json
import pickle
import random
import tarfile
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aligned_ranks import on_ranks

from odb_nodes import (
    ODBDataLoader,
    ParquetDataset,
    StateError,
    TarDataset,
    WorkerOptions,
    pop_step_info,
    reshard,
)
from odb_nodes.core.sources import ShardedSampler, kept_index, tar_dataset
from odb_nodes.core.sources.data_file import LocalFile
from odb_nodes.core.sources.dataset_order import BlockPermutation

SIZES = [130, 0, 75]


@pytest.fixture
def files(tmp_path):
    """Files of 20 rows in a group, of which one is empty."""
    paths, ids = [], iter(range(1000))
    for number, size in enumerate(SIZES):
        rows = [
            {
                "id": (number_of_row := next(ids)),
                "input_ids": [number_of_row % 9] * (number_of_row % 23 + 2),
            }
            for _ in range(size)
        ]
        schema = pa.schema([("id", pa.int64()), ("input_ids", pa.list_(pa.int32()))])
        paths.append(tmp_path / f"{number}.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema), paths[-1], row_group_size=20)
    return paths


def process(row):
    return {"input_ids": row["input_ids"], "id": row["id"]}


def loader_of(files, **options):
    options = {"token_budget": 120, "window": 16, "process_fn": process, "seed": 3, **options}
    return ODBDataLoader(ParquetDataset(files, mixed_blocks=2), **options)


def steps(batches):
    return [(batch["id"].tolist(), batch["input_ids"].tolist()) for batch in batches]


def test_rows_are_those_of_the_files_in_their_order(files, tmp_path):
    for paths in (files, tmp_path, str(tmp_path / "*.parquet")):
        rows = ParquetDataset(paths)
        assert [row["id"] for row in map(rows.__getitem__, range(len(rows)))] == [*range(205)]
        assert rows[24] == {"id": 24, "input_ids": [24 % 9] * (24 % 23 + 2)}
    assert ParquetDataset(files[0], ["id"])[3] == {"id": 3}
    assert len(pickle.dumps(rows)) < 20_000  # without the rows that it keeps


@pytest.mark.parametrize("starts", [[0], [0, 7, 7, 30, 31, 90], [*range(0, 100, 10)]])
@pytest.mark.parametrize("mixed", [1, 2, 9])
def test_a_permutation_of_blocks_keeps_the_elements_of_few_together(starts, mixed):
    every, orders = np.arange(100), []
    for seed in range(3):
        permutation = BlockPermutation(100, starts, mixed, seed)
        order = permutation(every)
        assert sorted(order) == [*range(100)]
        assert [*permutation(every[::-1])[::-1]] == [*order] == [*map(int, order)]
        blocks = np.searchsorted(starts, order, "right")
        for block in {*blocks}:
            places = np.flatnonzero(blocks == block)
            assert len({*blocks[places[0] : places[-1] + 1]}) <= mixed
        orders.append(tuple(order))
    assert len({*orders}) == 3


def test_a_row_group_is_read_once_in_an_epoch_and_few_are_kept(files, monkeypatch):
    read, table = [], ParquetDataset._columns_of
    monkeypatch.setattr(
        ParquetDataset, "_columns_of", lambda *args: read.append(args[1]) or table(*args)
    )
    rows = ParquetDataset(files, mixed_blocks=2)
    for epoch in range(2):
        sampler = ShardedSampler(rows, seed=epoch, rank=0, world_size=1)
        assert sorted(rows[index]["id"] for index in sampler) == [*range(205)]
        assert len(rows._read_last) <= 3
    assert max(Counter(read).values()) <= 2 and len(read) <= 22  # 11 with rows


def test_ranks_share_the_rows_and_others_go_on(files):
    def begun(exchange):
        loader = loader_of(files, process_group=exchange)
        batches = iter(loader)
        done = [ids_of(next(batches)) for _ in range(4)]
        return done, loader.state_dict()

    def ids_of(batch):
        return [] if pop_step_info(batch).is_filler else batch["id"].tolist()

    parts = on_ranks(2, begun)
    states = reshard([state for _, state in parts], 3)

    def rest(exchange):
        loader = loader_of(files, process_group=exchange)
        loader.load_state_dict(states[exchange.rank])
        return [ids_of(batch) for batch in loader]

    ids = [done for done, _ in parts] + on_ranks(3, rest)
    assert sorted(index for rank in ids for ids in rank for index in ids) == [*range(205)]


def test_a_state_does_not_fit_other_files(files):
    loader = loader_of(files)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(StateError, match="`data_id` was '3 files"):
        iter_of(loader_of(files[:1] + files[2:]), state)
    with pytest.raises(StateError, match="`mixed_blocks` was 2"):
        other = ODBDataLoader(
            ParquetDataset(files), token_budget=120, window=16, process_fn=process, seed=3
        )
        iter_of(other, state)


def iter_of(loader, state):
    loader.load_state_dict(state)
    return iter(loader)


def test_what_cannot_be_read_is_named(files, tmp_path):
    whole = files[0].read_bytes()
    rows = ParquetDataset(files)
    files[0].write_bytes(whole[:2000])
    with pytest.raises(OSError, match=r"row group 1 of .*0.parquet \(rows 20..39\).* cut or repl"):
        rows[25]
    with pytest.raises(ValueError, match=r"0.parquet is no Parquet file, or is cut: "):
        ParquetDataset(files)
    files[0].unlink()
    with pytest.raises(FileNotFoundError, match=r"row group 1 of .*0.parquet .*is gone. Put it b"):
        rows[25]
    damaged = bytearray(whole)
    damaged[100:300] = b"x" * 200
    files[0].write_bytes(damaged)
    with pytest.raises(OSError, match=r"row group 0 of .*0.parquet \(rows 0..19\) cannot"):
        ParquetDataset(files)[0]
    files[0].write_bytes(whole)
    with pytest.raises(ValueError, match=r"0.parquet has no column 'text': it has \['id'"):
        ParquetDataset(files, ["text"])
    with pytest.raises(ValueError, match="`columns` must name at least 1 column, but is empty"):
        ParquetDataset(files, ())
    with pytest.raises(TypeError, match="`columns` must be a list of names, but is 7"):
        ParquetDataset(files, 7)
    twice = pa.table([[1], [2]], names=["id", "id"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice.parquet has 2 columns 'id'"):
        ParquetDataset(tmp_path / "twice.parquet")
    with pytest.raises(FileNotFoundError, match="none"):
        ParquetDataset(tmp_path / "none.parquet")
    with pytest.raises(IndexError, match="no row 205: .* 205"):
        rows[205]


class Blocks(list):
    mixed_blocks = 4


@pytest.mark.parametrize("starts", [[2, 5], [0, 5, 3], [0, 20], [], [0.5]])
def test_blocks_that_are_none_are_refused(starts):
    data = Blocks(range(10))
    data.shuffle_blocks = starts
    with pytest.raises(ValueError, match="`shuffle_blocks` must be the first index of each block"):
        ShardedSampler(data, rank=0, world_size=1)
    data.shuffle_blocks, data.mixed_blocks = [0, 4, 10], 0
    with pytest.raises(ValueError, match="`mixed_blocks`"):
        ShardedSampler(data, rank=0, world_size=1)
    data.mixed_blocks = 1
    assert "blocks" in ShardedSampler(data, rank=0, world_size=1).fingerprint()


# --- tar: found as WebDataset finds them ---------------------------------------------------------


def write(path, members, format=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content or b""))


@pytest.fixture
def tars(tmp_path):
    """Two files of 60 samples, with a text of its own length in each."""
    paths = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for number, path in enumerate(paths):
        members = [("train/", None)]
        for index in range(60 * number, 60 * number + 60):
            members.append((f"train/{index:03}.JSON", json.dumps({"id": index}).encode()))
            members.append((f"train/{index:03}.input.txt", bytes([index % 9 + 65]) * (index % 20)))
        write(path, members)
    return paths


def process_tar(sample):
    ids = list(sample["input.txt"]) or [0]
    return {"input_ids": ids, "id": json.loads(sample["json"])["id"]}


def tar_loader(tars, **options):
    return ODBDataLoader(
        TarDataset(tars), token_budget=90, window=16, process_fn=process_tar, seed=3, **options
    )


def test_members_are_those_that_tarfile_finds(tmp_path):
    kinds = [tarfile.REGTYPE] * 5 + [tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE]
    for seed in range(40):
        draw = random.Random(seed)
        format = draw.choice([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
        said = draw.choice([None, None, {"comment": "of all"}, {"path": "of all"}])
        said = said if format == tarfile.PAX_FORMAT else None
        with tarfile.open(tmp_path / "a.tar", "w", format=format, pax_headers=said) as tar:
            for number in range(draw.randrange(1, 6)):
                member = tarfile.TarInfo(
                    draw.choice(["a", "b/c", "d" * 120 + "/e"]) + f"{number}.x"
                )
                member.type, member.linkname = draw.choice(kinds), "a0.x"
                member.mtime = 5 if format != tarfile.PAX_FORMAT else draw.choice([5, 5.5])
                member.size = draw.randrange(1500) if member.isreg() else 0
                tar.addfile(member, io.BytesIO(b"q" * member.size))
        with tarfile.open(tmp_path / "a.tar") as tar:
            files = [member for member in tar if member.isreg() or member.issym()]
        expected = [
            (member.name, member.offset_data, member.size if member.isreg() else None)
            for member in files
        ]
        assert [*tar_dataset._members(LocalFile(tmp_path / "a.tar"))] == expected


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_of_one_name_are_a_sample(format, tmp_path):
    long, odd = "d" * 150 + "/7", "g\xfcn\udcff"
    members = [("x/1.jpg", b"j"), ("x/._1.jpg", b"of macOS"), ("x/README", b"no extension")]
    members += [("x/1.cls.txt", b""), ("y/1.jpg", b"k"), (".hidden", b"h")]
    write(tmp_path / "a.tar", [*members, (f"{long}.jpg", b"l" * 2000), (f"{odd}.jpg", b"")], format)
    samples = TarDataset(tmp_path)
    assert [samples[index] for index in range(len(samples))] == [
        {"__key__": "x/1", "jpg": b"j", "cls.txt": b""},
        {"__key__": "y/1", "jpg": b"k"},
        {"__key__": long, "jpg": b"l" * 2000},
        {"__key__": odd, "jpg": b""},
    ]


def test_a_large_file_is_searched_once(tars, monkeypatch):
    monkeypatch.setattr(kept_index, "KEPT_FROM_BYTES", 0)
    samples = TarDataset(tars)
    expected = [samples[index] for index in range(0, 120, 7)]
    for path in tars:  # kept by another version, so it is made again
        with path.with_name(f".{path.name}.tar1").open("wb") as kept:
            np.savez(kept, stamp=LocalFile(path).stamp)
    samples = TarDataset(tars)
    monkeypatch.setattr(tar_dataset, "_search", lambda path: pytest.fail(f"{path} was read"))
    samples = TarDataset(tars)
    assert [samples[index] for index in range(0, 120, 7)] == expected


def test_a_tar_file_that_cannot_be_read_is_named(tars, tmp_path):
    samples, whole = TarDataset(tars), tars[0].read_bytes()
    loader = tar_loader(tars)
    next(iter(loader))
    state = loader.state_dict()
    for size in 100 * 512, 100 * 512 + 100, 700:
        tars[0].write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a.tar is (cut|no tar file, or)"):
            TarDataset(tars)
    with pytest.raises(OSError, match=r"train/059.JSON of .*a.tar cannot be read: .* cut or repl"):
        samples[59]
    damaged = bytearray(whole)
    damaged[100 * 512 : 102 * 512] = b"x" * 1024  # Two headers, or one and its data.
    tars[0].write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a.tar is (damaged at byte|no tar file)"):
        TarDataset(tars)
    for begin in b"", whole:
        tars[0].write_bytes(begin + bytes(2 << 20))
        with pytest.raises(ValueError, match=r"a.tar has \d+ zeros from byte \d+ on"):
            TarDataset(tars)
    tars[0].write_bytes(whole + tars[1].read_bytes())
    with pytest.raises(ValueError, match=r"a.tar is damaged at byte .* several files are joined"):
        TarDataset(tars)
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for name, kind in ("1.txt", tarfile.REGTYPE), ("2.txt", tarfile.LNKTYPE):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "1.txt"
            tar.addfile(info)
    with pytest.raises(ValueError, match=r"2.txt as a link.* `--dereference --hard-dereference`"):
        TarDataset(tmp_path / "twice.tar")
    write(tmp_path / "twice.tar", [("1.txt", b"a"), ("1.TXT", b"b")])
    with pytest.raises(ValueError, match=r"1.TXT twice in one sample"):
        TarDataset(tmp_path / "twice.tar")
    write(tmp_path / "twice.tar", [("1.txt", b"a"), ("1.__key__", b"b")])
    with pytest.raises(ValueError, match=r"1.__key__ twice in one sample, or as its key"):
        TarDataset(tmp_path / "twice.tar")
    write(tmp_path / "twice.tar", [("1.txt", b"a"), ("2.txt", b"b"), ("1.json", b"c")])
    with pytest.raises(ValueError, match=r"1.json behind other samples .* sorted by name"):
        TarDataset(tmp_path / "twice.tar")
    (tmp_path / "twice.tar").unlink()
    tars[0].write_bytes(gzip.compress(whole))
    with pytest.raises(ValueError, match="a.tar is no tar file, or is compressed"):
        TarDataset(tars)
    with pytest.raises(FileNotFoundError, match="none"):
        TarDataset(tmp_path / "none.tar")
    with pytest.raises(IndexError, match="no sample 120: .* 120"):
        samples[120]
    write(tars[0], [(f"{index}.txt", b"abc") for index in range(60)])
    other = tar_loader(tars)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="`data_id` was '2 files"):
        iter(other)


# --- both -----------------------------------------------------------------------------------------

THREADS = {"workers": WorkerOptions(num_workers=2, method="thread")}


@pytest.mark.parametrize(
    "options", [{}, THREADS, pytest.param({"num_workers": 2}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("make", "size"), [(loader_of, 205), (tar_loader, 120)])
def test_each_sample_comes_once_and_a_run_resumes_exactly_whoever_reads(
    make, size, options, request
):
    paths = request.getfixturevalue("files" if make is loader_of else "tars")
    with make(paths) as loader:
        expected = [steps(loader) for _ in range(2)]
    assert sorted(index for ids, _ in expected[0] for index in ids) == [*range(size)]
    assert expected[0] != expected[1]
    with make(paths, **options) as loader, make(paths, **options) as resumed:
        batches = iter(loader)
        for step in range(7):
            resumed.load_state_dict(loader.state_dict())
            if step in (1, 6):
                assert steps(resumed) == expected[0][step:]
                assert steps(resumed) == expected[1]
            next(batches)
