"""Jobs of real processes, one per rank, over gloo on 127.0.0.1; and what their programs import."""

import gc
import json
import socket
import textwrap
import time
from pathlib import Path

import psutil
import torch.distributed as dist
from torchdata.nodes import IterableWrapper
from worker_functions import Program, Texts

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    RankAligner,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.core.nodes.read_ahead import ReadAhead

WARM = ("torch.distributed.checkpoint", "torchdata.nodes", "odb_nodes", "psutil")
"""What every program of ranks imports."""

_BODY = """
import json
import torch.distributed as dist
import rank_jobs as r
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
"""


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class RankJob:
    """One program per rank, as torchrun would start them.

    Args:
        folder: where the files go.
        body: of the program, after torch.distributed is initialised. It has `rank` and
            `world_size`, and the names of this module as `r`.
        world_size: number of ranks.
        args: of the command line; `sys.argv[1:]` there.
        init: initialise torch.distributed.
        warm: names of modules that the ranks have imported as they start. With `--exhaustive`, and
            where there are none, each rank has an interpreter of its own.
    """

    fresh = False  # set by `--exhaustive`

    def __init__(self, folder, body, world_size, *args, init=True, warm=WARM):
        before = _BODY if init else _BODY.rpartition("dist.init")[0]
        whole, port = before + textwrap.dedent(body), free_port()
        self.ranks = []
        for rank in range(world_size):
            path, names = folder / f"rank{rank}", ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            path.mkdir(exist_ok=True)
            environment = dict(zip(names, map(str, (rank, rank, world_size)), strict=True))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            options = {"environment": environment, "warm": () if self.fresh else warm}
            self.ranks.append(Program(path, whole, *args, **options))

    def finish(self, timeout_s=120):
        """The output of each rank; an AssertionError shows the first that did not end well."""
        results = self.results(timeout_s)
        for rank, (code, out, errors) in enumerate(results):
            assert code == 0, f"rank {rank} ended with {code}:\n{out}\n{errors}"
        return [out for _, out, _ in results]

    def results(self, timeout_s=120):
        """Exit code, output and complaints of each rank."""
        return list(self.results_of(range(len(self.ranks)), timeout_s).values())

    def results_of(self, ranks, timeout_s=120):
        """The same by rank, of these ranks alone: others may go on."""
        deadline = time.monotonic() + timeout_s
        return {
            rank: self.ranks[rank].finish(max(0.1, deadline - time.monotonic())) for rank in ranks
        }

    def kill(self):
        for program in self.ranks:
            program.kill()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()


def run_ranks(folder, body, world_size, *args, timeout_s=120, **options):
    """What each rank of a job printed as its last line, from JSON."""
    with RankJob(folder, body, world_size, *args, **options) as job:
        return [json.loads(out.splitlines()[-1]) for out in job.finish(timeout_s)]


# --- what the programs use ------------------------------------------------------------------------


def samples_of(rank, size, seed=0):
    """Samples of one rank, whose lengths come from their ids; some labels are masked."""
    samples = []
    for index in range(size):
        length = 2 + (7 * index + 5 * seed + 3 * rank) % 23
        labels = [-100 if (index + place) % 3 == 0 else 1 for place in range(length)]
        samples.append({"input_ids": [1] * length, "labels": labels, "id": 1000 * rank + index})
    return samples


def make_loader(size, *, seed=0, **options):
    """The loader of this rank, over `size` samples of its own; see `loader_over`."""
    return loader_over(samples_of(dist.get_rank(), size, seed), **options)


def loader_over(samples, *, read_ahead=0, timeout_s=60.0, budget=60, window=8, **options):
    """The loader of a rank that has these samples."""
    bucketer = WindowBucketer(LengthObserver(IterableWrapper(samples)), budget, window)
    node = GroupCollator(RankAligner(bucketer, timeout_s=timeout_s, **options))
    return Loader(ReadAhead(node, read_ahead) if read_ahead else node)


def groups_alone(samples):
    """How many groups these samples make where no rank splits any to have more."""
    return len(list(Loader(WindowBucketer(LengthObserver(IterableWrapper(samples)), 60, 8))))


def make_dataloader(size, *, timeout_s=60.0, **options):
    """An `ODBDataLoader` over texts that its ranks share."""
    arguments = {"token_budget": 96, "window": 16, "round_size": 8, **options}
    return ODBDataLoader(Texts(size), timeout_s=timeout_s, **arguments)


def describe(batch):
    """A batch as plain data: ids, whether it fills, the totals."""
    info = pop_step_info(batch)
    return [
        batch["id"].tolist(),
        info.is_filler,
        info.step,
        info.all_samples_this_step,
        info.all_targets,
        info.loss_scale,
    ]


def epochs_of(loader, epochs=2):
    return [[describe(batch) for batch in loader] for _ in range(epochs)]


def real_ids(epoch):
    return sorted(index for ids, is_filler, *_ in epoch if not is_filler for index in ids)


def gathered(value):
    """The value of every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_epochs(sizes, epochs):
    """Equal steps on all ranks, every sample once; on every rank."""
    for epoch in zip(*gathered(epochs), strict=True):
        assert len({len(steps) for steps in epoch}) == 1, [len(steps) for steps in epoch]
        for rank, steps in enumerate(epoch):
            assert real_ids(steps) == [1000 * rank + index for index in range(sizes[rank])]
        for step in zip(*epoch, strict=True):
            assert (
                len({(index, samples, targets) for _, _, index, samples, targets, _ in step}) == 1
            )
            assert step[0][3] == sum(len(ids) for ids, is_filler, *_ in step if not is_filler)


def write_groups(folder, size):
    """Write what this rank gets, without workers and with two, to a file of its own."""
    groups = []
    for num_workers in (0, 2):
        with make_dataloader(size, num_workers=num_workers) as loader:
            groups.append(epochs_of(loader))
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(groups))
    dist.destroy_process_group()


def join_and_write_groups(rank, world_size, port, folder, size):
    """Be a rank whose environment says nothing of it."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=world_size)
    write_groups(folder, size)


def held(quiet_s=0.3):
    """What this process holds of the system, once that has not changed for `quiet_s`."""
    process, counts, since = psutil.Process(), None, time.monotonic()
    while time.monotonic() - since < quiet_s:
        now = {
            "threads": process.num_threads(),
            "files": process.num_fds(),
            "connections": len(process.net_connections("all")),
            "children": len(process.children(recursive=True)),
            "process groups": len(dist.distributed_c10d._world.pg_map),
        }
        if now != counts:
            counts, since = now, time.monotonic()
        time.sleep(0.02)
    return counts


def finish(value=None):
    """End as a program should: print a result, and leave the job."""
    print(json.dumps(value), flush=True)
    # A model under DDP would keep the group, and torch aborts now and then when one is left at the
    # very end: its threads need the interpreter to let go of tensors.
    gc.collect()
    dist.destroy_process_group()
