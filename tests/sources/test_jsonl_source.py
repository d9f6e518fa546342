import gzip
import json
import os
from collections import Counter
from functools import partial

import pytest
from torchdata.nodes import Mapper

from odb_nodes import JsonlSource, Loader, ODBDataLoader, SampleError, StateError, pop_step_info
from odb_nodes.sources import ShardedSampler
from odb_nodes.testing import assert_resumes_exactly

in_order = partial(JsonlSource, shuffle=False)


@pytest.fixture
def files(tmp_path):
    """Two files of 60 records, with blank lines, long lines, and no newline at the end."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for first, path in zip((0, 40), paths, strict=True):
        records = [{"id": i, "text": "é" * (i % 7)} for i in range(first, 40 if not first else 60)]
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        path.write_text("\n\n".join(lines), encoding="utf-8")
    return paths


def token(_):
    return {"input_ids": [1]}


def ids(source):
    return [record["id"] for record in Loader(source)]


def test_without_shuffling_all_records_in_order_in_every_epoch(files):
    loader = Loader(in_order(files, 0, 1))
    for _ in range(3):
        assert [record["id"] for record in loader] == list(range(60))


def test_each_epoch_has_the_order_of_a_list_of_the_records(files):
    loader, indices = Loader(JsonlSource(files, 0, 1, seed=3)), Loader(ShardedSampler(60, seed=3))
    for _ in range(3):
        assert [record["id"] for record in loader] == [*indices]


@pytest.mark.parametrize("name", ["", "a"])
@pytest.mark.parametrize("shuffle", [None, False, True])
def test_a_loader_shuffles_files_as_it_does_a_list(name, shuffle, tmp_path):
    path = tmp_path / "data.jsonl"
    data = [{"input_ids": [n] * (n % 9 + 1)} for n in range(80)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in data))
    options = {"token_budget": 64, "window": 256, "seed": 5, "shuffle": shuffle}
    of_files, of_list = (
        ODBDataLoader({name: one} if name else one, **options) for one in (JsonlSource(path), data)
    )
    for _ in range(2):
        for batch, expected in zip(of_files, of_list, strict=True):
            assert batch["input_ids"].tolist() == expected["input_ids"].tolist()


def test_the_order_is_that_of_the_seeds_of_source_and_loader(files):
    def order(of_source, of_loader):
        source = JsonlSource(files, seed=of_source)
        loader = ODBDataLoader(source, token_budget=1, process_fn=token, seed=of_loader)
        return [key for batch in loader for key in pop_step_info(batch).keys]

    assert order(1, 0) == order(0, 1) != order(0, 0)


def test_shuffling_is_refused_where_it_is_contradicted_or_cannot_be(files, compressed):
    with pytest.raises(ValueError, match=r"`shuffle` must not be True .* `shuffle=False`\. Leave"):
        ODBDataLoader(in_order(files), token_budget=8, shuffle=True)
    with pytest.raises(ValueError, match=r"`shuffle` must be False for comp.*a\.jsonl\.gz is one"):
        JsonlSource([*files, *compressed])
    with pytest.raises(TypeError, match="`shuffle` must be True or False, but is None"):
        JsonlSource(files, shuffle=None)


@pytest.mark.parametrize("world_size", [2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_the_records_of_all_files(files, world_size, shuffle):
    shards = [
        ids(JsonlSource(files, rank, world_size, shuffle=shuffle)) for rank in range(world_size)
    ]
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
    assert ids(in_order(folder / "*.jsonl", 0, 1)) == list(range(60))
    assert ids(in_order(str(folder / "*.gz"), 0, 1)) == list(range(60))
    assert sorted(ids(in_order(folder, 0, 1))) == sorted(2 * [*range(60)])
    assert ids(in_order([files[1], compressed[0]], 0, 1)) == [*range(40, 60), *range(40)]


def test_files_that_are_no_files_or_come_twice_are_refused(files, compressed):
    folder = files[0].parent
    os.mkfifo(folder / "c.jsonl")
    assert ids(in_order(folder / "*.jsonl", 0, 1)) == list(range(60))
    with pytest.raises(ValueError, match="must be regular files, but .*c.jsonl is none"):
        JsonlSource(folder / "c.jsonl")
    with pytest.raises(ValueError, match="each file once, but a folder or pattern has .*a.jsonl"):
        JsonlSource([files[0], folder / "*.jsonl"])
    assert len(ids(JsonlSource([files[0], files[0]], 0, 1))) == 80  # as it was asked for
    with pytest.raises(TypeError, match="must be a path, .*, or a list of them, but is None"):
        JsonlSource(None)
    compressed[0].write_bytes(compressed[0].read_bytes()[:-40])
    with pytest.raises(ValueError, match="a.jsonl.gz cannot be decompressed"):
        in_order(compressed)


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path):
    path = tmp_path / "[a].jsonl"
    path.write_text('{"id": 7}')
    assert ids(JsonlSource(path, 0, 1)) == [7]


@pytest.mark.parametrize("shard", [(0, 1), (1, 3)])
def test_every_step_of_compressed_files_resumes(compressed, shard, sampled):
    less = sampled(horizon=12, every=3)
    assert_resumes_exactly(lambda: Loader(in_order(compressed, *shard)), epochs=2, **less)


def test_a_compressed_file_that_is_cut_is_an_error_at_its_place(compressed):
    whole = compressed[0].read_bytes()
    loader, seen = Loader(in_order(compressed, 0, 1)), []
    compressed[0].write_bytes(whole[:-40])
    with pytest.raises(SampleError, match=r"a.jsonl.gz, line \d+, cannot be decompressed"):
        seen.extend(record["id"] for record in loader)
    compressed[0].write_bytes(whole)
    assert [*seen, *(record["id"] for record in loader)] == [*range(60)]


def test_a_state_beyond_the_end_is_refused(files):
    source = JsonlSource(files, 0, 1)
    source.reset(None)
    next(source)
    state = {**source.state_dict(), "position": 61}
    with pytest.raises(StateError, match="after 61 indices, but an epoch of this rank has 60"):
        source.reset(state)


@pytest.mark.parametrize("shard", [(0, 1), (1, 7)])
def test_the_number_of_records_is_known(files, shard):
    source = JsonlSource(files, *shard)
    assert (source.num_records, len(source)) == (60, len(ids(source)))
    loader = ODBDataLoader(JsonlSource(files), token_budget=64, process_fn=token)
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
    expected = next(source)
    line_of = JsonlSource._line
    monkeypatch.setattr(
        JsonlSource, "_line", lambda self, *place: read.append(place) or line_of(self, *place)
    )
    resumed = JsonlSource(files, rank=0, world_size=1)
    resumed.reset(state)
    assert read == []
    assert (next(resumed), len(read)) == (expected, 1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_broken_line_is_named_and_loses_nothing(files, shuffle):
    good = files[1].read_text()
    files[1].write_text(good.replace('"id": 45', '"id" 45'))
    loader, seen = Loader(JsonlSource(files, 0, 1, shuffle=shuffle)), []
    for _ in range(2):
        with pytest.raises(
            SampleError, match=r"b\.jsonl, line 11, is not valid JSON in UTF-8.*\"id\" 45"
        ):
            for record in loader:
                seen.append(record["id"])
    files[1].write_text(good + '\n{"id": 60}')
    with pytest.raises(SampleError, match="b.jsonl has 21 records now, but had 20"):
        next(iter(loader))
    files[1].write_text(good)  # The lines after it begin elsewhere now.
    seen += [record["id"] for record in loader]
    assert sorted(seen) == list(range(60))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("old", "new"), [('"id": 41,', '"id": 4141,'), ('"id": 41,', '"id":\n41,')], ids=str
)
def test_lines_that_have_moved_are_an_error(files, shuffle, old, new):
    source, seen = JsonlSource(files, 0, 1, shuffle=shuffle), []
    good = files[1].read_text()
    files[1].write_text(good.replace(old, new))
    with pytest.raises(SampleError, match=r"b\.jsonl (is another|ends at byte \d+), in line \d+"):
        for record in source:
            seen.append(record["id"])
    files[1].write_text(good)
    seen += [record["id"] for record in source]
    assert sorted(seen) == [*range(60)]


def test_more_files_than_may_be_open(tmp_path):
    for n in range(70):
        (tmp_path / f"{n:02}.jsonl").write_text(f'{{"id": {2 * n}}}\n{{"id": {2 * n + 1}}}')
    source = JsonlSource(tmp_path, 0, 1)
    assert Counter(record["id"] for record in source) == Counter(range(140))
    assert len(source._open) == 64
    source.close()


@pytest.mark.parametrize(
    "line", [b'{"id": "\xe9"}', b"\x00\x00", b"[" * 100_000, '{"id": 1}'.encode("utf-16")]
)
def test_what_is_no_json_in_utf_8_is_named(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 0}\n' + line + b"\n")
    with pytest.raises(SampleError, match=r"a\.jsonl, line 2, is not valid JSON in UTF-8"):
        ids(in_order(tmp_path / "a.jsonl", 0, 1))


def test_a_broken_line_of_another_rank_is_left_to_it(files):
    files[1].write_text(files[1].read_text().replace('"id": 45', '"id" 45'))
    assert len(ids(in_order(files, 0, 2))) == 30
    with pytest.raises(SampleError, match="line 11"):
        ids(in_order(files, 1, 2))


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
    expected = [*ShardedSampler(60, rank=0, world_size=1)]
    assert next(resumed)["id"] == expected[1]


def test_no_file_is_left_open(files):
    source = JsonlSource(files[0], rank=0, world_size=1)
    loader = Loader(Mapper(source, dict))
    next(iter(loader))
    assert source._open
    loader.close()
    assert not source._open


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
    node = in_order(path, 0, 1)
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
