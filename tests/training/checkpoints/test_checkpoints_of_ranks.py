"""Checkpoints of ranks, asked for in different ways. Kills: ledger/test_killed_runs.py."""

import os
import re
import threading
import time
from types import SimpleNamespace

import pytest
from aligned_ranks import on_ranks
from rank_jobs import real_ids, run_ranks

from odb_nodes import Checkpoints, PeerError, StateError, load_state
from odb_nodes.core.alignment.exchange import channel as module
from odb_nodes.training.checkpoints.checkpoint_folders import CheckpointFolders


def complete(folder):
    return CheckpointFolders(folder).complete()


@pytest.mark.slow
def test_fsdp_modules_are_saved_in_shards(tmp_path):
    body = """
        from odb_nodes import Checkpoints
        from torch.distributed.fsdp import fully_shard
        def job(seed):
            torch.manual_seed(seed)
            model = fully_shard(torch.nn.Linear(6, 4))
            optimizer = torch.optim.AdamW(model.parameters())
            parts = {"model": model, "optimizer": optimizer}
            return model, optimizer, Checkpoints(sys.argv[1], parts)
        def train(model, optimizer):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return [parameter.to_local().tolist() for parameter in model.parameters()]
        model, optimizer, checkpoints = job(0)
        train(model, optimizer)
        checkpoints.save(1)
        expected = train(model, optimizer)
        dist.barrier()
        model, optimizer, checkpoints = job(1)
        assert checkpoints.load() == 1
        r.finish(train(model, optimizer) == expected)
    """
    assert run_ranks(tmp_path, body, 2, tmp_path / "checkpoints") == [True, True]


# Ranks that are threads.


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Runs a function on two ranks; returns what it returned, or raised, on each of them."""
    local, barrier = threading.local(), threading.Barrier(2, timeout=30)
    monkeypatch.setattr(module, "resolve_exchange", lambda group, timeout_s: local.exchange)

    def checkpoints(parts=None, folder="checkpoints", **options):
        return Checkpoints(tmp_path / folder, {"done": {}} if parts is None else parts, **options)

    def run(body, timeout_s=20.0):
        def on_rank(exchange):
            local.exchange = exchange
            try:
                return body(
                    SimpleNamespace(rank=exchange.rank, meet=barrier.wait, checkpoints=checkpoints)
                )
            except (PeerError, StateError) as error:
                return f"{type(error).__name__}: {error}"

        return on_ranks(2, on_rank, timeout_s)

    return run


def saved_steps(folder):
    return [path.name[:13] for path in complete(folder)]


def test_what_is_equal_on_all_ranks_is_written_once(results):
    def body(job):
        parts = {"model": {"value": job.rank}, "own": {"value": job.rank}}
        folder = job.checkpoints(parts, replicated=["model"]).save(4)
        job.meet()
        for part in parts.values():
            part["value"] = None
        assert job.checkpoints(parts).load() == 4  # it knows what was replicated
        saved = load_state(folder / f"rank{job.rank:05d}-of-00002.pt")["parts"]
        return [parts["model"]["value"], parts["own"]["value"], sorted(saved)]

    assert results(body) == [[0, 0, ["model", "own"]], [0, 1, ["own"]]]


def test_where_a_rank_cannot_load_all_raise_and_no_part_has_changed(results):
    def body(job):
        parts = {"done": {"rank": job.rank}, "more": {}}
        folder = job.checkpoints(parts).save(1)
        job.meet()
        if job.rank == 1:
            (folder / "rank00001-of-00002.pt").write_bytes(b"damaged")
        parts["done"]["rank"] = 7
        with pytest.raises((StateError, PeerError)) as caught:
            job.checkpoints(parts).load()
        assert parts == {"done": {"rank": 7}, "more": {}}
        return str(caught.value)

    error_of_rank_0, error_of_rank_1 = results(body)
    assert "rank 1 failed in loading the checkpoint" in error_of_rank_0
    assert "truncated or not a state file" in error_of_rank_1 and "Remove `" in error_of_rank_1


def test_where_a_rank_sees_checkpoints_that_were_not_loaded_all_raise(results, tmp_path):
    def body(job):
        if job.rank == 1:
            job.checkpoints(folder="1")._folders.folder(1, 5, "0" * 8).mkdir(parents=True)
            (tmp_path / "1/000001-step-5-00000000/rank00001-of-00002.pt").touch()
        job.meet()
        return job.checkpoints(folder=str(job.rank)).save(6)

    for error in results(body):
        assert "has 1, up to `000001-step-5-00000000`. Call `load()`" in error
    assert [path.name for path in tmp_path.glob("*/*")] == ["000001-step-5-00000000"]


def not_come(job):
    if job.rank == 1:
        return "not come"
    return job.checkpoints(timeout_s=1).load()


def alone(job):
    checkpoints = job.checkpoints(timeout_s=1)
    checkpoints.load()
    if job.rank == 0:
        for step in range(4):
            checkpoints.save(step)


def folder_of_each(job):
    job.checkpoints(folder=str(job.rank)).save(1)
    job.meet()
    job.checkpoints(folder=str(job.rank)).load()


def other_parts(job):
    job.checkpoints({f"done{job.rank}": {}}).load()


def waiting(job):
    """Rank 0 is two saves ahead, and waits, when rank 1 saves another step."""
    checkpoints = job.checkpoints()
    checkpoints.load()
    if job.rank == 1:
        time.sleep(0.5)
        checkpoints.save(7)
    for step in range(3):
        checkpoints.save(step)


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        (not_come, r"PeerError: .*rank \[?1\]? .*within", "not come"),
        (alone, "PeerError: rank 1 has not saved the checkpoint .*000001-step-0", "None"),
        (folder_of_each, *["StateError: .*rank 0 sees the files of 1 ranks.*all ranks share"] * 2),
        (other_parts, *["`Checkpoints.parts`"] * 2),
        (waiting, *["PeerError: the ranks save different steps"] * 2),
    ],
)
def test_ranks_that_do_not_agree_are_an_error(body, first, second, results):
    started = time.monotonic()
    outcomes = [*map(str, results(body, 2.0 if body is not_come else 20.0))]
    assert all(map(re.search, (first, second), outcomes)), outcomes
    assert time.monotonic() - started < 60  # of 600


def test_saving_different_steps_is_an_error_at_the_second_save_at_the_latest(results, tmp_path):
    def body(job):
        checkpoints = job.checkpoints()
        checkpoints.save(1)
        if job.rank == 0:
            checkpoints.save(10)
        job.meet()
        try:
            if job.rank == 1:
                checkpoints.save(11)
        finally:
            job.meet()
        if job.rank == 0:
            checkpoints.save(20)

    # Rank 1 sees what rank 0 has saved; rank 0, which was first, sees it one save later.
    first, second = results(body)
    for error, rank, mine, theirs in ((first, 0, 10, 11), (second, 1, 11, 10)):
        assert f"different steps: rank {rank} saves `000002-step-{mine}-" in error
        assert f"but another rank `000002-step-{theirs}-" in error
    assert saved_steps(tmp_path / "checkpoints") == ["000001-step-1"]


def test_a_save_that_failed_on_one_rank_may_be_tried_again_there(results, tmp_path, monkeypatch):
    replace, failing = os.replace, []

    def replace_or_fail(*paths):
        if threading.get_ident() in failing:
            failing.clear()
            raise OSError("disk")
        return replace(*paths)

    monkeypatch.setattr(os, "replace", replace_or_fail)

    def body(job):
        checkpoints = job.checkpoints({"done": {"step": 0}})
        checkpoints.save(1)
        if job.rank == 1:
            failing.append(threading.get_ident())
            with pytest.raises(OSError, match="disk"):
                checkpoints.save(2)
        for step in (2, 3, 4):
            checkpoints.save(step)

    assert results(body) == [None, None]
    assert saved_steps(tmp_path / "checkpoints") == ["000003-step-3", "000004-step-4"]


ON_A_MESH = """
    from odb_nodes import Checkpoints
    from torch.distributed.device_mesh import init_device_mesh
    folder, dp, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    names = "dp_shard", "cp"
    mesh = init_device_mesh("cpu", (dp, world_size // dp), mesh_dim_names=names)
    loader = r.make_dataloader(200, process_group=mesh)
    weights = torch.nn.Linear(2, 2)
    parts = {"loader": loader, "weights": weights}
    checkpoints = Checkpoints(folder, parts, replicated=["weights"], process_group=mesh)
    step, done, batches = checkpoints.load(), [], iter(loader)
    while len(done) < steps and (batch := next(batches, None)) is not None:
        done.append(r.describe(batch))
    checkpoints.save(step + len(done))
    loader.close()
    r.finish([step, done])
"""


@pytest.mark.slow
def test_a_checkpoint_of_a_mesh_resumes_on_another(tmp_path):
    seen, start = [], 0
    for world_size, dp, steps in [(4, 2, 4), (4, 4, 2), (4, 2, 3), (2, 1, 4), (4, 2, 10**6)]:
        results = run_ranks(tmp_path, ON_A_MESH, world_size, tmp_path / "runs", dp, steps)
        cp = world_size // dp
        assert {step for step, _ in results} == {start}
        assert all(result == results[rank // cp * cp] for rank, result in enumerate(results))
        start += len(results[0][1])
        seen += [index for _, done in results[::cp] for index in real_ids(done)]
    assert sorted(seen) == [*range(200)]
