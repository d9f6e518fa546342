"""What a path, a folder, a pattern or a list stands for, alike for all sources of files."""

import io
import json
import os
import re
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from odb_nodes import JsonlSource, ParquetDataset, TarDataset
from odb_nodes.core.sources.data_files import JSON_LINES, PARQUET, TAR, listed


def write_lines(path):
    path.write_text(json.dumps({"id": 1}) + "\n")


def write_rows(path):
    pq.write_table(pa.table({"id": [1]}), path)


def write_tar(path):
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("1.txt")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))


WRITERS = {JsonlSource: write_lines, ParquetDataset: write_rows, TarDataset: write_tar}
KINDS = {JsonlSource: JSON_LINES, ParquetDataset: PARQUET, TarDataset: TAR}
ENDS = {JsonlSource: ".jsonl", ParquetDataset: ".parquet", TarDataset: ".tar"}
pytestmark = pytest.mark.timeout(60)


def size_of(source):
    return source.num_records if isinstance(source, JsonlSource) else len(source)


@pytest.fixture(params=WRITERS, ids=lambda source: source.__name__)
def kind(request):
    """A source, the end of its files, and what writes one of a single record."""
    return request.param, ENDS[request.param], WRITERS[request.param]


def test_braces_count_with_zeros_and_combine():
    names = listed(["x{08..10}.a", "y/{p,q}/{1..2}", "plain"])
    assert names == ["x08.a", "x09.a", "x10.a", "y/p/1", "y/p/2", "y/q/1", "y/q/2", "plain"]


def test_a_folder_stands_for_its_files_whatever_the_case_of_their_ends_but_hidden_ones(
    kind, tmp_path
):
    source, end, write = kind
    for name in (f"a{end}", f"b{end.upper()}"):
        write(tmp_path / name)
    for name in (f"._a{end}", "_SUCCESS", "_metadata", "README.md", f"a{end}.crc"):
        (tmp_path / name).write_text("no data")
    for folder in (".hidden", "_temporary", "empty"):
        (tmp_path / folder).mkdir()
    write(tmp_path / "_temporary" / f"part{end}")
    assert size_of(source(tmp_path)) == 2


@pytest.mark.parametrize(
    "further", ["sub/b{}", "sub/deep/b{}", "linked/b{}", "b{}.zst", "sub/b{}.bz2", "c{}/b{}"]
)
def test_data_that_a_folder_would_leave_out_are_named(further, kind, tmp_path):
    source, end, write = kind
    folder, path = tmp_path / "data", tmp_path / "data" / further.replace("{}", end)
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    write(folder / f"a{end}")
    assert size_of(source(folder)) == 1
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path)
    for paths in (folder, f"{folder}/*")[: 1 if path.parent == folder else 2]:
        with pytest.raises(ValueError, match=rf"leave out 1 file of data: .*{path.name}. .*/\*\*'"):
            source(paths)
    assert size_of(source([f"{folder}/a*{end}", path] if path.suffix == end else f"{folder}/a*"))
    if path.suffix == end:
        assert size_of(source(f"{folder}/**/[ab]{end}")) == 2


def test_the_form_that_an_error_advises_reads_all_that_was_left_out(kind, tmp_path):
    source, end, write = kind
    folder, ends = tmp_path / "data[1]", KINDS[source].ends[:2]
    names = [f"a{ends[0]}", f"b{ends[-1]}", f"sub/c{ends[-1]}", f"sub/deep/D{ends[0].upper()}"]
    for name in (*names, f".hidden/e{end}", f"_temporary/f{end}"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name)
    (folder / "sub" / "README.md").write_text("no data")
    with pytest.raises(ValueError, match="leave out 2 files of data") as raised:
        source(folder)
    (advised,) = re.findall(r"Pass '(.*?)'", str(raised.value))
    assert size_of(source(advised)) == len(names)
    (folder / f"sub/g{end}.zst").touch()
    with pytest.raises(ValueError, match=r"leave out 1 file .*decompress"):
        source(advised)


def test_a_link_to_the_folder_itself_is_not_followed(kind, tmp_path):
    source, end, write = kind
    write(tmp_path / f"a{end}")
    (tmp_path / "loop").symlink_to(tmp_path)
    for paths in (tmp_path, f"{tmp_path}/*"):
        assert size_of(source(paths)) == 1


def test_two_stars_stand_for_the_present_folder_with_its_subfolders(kind, tmp_path, monkeypatch):
    source, end, write = kind
    (tmp_path / "sub").mkdir()
    for name in (f"a{end}", f"sub/b{end}"):
        write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert size_of(source("**")) == size_of(source("./**")) == 2


def test_compressed_tar_files_of_any_name_are_not_left_out(tmp_path):
    write_tar(tmp_path / "a.tar")
    (tmp_path / "b.tgz").touch()
    (tmp_path / "c.tar.gz").touch()
    with pytest.raises(ValueError, match=r"2 files of data: .*b.tgz, .*c.tar.gz. .*decompress"):
        TarDataset(tmp_path)


def test_json_files_beside_json_lines_are_told_of(tmp_path):
    write_lines(tmp_path / "a.ndjson")
    write_lines(tmp_path / "b.json")
    with pytest.warns(UserWarning, match="without 1 file: b.json. Where they are meant, name them"):
        assert JsonlSource(tmp_path).num_records == 1
    assert JsonlSource(f"{tmp_path}/*json").num_records == 2


@pytest.mark.parametrize("spelling", ["same", "relative", "link", "hard link", "pattern", "folder"])
def test_a_file_given_twice_is_refused_however_it_is_spelled(spelling, kind, tmp_path, monkeypatch):
    source, end, write = kind
    path, link = tmp_path / f"a{end}", tmp_path / f"link{end}.b"
    write(path)
    link.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    if spelling == "hard link":
        os.link(path, tmp_path / f"other{end}")
        with pytest.raises(ValueError, match=rf"comes 2 times, as .*a{end}, .*other{end}: "):
            source(tmp_path)
        return
    spellings = {"same": path, "relative": path.name, "link": link, "pattern": f"*{end}"}
    with pytest.raises(ValueError, match=rf"each file once, but .*a{end} comes 2 times.*`weights`"):
        source([path, spellings.get(spelling, tmp_path)])


def test_what_is_no_regular_file_is_refused_and_nothing_waits_for_it(kind, tmp_path):
    source, end, write = kind
    write(tmp_path / f"a{end}")
    os.mkfifo(tmp_path / f"b{end}")
    for paths in (tmp_path / f"b{end}", tmp_path, f"{tmp_path}/*{end}"):
        with pytest.raises(
            ValueError, match=rf"regular files, but .*b{end} is a folder, pipe or device"
        ):
            source(paths)


@pytest.mark.parametrize("name", ["[D_DATA]", "run{1,2}", "a[0-9]", "{a}", "x*y", "q?"])
def test_folders_may_have_the_signs_of_patterns_in_their_names(name, kind, tmp_path):
    source, end, write = kind
    (tmp_path / name / "sub").mkdir(parents=True)
    for file in "ab":
        write(tmp_path / name / "sub" / f"{file}{end}")
    for pattern in (f"*{end}", f"{{a,b}}{end}", f"[ab]{end}", "", f"../*/*{end}"):
        assert size_of(source(f"{tmp_path}/{name}/sub/{pattern}")) == 2


# --- folders named `key=value` --------------------------------------------------------------------


@pytest.fixture
def partitioned(tmp_path):
    """Files of one name in folders that say the language and the year of their rows."""
    for lang, year in (("en", "2024"), ("d%20e", "2025"), ("__HIVE_DEFAULT_PARTITION__", "26")):
        folder = tmp_path / "data" / f"lang={lang}" / f"year={year}"
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"id": [1, 2], "kind": ["a", "b"]}), folder / "0.parquet")
    return tmp_path / "data"


def test_partitions_are_read_and_are_columns(partitioned):
    for paths in (partitioned, f"{partitioned}/*/*/0.parquet", f"{partitioned}/**/*.parquet"):
        rows = ParquetDataset(paths)
        values = [(rows[index]["lang"], rows[index]["year"]) for index in (0, 2, 4)]
        assert values == [(None, "26"), ("d e", "2025"), ("en", "2024")] and len(rows) == 6
        assert rows[5] == {"id": 2, "kind": "b", "lang": "en", "year": "2024"}
    assert ParquetDataset(partitioned, ["lang", "id"])[5] == {"id": 2, "lang": "en"}
    assert ParquetDataset(partitioned, ["year"])[5] == {"year": "2024"}
    assert ParquetDataset(partitioned / "lang=en")[0]["lang"] == "en"


def test_a_state_does_not_fit_partitions_of_other_values(partitioned):
    before = ParquetDataset(partitioned).data_id
    assert ParquetDataset(partitioned).data_id == before
    (partitioned / "lang=en").rename(partitioned / "lang=fr")
    assert ParquetDataset(partitioned).data_id != before


def test_a_column_of_a_file_comes_before_that_of_its_folder(tmp_path):
    (tmp_path / "kind=b").mkdir()
    pq.write_table(pa.table({"kind": ["a"]}), tmp_path / "kind=b" / "0.parquet")
    assert ParquetDataset(tmp_path)[0] == {"kind": "a"}


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_a_column_that_only_some_files_have_is_left_out_by_name_alone(names, tmp_path):
    pq.write_table(pa.table({"id": [1]}), tmp_path / f"{names[0]}.parquet")
    pq.write_table(pa.table({"id": [1], "more": [2]}), tmp_path / f"{names[1]}.parquet")
    with pytest.raises(ValueError, match=r"'more'.* `columns` that all files have"):
        ParquetDataset(tmp_path)
    assert ParquetDataset(tmp_path, ["id"])[0] == {"id": 1}


def test_a_file_beside_partitions_lacks_their_columns(partitioned):
    pq.write_table(pa.table({"id": [1], "kind": ["a"]}), partitioned / "top.parquet")
    with pytest.raises(ValueError, match="top.parquet has no column 'lang'"):
        ParquetDataset(partitioned)
    assert len(ParquetDataset(partitioned, ["id"])) == 7
