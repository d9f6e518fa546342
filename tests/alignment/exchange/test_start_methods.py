"""However the ranks of a job are started, they get the same groups; and what is no such job."""

import json

import pytest
from rank_jobs import epochs_of, free_port, loader_over, make_dataloader, on_threads, samples_of
from torchdata.nodes import Mapper
from worker_functions import Program, Texts

from odb_nodes import LengthObserver, Loader, RankAligner, ShardedSampler, WindowBucketer
from odb_nodes.alignment.exchange.in_process import InProcessHub

WORLD_SIZE = 2
SIZE = 101  # so that one rank has more than the other

TORCHRUN = """
    import torch.distributed as dist
    import rank_jobs as r
    dist.init_process_group("gloo")
    r.write_groups(sys.argv[1], int(sys.argv[2]))
"""
MULTIPROCESSING = """
    import multiprocessing
    import rank_jobs as r
    method, folder, world_size, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    context, port = multiprocessing.get_context(method), r.free_port()
    ranks = [
        context.Process(target=r.join_and_write_groups, args=(rank, world_size, port, folder, size))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
"""


@pytest.fixture(scope="module")
def on_threads_of_one_process():
    """By rank: the groups of two epochs."""
    return on_threads(
        WORLD_SIZE, lambda exchange: epochs_of(make_dataloader(SIZE, process_group=exchange))
    )


def test_ranks_on_threads_share_the_data_and_their_steps(on_threads_of_one_process):
    for epoch in zip(*on_threads_of_one_process, strict=True):
        ids = [
            index
            for steps in epoch
            for ids, is_filler, *_ in steps
            if not is_filler
            for index in ids
        ]
        assert sorted(ids) == list(range(SIZE))
        assert len({len(steps) for steps in epoch}) == 1


def check_groups(program, folder, expected):
    """Without workers and with two, each rank has written what it has on a thread."""
    with program:
        code, out, errors = program.finish(60)
        assert code == 0, f"{out}\n{errors}"
    for rank, epochs in enumerate(expected):
        without_workers, with_two = json.loads((folder / f"{rank}.json").read_text())
        assert without_workers == epochs
        assert with_two == epochs


def test_ranks_of_torchrun_get_the_groups_of_threads(tmp_path, on_threads_of_one_process):
    launcher = (
        *("-m", "torch.distributed.run"),
        f"--nproc-per-node={WORLD_SIZE}",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    )
    program = Program(tmp_path, TORCHRUN, tmp_path, SIZE, launcher=launcher)
    check_groups(program, tmp_path, on_threads_of_one_process)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ranks_of_multiprocessing_get_the_groups_of_threads(
    method, tmp_path, on_threads_of_one_process
):
    program = Program(tmp_path, MULTIPROCESSING, method, tmp_path, WORLD_SIZE, SIZE)
    check_groups(program, tmp_path, on_threads_of_one_process)


# --- jobs that nothing can align ------------------------------------------------------------------

LOADERS = {
    "ODBDataLoader": lambda: make_dataloader(SIZE),
    "RankAligner": lambda: loader_over(samples_of(0, SIZE)),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_several_ranks_without_a_process_group_are_an_error(make, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"has 2 ranks.*not initialised.*init_process_group\("):
        iter(make())


@pytest.mark.parametrize(("place", "shards"), [(0, 3), (0, 4), (1, 2)])
def test_a_source_of_another_rank_than_the_aligner_is_an_error(place, shards):
    texts = Texts(SIZE)
    source = Mapper(ShardedSampler(texts, rank=place, world_size=shards), texts.__getitem__)
    bucketer = WindowBucketer(LengthObserver(source), 96, 16)
    aligner = RankAligner(bucketer, InProcessHub(2).exchange(0))
    rule = rf"`ShardedSampler` is rank {place} of {shards} ranks.*is rank 0 of 2.*Give both the"
    with pytest.raises(RuntimeError, match=rule):
        iter(Loader(aligner))
