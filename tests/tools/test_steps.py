"""A step of a run is made again, bit for bit, in one process."""

import math
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from aligned_ranks import on_ranks
from step_jobs import (
    BUDGET,
    JOBS,
    SIZE,
    Shelf,
    augmented,
    check,
    masked,
    packed,
    padded,
    recorded,
    text_loader,
)
from torch.testing import assert_close

from odb_nodes import (
    GroupCollator,
    IterableSource,
    Ledger,
    LengthObserver,
    Loader,
    Observation,
    ODBDataLoader,
    ParallelProcessor,
    ShardedSampler,
    StateError,
    WindowBucketer,
    load_state,
    pop_step_info,
    save_rank_state,
)
from odb_nodes.alignment.exchange.base import LocalExchange
from odb_nodes.ledger.steps import read_steps
from odb_nodes.tools import steps as tool
from odb_nodes.tools.steps import remake_from_checkpoint, remake_from_ledger


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world_size", "make_loader"), JOBS)
def test_a_step_is_made_again_from_a_ledger(world_size, make_loader, tmp_path):
    ranks = on_ranks(world_size, recorded(make_loader, tmp_path, epochs=2))
    places = random.Random(world_size).sample([*ranks[0]], 5)
    for epoch, step in [*places, max(ranks[0])]:
        remade = remake_from_ledger(make_loader, tmp_path, epoch=epoch, step=step)
        assert [one.rank for one in remade] == [*range(world_size)]
        for one, rank in zip(remade, ranks, strict=True):
            info, batch, _ = rank[epoch, step]
            if info.is_filler:
                assert one.batch is None
                assert one.info.is_filler
                assert one.info.optimizer_targets == info.optimizer_targets
            else:
                check(one, info, batch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lost", [[9, 10, 11], [12]])
def test_a_step_whose_optimizer_step_was_not_recorded_whole_has_no_weight(lost, tmp_path):
    def run(exchange):
        ledger = Ledger(tmp_path, rank=exchange.rank, world_size=2)
        found = {}
        for batch in padded(exchange):
            info = pop_step_info(batch)
            found[info.step] = info, batch
            if info.step not in lost and info.step < 14:  # steps 12, 13, 14 are one
                ledger.record(info)
        return found

    ranks = on_ranks(2, run)
    for one, rank in zip(
        remake_from_ledger(padded, tmp_path, epoch=0, step=13), ranks, strict=True
    ):
        info, batch = rank[13]
        assert one.info.keys == info.keys
        assert math.isnan(one.info.loss_scale)
        assert one.info.optimizer_targets == 0
        assert one.info.all_targets == info.all_targets
        for name, value in batch.items():
            assert_close(one.batch[name], value, rtol=0, atol=0)
    whole = remake_from_ledger(padded, tmp_path, epoch=0, step=7)
    check(whole[1], *ranks[1][7])


@pytest.mark.filterwarnings("ignore")
def test_where_ranks_end_apart_those_that_go_on_are_made_again(tmp_path):
    def make_loader(group):
        size = 60 if group.rank == 0 else 200
        own = range(1000 * group.rank, 1000 * group.rank + size)
        options = {"sharded": True, "uneven": "join", "accumulate": 2}
        return text_loader(group, data=Shelf(own), **options)

    ranks = on_ranks(2, recorded(make_loader, tmp_path))
    ends = [max(rank)[1] for rank in ranks]
    assert ends[0] < ends[1]
    for step in range(ends[0] - 3, ends[0] + 5):
        remade = remake_from_ledger(make_loader, tmp_path, epoch=0, step=step)
        taking = [rank for rank in range(2) if step <= ends[rank]]
        assert [one.rank for one in remade] == taking
        for one in remade:
            assert one.info.keys == ranks[one.rank][0, step][0].keys


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world_size", "make_loader"), JOBS)
def test_the_step_after_a_checkpoint_is_made_again(world_size, make_loader, tmp_path):
    ranks = on_ranks(world_size, recorded(make_loader, tmp_path / "ledger"))
    rng = random.Random(world_size)
    for number, (_, step) in enumerate(rng.sample([*ranks[0]][:-3], 4)):
        states = [rank[0, step][2] for rank in ranks]
        if number == 0:  # as a trainer writes them
            for rank, state in enumerate(states):
                group = LocalExchange()
                group.rank, group.world_size = rank, world_size
                save_rank_state({"epoch": 1, "loader": state}, tmp_path / "states", group)
            states = tmp_path / "states"
        further = rng.randrange(3)
        remade = remake_from_checkpoint(make_loader, states, further=further)
        for one, rank in zip(remade, ranks, strict=True):
            check(one, *rank[0, step + 1 + further][:2])


def test_a_step_of_an_iterable_is_made_again_from_a_checkpoint_alone(tmp_path):
    def make_loader(group):
        return text_loader(group, data=IterableSource(range(SIZE), group.rank, group.world_size))

    with pytest.warns(UserWarning):
        ranks = on_ranks(2, recorded(make_loader, tmp_path))
    with pytest.raises(ValueError, match="cannot read items by their keys.*remake_from_checkpoint"):
        remake_from_ledger(make_loader, tmp_path, epoch=0, step=3)
    remade = remake_from_checkpoint(make_loader, [rank[0, 9][2] for rank in ranks])
    for one, rank in zip(remade, ranks, strict=True):
        check(one, *rank[0, 10][:2])


def test_a_key_of_ones_own_is_not_taken_for_that_of_another_sample(tmp_path):
    def observe(sample):
        return Observation(2, key=99 - sample["n"])

    def make_loader(group):
        data = [{"input_ids": [n, n], "n": n} for n in range(100)]
        return ODBDataLoader(data, token_budget=64, window=8, observe=observe, process_group=group)

    on_ranks(1, recorded(make_loader, tmp_path))
    with pytest.raises(StateError, match=r"is read for key \d+ is Sample.*`Observation.key`"):
        remake_from_ledger(make_loader, tmp_path, epoch=0, step=3)


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_not_there_is_an_error(tmp_path):
    on_ranks(2, recorded(packed, tmp_path))
    for epoch, step in ((0, 999), (1, 0)):
        with pytest.raises(StateError, match=f"has no step {step} of epoch {epoch}"):
            remake_from_ledger(packed, tmp_path, epoch=epoch, step=step)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in tmp_path.glob("*.ledger"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / path.name).write_bytes(content)
    with pytest.raises(StateError, match="is damaged, so nothing is made of it"):
        remake_from_ledger(packed, damaged, epoch=0, step=0)
    with pytest.raises(FileNotFoundError, match="has no ledger"):
        remake_from_ledger(packed, tmp_path / "elsewhere", epoch=0, step=0)
    with pytest.raises(StateError, match=r"has no states, but folders \['damaged'\]"):
        remake_from_checkpoint(packed, tmp_path)
    with pytest.raises(StateError, match="has no states: pass the folder of a checkpoint"):
        remake_from_checkpoint(packed, damaged)
    with pytest.raises(StateError, match="state of rank [01] holds none of a `GroupCollator`"):
        remake_from_checkpoint(packed, [{"model": 1}, {"model": 2}])
    ranks = on_ranks(2, recorded(packed, tmp_path / "other"))
    with pytest.raises(StateError):
        remake_from_checkpoint(packed, [ranks[0][0, 9][2], {"model": 2}])
    with pytest.raises(StateError, match="state of rank 0 holds none"):  # and rank 1 waits no more
        remake_from_checkpoint(packed, [{"model": 2}, ranks[1][0, 9][2]])
    last = max(ranks[0])[1]
    with pytest.raises(StateError, match="the epoch has 2 steps after this state"):
        remake_from_checkpoint(packed, [rank[0, last - 2][2] for rank in ranks], further=5)


def test_of_a_graph_without_an_aligner_too(tmp_path):
    def make_loader(group):
        node = LengthObserver(ParallelProcessor(ShardedSampler(90), augmented))
        return Loader(GroupCollator(WindowBucketer(node, BUDGET, 8), masked, seed=3))

    with pytest.warns(UserWarning):
        (steps,) = on_ranks(1, recorded(make_loader, tmp_path))
    for step in (0, 7, 11):
        check(remake_from_ledger(make_loader, tmp_path, epoch=0, step=step)[0], *steps[0, step][:2])
        state = steps[0, step][2]
        (again,) = remake_from_checkpoint(make_loader, [state], further=2)
        check(again, *steps[0, step + 3][:2])


PROGRAM = """
    import os, signal, sys, warnings
    sys.path.insert(0, {tests!r})
    warnings.simplefilter("ignore")
    import torch
    from aligned_ranks import on_ranks
    from odb_nodes import Ledger, pop_step_info
    from step_jobs import padded

    def run(exchange):
        ledger = Ledger({folder!r}, rank=exchange.rank, world_size=2)
        for batch in padded(exchange):
            info = pop_step_info(batch)
            torch.save([info.keys, dict(batch)], f"{folder}/{{exchange.rank}}-{{info.step}}.pt")
            ledger.record(info)
            if info.step == 13 and exchange.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    on_ranks(2, run)
"""


def test_a_step_of_a_killed_run_is_made_again_by_the_command(tmp_path, capsys):
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path))
    lines = "\n".join(line[4:] for line in program.splitlines())
    done = subprocess.run([sys.executable, "-c", lines], timeout=100, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    step = max(read_steps(tmp_path, 0, range(99))) - 2
    out = tmp_path / "step.pt"
    code = tool.main(
        ["step_jobs:padded", "--ledger", str(tmp_path), "--step", str(step), "--out", str(out)]
    )
    assert code == 0
    printed = capsys.readouterr().out
    for rank, again in enumerate(load_state(out)):
        keys, batch = torch.load(tmp_path / f"{rank}-{step}.pt")
        assert tuple(again["info"]["keys"]) == keys
        assert f"rank {rank}, epoch 0, step {step}: {len(keys)} samples" in printed
        assert all(f"  {key}: " in printed for key in keys)
        for name, value in batch.items():
            assert_close(again["batch"][name], value, rtol=0, atol=0)
