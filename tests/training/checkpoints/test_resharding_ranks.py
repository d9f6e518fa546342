"""The run of docs/resuming.md, on real ranks that are killed: each sample is trained on once."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rank_jobs import free_port

from odb_nodes import audit
from odb_nodes.training.checkpoints.checkpoint_folders import CheckpointFolders

PAGE = Path(__file__).parents[3] / "docs/resuming.md"
SAMPLES = 6000


@pytest.fixture
def script(tmp_path):
    """The program that the page shows."""
    path = tmp_path / "train.py"
    path.write_text(
        re.search(r"<!-- the script -->\n```python\n(.*?)```", PAGE.read_text(), re.S)[1]
    )
    return path


def start(script, world_size, folder):
    """Start a process for each rank."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": port, "RUN_FOLDER": str(folder), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(world_size)
    ]


def kill_after_a_checkpoint(ranks, folder, timeout_s=90):
    """Kill all ranks, by SIGKILL, once they have saved a checkpoint that was not there before."""
    checkpoints = CheckpointFolders(folder / "checkpoints")
    before, deadline = checkpoints.complete()[-1:], time.monotonic() + timeout_s
    while checkpoints.complete()[-1:] == before and time.monotonic() < deadline:
        assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[0]
        time.sleep(0.002)
    for rank in ranks:
        rank.kill()
    outcomes = [(rank.communicate()[0], rank.returncode) for rank in ranks]
    assert [code for _, code in outcomes] == [-9] * len(ranks), outcomes[0][0]
    return checkpoints.complete()[-1]


@pytest.mark.timeout(400)
def test_a_run_shrinks_and_grows(script, tmp_path):
    folder, steps = tmp_path / "run", []
    for world_size in (4, 2):
        saved = kill_after_a_checkpoint(start(script, world_size, folder), folder)
        steps.append(int(saved.name.split("-")[2]))
    ranks = start(script, 3, folder)
    for rank in ranks:
        output, _ = rank.communicate(timeout=180)
        assert rank.returncode == 0, output
    assert 0 < steps[0] < steps[1]
    result = audit(folder / "ledger", SAMPLES)
    assert result.ok, result.problems
    (epoch,) = result.epochs
    assert epoch.is_complete and epoch.world_sizes == (4, 2, 3)
    assert epoch.fates == {"trained": SAMPLES}
