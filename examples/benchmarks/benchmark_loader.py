"""Throughput of three loaders, side by side: odb_nodes, online-dynamic-batching, torch.

    python examples/benchmarks/benchmark_loader.py
    python examples/benchmarks/benchmark_loader.py --kind table
    python examples/benchmarks/benchmark_loader.py --kind ready
    python examples/benchmarks/benchmark_loader.py --kind list --row-by-row
    python examples/benchmarks/benchmark_loader.py --kind image --samples 2000
    python examples/benchmarks/benchmark_loader.py --samples 2000 --rounds 1

All collate the same texts with the same function and the same number of workers, and processing is
next to nothing: what is measured is the plumbing. With `--kind ready` it is nothing at all, samples
have one tensor each, and the collate function pads row by row in torch, as many do: what is left is
the case for a loader that collates in its workers. `--row-by-row` pads other kinds in this way;
for lists, a further row converts them to arrays in `process_fn`. With `--kind image`, each sample
has 5 MB of pixels beside a short text: what is left is moving bytes. `--quiet` has the data declare
that they draw no random numbers, so that this library does not seed them; the others never do. In
every round each loader runs one epoch, from the start of its workers to their end, one loader after
the other; of each loader the median run counts. Throughput is the machine's; the ratios are the
result.

`--kind table`, which a run without `--kind` adds, reads a tokenized table of `datasets`, of which
this library knows all lengths before it reads a row. It compares epochs with the default collate
function and with one that pads row by row, the time to the first batch, and the time to the first
batch of a resume in mid-epoch.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import datasets
import numpy as np
import odb
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from odb_nodes import ODBDataLoader, PaddingCollate, TokenBudget

BUDGET_TOKENS = 16_384
BATCH_SAMPLES = 32
MEAN_TOKENS, CV, SHORTEST_TOKENS, LONGEST_TOKENS = 400, 1.0, 8, 4096

KINDS: dict[str, Callable[[Any], Any]] = {
    "numpy": np.copy,
    "torch": torch.tensor,
    "list": np.ndarray.tolist,
}
READY, IMAGE, TABLE = "ready", "image", "table"
IMAGE_SHAPE = (3, 1024, 1628)  # 5 MB of uint8
IMAGE_TOKENS, IMAGE_SAMPLES = 100, 8

Batch = dict[str, Any]


def draw_lengths(rng: np.random.Generator, samples: int) -> Any:
    """Return lognormal lengths in tokens, (samples,) int64."""
    sigma = math.sqrt(math.log(1 + CV**2))
    tokens = rng.lognormal(math.log(MEAN_TOKENS) - sigma**2 / 2, sigma, samples)
    return np.clip(tokens, SHORTEST_TOKENS, LONGEST_TOKENS).astype(np.int64)


class ByteTexts(Dataset[Batch]):
    """Texts of lognormal lengths, tokenized when they are read: one token per byte.

    Args:
        samples: number of texts.
        kind: type of `input_ids` and `labels`, both (L,) int64: a key of `KINDS`. `READY`:
            `input_ids` alone, tensors that were made before.
        quiet: whether to declare that they draw no random numbers.
        collate_fn: what makes a batch of samples. `READY` texts have `pad_row_by_row`.
    """

    def __init__(
        self,
        samples: int,
        kind: str,
        quiet: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self.draws_random_numbers = not quiet
        self.collate_fn = pad_row_by_row if kind == READY else collate_fn or PaddingCollate()
        rng = np.random.default_rng(0)
        lengths = draw_lengths(rng, samples)
        letters = bytes(rng.integers(97, 123, LONGEST_TOKENS, dtype=np.uint8)).decode()
        self.texts = [letters[:length] for length in lengths]
        self.kind = kind
        self.ready = [torch.arange(n) for n in lengths.tolist()] if kind == READY else []

    batch_samples = BATCH_SAMPLES
    budget = TokenBudget(BUDGET_TOKENS)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Batch:
        if self.ready:
            return {"input_ids": self.ready[index]}
        ids = np.frombuffer(self.texts[index].encode(), np.uint8).astype(np.int64)
        return {key: KINDS[self.kind](ids) for key in ("input_ids", "labels")}


class Images(Dataset[Batch]):
    """Large images beside texts of one length, as many in the batches of all loaders.

    Args:
        samples: number of images.
        quiet: whether to declare that they draw no random numbers.
    """

    kind = IMAGE
    batch_samples = IMAGE_SAMPLES
    budget = TokenBudget(IMAGE_TOKENS * IMAGE_SAMPLES)

    def __init__(self, samples: int, quiet: bool = False) -> None:
        self.draws_random_numbers = not quiet
        self._samples = samples
        self._pixels = np.random.default_rng(0).integers(0, 256, IMAGE_SHAPE, dtype=np.uint8)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": np.full(IMAGE_TOKENS, index), "pixels": self._pixels.copy()}

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """What makes a batch of samples."""
        return stack


def stack(samples: list[Batch]) -> Batch:
    """Return `input_ids` (B, T) int64, its mask, and `pixels` (B, 3, H, W) uint8."""
    batch = {
        key: torch.stack([torch.from_numpy(sample[key]) for sample in samples])
        for key in ("input_ids", "pixels")
    }
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def pad_row_by_row(samples: list[Batch]) -> Batch:
    """Return `input_ids` and `attention_mask`, (B, T) int64, padded by 0."""
    width = max(len(sample["input_ids"]) for sample in samples)
    batch = {
        key: torch.zeros(len(samples), width, dtype=torch.int64)
        for key in ("input_ids", "attention_mask")
    }
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        batch["input_ids"][row, :length] = torch.as_tensor(sample["input_ids"])
        batch["attention_mask"][row, :length] = 1
    return batch


Data = ByteTexts | Images


@dataclass(frozen=True, kw_only=True)
class Run:
    """One epoch of one loader.

    Attributes:
        samples: samples that came out.
        batches: batches they came in.
        real_tokens: tokens of the samples.
        padded_tokens: tokens of the batches, padding included.
        seconds: from the start of the workers to their end.
        cpu_s: seconds of CPU time meanwhile, of this process and of the workers.
    """

    samples: int
    batches: int
    real_tokens: int
    padded_tokens: int
    seconds: float
    cpu_s: float

    @property
    def samples_per_s(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Real tokens per second."""
        return self.real_tokens / self.seconds

    @property
    def padding(self) -> float:
        """Share of the padded tokens that is padding."""
        return 1 - self.real_tokens / self.padded_tokens


@dataclass(frozen=True)
class Contender:
    """A loader under test.

    Attributes:
        name: what the table calls it.
        epoch: data set and number of workers -> the batches of one epoch.
        dataset: what it reads.
    """

    name: str
    epoch: Callable[[Data, int], Iterator[Batch]]
    dataset: Data


def to_arrays(sample: Batch) -> Batch:
    """Return a sample with its lists as arrays."""
    return {key: np.asarray(values) for key, values in sample.items()}


def odb_nodes_epoch(
    dataset: Data, workers: int, collate_in: Any = "auto", process_fn: Any = None
) -> Iterator[Batch]:
    """Yield the batches of this library's loader."""
    with ODBDataLoader(
        dataset,
        token_budget=dataset.budget,
        num_workers=workers,
        process_fn=process_fn,
        collate_fn=dataset.collate_fn,
        collate_in=collate_in,
    ) as loader:
        yield from loader


def reference_epoch(dataset: Data, workers: int) -> Iterator[Batch]:
    """Yield the batches of the online-dynamic-batching package's loader."""
    yield from odb.ODBDataLoader(
        dataset,
        token_budget=BUDGET_TOKENS,
        batch_size=1,
        shuffle=True,
        num_workers=workers,
        prefetch_factor=64,
        join=False,
        collate_fn=dataset.collate_fn,
    )


def torch_epoch(dataset: Data, workers: int) -> Iterator[Batch]:
    """Yield the batches of torch's loader, each of the same number of samples."""
    yield from DataLoader(
        dataset,
        dataset.batch_samples,
        shuffle=True,
        num_workers=workers,
        collate_fn=dataset.collate_fn,
    )


def make_contenders(args: argparse.Namespace) -> list[Contender]:
    """Return the loaders under test, this library's first."""
    samples, kind, quiet = args.samples, args.kind, args.quiet
    own_epoch = partial(odb_nodes_epoch, collate_in=args.collate_in)
    if kind == IMAGE:
        images = Images(samples, quiet)
        return [
            Contender("odb_nodes", own_epoch, images),
            Contender(f"DataLoader({IMAGE_SAMPLES})", torch_epoch, images),
        ]
    collate_fn = pad_row_by_row if args.row_by_row else None
    dataset = ByteTexts(samples, kind, quiet, collate_fn)
    by_arrays = Contender("odb_nodes, to arrays", partial(own_epoch, process_fn=to_arrays), dataset)
    # The package sees no length in an array and drops the sample without a word; of what it does
    # take, lists are the faster.
    for_reference = dataset
    if kind == "numpy":
        for_reference = ByteTexts(samples, "list", collate_fn=collate_fn)
    reference = Contender("online-dynamic-batching", reference_epoch, for_reference)
    return [
        Contender("odb_nodes", own_epoch, dataset),
        *([by_arrays] if args.row_by_row and kind == "list" else []),
        *([] if args.without_reference else [reference]),
        Contender(f"DataLoader({BATCH_SAMPLES})", torch_epoch, dataset),
    ]


def measure_batches(epoch: Iterator[Batch]) -> Run:
    """Run one epoch and count what comes out."""
    samples = batches = real_tokens = padded_tokens = 0
    start, cpu_start = time.perf_counter(), cpu_s()
    for batch in epoch:
        samples += len(batch["input_ids"])
        batches += 1
        # By numpy: the threads of a torch sum would take the cores from the workers.
        real_tokens += int(np.count_nonzero(batch["attention_mask"].numpy()))
        padded_tokens += batch["input_ids"].numel()
    return Run(
        samples=samples,
        batches=batches,
        real_tokens=real_tokens,
        padded_tokens=padded_tokens,
        seconds=time.perf_counter() - start,
        cpu_s=cpu_s() - cpu_start,
    )


def cpu_s() -> float:
    """Return the CPU time so far of this process and of its children that have ended."""
    return sum(os.times()[:4])


def compare(contenders: list[Contender], workers: int, rounds: int) -> list[Run]:
    """Return the median run of each loader."""
    runs = [
        [measure_batches(one.epoch(one.dataset, workers)) for one in contenders]
        for _ in range(rounds)
    ]
    return [
        sorted(several, key=attrgetter("seconds"))[(rounds - 1) // 2]
        for several in zip(*runs, strict=True)
    ]


def report(contenders: list[Contender], runs: list[Run]) -> None:
    """Print a table of the runs, with the ratio of the first one's throughput to each."""
    print(
        f"{'loader':<24}{'reads':>6}{'samples':>9}{'batches':>9}{'padding':>9}{'samples/s':>11}"
        f"{'tokens/s':>12}{'CPU us/sample':>15}{'odb_nodes is':>14}"
    )
    for contender, run in zip(contenders, runs, strict=True):
        print(
            f"{contender.name:<24}{contender.dataset.kind:>6}{run.samples:>9,}{run.batches:>9,}"
            f"{run.padding:>9.1%}{run.samples_per_s:>11,.0f}{run.tokens_per_s:>12,.0f}"
            f"{run.cpu_s / run.samples * 1e6:>15,.0f}"
            f"{runs[0].samples_per_s / run.samples_per_s:>13.2f}x"
        )


# --- a tokenized table ----------------------------------------------------------------------------

MakeLoader = Callable[[], Any]


def make_table(samples: int) -> datasets.Dataset:
    """Return a table with `input_ids` alone."""
    rng = np.random.default_rng(0)
    offsets = np.append(0, np.cumsum(draw_lengths(rng, samples))).astype(np.int32)
    ids = rng.integers(0, 50_000, offsets[-1])
    return datasets.Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, ids)}))


def batches_of(make: MakeLoader) -> Iterator[Batch]:
    """Yield the batches of an epoch of a new loader."""
    loader = make()
    yield from loader
    if isinstance(loader, ODBDataLoader):  # Workers of torch end with their iterator.
        loader.close()


def seconds_to_first_batch(make: MakeLoader, state: Any = None) -> float:
    """Return the seconds from before a loader is made to its first batch."""
    start = time.perf_counter()
    loader = make()
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    seconds = time.perf_counter() - start  # Before the workers end: torch's do with the iterator.
    if isinstance(loader, ODBDataLoader):
        loader.close()
    return seconds


def state_in_mid_epoch(make: MakeLoader, samples: int) -> Any:
    """Return the state of a loader after half of the samples of an epoch."""
    loader, taken = make(), 0
    for batch in loader:
        taken += len(batch["input_ids"])
        if taken >= samples // 2:
            break
    state = loader.state_dict()
    if isinstance(loader, ODBDataLoader):
        loader.close()
    return state


def compare_tables(samples: int, workers: int, rounds: int) -> None:
    """Print what loaders of one table take, in turns: the medians of the rounds, and ratios."""
    table, pads = make_table(samples), PaddingCollate()
    options: Any = {"batch_size": BATCH_SAMPLES, "shuffle": True, "num_workers": workers}
    ours = partial(ODBDataLoader, table, token_budget=BUDGET_TOKENS, num_workers=workers)
    theirs = partial(DataLoader, table, **options)
    stateful = partial(StatefulDataLoader, table, **options, collate_fn=pads)
    print(f"\n{samples:,} rows of a tokenized table, {workers} workers, medians of {rounds}")
    print(f"{'':<36}{'odb_nodes':>11}{f'DataLoader({BATCH_SAMPLES})':>16}{'odb_nodes is':>14}")

    def show(name: str, values: Any, digits: int) -> None:
        own, other = np.median(values, axis=0)
        print(f"{name:<36}{own:>11,.{digits}f}{other:>16,.{digits}f}{own / other:>13.2f}x")

    makes: list[MakeLoader]
    for name, collate, given in (
        ("default collate", pads, {}),
        ("row by row", pad_row_by_row, {"collate_fn": pad_row_by_row}),
    ):
        makes = [partial(ours, **given), partial(theirs, collate_fn=collate)]
        runs = [[measure_batches(batches_of(make)) for make in makes] for _ in range(rounds)]
        show(f"{name}: samples/s", [[run.samples_per_s for run in turn] for turn in runs], 0)
        show(
            f"{name}: real share of tokens", [[1 - run.padding for run in turn] for turn in runs], 3
        )
    makes = [ours, partial(theirs, collate_fn=pads)]
    times = [[seconds_to_first_batch(make) for make in makes] for _ in range(rounds)]
    show("seconds to the first batch", times, 3)
    makes = [ours, stateful]
    states = [state_in_mid_epoch(make, samples) for make in makes]
    resumes = [*zip(makes, states, strict=True)]
    times = [[seconds_to_first_batch(*resume) for resume in resumes] for _ in range(rounds)]
    show("after a resume (StatefulDataLoader)", times, 3)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000, help="texts per epoch")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each loader")
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each loader")
    kinds = [*KINDS, READY, IMAGE, TABLE]
    parser.add_argument("--kind", choices=kinds, help="samples; default: numpy, and then a table")
    parser.add_argument("--row-by-row", action="store_true", help="pad in torch, row by row")
    parser.add_argument("--quiet", action="store_true", help="declare that nothing is drawn")
    parser.add_argument("--collate-in", choices=["auto", "workers", "main"], default="auto")
    parser.add_argument("--without-reference", action="store_true", help="leave the slowest out")
    args = parser.parse_args()
    has_table = args.kind in (None, TABLE)
    if args.kind != TABLE:
        args.kind = args.kind or "numpy"
        contenders = make_contenders(args)
        report(contenders, compare(contenders, args.workers, args.rounds))
    if has_table:
        compare_tables(args.samples, args.workers, args.rounds)


if __name__ == "__main__":
    main()
