"""How many samples a second a loader delivers where processing is next to nothing."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from benchmark_loader import (
    BATCH_SAMPLES,
    BUDGET_TOKENS,
    ByteTexts,
    Run,
    measure_batches,
    odb_nodes_epoch,
    pad_row_by_row,
    to_arrays,
    torch_epoch,
)
from comparing.common import (
    Options,
    RivalMissingError,
    Row,
    Table,
    Tables,
    in_turns,
    isolated,
    rival,
    spread,
)
from odb_nodes import ODBDataLoader, PaddingCollate, TarDataset

TIMEOUT_S = 600.0
SAMPLES, FEW_SAMPLES = 6_000, 2_000

Batches = Iterator[dict[str, Any]]
collate = PaddingCollate()


def tokens_of(text: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return the sample of a text, as `ByteTexts` makes it."""
    ids = np.frombuffer(text, np.uint8).astype(np.int64)
    return {"input_ids": ids.copy(), "labels": ids.copy()}


def odb_nodes(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run this library over texts in memory."""
    with ODBDataLoader(data, token_budget=BUDGET_TOKENS, num_workers=workers) as loader:
        yield from loader


def odb_nodes_tar(data: ByteTexts, folder: Path, workers: int) -> Batches:
    """Run this library over tar files."""
    with ODBDataLoader(
        TarDataset(tar_files(data, folder)),
        token_budget=BUDGET_TOKENS,
        num_workers=workers,
        process_fn=tokens_of_member,
    ) as loader:
        yield from loader


def odb_nodes_table(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run this library over an Arrow table of Hugging Face `datasets`."""
    with ODBDataLoader(
        table_of(data), token_budget=BUDGET_TOKENS, num_workers=workers, process_fn=tokens_of_text
    ) as loader:
        yield from loader


def torch_table(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run torch's `DataLoader` over an Arrow table of Hugging Face `datasets`."""
    yield from DataLoader(
        table_of(data),
        BATCH_SAMPLES,
        shuffle=True,
        num_workers=workers,
        collate_fn=lambda rows: collate([*map(tokens_of_text, rows)]),
    )


@cache
def table_of(data: ByteTexts) -> Any:
    """Return the texts as a table."""
    return rival("datasets").Dataset.from_dict({"text": data.texts})


def tokens_of_text(row: dict[str, str]) -> dict[str, Any]:
    """Return the sample of a row of the table."""
    return tokens_of(row["text"].encode())


def torch_loader(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run torch's `DataLoader`."""
    yield from DataLoader(
        data, BATCH_SAMPLES, shuffle=True, num_workers=workers, collate_fn=collate
    )


def stateful_dataloader(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run torchdata's `StatefulDataLoader`."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    yield from StatefulDataLoader(
        data, BATCH_SAMPLES, shuffle=True, num_workers=workers, collate_fn=collate
    )


def grain(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run Grain, with processes that prefetch."""
    grain = rival("grain")
    stream = grain.MapDataset.source(data).seed(0).shuffle()
    batches = stream.batch(BATCH_SAMPLES, batch_fn=collate).to_iter_dataset()
    yield from batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))


def spdl(data: ByteTexts, _folder: Path, workers: int) -> Batches:
    """Run SPDL, with threads."""
    order = [*range(len(data))]
    random.Random(0).shuffle(order)
    pipeline = (
        rival("spdl.pipeline")
        .PipelineBuilder()
        .add_source(order)
        .pipe(data.__getitem__, concurrency=workers, output_order="input")
        .aggregate(BATCH_SAMPLES)
        .pipe(collate)
        .add_sink(4)
        .build(num_threads=workers + 1)
    )
    with pipeline.auto_stop():
        yield from pipeline


def webdataset(data: ByteTexts, folder: Path, workers: int) -> Batches:
    """Run WebDataset on tar files on the local disk."""
    package = rival("webdataset")
    files = tar_files(data, folder)
    stream = (
        package.WebDataset(files, shardshuffle=len(files), empty_check=False)
        .shuffle(1000)
        .map(tokens_of_member)
        .batched(BATCH_SAMPLES, collation_fn=collate)
    )
    yield from package.WebLoader(stream, batch_size=None, num_workers=workers)


def tokens_of_member(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample of a text in a tar file."""
    return tokens_of(sample["txt"])


def tar_files(data: ByteTexts, folder: Path) -> list[str]:
    """Return tar files of the texts, written where there are none yet."""
    import io
    import tarfile

    files = [folder / f"{at:03}.tar" for at in range(8)]
    for at, path in enumerate(files):
        if path.exists():
            continue
        with tarfile.open(path, "w") as tar:
            for index in range(at, len(data), len(files)):
                text = data.texts[index].encode()
                member = tarfile.TarInfo(f"{index:06}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text))
    return [*map(str, files)]


def litdata(data: ByteTexts, folder: Path, workers: int) -> Batches:
    """Run LitData on chunks on the local disk."""
    package = rival("litdata")
    if not (chunks := folder / "litdata").exists():
        package.optimize(
            row_of_text,
            data.texts,
            str(chunks),
            chunk_bytes="4MB",
            num_workers=1,
            start_method="fork",
        )

    yield from package.StreamingDataLoader(
        package.StreamingDataset(str(chunks), shuffle=True, transform=tokens_of_row),
        batch_size=BATCH_SAMPLES,
        num_workers=workers,
        collate_fn=collate,
    )


def tokens_of_row(row: dict[str, bytes]) -> dict[str, Any]:
    """Return the sample of a row."""
    return tokens_of(row["text"])


def row_of_text(text: str) -> dict[str, bytes]:
    """Return the row of a text."""
    return {"text": text.encode()}


def streaming(data: ByteTexts, folder: Path, workers: int) -> Batches:
    """Run MosaicML Streaming on shards on the local disk."""
    package = rival("streaming")
    package.base.util.clean_stale_shared_memory()
    if not (shards := folder / "mds").exists():
        with package.MDSWriter(out=str(shards), columns={"text": "bytes"}) as writer:
            for text in data.texts:
                writer.write({"text": text.encode()})

    class Shards(package.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, at: int) -> dict[str, Any]:
            return tokens_of(super().__getitem__(at)["text"])

    yield from package.StreamingDataLoader(
        Shards(local=str(shards), shuffle=True, batch_size=BATCH_SAMPLES),
        batch_size=BATCH_SAMPLES,
        num_workers=workers,
        collate_fn=collate,
    )


CONTENDERS = {
    "odb_nodes, memory": odb_nodes,
    "`DataLoader`, memory": torch_loader,
    "`StatefulDataLoader`, memory": stateful_dataloader,
    "Grain, memory": grain,
    "SPDL, memory, threads": spdl,
    "odb_nodes, Arrow table": odb_nodes_table,
    "`DataLoader`, Arrow table": torch_table,
    "odb_nodes, tar files": odb_nodes_tar,
    "WebDataset, tar files": webdataset,
    "LitData, chunks on disk": litdata,
    "Streaming, shards on disk": streaming,
}


# Whose batches are made by a function of the user that pads row by row: epoch, kind of samples
OWN_COLLATE = {
    "odb_nodes, arrays": (odb_nodes_epoch, "numpy"),
    "`DataLoader`, arrays": (torch_epoch, "numpy"),
    "odb_nodes, lists": (odb_nodes_epoch, "list"),
    "odb_nodes, lists, arrays by `process_fn`": (
        partial(odb_nodes_epoch, process_fn=to_arrays),
        "list",
    ),
    "`DataLoader`, lists": (torch_epoch, "list"),
}


def measure(epoch: Any, *job: Any) -> Run:
    """Run one epoch."""
    return measure_batches(epoch(*job))


def tables(options: Options) -> Tables:
    """Yield a table of all loaders, and one of those that collate by a function of the user."""
    yield rates_of_all(options)
    samples = FEW_SAMPLES if options.quick else SAMPLES
    data = {kind: ByteTexts(samples, kind, False, pad_row_by_row) for kind in ("numpy", "list")}
    epochs = {
        name: partial(isolated, measure, epoch, data[kind], 2, limit_s=TIMEOUT_S)
        for name, (epoch, kind) in OWN_COLLATE.items()
    }
    yield Table(
        "Own collate function",
        f"{samples:,} texts as above, padded row by row in torch; 2 workers.",
        [
            {"": name, "samples / s": rate_of(runs), "CPU us a sample": cpu_us_of(runs)}
            for name, runs in in_turns(epochs, options.rounds).items()
        ],
    )


def rate_of(runs: list[Run]) -> str:
    """Return the samples a second of runs."""
    return spread([run.samples_per_s for run in runs])


def cpu_us_of(runs: list[Run]) -> str:
    """Return the median CPU time of a sample in us."""
    return f"{statistics.median(run.cpu_s / run.samples * 1e6 for run in runs):,.0f}"


def rates_of_all(options: Options) -> Table:
    """Return the table of all loaders."""
    settings = [(1, SAMPLES), (2, SAMPLES), (4, SAMPLES), (2, FEW_SAMPLES)]
    rates: dict[str, Row] = {name: {"": name} for name in CONTENDERS}
    rest: dict[str, Row] = {name: {} for name in CONTENDERS}
    for workers, samples in settings[-1:] if options.quick else settings:
        data = ByteTexts(samples, "numpy")
        with suppress(RivalMissingError):
            table_of(data)  # before the clock starts
        with tempfile.TemporaryDirectory() as folder:
            epochs = {
                name: partial(
                    isolated, measure, one, data, Path(folder), workers, limit_s=TIMEOUT_S
                )
                for name, one in CONTENDERS.items()
            }
            if not options.quick:
                in_turns(epochs, 1)  # writes the files, and reads them once
            found = in_turns(epochs, options.rounds)
        column = f"{workers} worker{'s' * (workers > 1)}"
        column += f", {samples:,} texts" * (samples < SAMPLES)
        for name, runs in found.items():
            rates[name][f"samples / s, {column}"] = rate_of(runs)
            rest[name][f"CPU us a sample, {column}"] = cpu_us_of(runs)
            rest[name][f"padding, {column}"] = f"{runs[-1].padding:.2f}"
    return Table(
        "Loader rate",
        f"{SAMPLES:,} texts, or as many as a column says (mean 400 tokens, one for each byte), "
        "numpy arrays, padded by the same function; an epoch from the start of the workers to "
        f"their end, the median of {options.rounds}, and the range. Fixed batches have "
        f"{BATCH_SAMPLES} samples; a budget is {BUDGET_TOKENS:,} padded tokens.",
        [row | rest[name] for name, row in rates.items() if len(row) > 1],
    )
