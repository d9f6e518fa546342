"""Dynamic batches under Lightning, on two ranks: real processes, DDP over gloo."""

import signal

import pytest

pytest.importorskip("lightning.pytorch")

import lightning_runs as runs
from ledgers import check_ledger
from rank_jobs import RankJob, run_ranks

WARM = ("lightning.pytorch", "odb_nodes.integrations.lightning")
WHOLE = """
    import lightning_runs as l
    folder, accumulate = sys.argv[1], int(sys.argv[2])
    r.finish([l.whole_and_resumed(folder, accumulate), l.gradient_errors_of_ranks(accumulate)])
"""
KILLED = """
    import lightning_runs as l
    l.run_until_killed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
RESUMED = """
    import lightning_runs as l
    r.finish(l.resume_after_kill(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_train_exactly_and_resume_exactly(accumulate, tmp_path):
    given = (str(tmp_path), str(accumulate))
    found = run_ranks(tmp_path, WHOLE, 2, *given, init=False, warm=WARM, timeout_s=240)
    ranks = [rank[0] for rank in found]

    # The same steps on both ranks, and every sample once per epoch over both.
    steps = {rank["steps"] for rank in ranks}
    assert len(steps) == 1
    assert len({tuple(one[3] for one in rank["seen"]) for rank in ranks}) == 1
    for epoch in range(2):
        ids = [
            index
            for rank in ranks
            for number, ids, is_filler, _ in rank["seen"]
            for index in ids
            if number == epoch and not is_filler
        ]
        assert sorted(ids) == list(range(runs.RANKS_SIZE))

    # The gradient is that of one process that has the batches of both.
    assert max(error for rank in found for error in rank[1]) <= 1e-12

    # Killed with SIGKILL, and resumed in new processes from the last checkpoint.
    with RankJob(tmp_path, KILLED, 2, *given, "5", init=False, warm=WARM) as job:
        results = job.results()
        assert [code for code, _, _ in results] == [-signal.SIGKILL] * 2, results
        assert not any(program.running() for program in job.ranks)
    resumed_at = run_ranks(tmp_path, RESUMED, 2, *given, init=False, warm=WARM)
    assert resumed_at == [4, 4]
    check_ledger(tmp_path / "ledger", runs.RANKS_SIZE, attempts=2)

    # One rank goes on with the checkpoint of two, and has the rest of the epoch.
    alone = runs.resumed_alone(tmp_path, accumulate)
    before = [one for rank in ranks for one in rank["seen"] if one[3] < 4]
    for epoch in range(2):
        ids = [
            index
            for number, ids, is_filler, _ in [*before, *alone]
            for index in ids
            if number == epoch and not is_filler
        ]
        assert sorted(ids) == list(range(runs.RANKS_SIZE))
