"""Real ranks, killed at any place: the audit of their records equals the audit of a whole run."""

import json
import random

import ledger_kills
import pytest
from rank_jobs import RankJob

from odb_nodes import audit
from odb_nodes.training.checkpoints.checkpoint_folders import CheckpointFolders

TRAINER = """
    import warnings
    from pathlib import Path
    import ledger_kills
    warnings.simplefilter("ignore")
    folder, sharded, kill = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    pids = r.gathered(os.getpid())
    meet = lambda: r.gathered(None)
    r.finish(ledger_kills.train(folder, rank, world_size, pids, sharded, kill, meet))
"""


def run(job_folder, folder, world_size, sharded, kill):
    """Whether the job has come to its end."""
    job_folder.mkdir(exist_ok=True)
    arguments = [folder, json.dumps(sharded), json.dumps(kill)]
    with RankJob(job_folder, TRAINER, world_size, *arguments) as job:
        results = job.results(90)
    for code, out, errors in results:
        assert code in (0, -9), f"{code}: {out[-500:]}\n{errors}"
    return all(code == 0 for code, *_ in results)


def check(folder, size, is_whole):
    result = audit(folder / "ledger")
    if result.epochs:  # else it was killed within its first record
        result = audit(folder / "ledger", size)
    assert result.state == ("ended" if is_whole else "open"), result.problems
    if is_whole:
        assert [epoch.is_complete for epoch in result.epochs] == [True] * ledger_kills.EPOCHS
        for epoch in result.epochs:
            assert sum(epoch.fates.values()) == size
            assert epoch.fates.keys() == {"trained", "dropped", "skipped (thirteenth)"}
    return result


def drawn_kill(draw, within, world_size, steps):
    """Where a run ends: within a record of the ledger, or at any moment of a save."""
    rank = draw.randrange(world_size)
    if within == "record":
        place = draw.choice([0.0, draw.random(), draw.random()])
        return {"rank": rank, "after_records": draw.randrange(max(2, steps // 3)), "place": place}
    delay_s = draw.random() * draw.choice([0, 0.002, 0.02])
    calls = draw.randrange(1, 60)  # of several saves
    return {"rank": rank, "after_calls": calls, "delay_s": delay_s, "seed": draw.random()}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("world_size", "sharded", "within", "most"),
    [
        (1, False, "record", 4),
        (2, True, "record", 2),
        (4, False, "record", 1),
        (2, False, "save", 6),
    ],
)
def test_a_run_killed_at_any_place_trains_each_sample_once(
    tmp_path, world_size, sharded, within, most, exhaustive
):
    size = ledger_kills.size_of(world_size, sharded)
    assert run(tmp_path / "job", tmp_path / "whole", world_size, sharded, None)
    whole = check(tmp_path / "whole", size, is_whole=True)
    if sharded and world_size > 1:
        assert sum(epoch.filler for epoch in whole.epochs) > 0
    draw, kills, attempt, incomplete, folder = random.Random(7), 0, 0, 0, tmp_path / "0"
    steps = sum(epoch.steps for epoch in whole.epochs)
    most = (100 if within == "save" else 20) if exhaustive else most
    while kills < most or attempt:
        kill = drawn_kill(draw, within, world_size, steps) if kills < most else None
        attempt += 1
        before = complete(folder)
        if not before:  # the job begins anew, and leaves unfinished folders alone
            left_alone = rank_file_names(folder)
        if run(tmp_path / "job", folder, world_size, sharded, kill):
            result = check(folder, size, is_whole=True)
            assert [epoch.digest for epoch in result.epochs] == [
                epoch.digest for epoch in whole.epochs
            ]
            names = rank_file_names(folder) - left_alone
            if complete(folder) != before:  # else nothing was left to save, and none cleaned up
                assert names == {path.name for path in complete(folder)} and len(names) == 2
            folder, attempt = tmp_path / str(kills + 1), 0
        else:
            kills += 1
            incomplete += len(rank_file_names(folder)) - len(complete(folder))
            if any((folder / "ledger").glob("*.ledger")):
                check(folder, size, is_whole=False)
    assert incomplete or within == "record"  # some were indeed killed within a save


def rank_file_names(folder):
    return {path.name for path in (folder / "checkpoints").glob("*")}


def complete(folder):
    return CheckpointFolders(folder / "checkpoints").complete()
