import gc
import gzip
import json
import os
from collections import Counter
from functools import partial

import numpy as np
import pytest
from damaged_states import resealed
from torchdata.nodes import Mapper

from odb_nodes import JsonlSource, Loader, ODBDataLoader, SampleError, StateError, pop_step_info
from odb_nodes.core.sources import ShardedSampler, jsonl_source, kept_index

in_order = partial(JsonlSource, shuffle=False)
ALONE = (0, 1)


@pytest.fixture
def files(tmp_path):
    """Two files of 60 records, with blank lines, long lines, and no newline at the end."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for first, path in zip((0, 40), paths, strict=True):
        records = [{"id": i, "text": "é" * (i % 7)} for i in range(first, 40 if not first else 60)]
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        path.write_text("\n\n".join(lines), encoding="utf-8")
    return paths


@pytest.fixture
def compressed(files):
    """The same records in files of gzip."""
    paths = [path.with_suffix(".jsonl.gz") for path in files]
    for plain, path in zip(files, paths, strict=True):
        path.write_bytes(gzip.compress(plain.read_bytes()))
    return paths


def token(_):
    return {"input_ids": [1]}


def ids(source):
    return [record["id"] for record in Loader(source)]


def begun(source):
    source.reset(None)
    next(source)
    return source


# What it yields.


def test_each_epoch_has_the_order_of_the_files_or_of_a_list_of_the_records(files):
    plain, loader = Loader(in_order(files, *ALONE)), Loader(JsonlSource(files, *ALONE, seed=3))
    indices = Loader(ShardedSampler(60, seed=3, rank=0, world_size=1))
    for _ in range(3):
        assert [record["id"] for record in plain] == [*range(60)]
        assert [record["id"] for record in loader] == [*indices]


def test_the_order_is_that_of_the_seeds_of_source_and_loader(files):
    def order(of_source, of_loader):
        source = JsonlSource(files, seed=of_source)
        loader = ODBDataLoader(source, token_budget=1, process_fn=token, seed=of_loader)
        return [key for batch in loader for key in pop_step_info(batch).keys]

    assert order(1, 0) == order(0, 1) != order(0, 0)


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_the_records_of_all_files(files, world_size, shuffle):
    sources = [JsonlSource(files, rank, world_size, shuffle=shuffle) for rank in range(world_size)]
    shards = [ids(source) for source in sources]
    assert sorted(sum(shards, [])) == list(range(60))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert [len(source) for source in sources] == [*map(len, shards)]
    assert sources[0].num_records == 60


def test_a_folder_and_a_pattern_stand_for_their_files(files, compressed):
    folder = files[0].parent
    (folder / "notes.txt").write_text("{")
    assert ids(in_order(folder / "*.jsonl", *ALONE)) == list(range(60))
    assert ids(in_order(str(folder / "*.gz"), *ALONE)) == list(range(60))
    assert sorted(ids(in_order(folder, *ALONE))) == sorted(2 * [*range(60)])
    assert ids(in_order([files[1], compressed[0]], *ALONE)) == [*range(40, 60), *range(40)]
    braces = f"{folder}/{{{files[1].name},{files[0].name}}}"
    assert ids(in_order(braces, *ALONE)) == [*range(40, 60), *range(40)]
    named = files[0].rename(folder / "[a].jsonl")  # a pattern, and a file
    assert ids(in_order(named, *ALONE)) == list(range(40))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_text_is_utf_8_with_or_without_a_mark(encoding, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ä"}\n', encoding=encoding)
    assert list(Loader(JsonlSource(tmp_path))) == [{"text": "ä"}]


def test_a_mark_before_a_blank_line_or_alone_is_no_record(tmp_path):
    mark, names = b"\xef\xbb\xbf", "abcd"
    contents = (mark, mark + b"\r\n" + b"1\n", b"2\n" + mark + b"\n" + mark + b"3", b"\n" + mark)
    for name, content in zip(names, contents, strict=True):
        (tmp_path / f"{name}.jsonl").write_bytes(content)
    source = in_order(tmp_path, *ALONE)
    assert [*Loader(source)] == [1, 2, 3] and source.num_records == 3
    with pytest.raises(ValueError, match="must hold a record, but .*a.jsonl is empty"):
        JsonlSource(tmp_path / "a.jsonl", *ALONE)


def test_no_more_files_are_open_than_may_be_and_none_after_close(tmp_path):
    for n in range(70):
        (tmp_path / f"{n:02}.jsonl").write_text(f'{{"id": {2 * n}}}\n{{"id": {2 * n + 1}}}')
    gc.collect()  # sources of other tests, which have open files
    source, before = JsonlSource(tmp_path, *ALONE), len(os.listdir("/proc/self/fd"))
    loader = Loader(Mapper(source, dict))
    assert Counter(record["id"] for record in loader) == Counter(range(140))
    assert len(os.listdir("/proc/self/fd")) == before + 64
    loader.close()
    assert len(os.listdir("/proc/self/fd")) == before


# State.


def test_restoring_reads_nothing_again_and_files_may_move(files, tmp_path, monkeypatch):
    source = JsonlSource(files, *ALONE)
    source.reset(None)
    for _ in range(50):
        next(source)
    (tmp_path / "elsewhere").mkdir()
    moved = [path.rename(tmp_path / "elsewhere" / path.name) for path in files]
    read, line_of = [], JsonlSource._line
    monkeypatch.setattr(
        JsonlSource, "_line", lambda self, *place: read.append(place) or line_of(self, *place)
    )
    resumed = JsonlSource(moved, *ALONE)
    resumed.reset(source.state_dict())
    assert read == []
    assert next(resumed)["id"] == [*ShardedSampler(60, rank=0, world_size=1)][50]
    assert len(read) == 1


def test_a_state_of_other_files_or_beyond_their_end_is_refused(files):
    state = begun(JsonlSource(files, *ALONE)).state_dict()
    with pytest.raises(StateError, match="after 61 indices, but .* has 60"):
        JsonlSource(files, *ALONE).reset(resealed({**state, "position": 61}))
    with pytest.raises(StateError, match="`files` was .* when saved"):
        JsonlSource(files[:1], *ALONE).reset(state)
    files[0].write_text(files[0].read_text() + "\n{}")
    with pytest.raises(StateError, match="`sizes_bytes` was .* when saved"):
        JsonlSource(files, *ALONE).reset(state)


# Lines and files that are broken, or change while they are read: named, and nothing is lost.


def read_until_error(source, message):
    seen = []
    with pytest.raises(SampleError, match=message):
        for record in source:
            seen.append(record["id"])
    return seen


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_broken_line_is_named_and_loses_nothing(files, shuffle):
    good, seen = files[1].read_text(), []
    files[1].write_text(good.replace('"id": 45', '"id" 45'))
    loader = Loader(JsonlSource(files, *ALONE, shuffle=shuffle))
    for _ in range(2):
        seen += read_until_error(loader, r"b\.jsonl, line 11, is not valid JSON.*\"id\" 45")
    files[1].write_text(good + '\n{"id": 60}')
    assert read_until_error(loader, "b.jsonl has 21 records now, but had 20") == []
    files[1].write_text(good)  # The lines after it begin elsewhere now.
    seen += [record["id"] for record in loader]
    assert sorted(seen) == list(range(60))


def test_a_broken_line_of_another_rank_is_left_to_it(files):
    files[1].write_text(files[1].read_text().replace('"id": 45', '"id" 45'))
    assert len(ids(in_order(files, 0, 2))) == 30
    with pytest.raises(SampleError, match="line 11"):
        ids(in_order(files, 1, 2))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("new", ['"id": 4141,', '"id":\n41,'], ids=repr)
def test_lines_that_have_moved_are_an_error(files, shuffle, new):
    source, good = JsonlSource(files, *ALONE, shuffle=shuffle), files[1].read_text()
    files[1].write_text(good.replace('"id": 41,', new))
    seen = read_until_error(source, r"b\.jsonl (is another|ends at byte \d+), in line \d+")
    files[1].write_text(good)
    assert sorted([*seen, *(record["id"] for record in source)]) == [*range(60)]


@pytest.mark.parametrize(
    "line",
    [b'{"id": "\xe9"}', b"\0\0", b"[" * 100_000, '{"id": 1}'.encode("utf-16"), b'{"a": 1}\0\0\0'],
    ids=["latin-1", "zeros", "deep", "utf-16", "padded"],
)
def test_what_is_no_json_in_utf_8_is_named_and_no_encoding_is_guessed(line, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 0}\n' + line + b"\n")
    with pytest.raises(SampleError, match=r"a\.jsonl, line 2, is not valid JSON in UTF-8"):
        ids(in_order(tmp_path / "a.jsonl", *ALONE))


@pytest.mark.parametrize("lines_left", [2, 2.5, 0])
def test_a_file_that_is_cut_while_it_is_read_does_not_end_the_epoch(tmp_path, lines_left):
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"id": n, "pad": "x" * 30_000}) + "\n" for n in range(5)]
    path.write_text("".join(lines))
    node = begun(in_order(path, *ALONE))
    os.truncate(path, int(lines_left * len(lines[0])))
    seen = read_until_error(node, r"data\.jsonl ends at byte .* but had \d+ bytes")
    path.write_text("".join(lines))
    assert [0, *seen, *(record["id"] for record in node)] == [0, 1, 2, 3, 4]


def test_a_last_line_that_is_cut_within_a_number_is_found_out(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("1\n234567")
    node = JsonlSource(path, *ALONE)
    path.write_text("1\n234")
    with pytest.raises(SampleError, match="ends at byte 5, in line 2, but had 8"):
        list(node)


def test_a_compressed_file_that_is_cut_is_an_error_at_its_place(compressed):
    whole, loader = compressed[0].read_bytes(), Loader(in_order(compressed, *ALONE))
    compressed[0].write_bytes(whole[:-40])
    seen = read_until_error(loader, r"a.jsonl.gz, line \d+, cannot be decompressed")
    compressed[0].write_bytes(whole)
    assert [*seen, *(record["id"] for record in loader)] == [*range(60)]


# What it refuses.

REFUSALS = [
    (lambda _: JsonlSource([]), ValueError, "`paths` must name at least 1"),
    (lambda _: JsonlSource(["/nowhere/x.jsonl"]), FileNotFoundError, "x.jsonl"),
    (lambda _: JsonlSource("/dev/null"), ValueError, "regular files, but /dev/null"),
    (lambda _: JsonlSource("/dev"), FileNotFoundError, "'/dev' has none"),
    (lambda _: JsonlSource("/dev/*.jsonl"), FileNotFoundError, r"'/dev/\*.jsonl' has none"),
    *(
        (lambda _, p=p: JsonlSource(p), TypeError, "`paths`")
        for p in (b"/x", 5, [b"/x"], [5], None)
    ),
    (lambda to: JsonlSource([to / "a.jsonl", to / "*.jsonl"]), ValueError, "each file once.*a.js"),
    (lambda to: JsonlSource(to / "*.gz"), ValueError, r"`shuffle` .* False .*a\.jsonl\.gz"),
    (lambda to: JsonlSource(to / "a.jsonl", shuffle=None), TypeError, "`shuffle` .* None"),
    (
        lambda to: ODBDataLoader(in_order(to / "a.jsonl"), token_budget=8, shuffle=True),
        ValueError,
        "`shuffle` must not be True .* `shuffle=False`",
    ),
    (lambda to: in_order(to / "cut.gz"), ValueError, "cut.gz cannot be decompressed"),
    (lambda to: JsonlSource(f"{to}/{{a,{{b,c}}}}.jsonl"), ValueError, r"braces .*\{a,\{b,c\}\}"),
    (lambda to: JsonlSource(f"{to}/{{5..1}}.jsonl"), ValueError, r"braces .*\{5\.\.1\}"),
    (lambda to: JsonlSource(f"{to}/{{a,a}}.jsonl"), ValueError, r"braces .*\{a,a\}"),
    (lambda to: JsonlSource(f"{to}/{{08..10}}.jsonl"), FileNotFoundError, "/08.jsonl"),
    (lambda to: JsonlSource(to / "dead"), FileNotFoundError, "link .* not exist, .*b.jsonl"),
    (lambda to: JsonlSource(to / "dead/*"), FileNotFoundError, "link .* not exist, .*b.jsonl"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_cannot_be_read_is_refused_by_name(call, error, message, compressed):
    folder = compressed[0].parent
    (folder / "cut.gz").write_bytes(compressed[1].read_bytes()[:-40])
    (folder / "dead").mkdir()
    (folder / "dead" / "b.jsonl").symlink_to("/nowhere/b.jsonl")
    with pytest.raises(error, match=message):
        call(folder)


# The index that is kept of a large file.


@pytest.fixture
def kept(files, tmp_path, monkeypatch):
    """Where the index of the first file is kept, beside it and else; all files count as large."""
    monkeypatch.setattr(kept_index, "KEPT_FROM_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return files[0].with_name(".a.jsonl.lines1"), tmp_path / "cache" / "odb_nodes"


def without_reading(monkeypatch):
    monkeypatch.setattr(jsonl_source, "_index_lines", lambda path: pytest.fail(f"{path} was read"))


@pytest.mark.parametrize("is_writable", [True, False])
def test_an_index_is_kept_and_used_again(is_writable, files, kept, compressed, monkeypatch):
    beside, cache = kept
    if not is_writable:
        beside.mkdir()  # which no file can take the place of
    expected = [ids(in_order(paths, *ALONE)) for paths in (files, compressed)]
    assert beside.is_file() == is_writable and cache.exists() != is_writable
    without_reading(monkeypatch)
    assert [ids(in_order(paths, *ALONE)) for paths in (files, compressed)] == expected
    assert in_order(files[0], *ALONE)._index[0].line(1) == 3  # A blank line is between them.


@pytest.mark.parametrize("cut", [0, 8, 200, -8, -1])
def test_an_index_that_is_damaged_is_made_again(cut, files, kept, monkeypatch):
    expected = ids(in_order(files, *ALONE))
    whole = kept[0].read_bytes()
    kept[0].write_bytes(whole[:cut])
    assert ids(in_order(files, *ALONE)) == expected and kept[0].read_bytes() == whole
    middle = len(whole) // 2
    kept[0].write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert ids(in_order(files, *ALONE)) == expected
    without_reading(monkeypatch)
    assert ids(in_order(files, *ALONE)) == expected


@pytest.mark.parametrize("change", [{"blanks": None}, {"more": [1]}, {"starts": [0.5]}], ids=repr)
def test_an_index_of_other_arrays_is_made_again(change, files, kept):
    expected = ids(in_order(files, *ALONE))
    with np.load(kept[0]) as index:
        arrays = {name: array for name, array in {**index, **change}.items() if array is not None}
    with kept[0].open("wb") as file:
        np.savez(file, **arrays)
    assert ids(in_order(files, *ALONE)) == expected


def test_an_index_is_not_used_for_a_file_that_has_changed(files, kept):
    path = files[0]
    in_order(path, *ALONE)
    before = path.stat()
    path.write_text('{"id": 1}\n' + '{"id": 2}\n' * 9 + " " * (before.st_size - 100))
    assert path.stat().st_size == before.st_size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert ids(in_order(path, *ALONE)) == [1, *[2] * 9]
