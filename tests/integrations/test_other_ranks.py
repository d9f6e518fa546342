"""Trainers go on with another number of ranks: each sample once, by the audit of their ledger."""

import json
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent))

from language_models import read
from rank_jobs import RankJob

from odb_nodes import audit
from odb_nodes.monitor import read_run

SIZE = 60
PROGRAM = """
    sys.path.insert(0, {folder!r})
    import {jobs} as jobs
    jobs.main()
"""
WARM = {
    "trainer_jobs": ("transformers", "odb_nodes.integrations.huggingface"),
    "accelerate_jobs": ("accelerate", "odb_nodes.integrations.accelerate"),
}


def job(folder, jobs, world_size, options):
    body = PROGRAM.format(folder=str(Path(__file__).parent), jobs=jobs)
    given = json.dumps(options)
    return RankJob(folder, body, world_size, given, init=False, warm=WARM[jobs])


def check(folder, world_sizes):
    found = audit(folder, SIZE)
    assert found.ok, found.problems
    (epoch,) = found.epochs
    assert epoch.is_complete and epoch.world_sizes == world_sizes
    assert epoch.fates == {"trained": SIZE}


@pytest.mark.parametrize("after", [1, 3])
def test_a_trainer(tmp_path, after):
    ledger, run = tmp_path / "ledger", tmp_path / "run"
    options = {"folder": str(run), "num_train_epochs": 1, "size": SIZE}
    odb = {"ledger": str(ledger), "monitor": str(tmp_path / "monitor"), "schedule": "samples"}
    options |= {"gradient_accumulation_steps": 2, "odb": odb}
    killed = options | {"name": "killed", "kill_at": 3, "save_strategy": "steps", "save_steps": 2}
    with job(tmp_path, "trainer_jobs", 2, killed) as ranks:
        assert [code for code, *_ in ranks.results(200)] == [-signal.SIGKILL] * 2
    with job(tmp_path, "trainer_jobs", after, options | {"name": "on", "resume": True}) as ranks:
        ranks.finish(200)
    check(ledger, (2, after))
    (epoch,) = read_run(tmp_path / "monitor").epochs
    assert epoch["sum"]["samples"] == SIZE and epoch["first_step"] == 1


@pytest.mark.parametrize("after", [1, 3])
def test_the_learning_rate_goes_on_from_where_it_was_at_the_pace_of_the_ranks(tmp_path, after):
    """A schedule by steps is made for those of 2 ranks, of which one rank takes twice as many."""
    options = {"folder": str(tmp_path / "run"), "num_train_epochs": 1, "size": SIZE}
    killed = options | {"name": "killed", "kill_at": 3, "save_strategy": "steps", "save_steps": 2}
    with job(tmp_path, "trainer_jobs", 2, killed) as ranks:
        assert [code for code, *_ in ranks.results(200)] == [-signal.SIGKILL] * 2
    checkpoint = f"{options['folder']}/checkpoint-2"
    on = options | {"name": "on", "resume": checkpoint}
    with job(tmp_path, "trainer_jobs", after, on) as ranks:
        ranks.finish(200)
    before, found = (
        [one["lr"] for one in read(tmp_path / "run" / f"{name}-0.jsonl")]
        for name in ("killed", "on")
    )
    step = before[0] - before[1]  # it falls along a line
    expected = [before[0] - step * (2 + n * after / 2) for n in range(len(found))]
    assert len(found) > 3 and step > 0
    assert found == pytest.approx([max(lr, 0) for lr in expected], rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("after", [1, 3])
def test_a_loop_of_accelerate(tmp_path, after):
    ledger, run = tmp_path / "ledger", tmp_path / "run"
    options = {"folder": str(run), "epochs": 1, "size": SIZE, "accumulate": 2}
    options |= {"ledger": str(ledger)}
    killed = options | {"name": "killed", "save_every": 2, "kill_at": 3}
    with job(tmp_path, "accelerate_jobs", 2, killed) as ranks:
        assert [code for code, *_ in ranks.results(200)] == [-signal.SIGKILL] * 2
    resumed = options | {"name": "on", "resume": str(run / "step-2")}
    with job(tmp_path, "accelerate_jobs", after, resumed) as ranks:
        ranks.finish(200)
    check(ledger, (2, after))
