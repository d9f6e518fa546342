"""A monitor of real ranks: one file also after a kill; a lost rank is an error and no hang."""

import pytest
from monitors import records_of
from rank_jobs import RankJob

from odb_nodes.training.monitor import read_losses, read_run

TRAIN = """
import signal, sys, warnings
from odb_nodes import Checkpoints, ODBDataLoader, pop_step_info
from odb_nodes.training.monitor import Monitor, RowLosses
warnings.simplefilter("ignore")
folder, kill_at = sys.argv[1], int(sys.argv[2])
samples = [{"input_ids": [1] * (n % 23 + 2)} for n in range(200)]
loader = ODBDataLoader(samples, token_budget=64, window=8, accumulate=2, timeout_s=20)
monitor = Monitor(folder + "/run", every=3, losses_by_sample=True, timeout_s=20)
checkpoints = Checkpoints(folder + "/checkpoints", {"loader": loader, "monitor": monitor})
step = checkpoints.load()
for batch in monitor.watch(loader):
    info = pop_step_info(batch)
    ones = torch.ones(len(info.keys))
    targets = torch.tensor([len(samples[key]["input_ids"]) - 1 for key in info.keys])
    losses = RowLosses(targets * (1.0 + rank + info.step / 64), targets)
    monitor.step(batch, info, row_losses=losses)
    step += info.ends_optimizer_step
    if info.ends_optimizer_step and step % 4 == 0:
        checkpoints.save(step)
    if info.ends_optimizer_step and step == kill_at and (rank or not sys.argv[3:]):
        if rank == 0:  # in the middle of a line
            os.write(os.open(folder + "/run/monitor.jsonl", os.O_WRONLY | os.O_APPEND), b'{"kind"')
        os.kill(os.getpid(), signal.SIGKILL)
monitor.close()
"""


def test_killed_ranks_resume_in_one_file(tmp_path):
    for name, kills in (("whole", (0,)), ("killed", (7, 0))):
        for kill_at in kills:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            with RankJob(tmp_path, TRAIN, 2, str(folder), str(kill_at)) as job:
                results = job.results()
            codes = [code for code, *_ in results]
            assert codes == ([-9, -9] if kill_at else [0, 0]), results
    whole, killed = (tmp_path / name / "run" for name in ("whole", "killed"))
    assert records_of(killed) == records_of(whole)
    assert len(read_run(killed).attempts) == 2
    (epoch,) = read_run(whole).epochs
    assert epoch["sum"]["samples"] == 200
    losses = read_losses(killed)
    assert sorted(loss.key for loss in losses) == [*range(200)]
    assert sorted(losses) == sorted(read_losses(whole))
    weighted = sum(loss.loss * loss.targets for loss in losses) / epoch["sum"]["targets"]
    assert epoch["mean"]["loss"] == pytest.approx(weighted, rel=1e-6)


def test_another_number_of_ranks_resumes_in_one_file(tmp_path):
    """The checkpoint is of step 4, and records had 3 steps: step 4 is in the epoch's record."""
    for world_size, kill_at in ((2, 7), (3, 0)):
        with RankJob(tmp_path, TRAIN, world_size, str(tmp_path), str(kill_at)) as job:
            results = job.results()
        codes = [code for code, *_ in results]
        assert codes == [-9 if kill_at else 0] * world_size, results
    run, losses = read_run(tmp_path / "run"), read_losses(tmp_path / "run")
    (epoch,) = run.epochs
    assert (epoch["first_step"], epoch["step"]) == (1, run.steps[-1]["step"])
    assert epoch["sum"]["samples"] == 200
    assert [record["first_step"] for record in run.steps[:3]] == [1, 5, 8]
    assert [attempt["world_size"] for attempt in run.attempts] == [2, 3]
    assert sorted(loss.key for loss in losses) == [*range(200)]
    weighted = sum(loss.loss * loss.targets for loss in losses) / epoch["sum"]["targets"]
    assert epoch["mean"]["loss"] == pytest.approx(weighted, rel=1e-6)


def test_a_rank_that_is_killed_is_an_error_on_the_other(tmp_path):
    with RankJob(tmp_path, TRAIN, 2, str(tmp_path), "7", "rank 1 alone") as job:
        (code, _, errors), (other, *_) = job.results()
    assert (code, other) == (1, -9)
    assert "PeerError" in errors
