import gzip
import json
import os

import pytest
from torchdata.nodes import Mapper

from odb_nodes import JsonlSource, Loader, ODBDataLoader, SampleError, StateError
from odb_nodes.testing import assert_resumes_exactly


@pytest.fixture
def files(tmp_path):
    """Two files of 60 records, with blank lines, long lines, and no newline at the end."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for first, path in zip((0, 40), paths, strict=True):
        records = [{"id": i, "text": "é" * (i % 7)} for i in range(first, 40 if not first else 60)]
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        path.write_text("\n\n".join(lines), encoding="utf-8")
    return paths


def ids(source):
    return [record["id"] for record in Loader(source)]


def test_all_records_in_order_in_every_epoch(files):
    loader = Loader(JsonlSource(files, rank=0, world_size=1))
    for _ in range(3):
        assert [record["id"] for record in loader] == list(range(60))


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_share_the_records_of_all_files(files, world_size):
    shards = [ids(JsonlSource(files, rank, world_size)) for rank in range(world_size)]
    assert sorted(sum(shards, [])) == list(range(60))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.fixture
def compressed(files):
    """The same records in files of gzip."""
    paths = [path.with_suffix(".jsonl.gz") for path in files]
    for plain, path in zip(files, paths, strict=True):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    return paths


def test_a_folder_and_a_pattern_stand_for_their_files(files, compressed):
    folder = files[0].parent
    (folder / "notes.txt").write_text("{")
    assert ids(JsonlSource(folder / "*.jsonl", 0, 1)) == list(range(60))
    assert ids(JsonlSource(str(folder / "*.gz"), 0, 1)) == list(range(60))
    assert sorted(ids(JsonlSource(folder, 0, 1))) == sorted(2 * [*range(60)])
    assert ids(JsonlSource([files[1], compressed[0]], 0, 1)) == [*range(40, 60), *range(40)]


def test_files_that_are_no_files_or_come_twice_are_refused(files, compressed):
    folder = files[0].parent
    os.mkfifo(folder / "c.jsonl")
    assert ids(JsonlSource(folder / "*.jsonl", 0, 1)) == list(range(60))
    with pytest.raises(ValueError, match="must be regular files, but .*c.jsonl is none"):
        JsonlSource(folder / "c.jsonl")
    with pytest.raises(ValueError, match="each file once, but a folder or pattern has .*a.jsonl"):
        JsonlSource([files[0], folder / "*.jsonl"])
    assert len(ids(JsonlSource([files[0], files[0]], 0, 1))) == 80  # as it was asked for
    with pytest.raises(TypeError, match="must be a path, .*, or a list of them, but is None"):
        JsonlSource(None)
    compressed[0].write_bytes(compressed[0].read_bytes()[:-40])
    with pytest.raises(ValueError, match="a.jsonl.gz cannot be decompressed"):
        JsonlSource(compressed, count_records=True)


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path):
    path = tmp_path / "[a].jsonl"
    path.write_text('{"id": 7}')
    assert ids(JsonlSource(path, 0, 1)) == [7]


@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_every_step_of_compressed_files_resumes(compressed, shard, sampled):
    less = sampled(horizon=12, every=3)
    assert_resumes_exactly(lambda: Loader(JsonlSource(compressed, *shard)), epochs=2, **less)


def test_a_compressed_file_that_is_cut_is_an_error_at_its_place(compressed):
    whole = compressed[0].read_bytes()
    compressed[0].write_bytes(whole[:-40])
    loader, seen = Loader(JsonlSource(compressed, 0, 1)), []
    with pytest.raises(SampleError, match=r"a.jsonl.gz, line \d+, cannot be decompressed"):
        seen.extend(record["id"] for record in loader)
    compressed[0].write_bytes(whole)
    seen = [record["id"] for record in loader]
    assert seen[-1] == 59


def test_a_state_beyond_the_end_of_a_compressed_file_is_refused(compressed):
    source = JsonlSource(compressed, 0, 1)
    source.reset(None)
    next(source)
    state = {**source.state_dict(), "offset": 10**6}
    with pytest.raises(StateError, match="where no line begins"):
        source.reset(state)


@pytest.mark.parametrize("shard", [(0, 1), (1, 7)])
def test_the_number_of_records_is_known_after_an_epoch_or_counted_before(files, shard):
    source = JsonlSource(files, *shard)
    with pytest.raises(TypeError, match="Pass `count_records=True`"):
        len(source)
    records = ids(source)
    assert len(source) == len(JsonlSource(files, *shard, count_records=True)) == len(records)
    loader = ODBDataLoader(
        JsonlSource(files, count_records=True),
        token_budget=64,
        process_fn=lambda record: {"input_ids": [1] * (record["id"] + 1)},
    )
    assert loader.num_samples == 60


@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_every_step_resumes(files, shard, sampled):
    less = sampled(horizon=12)
    assert_resumes_exactly(lambda: Loader(JsonlSource(files, *shard)), epochs=3, **less)


def test_restoring_reads_nothing_again(files, monkeypatch):
    source = JsonlSource(files, rank=0, world_size=1)
    source.reset(None)
    for _ in range(50):
        next(source)
    state = source.state_dict()
    read = []
    monkeypatch.setattr(JsonlSource, "_parse", lambda self, line: read.append(line) or line)
    resumed = JsonlSource(files, rank=0, world_size=1)
    resumed.reset(state)
    assert read == []
    assert json.loads(next(resumed))["id"] == 50


def test_a_broken_line_is_named_and_loses_nothing(files):
    good = files[1].read_text()
    files[1].write_text(good.replace('"id": 45', '"id" 45'))
    loader, seen = Loader(JsonlSource(files, rank=0, world_size=1)), []
    for _ in range(2):
        with pytest.raises(
            SampleError, match=r"b\.jsonl, line 11, is not valid JSON in UTF-8.*\"id\" 45"
        ):
            for record in loader:
                seen.append(record["id"])
    files[1].write_text(good)
    seen += [record["id"] for record in loader]
    assert seen == list(range(60))


@pytest.mark.parametrize(
    "line", [b'{"id": "\xe9"}', b"\x00\x00", b"[" * 100_000, '{"id": 1}'.encode("utf-16")]
)
def test_what_is_no_json_in_utf_8_is_named(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 0}\n' + line + b"\n")
    with pytest.raises(SampleError, match=r"a\.jsonl, line 2, is not valid JSON in UTF-8"):
        ids(JsonlSource(tmp_path / "a.jsonl", 0, 1))


def test_a_broken_line_of_another_rank_is_left_to_it(files):
    files[1].write_text(files[1].read_text().replace('"id": 45', '"id" 45'))
    assert len(ids(JsonlSource(files, 0, 2))) == 30
    with pytest.raises(SampleError, match="line 11"):
        ids(JsonlSource(files, 1, 2))


def test_other_files_are_refused(files):
    source = JsonlSource(files, rank=0, world_size=1)
    source.reset(None)
    next(source)
    with pytest.raises(StateError, match="`files` was .* when saved"):
        JsonlSource(files[:1], rank=0, world_size=1).reset(source.state_dict())
    files[0].write_text(files[0].read_text() + "\n{}")
    with pytest.raises(StateError, match="`sizes_bytes` was .* when saved"):
        JsonlSource(files, rank=0, world_size=1).reset(source.state_dict())


def test_files_may_move(files, tmp_path):
    source = JsonlSource(files, rank=0, world_size=1)
    source.reset(None)
    next(source)
    moved = []
    for path in files:
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        moved.append(path.rename(tmp_path / "elsewhere" / path.name))
    resumed = JsonlSource(moved, rank=0, world_size=1)
    resumed.reset(source.state_dict())
    assert next(resumed)["id"] == 1


def test_no_file_is_left_open(files):
    source = JsonlSource(files[0], rank=0, world_size=1)
    loader = Loader(Mapper(source, dict))
    next(iter(loader))
    assert source._open is not None
    loader.close()
    assert source._open is None


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        ([], ValueError, "`paths` must name at least 1 file"),
        (["/nowhere/x.jsonl"], FileNotFoundError, "x.jsonl"),
        (["/dev/null"], ValueError, "must be regular files, but /dev/null is none"),
        (["/dev"], FileNotFoundError, "must name files, but '/dev' has none"),
        (["/dev/*.jsonl"], FileNotFoundError, r"must name files, but '/dev/\*.jsonl' has none"),
    ],
)
def test_paths_that_are_not_valid_are_named(paths, error, message):
    with pytest.raises(error, match=message):
        JsonlSource(paths)


@pytest.mark.parametrize("left", ["two lines", "half of the third line", "nothing"])
def test_a_file_that_is_cut_while_it_is_read_does_not_end_the_epoch(tmp_path, left):
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"id": n, "pad": "x" * 30_000}) + "\n" for n in range(5)]
    path.write_text("".join(lines))
    size = {"two lines": 2, "half of the third line": 2.5, "nothing": 0}[left] * len(lines[0])
    node = JsonlSource(path, 0, 1)
    node.reset(None)
    records = [next(node)]
    os.truncate(path, int(size))
    with pytest.raises(SampleError, match=r"data\.jsonl ends at byte .* but had \d+ bytes when"):
        for record in node:
            records.append(record)
    path.write_text("".join(lines))
    assert [record["id"] for record in [*records, *node]] == [0, 1, 2, 3, 4]


def test_a_last_line_that_is_cut_within_a_number_is_found_out(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("1\n234567")
    node = JsonlSource(path, 0, 1)
    path.write_text("1\n234")
    with pytest.raises(SampleError, match="ends at byte 5, in line 2, but had 8 bytes"):
        list(node)


@pytest.mark.parametrize("pattern", ["", "/*.jsonl"])
def test_a_link_that_leads_nowhere_is_an_error(pattern, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.jsonl").symlink_to("/nowhere/b.jsonl")
    with pytest.raises(FileNotFoundError, match="a link to a file that does not exist, .*b.jsonl"):
        JsonlSource(f"{tmp_path}{pattern}")


@pytest.mark.parametrize("paths", [b"/data", 5, [b"/data"], [5]])
def test_paths_are_strings_or_paths(paths):
    with pytest.raises(TypeError, match="`paths` must be a path, a string or"):
        JsonlSource(paths)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_is_utf_8_with_or_without_a_mark(encoding, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ä"}\n', encoding=encoding)
    assert list(Loader(JsonlSource(tmp_path))) == [{"text": "ä"}]


@pytest.mark.parametrize("line", [b'{"a": 1}\0\0\0', '{"a": 1}'.encode("utf-16")])
def test_another_encoding_is_not_guessed(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(line + b"\n")
    with pytest.raises(SampleError, match="is not valid JSON in UTF-8: (Extra|'utf-8' codec)"):
        list(Loader(JsonlSource(tmp_path)))
