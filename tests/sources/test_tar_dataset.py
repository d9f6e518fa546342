"""Samples of tar files: found as WebDataset finds them, each once, resumed exactly."""

import gzip
import io
import json
import random
import tarfile

import pytest

from odb_nodes import ODBDataLoader, StateError, TarDataset, WorkerOptions
from odb_nodes.sources import kept_index, tar_dataset


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
def files(tmp_path):
    """Two files of 60 samples, with a text of its own length in each."""
    paths = [tmp_path / "a.tar", tmp_path / "b.tar"]
    for number, path in enumerate(paths):
        members = [("train/", None)]
        for index in range(60 * number, 60 * number + 60):
            members.append((f"train/{index:03}.JSON", json.dumps({"id": index}).encode()))
            members.append((f"train/{index:03}.input.txt", bytes([index % 9 + 65]) * (index % 20)))
        write(path, members)
    return paths


def process(sample):
    ids = list(sample["input.txt"]) or [0]
    return {"input_ids": ids, "id": json.loads(sample["json"])["id"]}


def loader_of(files, **options):
    return ODBDataLoader(
        TarDataset(files), token_budget=90, window=16, process_fn=process, seed=3, **options
    )


def steps(batches):
    return [(batch["id"].tolist(), batch["input_ids"].tolist()) for batch in batches]


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
            files = [one for one in tar if one.isreg() or one.issym()]
        expected = [(one.name, one.offset_data, one.size if one.isreg() else None) for one in files]
        assert [*tar_dataset._members(tmp_path / "a.tar")] == expected


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


@pytest.mark.parametrize(
    "workers",
    [
        WorkerOptions(),
        pytest.param(WorkerOptions(num_workers=2), marks=pytest.mark.slow),
        WorkerOptions(num_workers=2, method="thread"),
    ],
)
def test_every_sample_comes_once_whoever_reads(workers, files):
    with loader_of(files, workers=workers) as loader:
        assert sorted(index for ids, _ in steps(loader) for index in ids) == [*range(120)]


def test_a_large_file_is_searched_once(files, monkeypatch):
    monkeypatch.setattr(kept_index, "KEPT_FROM_BYTES", 0)
    expected = [TarDataset(files)[index] for index in range(120)]
    monkeypatch.setattr(tar_dataset, "_search", lambda path: pytest.fail(f"{path} was read"))
    samples = TarDataset(files)
    assert [samples[index] for index in range(120)] == expected


def test_what_cannot_be_read_is_named(files, tmp_path):
    samples, whole = TarDataset(files), files[0].read_bytes()
    loader = loader_of(files)
    next(iter(loader))
    state = loader.state_dict()
    for size in 100 * 512, 100 * 512 + 100, 700:
        files[0].write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"a.tar is (cut|no tar file, or)"):
            TarDataset(files)
    with pytest.raises(OSError, match=r"train/059.JSON of .*a.tar cannot be read: .* cut or repl"):
        samples[59]
    damaged = bytearray(whole)
    damaged[100 * 512 : 102 * 512] = b"x" * 1024  # Two headers, or one and its data.
    files[0].write_bytes(damaged)
    with pytest.raises(ValueError, match=r"a.tar is (damaged at byte|no tar file)"):
        TarDataset(files)
    files[0].write_bytes(whole + files[1].read_bytes())
    with pytest.raises(ValueError, match=r"a.tar is damaged at byte .* several files are joined"):
        TarDataset(files)
    with tarfile.open(tmp_path / "twice.tar", "w") as tar:
        for name, kind in ("1.txt", tarfile.REGTYPE), ("2.txt", tarfile.LNKTYPE):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "1.txt"
            tar.addfile(info)
    with pytest.raises(ValueError, match=r"2.txt as a link"):
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
    files[0].write_bytes(gzip.compress(whole))
    with pytest.raises(ValueError, match="a.tar is no tar file, or is compressed"):
        TarDataset(files)
    with pytest.raises(FileNotFoundError, match="none"):
        TarDataset(tmp_path / "none.tar")
    with pytest.raises(IndexError, match="no sample 120: .* 120"):
        samples[120]
    write(files[0], [(f"{index}.txt", b"abc") for index in range(60)])
    other = loader_of(files)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="`data_id` was '2 files"):
        iter(other)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
        {"num_workers": 2, "method": "thread"},
    ],
)
def test_a_run_resumes_exactly(options, files):
    if "method" in options:
        from odb_nodes import WorkerOptions

        options = {"workers": WorkerOptions(**options)}
    with loader_of(files, **options) as loader, loader_of(files, **options) as again:
        expected = [steps(loader) for _ in range(2)]
        assert sorted(index for ids, _ in expected[0] for index in ids) == [*range(120)]
        loader.set_epoch(0)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        again.load_state_dict(loader.state_dict())
        assert steps(again) == expected[0][3:] and steps(again) == expected[1]
