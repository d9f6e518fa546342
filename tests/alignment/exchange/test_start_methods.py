"""However the ranks of a job are started, they get the same groups; and what is no such job."""

import json

import pytest
from aligned_ranks import on_ranks
from in_process import InProcessHub
from rank_jobs import epochs_of, free_port, loader_over, make_dataloader, samples_of
from torchdata.nodes import Mapper
from worker_functions import Program, Texts

from odb_nodes import LengthObserver, Loader, RankAligner, ShardedSampler, WindowBucketer

SIZE = 101  # so that one of two ranks has more than the other

TORCHRUN = """
    import torch.distributed as dist
    import rank_jobs as r
    dist.init_process_group("gloo")
    r.write_groups(sys.argv[1], int(sys.argv[2]))
"""
MULTIPROCESSING = """
    import multiprocessing
    import rank_jobs as r
    method, folder, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    context, port = multiprocessing.get_context(method), r.free_port()
    ranks = [
        context.Process(target=r.join_and_write_groups, args=(rank, 2, port, folder, size))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode) for process in ranks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torchrun", "fork", "spawn", "forkserver"])
def test_ranks_get_the_groups_of_ranks_on_threads_however_they_are_started(how, tmp_path):
    if how == "torchrun":
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
        launcher = (*launcher, "--master-addr=127.0.0.1", f"--master-port={free_port()}")
        program = Program(tmp_path, TORCHRUN, tmp_path, SIZE, launcher=launcher)
    else:
        program = Program(tmp_path, MULTIPROCESSING, how, tmp_path, SIZE)
    with program:
        code, out, errors = program.finish(60)
        assert code == 0, f"{out}\n{errors}"
    expected = on_ranks(2, lambda rank: epochs_of(make_dataloader(SIZE, process_group=rank)))
    for rank, epochs in enumerate(expected):
        without_workers, with_two = json.loads((tmp_path / f"{rank}.json").read_text())
        assert without_workers == with_two == epochs


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


@pytest.mark.parametrize(("place", "shards", "ranks"), [(0, 3, 2), (1, 2, 2), (0, 2, 1)])
def test_a_source_of_another_rank_than_the_aligner_is_an_error(place, shards, ranks):
    texts = Texts(SIZE)
    source = Mapper(ShardedSampler(texts, rank=place, world_size=shards), texts.__getitem__)
    bucketer = WindowBucketer(LengthObserver(source), 96, 16)
    aligner = RankAligner(bucketer, InProcessHub(2).exchange(0) if ranks == 2 else None)
    rule = rf"`ShardedSampler` is rank {place} of {shards} ranks.*is rank 0 of {ranks}"
    with pytest.raises(RuntimeError, match=rule):
        iter(Loader(aligner))
