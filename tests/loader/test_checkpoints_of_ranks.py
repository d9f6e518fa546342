"""Checkpoints of real ranks: killed at any moment of a save, and asked for in different ways."""

import json
import random
import time

import pytest
from rank_jobs import RankJob, run_ranks

from odb_nodes.loader.checkpoint_folders import CheckpointFolders

WORLD_SIZE = 2
TRAINER = """
    import checkpoint_kills
    from odb_nodes import Checkpoints
    folder, kill = sys.argv[1], json.loads(sys.argv[2])
    torch.manual_seed(rank)
    weights = torch.nn.Linear(2, 2)
    loader = r.make_loader([60, 45][rank], read_ahead=2)
    done = {"epoch": 0}
    parts = {"loader": loader, "weights": weights, "done": done}
    checkpoints = Checkpoints(folder, parts, timeout_s=60)
    step = checkpoints.load()
    print(json.dumps([step, done["epoch"]]), flush=True)
    if kill:
        checkpoint_kills.arrange(checkpoints, r.gathered(os.getpid()), **kill)
    while done["epoch"] < 3:
        for batch in loader:
            with torch.no_grad():
                weights.weight += torch.rand(2, 2)
            step += 1
            event = [step, done["epoch"], r.describe(batch), weights.weight.tolist()]
            print(json.dumps(event), flush=True)
            if step % 2 == 0:
                checkpoints.save(step)
        done["epoch"] += 1
        checkpoints.save(step)  # perhaps once more
    loader.close()
    print("end", flush=True)
    dist.destroy_process_group()
"""


def run_trainer(job_folder, folder, kill=None):
    """Where each rank began, the events of its steps, and whether it has come to the end."""
    with RankJob(job_folder, TRAINER, WORLD_SIZE, folder, json.dumps(kill)) as job:
        results = job.results(90)
    outcomes = []
    for code, out, errors in results:
        first, *events = out.splitlines()
        assert code in (0, -9), f"{code}: {out[-500:]}\n{errors}"
        outcomes.append((json.loads(first), [one for one in events if one != "end"], code == 0))
    return outcomes


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The events of each rank of a job that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    return [events for _, events, _ in run_trainer(folder, folder / "checkpoints")]


@pytest.mark.timeout(1200)
def test_a_job_killed_at_any_moment_of_a_save_resumes_exactly(whole, tmp_path, exhaustive):
    draw, kills, incomplete, folder = random.Random(7), 0, 0, tmp_path / "0"
    while kills < (100 if exhaustive else 8):
        kill = {
            "rank": draw.randrange(WORLD_SIZE),
            "after_calls": draw.randrange(1, 60),  # of several saves
            "delay_s": draw.random() * draw.choice([0, 0.002, 0.02]),
            "seed": draw.random(),
        }
        if check_run(whole, tmp_path, folder, kill):
            folder = tmp_path / str(kills)
        else:
            kills += 1
            incomplete += len(names_in(folder)) - len(complete(folder))
    print(f"{kills} kills left {incomplete} incomplete checkpoints")
    assert incomplete > (20 if exhaustive else 0)  # some were indeed killed within a save
    assert check_run(whole, tmp_path, folder, None)


def check_run(whole, job_folder, folder, kill):
    """Check what a job does from the newest checkpoint on; return whether it has come to an end."""
    saved = [int(path.name.split("-")[2]) for path in complete(folder)]
    outcomes = run_trainer(job_folder, folder, kill)
    for ((step, _), events, _), expected in zip(outcomes, whole, strict=True):
        assert step == (saved[-1] if saved else 0)
        assert events == expected[step : step + len(events)]
    ended = all(ended for *_, ended in outcomes)
    if ended and outcomes[0][1]:  # A job that has nothing left to do removes nothing.
        assert names_in(folder) == {path.name for path in complete(folder)}
        assert len(names_in(folder)) == 2
    return ended


def complete(folder):
    return CheckpointFolders(folder).complete()


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def errors_of(job_folder, body, *args, world_size=2):
    """What each rank of a job printed as its last line: its error, or what it returned."""
    caught = """
    from odb_nodes import Checkpoints, PeerError, StateError
    def run():
{body}
    try:
        result = run()
    except (PeerError, StateError) as error:
        result = f"{{type(error).__name__}}: {{error}}"
    r.finish(result)
    """
    return run_ranks(job_folder, caught.format(body=body), world_size, *args)


def test_what_is_equal_on_all_ranks_is_written_once(tmp_path):
    body = """
        def checkpoints(value, **options):
            parts = {"model": {"value": value}, "own": {"value": value}}
            return parts, Checkpoints(sys.argv[1], parts, **options)
        _, before = checkpoints(rank, replicated=["model"])
        folder = before.save(4)
        dist.barrier()
        parts, after = checkpoints(None)  # it knows what was replicated
        assert after.load() == 4
        path = folder / f"rank{rank:05d}-of-00002.pt"
        saved = torch.load(path, weights_only=True)["parts"]
        return [parts["model"]["value"], parts["own"]["value"], sorted(saved)]
    """
    folder = tmp_path / "checkpoints"
    assert errors_of(tmp_path, body, folder) == [[0, 0, ["model", "own"]], [0, 1, ["own"]]]


def test_fsdp_modules_are_saved_in_shards(tmp_path):
    body = """
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
        return train(model, optimizer) == expected
    """
    assert errors_of(tmp_path, body, tmp_path / "checkpoints") == [True, True]


def test_where_a_rank_cannot_load_all_raise_and_no_part_has_changed(tmp_path):
    body = """
        parts = {"done": {"rank": rank}, "more": {}}
        folder = Checkpoints(sys.argv[1], parts).save(1)
        dist.barrier()
        if rank == 1:
            (folder / "rank00001-of-00002.pt").write_bytes(b"damaged")
        parts["done"]["rank"] = 7
        try:
            Checkpoints(sys.argv[1], parts).load()
        except StateError as error:
            return [f"StateError: {error}", parts]
    """
    (other, changed), (own, _) = errors_of(tmp_path, body, tmp_path / "checkpoints")
    assert changed == {"done": {"rank": 7}, "more": {}}
    assert "StateError" in own and "truncated or not a state file" in own and "Remove `" in own
    assert "StateError: rank 1 failed in loading the checkpoint" in other


def test_a_rank_that_does_not_come_is_an_error(tmp_path):
    body = """
        start = time.monotonic()
        if rank == 1:
            time.sleep(5)
            return "not come"
        try:
            Checkpoints(sys.argv[1], {"done": {}}, timeout_s=3).load()
        finally:
            assert time.monotonic() - start < 10
    """
    error, _ = errors_of(tmp_path, body, tmp_path / "checkpoints")
    assert "PeerError: rank 1 did not come to the first exchange within 3" in error


def test_saving_on_one_rank_alone_is_an_error(tmp_path):
    body = """
        checkpoints = Checkpoints(sys.argv[1], {"done": {}}, timeout_s=3)
        checkpoints.load()
        if rank == 0:
            for step in range(4):
                checkpoints.save(step)
    """
    error, _ = errors_of(tmp_path, body, tmp_path / "checkpoints")
    assert "PeerError: rank 1 has not saved the checkpoint" in error and "000001-step-0" in error


def test_saving_different_steps_is_an_error_at_the_second_save_at_the_latest(tmp_path):
    body = """
        checkpoints = Checkpoints(sys.argv[1], {"done": {}}, timeout_s=60)
        checkpoints.save(1)
        if rank == 0:
            checkpoints.save(10)
        dist.barrier()
        try:
            if rank == 1:
                checkpoints.save(11)
        finally:
            dist.barrier()
        if rank == 0:
            checkpoints.save(20)
    """
    folder = tmp_path / "checkpoints"
    # Rank 1 sees what rank 0 has saved; rank 0, which was first, sees it one save later.
    first, second = errors_of(tmp_path, body, folder)
    for error, rank, mine, its in ((first, 0, 10, 11), (second, 1, 11, 10)):
        assert (
            f"PeerError: the ranks save different steps: rank {rank} saves `000002-step-{mine}-"
            in error
        )
        assert f"but another rank `000002-step-{its}-" in error
    assert [path.name[:13] for path in complete(folder)] == ["000001-step-1"]


def test_a_save_that_failed_on_one_rank_may_be_tried_again_there(tmp_path):
    body = """
        checkpoints = Checkpoints(sys.argv[1], {"done": {"step": 0}}, timeout_s=60)
        checkpoints.save(1)
        if rank == 1:
            replace, os.replace = os.replace, lambda *_: 1 / 0
            try:
                checkpoints.save(2)
            except ZeroDivisionError:
                os.replace = replace
        for step in (2, 3, 4):
            checkpoints.save(step)
        dist.barrier()
    """
    folder = tmp_path / "checkpoints"
    assert errors_of(tmp_path, body, folder) == [None, None]
    assert [path.name[:13] for path in complete(folder)] == ["000003-step-3", "000004-step-4"]


def test_different_steps_are_seen_while_a_rank_waits_for_the_other(tmp_path):
    body = """
        checkpoints = Checkpoints(sys.argv[1], {"done": {}}, timeout_s=60)
        checkpoints.load()
        if rank == 1:
            time.sleep(3)  # rank 0 is two saves ahead, and waits
            checkpoints.save(7)
        for step in range(3):
            checkpoints.save(step)
    """
    start = time.monotonic()
    for error in errors_of(tmp_path, body, tmp_path / "checkpoints"):
        assert "PeerError: the ranks save different steps" in error
    assert time.monotonic() - start < 50


def test_a_folder_of_each_rank_is_an_error(tmp_path):
    body = """
        folder = f"{sys.argv[1]}/{rank}"
        Checkpoints(folder, {"done": {}}).save(1)
        dist.barrier()
        Checkpoints(folder, {"done": {}}).load()
    """
    for error in errors_of(tmp_path, body, tmp_path / "checkpoints"):
        assert "StateError" in error and "rank 0 sees the files of 1 ranks" in error
        assert "Use a folder on a disk that all ranks share" in error


def test_other_parts_on_other_ranks_are_an_error(tmp_path):
    body = """
        Checkpoints(sys.argv[1], {f"done{rank}": {}}).load()
    """
    for error in errors_of(tmp_path, body, tmp_path / "checkpoints"):
        assert "`Checkpoints.parts`" in error
