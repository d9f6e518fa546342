"""An object store: `benchmark_store.py` at a size that all contenders bear."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import benchmark_store as store
from comparing.common import Options, RivalMissingError, Table, Tables, attempts, rival, skip

WORKERS = 2


def tables(options: Options) -> Tables:
    """Yield the table."""
    try:
        rival("moto.server")
    except RivalMissingError as error:
        skip("object store", str(error))
        return
    samples = 4_000 if options.quick else 50_000
    job = argparse.Namespace(samples=samples, workers=WORKERS, ranks=[1])
    texts = store.Texts(samples)
    with tempfile.TemporaryDirectory() as name, store.s3_server(Path(name)) as url:
        for write in (store.write_parquet, store.write_tar):
            write(texts)
        rows = attempts(store.contenders(job, url, Path(name)))
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    yield Table(
        "Object store",
        f"{samples:,} texts on an S3 server on loopback, {WORKERS} workers. See "
        "benchmark_store.py for the columns.",
        [
            {"": name} | {column: row.get(column, "") for column in columns}
            for name, row in rows.items()
        ],
    )
