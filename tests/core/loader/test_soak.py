"""A long run with everything that happens to one: workers killed, breaks, resumes, closes."""

import gc
import os
import random
import signal
from collections import Counter
from contextlib import suppress

import numpy as np
import psutil
import pytest

from odb_nodes import Ledger, ODBDataLoader, WorkerError, WorkerOptions, audit, pop_step_info

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create"),
    pytest.mark.filterwarnings("ignore:worker process .* was killed:UserWarning"),
]

EVENTS = ("kill", "kill", "break", "close", "anew", "break", "break")


class Rows:
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        length = length_of(index)
        return {"input_ids": np.full(length, index), "labels": np.arange(length)}


def length_of(index):
    return 10 + index * 31 % 300


def kill_a_worker(loader, rng):
    if pids := loader.worker_pids:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(pids), signal.SIGKILL)


def held():
    """Open files, mappings of files of memory, threads and children of this process."""
    gc.collect()
    me = psutil.Process()
    mapped = sum("memfd:odb_nodes" in mapping.path for mapping in me.memory_maps(grouped=False))
    return me.num_fds() + mapped + me.num_threads() + len(me.children(recursive=True))


@pytest.mark.parametrize("are_known", [False, True], ids=["trainer collates", "workers collate"])
def test_every_sample_comes_once_over_kills_breaks_and_resumes(are_known, tmp_path, exhaustive):
    size, epochs = (50_000, 4) if exhaustive else (1_500, 2)
    rng = random.Random(5)
    ledger = Ledger(tmp_path)

    def make():
        workers = WorkerOptions(num_workers=2, start_method="fork", timeout_s=60)
        lengths = [*map(length_of, range(size))] if are_known else None
        options = {"token_budget": 4096, "window": 256, "lengths": lengths}
        return ODBDataLoader(Rows(size), workers=workers, **options)

    loader, seen, counts, grown = make(), Counter(), Counter(), []
    for epoch in range(epochs):
        done = False
        while not done:
            event, after = rng.choice(EVENTS), rng.randrange(1, 40)
            counts[event] += 1
            try:
                for step, batch in enumerate(loader):
                    info = pop_step_info(batch)
                    assert info.epoch == epoch
                    assert [*dict.fromkeys(batch["input_ids"][:, 0].tolist())] == [*info.keys]
                    seen.update(info.keys)
                    ledger.record(info)
                    if step == after and event == "kill":
                        kill_a_worker(loader, rng)
                    elif step == after:
                        break
                else:
                    done = True
            except WorkerError:
                counts["error"] += 1
            if done:
                break
            state = loader.state_dict()
            if event in ("close", "anew"):
                loader.close()
            if event == "anew":
                loader = make()
            loader.load_state_dict(state)
        assert {*seen.values()} == {epoch + 1}
        assert len(seen) == size
        grown.append(held())
    loader.close()
    ledger.close()
    assert counts["kill"] > 1  # not of errors: an epoch may end before a death is seen
    assert max(grown) <= grown[0] + 20
    report = audit(tmp_path, size=size)
    assert report.ok, str(report)
    print(dict(counts), grown, psutil.Process().memory_info().rss >> 20, "MiB")
