r"""How fast samples come from an object store: an S3 server on loopback that this script starts.

    pip install -c constraints.txt -e '.[dev]'  # has `moto[server]` and `s3fs`
    python examples/benchmarks/benchmark_store.py --samples 100000
    python examples/benchmarks/benchmark_store.py --ranks 1 2 4 --only "odb_nodes, Parquet"

"index": making the dataset where nothing is kept. "first batch": making dataset and loader with a
kept index and no kept data, until the first batch. "resume": the same with a state of mid-epoch.
"samples / s": of an epoch, whose data are fetched from the store, from the start of its workers
to their end; CPU time is that of all ranks and workers, without the server. "memory": of all its
processes, shared pages divided among them (PSS), after a tenth of the epoch, half, and nine tenths.
Each is measured in a new process, after its imports. Of `odb_nodes`, each sample is checked to come
once over all ranks.

The server is written in Python: it bounds the rates, which compare only to each other. Rivals that
are not installed are named in a line that begins with "skipped", see `compare.py`.
"""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from benchmark_loader import cpu_s
from comparing.common import Row, Table, attempts, in_ranks, isolated, rival
from odb_nodes import ODBDataLoader, PaddingCollate, ParquetDataset, TarDataset, pop_step_info

BUCKET = "bucket"
BUDGET_TOKENS = 32_768
BATCH_SAMPLES = 100
SHARD_SAMPLES = 25_000
ROW_GROUP_SAMPLES = 5_000
MEASURED = (0.1, 0.5, 0.9)  # parts of an epoch after which memory is measured
STATE_AFTER = 2  # of them, a state is taken
START_S = 120.0
TIMEOUT_S = 3600.0

Batches = Iterator[dict[str, Any]]
collate = PaddingCollate()


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Start a server in a process of its own, and point the environment to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",  # of Streaming
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + START_S
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"the server did not start within {START_S:.0f} s")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/{BUCKET}"
        finally:
            process.kill()


class Texts:
    """Texts of 20 to some 1,000 bytes, made again from their numbers."""

    def __init__(self, samples: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = np.clip(rng.lognormal(5.5, 0.6, samples), 20, 1000).astype(int).tolist()
        self._letters = bytes(rng.integers(97, 123, 1 << 16, np.uint8))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> bytes:
        begin = number * 37 % ((1 << 16) - 1000)
        return self._letters[begin : begin + self.lengths[number]]


def upload(name: str, content: bytes) -> None:
    """Write an object."""
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    client.put_object(Bucket=BUCKET, Key=name, Body=content, ACL="public-read")  # for `curl`


def write_parquet(texts: Texts) -> None:
    """Write Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for shard, begin in enumerate(range(0, len(texts), SHARD_SAMPLES)):
        ids = range(begin, min(begin + SHARD_SAMPLES, len(texts)))
        table = pa.table({"id": [*ids], "text": [texts[number] for number in ids]})
        file = io.BytesIO()
        pq.write_table(table, file, row_group_size=ROW_GROUP_SAMPLES)
        upload(f"{shard:04}.parquet", file.getvalue())


def write_tar(texts: Texts) -> None:
    """Write tar files."""
    for shard, begin in enumerate(range(0, len(texts), SHARD_SAMPLES)):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for number in range(begin, min(begin + SHARD_SAMPLES, len(texts))):
                member = tarfile.TarInfo(f"{number:08}.txt")
                member.size = len(texts[number])
                tar.addfile(member, io.BytesIO(texts[number]))
        upload(f"{shard:04}.tar", file.getvalue())


def sample_of(text: bytes, number: int) -> dict[str, Any]:
    """Return the sample of a text."""
    ids = np.frombuffer(text, np.uint8).astype(np.int64)
    return {"input_ids": ids, "labels": ids, "id": number}


def sample_of_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the sample of a row of Parquet, or of Streaming or LitData."""
    return sample_of(row["text"], row["id"])


def sample_of_members(members: dict[str, Any]) -> dict[str, Any]:
    """Return the sample of a tar file."""
    return sample_of(members["txt"], int(members["__key__"]))


# --- what is compared -----------------------------------------------------------------------------


def make_loader(kind: str, workers: int) -> ODBDataLoader:
    """Return a loader over all files of a kind."""
    make, process = {
        "parquet": (ParquetDataset, sample_of_row),
        "tar": (TarDataset, sample_of_members),
    }[kind]
    return ODBDataLoader(
        make(f"s3://{BUCKET}/*.{kind}"),
        token_budget=BUDGET_TOKENS,
        process_fn=process,
        num_workers=workers,
    )


def webdataset(url: str, shards: int, workers: int) -> Batches:
    """Run WebDataset on the tar files, which `curl` reads."""
    package = rival("webdataset")
    files = [f"pipe:curl -s -f {url}/{shard:04}.tar" for shard in range(shards)]
    stream = (
        package.WebDataset(files, shardshuffle=len(files), empty_check=False)
        .shuffle(1000)
        .map(sample_of_members)
        .batched(BATCH_SAMPLES, collation_fn=collate)
    )
    yield from package.WebLoader(stream, batch_size=None, num_workers=workers)


def unchanged(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row."""
    return row


def write_litdata(texts: Texts, folder: Path) -> None:
    """Write the chunks of LitData."""
    rows = [{"text": texts[number], "id": number} for number in range(len(texts))]
    rival("litdata").optimize(
        unchanged, rows, str(folder), chunk_bytes="4MB", num_workers=1, start_method="fork"
    )


def litdata(folder: Path, workers: int) -> Batches:
    """Run LitData."""
    package = rival("litdata")
    rival("litdata.streaming.downloader")._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
    dataset = package.StreamingDataset(
        f"s3://{BUCKET}/litdata",
        cache_dir=str(folder / "litdata-cache"),
        shuffle=True,
        transform=sample_of_row,
        storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
    )
    yield from package.StreamingDataLoader(
        dataset, batch_size=BATCH_SAMPLES, num_workers=workers, collate_fn=collate
    )


def write_streaming(texts: Texts, folder: Path) -> None:
    """Write the shards of Streaming."""
    package = rival("streaming")
    columns = {"text": "bytes", "id": "int"}
    with package.MDSWriter(out=str(folder), columns=columns, size_limit="4mb") as writer:
        for number in range(len(texts)):
            writer.write({"text": texts[number], "id": number})


def streaming(folder: Path, workers: int) -> Batches:
    """Run MosaicML Streaming."""
    package = rival("streaming")
    package.base.util.clean_stale_shared_memory()

    class Shards(package.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, number: int) -> dict[str, Any]:
            return sample_of_row(super().__getitem__(number))

    dataset = Shards(
        remote=f"s3://{BUCKET}/streaming",
        local=str(folder / "streaming-cache"),
        shuffle=True,
        batch_size=BATCH_SAMPLES,
    )
    yield from package.StreamingDataLoader(
        dataset, batch_size=BATCH_SAMPLES, num_workers=workers, collate_fn=collate
    )


# --- measurements, each in a process of its own ---------------------------------------------------


def memory_mib() -> float:
    """Return the memory of this process and its children."""
    process = psutil.Process()
    processes = [process, *process.children(recursive=True)]
    return float(sum(part.memory_full_info().pss for part in processes)) / 2**20


def index_s(kind: str) -> float:
    """Return how long the dataset takes."""
    began_s = time.perf_counter()
    make_loader(kind, 0)
    return time.perf_counter() - began_s


def first_batch_s(kind: str, workers: int, state: Path | None) -> float:
    """Return how long the first batch takes, without and with a state."""
    began_s = time.perf_counter()
    with make_loader(kind, workers) as loader:
        if state is not None:
            loader.load_state_dict(pickle.loads(state.read_bytes()))
        next(iter(loader))
        return time.perf_counter() - began_s


def epoch(
    kind: str, samples: int, workers: int, state: Path, rank: int, ranks: int
) -> tuple[float, float, list[float]]:
    """Return seconds of an epoch, its CPU seconds, and its memory; check its samples."""
    came = torch.zeros(samples, dtype=torch.int32)
    memory: list[float] = []
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    with make_loader(kind, workers) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            if not info.is_filler:
                came[batch["id"]] += 1
            done = int(came.sum()) * ranks / samples
            if is_due(memory, done) and len(memory) == STATE_AFTER:
                state.with_suffix(f".{rank}").write_bytes(pickle.dumps(loader.state_dict()))
    passed_s = time.perf_counter() - began_s
    used_s = torch.tensor(cpu_s() - began_cpu_s)
    if ranks > 1:
        torch.distributed.all_reduce(came)
        torch.distributed.all_reduce(used_s)
    if not bool((came == 1).all()):
        raise RuntimeError(f"{int((came != 1).sum())} samples did not come once")
    return passed_s, float(used_s), memory


def rival_epoch(batches: Callable[[], Batches], samples: int) -> Row:
    """Return the row of a rival."""
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    seen, first_s, memory = 0, 0.0, list[float]()
    for batch in batches():
        first_s = first_s or time.perf_counter() - began_s
        seen += len(batch["id"])
        is_due(memory, seen / samples)
    passed_s = time.perf_counter() - began_s
    used_s = cpu_s() - began_cpu_s
    return row_of(seen, first_s, passed_s, used_s, memory) | {"samples": f"{seen:,}"}


def is_due(memory: list[float], done: float) -> bool:
    """Measure the memory where a part of the epoch is done, and tell whether it was."""
    if len(memory) == len(MEASURED) or done < MEASURED[len(memory)]:
        return False
    memory.append(memory_mib())
    return True


def row_of(
    samples: int, first_s: float, passed_s: float, used_s: float, memory: list[float]
) -> Row:
    """Return what all rows have."""
    return {
        "first batch, s": f"{first_s:.2f}",
        "samples / s": f"{samples / passed_s:,.0f}",
        "CPU us a sample": f"{used_s / samples * 1e6:,.0f}",
        "memory, MiB": ", ".join(f"{mib:.0f}" for mib in memory),
    }


def forget(what: str) -> None:
    """Delete what is kept: all ("."), or the data alone ("ranges")."""
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"], "odb_nodes", what), ignore_errors=True)


def measured(kind: str, options: argparse.Namespace, ranks: int, folder: Path) -> Row:
    """Return the row of this library."""
    rival("s3fs")  # before the clock starts
    state = folder / "state"
    run = partial(isolated, limit_s=TIMEOUT_S)
    forget(".")
    index = run(index_s, kind)
    forget("ranges")
    first_s = run(first_batch_s, kind, options.workers, None)
    forget("ranges")
    job = (kind, options.samples, options.workers, state)
    row = row_of(options.samples, first_s, *run(in_ranks, epoch, job, ranks))
    if ranks == 1:
        forget("ranges")
        resume_s = run(first_batch_s, kind, options.workers, state.with_suffix(".0"))
        row["resume, s"] = f"{resume_s:.2f}"
    return {"index, s": f"{index:.2f}", **row, "samples": f"{options.samples:,}, each once"}


def upload_folder(folder: Path) -> None:
    """Write the files of a folder as objects."""
    for path in folder.iterdir():
        upload(f"{folder.name}/{path.name}", path.read_bytes())


def contenders(options: argparse.Namespace, url: str, folder: Path) -> dict[str, Callable[[], Row]]:
    """Return for each name a function that measures its row."""
    texts, workers = Texts(options.samples), options.workers
    shards = -(-options.samples // SHARD_SAMPLES)
    runs: dict[str, Callable[[], Row]] = {}
    for ranks in options.ranks:
        of_ranks = f", {ranks} ranks" * (ranks > 1)
        for kind, name in {"parquet": "Parquet", "tar": "tar"}.items():
            runs[f"odb_nodes, {name}{of_ranks}"] = partial(measured, kind, options, ranks, folder)
    batches: dict[str, Callable[[], Batches]] = {
        "WebDataset, tar": partial(webdataset, url, shards, workers),
        "LitData": partial(litdata, folder, workers),
        "Streaming": partial(streaming, folder, workers),
    }
    writers = {"LitData": write_litdata, "Streaming": write_streaming}
    modules = {"WebDataset, tar": "webdataset", "LitData": "litdata", "Streaming": "streaming"}

    def run_rival(name: str) -> Row:
        rival(modules[name])  # before the clock starts
        if name in writers:
            written = folder / name.lower()
            isolated(writers[name], texts, written, limit_s=TIMEOUT_S)
            upload_folder(written)
        row: Row = isolated(rival_epoch, batches[name], options.samples, limit_s=TIMEOUT_S)
        return row

    return runs | {name: partial(run_rival, name) for name in batches}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--samples", type=int, default=1_000_000, help="records (%(default)s)")
    add("--workers", type=int, default=2, help="worker processes of a rank (%(default)s)")
    add("--ranks", type=int, nargs="+", default=[1], help="numbers of ranks (default: 1)")
    add("--only", nargs="+", help="names of rows (default: all)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the server
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as url:
        texts = Texts(options.samples)
        for write in (write_parquet, write_tar):
            write(texts)
        runs = contenders(options, url, Path(folder))
        rows: dict[str, Row] = {}
        for name in options.only or runs:
            rows |= (row := attempts({name: runs[name]}))
            print(*row.values(), file=sys.stderr, flush=True)
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    table = Table(
        "Object store",
        f"{options.samples:,} texts (mean {np.mean(texts.lengths):.0f} bytes) on an S3 server on "
        f"loopback; {options.workers} worker processes a rank; load average "
        f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores.",
        [
            {"": name} | {column: row.get(column, "") for column in columns}
            for name, row in rows.items()
        ],
    )
    print(table)


if __name__ == "__main__":
    main()
