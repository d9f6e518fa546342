"""A training job with a ledger that kills itself, all ranks at once, at a drawn place of a step."""

import os

import checkpoint_kills

from odb_nodes import Checkpoints, Ledger, ODBDataLoader, Skipped, TokenBudget, pop_step_info

SIZES = (61, 5, 44, 9)
EPOCHS = 2
SAVE_EVERY = 3


def sample_of(index):
    """Some are skipped, and some exceed the budget and are dropped."""
    if index % 13 == 4:
        return Skipped("thirteenth")
    return {"input_ids": [1] * (90 if index in (8, 21) else 3 + 7 * index % 23), "id": index}


def size_of(world_size, sharded):
    """Samples of all ranks."""
    return sum(SIZES[:world_size]) if sharded else 97


def train(folder, rank, world_size, pids, sharded, kill, meet):
    """Train from the newest checkpoint on, with a checkpoint every few steps.

    Args:
        folder: of the checkpoints and the ledger.
        rank, world_size: of this process.
        pids: the processes of all ranks.
        sharded: whether each rank has data of its own, of very different size.
        kill: `None`; or `rank`, the one that does it; and `after_records` and `place`, the part of
            the bytes of the record after those that is written before; or else the options of
            `checkpoint_kills.arrange`, for a kill within a save.
        meet: waits for all ranks; called before the ledger is closed.
    """
    size = SIZES[rank] if sharded else size_of(world_size, sharded)
    loader = ODBDataLoader(
        range(size),
        token_budget=TokenBudget(64, oversize="drop"),
        process_fn=sample_of,
        window=8,
        round_size=4,
        sharded=sharded,
    )
    done = {"epoch": 0}
    checkpoints = Checkpoints(folder / "checkpoints", {"loader": loader, "done": done})
    step = checkpoints.load()
    ledger = Ledger(folder / "ledger")
    if kill and "place" not in kill:
        checkpoint_kills.arrange(checkpoints, pids, **kill)
    elif kill and kill["rank"] == rank:
        _arrange(pids, kill)
    with loader, ledger:
        while done["epoch"] < EPOCHS:
            for batch in loader:
                ledger.record(pop_step_info(batch))
                step += 1
                if step % SAVE_EVERY == 0:
                    checkpoints.save(step)
            done["epoch"] += 1
        meet()
    return step


def _arrange(pids, kill):
    write, records = os.write, 0

    def kill_in_write(file, data):
        nonlocal records
        if not os.readlink(f"/proc/self/fd/{file}").endswith(".ledger"):
            return write(file, data)
        records += 1
        if records > kill["after_records"]:
            write(file, data[: int(len(data) * kill["place"])])
            checkpoint_kills.end(pids)
        return write(file, data)

    os.write = kill_in_write
