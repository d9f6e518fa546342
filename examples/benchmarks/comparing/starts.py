"""How each contender begins an epoch that can be resumed; processing a sample is a sleep."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
import torch.utils.data

from comparing.common import rival
from odb_nodes import ODBDataLoader

BATCH_SAMPLES, BUDGET = 32, 16_384
WORKERS = 2
SLEEP_MS = "COMPARE_SLEEP_MS"  # in the environment, so that workers of any kind know it

Batch = list[int]
Start = Callable[["Process", int, Any], "Running"]
"""Begins an epoch with a window or buffer of so many samples, at a state or afresh (`None`)."""


class Process:
    """Makes a sample of an index: sleeps, and adds a byte to a file that counts.

    Args:
        lengths: tokens of each sample.
        calls: the file.
    """

    def __init__(self, lengths: Sequence[int], calls: Path) -> None:
        self.lengths, self.calls = lengths, calls

    def __call__(self, index: int) -> dict[str, Any]:
        """Return the sample: its tokens, and its index as `id`."""
        with self.calls.open("ab") as file:
            file.write(b".")
        time.sleep(float(os.environ[SLEEP_MS]) / 1000)
        return {"input_ids": [0] * self.lengths[index], "id": int(index)}

    def count(self) -> int:
        """Return how many samples have been made so far."""
        return self.calls.stat().st_size if self.calls.exists() else 0


class Running(NamedTuple):
    """An epoch under way: the indices of each batch, and a state after the batches seen so far."""

    batches: Iterator[Batch]
    state: Callable[[], Any]


def ids(samples: Sequence[dict[str, Any]]) -> Batch:
    """Collate nothing but the indices."""
    return [int(sample["id"]) for sample in samples]


class Items(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def __len__(self) -> int:
        return len(self.process.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.process(index)


class ShuffleBuffer(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A stream behind a buffer of random order, which knows nothing of states."""

    def __init__(self, process: Process, window: int) -> None:
        self.process, self.window = process, window

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = torch.utils.data.get_worker_info()
        at, of = (info.id, info.num_workers) if info else (0, 1)
        rng, buffer = random.Random(0), []
        for index in range(at, len(self.process.lengths), of):
            buffer.append(self.process(index))
            if len(buffer) > self.window // of:
                yield buffer.pop(rng.randrange(len(buffer)))
        rng.shuffle(buffer)
        yield from buffer


def odb_nodes(process: Process, window: int, state: Any, way: str = "") -> Running:
    """Run this library, over a list or a stream of indices."""
    data: Any = range(len(process.lengths))
    options: dict[str, Any] = {"window": window}
    if way == "stream":
        data, options["shuffle"] = Stream(len(data)), False
    elif way == "early":
        options["window_start"] = "early"
    elif way == "lengths":
        options = {"lengths": process.lengths}  # All are planned together.
    loader = ODBDataLoader(
        data,
        token_budget=BUDGET,
        process_fn=process,
        collate_fn=as_dict,
        num_workers=WORKERS,
        **options,
    )
    if state is not None:
        loader.load_state_dict(state)
    return Running((batch["id"] for batch in loader), loader.state_dict)


def as_dict(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Collate the indices as a mapping."""
    return {"id": ids(samples)}


class Stream:
    """Indices that can only be read in turn."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


def rank_and_ranks() -> tuple[int, int]:
    """Return the rank of this process, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def stateful_dataloader(process: Process, window: int, state: Any, buffer: bool = False) -> Running:
    """Run torchdata's `StatefulDataLoader`, shuffled by its samplers or by a buffer."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    rank, ranks = rank_and_ranks()
    data: Any = ShuffleBuffer(process, window) if buffer else Items(process)
    sampler = StatefulDistributedSampler(data, ranks, rank) if ranks > 1 else None
    loader: Any = StatefulDataLoader(
        data,
        BATCH_SAMPLES,
        shuffle=None if buffer or sampler else True,
        sampler=sampler,
        num_workers=WORKERS,
        collate_fn=ids,
        generator=torch.Generator().manual_seed(0),
    )
    if state is not None:
        loader.load_state_dict(state)
    return Running(iter(loader), loader.state_dict)


def hf_stream(process: Process, window: int, state: Any) -> Running:
    """Run a stream of Hugging Face datasets in a `StatefulDataLoader`, as its docs say.

    Without workers: with them, loading a state of a shuffled stream fails in datasets 5.2.0.
    """
    datasets = rival("datasets")
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = datasets.Dataset.from_dict({"at": [*range(len(process.lengths))]})
    stream = data.to_iterable_dataset(num_shards=8).shuffle(seed=0, buffer_size=window)
    rank, ranks = rank_and_ranks()
    stream = rival("datasets.distributed").split_dataset_by_node(stream, rank, ranks)
    stream = stream.map(partial(process_row, process), remove_columns=["at"])
    loader: Any = StatefulDataLoader(stream, BATCH_SAMPLES, collate_fn=ids)
    if state is not None:
        loader.load_state_dict(state)
    return Running(iter(loader), loader.state_dict)


def process_row(process: Process, row: dict[str, int]) -> dict[str, Any]:
    """Process a row that holds nothing but an index."""
    return process(row["at"])


def grain(process: Process, window: int, state: Any, way: str = "") -> Running:
    """Run a Grain pipeline: batches of a fixed number, or rows that are packed first fit."""
    grain = rival("grain")
    rank, ranks = rank_and_ranks()
    data = grain.MapDataset.source(range(len(process.lengths))).seed(0).shuffle()
    if way != "elastic":
        data = data[rank::ranks]
    data = data.map(process)
    threads = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH_SAMPLES)
    if way == "elastic":
        iterator = iter(
            rival("grain.experimental").ElasticIterator(
                data.map(id_of),
                BATCH_SAMPLES * ranks,
                grain.sharding.ShardOptions(rank, ranks),
                read_options=threads,
            )
        )
    elif way == "packed":
        stream = data.to_iter_dataset(threads).map(grain_tokens)
        stream = rival("grain.experimental").FirstFitPackIterDataset(
            stream, length_struct={"id": BUDGET}, num_packing_bins=window // 40
        )
        iterator = iter(stream.map(grain_ids))
    else:
        iterator = iter(data.batch(BATCH_SAMPLES, batch_fn=ids).to_iter_dataset(threads))
    if state is not None:
        iterator.set_state(state)
        iterator.start_prefetch()  # as its checkpoint handler does
    batches = map(np.ndarray.tolist, iterator) if way == "elastic" else iterator
    return Running(batches, iterator.get_state)


def id_of(sample: dict[str, Any]) -> int:
    """Return the index of a sample."""
    return int(sample["id"])


def grain_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    """Mark each token with the index of its sample, so that a packed row shows its samples."""
    return {"id": np.full(len(sample["input_ids"]), sample["id"] + 1)}


def grain_ids(row: dict[str, Any]) -> Batch:
    """Return the indices of the samples in a packed row."""
    return [one - 1 for one in dict.fromkeys(row["id"].tolist()) if one]


def lhotse(process: Process, window: int, state: Any, way: str = "") -> Running:
    """Run lhotse's `DynamicBucketingSampler` over cuts whose length is known once processed.

    The manifest is indexed, so that a state holds the positions of the buffered cuts. If it has
    the lengths, the samples of a batch are processed when the sampler has made it.
    """
    from comparing.batching import lhotse_cuts

    manifest = process.calls.parent / "cuts.jsonl"
    if not manifest.exists():
        lhotse_cuts(process.lengths).to_file(manifest)

    def cut_of(cut: Any) -> Any:
        process(int(cut.id))
        return cut

    sampling = rival("lhotse.dataset.sampling")
    cut_set = rival("lhotse").CutSet
    cuts = cut_set.from_file(manifest, indexed=True)
    if way != "lengths":
        cuts = cut_set(rival("lhotse.lazy").LazyMapper(cuts, cut_of))
    rank, ranks = rank_and_ranks()
    sampler = sampling.DynamicBucketingSampler(
        cuts, max_duration=float(BUDGET), shuffle=True, buffer_size=window, num_buckets=10,
        duration_bins=[100.0, 200, 300, 400, 600, 800, 1200, 1800, 2700],
        world_size=ranks, rank=rank, seed=0,
    )  # fmt: skip
    if state is not None:
        sampler.load_state_dict(state)
    batches = iter(sampler)
    if way == "lengths":
        batches = ([cut_of(cut) for cut in batch] for batch in batches)
    return Running(([int(cut.id) for cut in batch] for batch in batches), sampler.state_dict)


def streaming(process: Process, _window: int, state: Any) -> Running:
    """Run MosaicML Streaming on shards on the local disk."""
    package = rival("streaming")
    package.base.util.clean_stale_shared_memory()
    folder = process.calls.parent / "mds"
    if not folder.exists():
        with package.MDSWriter(out=str(folder), columns={"at": "int"}, size_limit=2**14) as writer:
            for index in range(len(process.lengths)):
                writer.write({"at": index})

    class Shards(package.StreamingDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, at: int) -> dict[str, Any]:
            return process(super().__getitem__(at)["at"])

    data = Shards(local=str(folder), shuffle=True, batch_size=BATCH_SAMPLES, shuffle_seed=0)
    loader = package.StreamingDataLoader(
        data, batch_size=BATCH_SAMPLES, num_workers=WORKERS, collate_fn=as_tensors
    )
    if state is not None:
        loader.load_state_dict(state)
    return Running((batch["id"].tolist() for batch in loader), loader.state_dict)


def as_tensors(samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate the indices as a mapping of tensors, which Streaming counts."""
    return {"id": torch.tensor(ids(samples))}


def litdata(process: Process, _window: int, state: Any) -> Running:
    """Run LitData on chunks on the local disk."""
    package = rival("litdata")
    folder = process.calls.parent / "litdata"
    if not folder.exists():
        package.optimize(
            row_of_index,
            [*range(len(process.lengths))],
            str(folder),
            chunk_size=256,
            num_workers=1,
            start_method="fork",
        )
    loader = package.StreamingDataLoader(
        package.StreamingDataset(
            str(folder), shuffle=True, seed=0, transform=partial(process_row, process)
        ),
        batch_size=BATCH_SAMPLES,
        num_workers=WORKERS,
        collate_fn=ids,
    )
    if state is not None:
        loader.load_state_dict(state)
    return Running(iter(loader), loader.state_dict)


def row_of_index(index: int) -> dict[str, int]:
    """Return a row that holds nothing but an index."""
    return {"at": index}


def energon(process: Process, window: int, state: Any) -> Running:
    """Run Megatron Energon on tar files on the local disk, behind its shuffle buffer."""
    package = rival("megatron.energon")
    folder = process.calls.parent / "energon"
    if not folder.exists():
        write_energon(folder, len(process.lengths))

    class Encoder(package.DefaultTaskEncoder):  # type: ignore[misc, name-defined]
        def encode_sample(self, sample: Any) -> dict[str, Any]:
            return process(int(sample.text))

        def batch(self, samples: list[Any]) -> Any:
            return ids(samples)

    config = package.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS)
    data = package.get_train_dataset(
        str(folder),
        worker_config=config,
        batch_size=BATCH_SAMPLES,
        shuffle_buffer_size=window,
        max_samples_per_sequence=100,
        task_encoder=Encoder(),
        repeat=False,
    )
    # The default of 60 s makes most of this short epoch again.
    loader = package.get_savable_loader(data, checkpoint_every_sec=0.1)
    if state is not None:
        loader.restore_state_rank(state)
    return Running(iter(loader), loader.save_state_rank)


def write_energon(folder: Path, size: int) -> None:
    """Write tar files of indices, and what `energon prepare` makes beside them."""
    import subprocess
    import sys

    folder.mkdir()
    with rival("webdataset").ShardWriter(f"{folder}/%03d.tar", maxcount=256) as writer:
        for index in range(size):
            writer.write({"__key__": f"{index:06}", "txt": str(index)})
    prepare = Path(sys.executable).with_name("energon")
    options = "--non-interactive --num-workers 2 --split-ratio 1,0,0 --sample-type TextSample"
    subprocess.run(
        [str(prepare), "prepare", *options.split(), "--field-map", '{"text": "txt"}', str(folder)],
        check=True,
    )


CONTENDERS: dict[str, tuple[str, Start]] = {
    "`StatefulDataLoader`, list": ("fixed", stateful_dataloader),
    "Grain": ("fixed", grain),
    "Grain, `ElasticIterator`": ("fixed", partial(grain, way="elastic")),
    "Streaming": ("fixed", streaming),
    "LitData": ("fixed", litdata),
    "`StatefulDataLoader`, stream": ("buffer", partial(stateful_dataloader, buffer=True)),
    "datasets, stream": ("buffer", hf_stream),
    "Energon": ("buffer", energon),
    "Grain, packed first fit": ("budget", partial(grain, way="packed")),
    "lhotse, lengths from processing": ("budget", lhotse),
    "lhotse, lengths known": ("budget", partial(lhotse, way="lengths")),
    "odb_nodes, list": ("budget", odb_nodes),
    "odb_nodes, stream": ("budget", partial(odb_nodes, way="stream")),
    "odb_nodes, list, `window_start`": ("budget", partial(odb_nodes, way="early")),
    "odb_nodes, list, lengths known": ("budget", partial(odb_nodes, way="lengths")),
}
