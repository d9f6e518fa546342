"""Where `collate_fn` runs, and what samples and batches of workers cost the trainer's process."""

import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from odb_nodes import Ledger, ODBDataLoader, TokenBudget, WorkerOptions, pop_step_info
from odb_nodes.core.processing import transport


class Rows:
    """Samples of different lengths, with an image of `side` x `side` pixels."""

    def __init__(self, size=160, side=0):
        self.size, self.side = size, side

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        sample = {"input_ids": np.arange(length_of(index)) + index, "id": index}
        if self.side:
            sample["pixels"] = torch.full((self.side, self.side), index, dtype=torch.int32)
        return sample


def length_of(index):
    return 5 + index * 37 % 60


def where(samples):
    """A padded batch, and the process that has made it."""
    ids = [torch.as_tensor(sample["input_ids"]) for sample in samples]
    batch = {
        "input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "ids": [sample["id"] for sample in samples],
        "made by": os.getpid(),
    }
    if "pixels" in samples[0]:
        batch["pixels"] = torch.stack([sample["pixels"] for sample in samples])
    return batch


def loader_of(dataset, **changed):
    workers = {"num_workers": 2, "chunk_size": 4, "start_method": "fork"}
    workers = WorkerOptions(**workers, **changed.pop("workers", {}))
    options = {"token_budget": 512, "window": 24, "collate_fn": where, "workers": workers}
    return ODBDataLoader(dataset, **options, **changed)


@pytest.mark.slow  # worker processes
@pytest.mark.parametrize("lengths", [None, [*map(length_of, range(160))]], ids=["unknown", "known"])
@pytest.mark.parametrize("collate_in", ["auto", "workers", "main"])
def test_workers_make_batches_where_lengths_are_known(collate_in, lengths, caplog):
    """Without lengths, the log says that `collate_in="workers"` has no effect."""
    with loader_of(Rows(), collate_in=collate_in, lengths=lengths) as loader:
        makers = {batch["made by"] for batch in loader}
        by_workers = lengths is not None and collate_in != "main"
        assert makers <= ({*loader.worker_pids} if by_workers else {os.getpid()})
    has_no_effect = collate_in == "workers" and lengths is None
    assert ('`collate_in="workers"` has no effect' in caplog.text) == has_no_effect


# --- memory of images on their way to the trainer -------------------------------------------------

needs_files = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs memfd_create")


def open_files(process="self"):
    """How many anonymous files of this library a process holds or maps."""
    gc.collect()
    folder = Path(f"/proc/{process}/fd")
    held = [os.readlink(path) for path in folder.iterdir() if path.is_symlink()]
    mapped = Path(f"/proc/{process}/maps").read_text().count("memfd:odb_nodes")
    return sum("memfd:odb_nodes" in name for name in held) + mapped


@pytest.mark.slow
@needs_files
@pytest.mark.parametrize(
    ("forking", "lengths"), [(False, None), (True, [*map(length_of, range(40))])]
)
def test_epochs_hold_no_more_and_more_files(forking, lengths):
    """Also where a child that was forked in between has them open."""
    before = open_files()
    with loader_of(Rows(40, 800), lengths=lengths) as loader:
        counts = []
        for _ in range(4):
            for step, batch in enumerate(loader):
                rows = batch["pixels"][:, 0, 0].tolist()
                assert rows == batch["ids"]
                if forking and step % 3 == 0:
                    child = os.fork()
                    if not child:
                        os._exit(int(batch["pixels"][:, 0, 0].tolist() != rows))
                    assert os.waitpid(child, 0)[1] == 0
                del batch
            counts.append([open_files(pid) for pid in ("self", *loader.worker_pids)])
        assert all(several == counts[0] for several in counts[1:])
    del loader
    assert open_files() == before


def allow_no_files(worker):
    transport.CAN_SHARE = False


def allow_few_files(worker):
    import resource  # which not every system has

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))


@pytest.mark.slow
@needs_files
@pytest.mark.parametrize(
    ("allow", "lengths"),
    [(allow_no_files, None), (allow_few_files, [*map(length_of, range(40))])],
)
def test_a_worker_may_have_few_files_or_none(allow, lengths):
    """Then large arrays come through the socket."""
    options = {"worker_init_fn": allow, "in_flight_samples": 200}
    with loader_of(Rows(40, 800), lengths=lengths, workers=options) as loader:
        images = {}
        for batch in loader:
            images.update(zip(batch["ids"], batch["pixels"], strict=True))
    assert sorted(images) == [*range(40)]
    assert all((pixels == row).all() for row, pixels in images.items())


# --- the trainer's process calls nothing for each sample, but for groups and chunks --------------


GROUPS, TOKENS = 24, 10


class Texts:
    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return self._samples

    def __getitem__(self, index):
        ids = np.full(TOKENS, index)
        return {"input_ids": ids, "labels": ids}


def calls_of_an_epoch(of_each, budget, ledger):
    """Return the calls of Python functions in an epoch of groups of `of_each` samples."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    loader = ODBDataLoader(
        Texts(GROUPS * of_each),
        token_budget=budget,
        window=4 * of_each,
        workers=WorkerOptions(num_workers=1, chunk_size=4 * of_each),
        prefetch=0,
    )
    with loader, ledger:
        batches, groups = iter(loader), 0
        ledger.record(pop_step_info(next(batches)))
        sys.setprofile(count)
        try:
            for batch in batches:
                ledger.record(pop_step_info(batch))
                groups += 1
        finally:
            sys.setprofile(None)
    assert groups == GROUPS - 1
    return calls


@pytest.mark.slow  # worker processes
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_function_is_called_for_each_sample(layout, tmp_path):
    few, many = (
        calls_of_an_epoch(
            of_each, TokenBudget(of_each * TOKENS, layout=layout), Ledger(tmp_path / str(of_each))
        )
        for of_each in (8, 128)
    )
    assert (many - few) / (GROUPS * (128 - 8)) < 0.5
