"""A host of a job over several hosts, and its ranks: see `test_parted_hosts.py`.

A host is the first process of namespaces of its own: it sees every process that its ranks leave
behind, and when its input ends, the kernel ends all of them, and removes its network.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from odb_nodes import Checkpoints, Ledger, ODBDataLoader, pop_step_info

SAMPLES, SAVE_EVERY = 6000, 15
MOMENTS = ("in a round", "before the first round", "while saving")
PATIENCE_S = 20  # for processes to end after their ranks


class Texts:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return {"input_ids": np.full(2 + index % 60, index % 97)}


def make_loader(timeout_s, **options):
    given = {"token_budget": 512, "window": 64, "round_size": 8, "seed": 3, **options}
    return ODBDataLoader(Texts(), timeout_s=timeout_s, **given)


def keys_of(batch):
    """The keys of a batch and its info."""
    info = pop_step_info(batch)
    return [] if info.is_filler else list(info.keys), info


def run_rank(folder, rank, timeout_s, moment, step_s):
    """Train an epoch, or the rest of one; write the keys of each step and the error."""

    def reach(name):
        """Tell the test that this rank is there; wait for it, but for a moment in a round."""
        if name == moment:
            (folder / f"reached-{rank}").touch()
            while name != MOMENTS[0] and not (folder / "go").exists():
                time.sleep(0.02)

    def save_file(*arguments, save=torch.save, **options):
        if len(steps) > SAVE_EVERY:  # There is a complete checkpoint.
            reach("while saving")
        return save(*arguments, **options)

    steps, error = [], None
    torch.save = save_file
    try:
        dist.init_process_group("gloo")
        loader = make_loader(timeout_s, num_workers=1)
        checkpoints = Checkpoints(folder / "checkpoints", {"loader": loader}, timeout_s=timeout_s)
        step = start = checkpoints.load()
        ledger = Ledger(folder / "ledger")
        reach("before the first round")
        for batch in loader:
            keys, info = keys_of(batch)
            time.sleep(step_s)
            steps.append(keys)
            step += 1
            ledger.record(info)
            if step % SAVE_EVERY == 0:
                checkpoints.save(step)
            if len(steps) == 2 * SAVE_EVERY:
                reach("in a round")
        loader.close()
        ledger.close()
        dist.barrier()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    result = {"start": start, "steps": steps, "error": error, "ended_s": time.monotonic()}
    (folder / f"result-{rank}.part").write_text(json.dumps(result))
    (folder / f"result-{rank}.part").rename(folder / f"result-{rank}")


def processes():
    """The processes of this host but for this one."""
    return [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def main(folder, first, last, options):
    """Fork the ranks from `first` to `last`, wait for them, and write what they left behind."""
    sys.stdin.readline()  # The network is there.
    ranks = []
    for rank in range(first, last):
        os.environ["RANK"] = str(rank)
        if (pid := os.fork()) == 0:
            return run_rank(folder, rank, **options)  # It ends as programs do.
        ranks.append(pid)
    threading.Thread(target=lambda: os._exit(len(sys.stdin.read())), daemon=True).start()
    deadline = None
    while deadline is None or (processes() and time.monotonic() < deadline):
        pid, _ = os.waitpid(-1, os.WNOHANG) if processes() else (0, 0)
        ranks = [rank for rank in ranks if rank != pid]
        if not ranks and deadline is None:
            deadline = time.monotonic() + PATIENCE_S
        time.sleep(0.02)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in processes()]
    (folder / f"left-{first}").write_text(json.dumps(commands))
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
