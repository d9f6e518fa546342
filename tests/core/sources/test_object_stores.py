"""Sources over a real S3 server: each record once, resumed exactly, through faults and changes."""

import gzip
import io
import json
import logging
import os
import re
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs
from aligned_ranks import on_ranks
from object_store import KEYS

from odb_nodes import (
    JsonlSource,
    Loader,
    ODBDataLoader,
    ParquetDataset,
    StateError,
    TarDataset,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.sources import range_cache, record_blocks, stored_file

RECORDS = 120
THREADS = {"workers": WorkerOptions(num_workers=2, method="thread")}
PROCESSES = pytest.param({"num_workers": 2}, marks=pytest.mark.slow, id="processes")
WORKERS = pytest.mark.parametrize("options", [pytest.param({}, id="inline"), THREADS, PROCESSES])


@pytest.fixture
def store(s3, monkeypatch, tmp_path):
    """The server, with credentials in the environment, short waits, and small blocks."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": s3.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_file, "WAIT_S", 0.002)
    monkeypatch.setattr(record_blocks, "BLOCK_BYTES", 512)
    monkeypatch.setattr(record_blocks.RecordBlocks, "mixed_blocks", 2)
    s3.proxy.clear()
    return s3


def texts(first):
    return [{"id": n, "input_ids": [n % 9] * (n % 23 + 2)} for n in range(first, first + 60)]


def others():
    """Other records in files of about the same size."""
    return [{**record, "input_ids": [8 - n for n in record["input_ids"]]} for record in texts(0)]


def json_lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(records):
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records), file, row_group_size=20)
    return file.getvalue()


def tar(records):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as written:
        for record in records:
            info = tarfile.TarInfo(f"{record['id']:03}.json")
            info.size = len(content := json.dumps(record).encode())
            written.addfile(info, io.BytesIO(content))
    return file.getvalue()


def sample_of(record):
    record = json.loads(record["json"]) if "json" in record else record
    return {"input_ids": record["input_ids"], "id": record["id"]}


FORMATS = {"jsonl": json_lines, "parquet": parquet, "tar": tar}
DATASETS = {
    "jsonl": JsonlSource,
    "parquet": partial(ParquetDataset, mixed_blocks=2),
    "tar": TarDataset,
}


@pytest.fixture(params=FORMATS)
def kind(request):
    return request.param


@pytest.fixture
def urls(store, kind, tmp_path, monkeypatch):
    """Two objects of 60 records, in some blocks each."""
    monkeypatch.setattr(record_blocks, "BLOCK_BYTES", 8192 if kind == "tar" else 512)
    name = f"{tmp_path.parent.name}-{tmp_path.name}"
    contents = {f"{name}/{n}.{kind}": FORMATS[kind](texts(60 * n)) for n in range(2)}
    return [store.put(path, content) for path, content in contents.items()]


def loader_of(kind, urls, **options):
    options = {"token_budget": 120, "window": 16, "process_fn": sample_of, "seed": 3, **options}
    ranks = options.get("process_group")
    share = (ranks.rank, ranks.world_size) if ranks is not None and kind == "jsonl" else ()
    return ODBDataLoader(DATASETS[kind](urls, *share), **options)


def ids_of(batch):
    return [] if pop_step_info(batch).is_filler else batch["id"].tolist()


def forget_ranges():
    for path in (range_cache.cache_folder() / "ranges").glob("*-*"):
        path.unlink()


def steps(batches):
    return [(batch["id"].tolist(), batch["input_ids"].tolist()) for batch in batches]


# --- what is read ---------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_record_comes_once_on_all_ranks(world_size, options, kind, urls):
    def epoch(exchange):
        with loader_of(kind, urls, process_group=exchange, **options) as loader:
            return [ids_of(batch) for batch in loader]

    ids = on_ranks(world_size, epoch)
    assert sorted(index for rank in ids for step in rank for index in step) == [*range(RECORDS)]


@WORKERS
def test_a_run_resumes_exactly_at_every_step(options, kind, urls):
    with loader_of(kind, urls) as loader:
        expected = steps(loader)
    with loader_of(kind, urls, **options) as loader, loader_of(kind, urls, **options) as resumed:
        batches = iter(loader)
        for step in range(len(expected)):
            resumed.load_state_dict(loader.state_dict())
            assert steps(resumed) == expected[step:]
            next(batches)


def test_patterns_and_braces_stand_for_objects(store, kind, urls):
    folder = urls[0].rpartition("/")[0]
    for paths in (f"{folder}/*.{kind}", f"{folder}/{{0..1}}.{kind}"):
        with loader_of(kind, paths) as loader:
            assert sorted(index for ids, _ in steps(loader) for index in ids) == [*range(RECORDS)]


def test_the_records_of_a_block_are_one_request(store, kind, urls):
    dataset = DATASETS[kind](urls)
    blocks = (dataset._record_blocks if kind == "jsonl" else dataset).shuffle_blocks
    store.proxy.requests.clear()
    with ODBDataLoader(dataset, token_budget=120, process_fn=sample_of) as loader:
        assert sum(len(ids) for ids, _ in steps(loader)) == RECORDS
    assert 6 <= store.proxy.requests["GET"] == len(blocks) < 20


def test_compressed_lines_are_read_in_their_order(store):
    url = store.put("a.jsonl.gz", gzip.compress(json_lines(texts(0))))
    source = JsonlSource(url, 0, 1, shuffle=False)
    for _ in range(2):
        assert [record["id"] for record in Loader(source)] == [*range(60)]


def test_columns_that_are_not_read_cost_no_bytes(store, monkeypatch):
    monkeypatch.setenv(range_cache.LIMIT, "0")
    table = pa.table({"id": [*range(40)], "image": [os.urandom(50_000)] * 40})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=20, use_dictionary=False)
    rows = ParquetDataset(store.put("wide.parquet", file.getvalue()), ["id"])
    store.proxy.bytes_sent = 0
    assert [rows[index]["id"] for index in range(40)] == [*range(40)]
    assert 0 < store.proxy.bytes_sent < 10_000


# --- what is kept ---------------------------------------------------------------------------------


def test_the_index_is_kept_until_the_version_changes(store, kind, urls):
    size = len(DATASETS[kind](urls))
    store.proxy.requests.clear()
    assert len(DATASETS[kind](urls)) == size and store.proxy.requests["GET"] == 0
    store.put(urls[1].removeprefix("s3://bucket/"), FORMATS[kind](texts(60)[:50]))
    assert len(DATASETS[kind](urls)) == size - 10 and store.proxy.requests["GET"] > 0


def test_ranks_of_a_machine_search_and_read_an_object_once(store, kind, urls):
    def epoch(exchange):
        with loader_of(kind, urls, process_group=exchange) as loader:
            return [ids_of(batch) for batch in loader]

    on_ranks(1, epoch)
    alone = store.proxy.requests["GET"]
    for path in range_cache.cache_folder().rglob("*.*"):
        if path.is_file() and ".lock" not in path.name:
            path.unlink()
    store.proxy.requests.clear()
    on_ranks(4, epoch)
    assert store.proxy.requests["GET"] == alone


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "message"),
    [("503", "Service Unavailable|Slow Down"), ("cut", "not completed"), (1.5, "FSTimeoutError")],
)
def test_a_fault_is_tried_again_and_told(fault, message, store, kind, urls, monkeypatch, caplog):
    monkeypatch.setattr(stored_file, "TRY_S", 0.5 if fault == 1.5 else 60.0)
    loader = loader_of(kind, urls)
    store.proxy.faults = [(fault, 2)]
    with caplog.at_level(logging.WARNING, "odb_nodes"), loader:
        assert sorted(index for ids, _ in steps(loader) for index in ids) == [*range(RECORDS)]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all(re.search(message, text) for text in told)
    assert "s3://bucket/" in told[0] and "could not be read" in told[0] and "try 2 of 6" in told[0]


@pytest.mark.parametrize("options", [pytest.param({}, id="inline"), PROCESSES])
def test_a_store_that_is_down_loses_nothing(options, store, kind, urls, caplog):
    for first in range(RECORDS, 4 * RECORDS, 60):
        name = urls[0].removeprefix("s3://bucket/").replace("/0.", f"/{first}.")
        urls.append(store.put(name, FORMATS[kind](texts(first))))
    with loader_of(kind, urls) as loader:
        expected = steps(loader)
    forget_ranges()
    with loader_of(kind, urls, prefetch=0, **options) as loader:
        batches, done = iter(loader), []
        done.append(next(batches))
        store.proxy.faults, store.proxy.methods = [("503", 10**9)], {"GET", "HEAD"}
        with pytest.raises(
            Exception, match=r"s3://.* could not be read in 6 tries: .*once the sto"
        ):
            done.extend(batches)
        state = loader.state_dict()
        store.proxy.clear()
        assert steps(done) + steps(loader) == expected
    with loader_of(kind, urls, **options) as resumed:
        resumed.load_state_dict(state)
        assert steps(done) == expected[: len(done)] and steps(resumed) == expected[len(done) :]


def test_a_store_that_is_down_before_a_loader_iterates_says_to_try_again(store, kind, urls):
    store.proxy.faults, store.proxy.methods = [("503", 10**9)], {"GET", "HEAD"}
    with pytest.raises(OSError, match=r"in 6 tries: .*Try again once the store answers\."):
        DATASETS[kind](urls)
    store.proxy.clear()


def test_a_store_that_is_down_at_the_resume_is_an_error_that_loses_nothing(store, kind, urls):
    with loader_of(kind, urls) as loader:
        expected = steps(loader)
    with loader_of(kind, urls) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = loader.state_dict()
    forget_ranges()
    with loader_of(kind, urls) as resumed:
        resumed.load_state_dict(state)
        store.proxy.faults = [("503", 10**9)]
        with pytest.raises(Exception, match="could not be read in 6 tries"):
            steps(resumed)
        store.proxy.clear()
        resumed.load_state_dict(state)
        assert steps(resumed) == expected[3:]


@WORKERS
def test_an_object_that_is_replaced_is_named_with_its_versions(options, store, kind, urls):
    changed = FORMATS[kind](others())
    with loader_of(kind, urls, **options) as loader:
        next(iter(loader))
        state = loader.state_dict()
    forget_ranges()
    versions = r"ETag (\w{32}) .*ETag (?!\1)\w{32}"
    with loader_of(kind, urls, **options) as loader:
        store.put(urls[0].removeprefix("s3://bucket/"), changed)
        with pytest.raises(Exception, match=rf"{urls[0]} was replaced .*: it was {versions}"):
            steps(loader)
    with loader_of(kind, urls, **options) as resumed:
        resumed.load_state_dict(state)
        with pytest.raises(
            StateError, match=rf"version of 0\.{kind}` was 'ETag \w+' .* 'ETag \w+' now"
        ):
            iter(resumed)


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(store, kind, urls):
    changed = FORMATS[kind](others())
    dataset = DATASETS[kind](urls)
    store.proxy.at_get = partial(store.put, urls[0].removeprefix("s3://bucket/"), changed)
    with pytest.raises(OSError, match="was replaced since the dataset was made"):
        dataset.read(0) if kind == "jsonl" else dataset[0]


def no_rights(store, _):
    store.check_rights(True)


def no_credentials(_, monkeypatch):
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    s3fs.S3FileSystem.clear_instance_cache()


REFUSALS = [
    (no_rights, "{url}", PermissionError, r"the store refuses it .*Give the credentials"),
    (no_credentials, "{url}", PermissionError, r"no credentials .*`AWS_ACCESS_KEY_ID`"),
    (None, "s3://no-bucket/a", FileNotFoundError, "no-bucket/a does not exist.* Check bucket"),
    (None, "s3://bucket/none", FileNotFoundError, "bucket/none does not exist"),
    (None, "s3://bucket/none*", FileNotFoundError, r"'s3://bucket/none\*' has none"),
    (None, "s3://bucket", ValueError, r"s3://bucket is a folder. Pass 's3://bucket/\*'"),
    (None, "no-protocol://a", OSError, "Protocol not known"),
    (None, "gs://bucket/a", ImportError, "install gcsfs"),
]


@pytest.mark.parametrize(("prepare", "path", "error", "message"), REFUSALS)
@pytest.mark.parametrize("kind", ["parquet"], indirect=True)
def test_what_no_further_try_can_help_is_an_error_at_once(
    prepare, path, error, message, store, kind, urls, monkeypatch, caplog
):
    try:
        if prepare is not None:
            prepare(store, monkeypatch)
        with pytest.raises(error, match=message):
            DATASETS[kind](path.format(url=urls[0]))
    finally:
        store.check_rights(False)
        s3fs.S3FileSystem.clear_instance_cache()
    assert not caplog.records


def test_rights_that_end_in_an_epoch_are_an_error_at_once(store, kind, urls, caplog):
    with loader_of(kind, urls) as loader:
        try:
            store.check_rights(True)
            with pytest.raises(Exception, match=r"the store refuses it .*Give the credentials"):
                steps(loader)
        finally:
            store.check_rights(False)
        assert not caplog.records
        assert sorted(index for ids, _ in steps(loader) for index in ids) == [*range(RECORDS)]


# --- HTTP -----------------------------------------------------------------------------------------


class WithRanges(SimpleHTTPRequestHandler):
    """Python's server of files, which sends whole files for ranges, and one that sends ranges."""

    has_ranges = True

    def do_GET(self):
        if not (span := self.headers.get("Range")) or not self.has_ranges:
            return super().do_GET()
        with self.send_head() as file:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            file.seek(first)
            self.wfile.write(file.read(last + 1 - first))

    def send_response(self, code, message=None):
        ranged = code == 200 and self.command == "GET" and self.has_ranges
        super().send_response(206 if ranged else code, message)

    def send_header(self, name, value):
        span = self.headers.get("Range") if self.command == "GET" and self.has_ranges else None
        if name == "Content-Length" and span:
            first, last = map(int, span.removeprefix("bytes=").split("-"))
            value = f"{min(last + 1, int(value)) - first}"
        super().send_header(name, value)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_server_of_http_must_know_ranges(has_ranges, kind, tmp_path, store):
    (tmp_path / f"a.{kind}").write_bytes(FORMATS[kind](texts(0)))
    handler = type("Handler", (WithRanges,), {"has_ranges": has_ranges})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.{kind}?signature={kind}"
        try:
            if has_ranges:
                with loader_of(kind, url) as loader:
                    assert sorted(i for ids, _ in steps(loader) for i in ids) == [*range(60)]
            else:
                with pytest.raises(Exception, match="returns the whole file for a ran"):
                    steps(loader_of(kind, url))
        finally:
            server.shutdown()
