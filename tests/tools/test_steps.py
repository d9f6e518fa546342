"""A step of a run is made again, bit for bit, in one process."""

import math
import random
import sys
from functools import partial
from itertools import islice

import pytest
import torch
from aligned_ranks import on_ranks
from jobs import KINDS, SAMPLES, Kind, augmented, noisy
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
    TokenBudget,
    WindowBucketer,
    load_state,
    pop_step_info,
    save_state,
)
from odb_nodes.cli import main
from odb_nodes.core.alignment.exchange.base import Exchange
from odb_nodes.tools.steps import remake_from_checkpoint, remake_from_ledger
from odb_nodes.training.checkpoints.rank_states import rank_file

pytestmark = pytest.mark.filterwarnings("ignore:.*skipped", "ignore:.*dropped")


BUDGET = TokenBudget(40, oversize="drop")


def of_kind(kind, **options):
    """A function: exchange -> loader."""
    return partial(Kind(kind.options | options).loader, folder=None)


def drawing(samples):
    """A collate function that draws."""
    return {name: torch.as_tensor(values) for name, values in noisy(samples).items()}


def own_data(rank_0, **options):
    """Ranks with separate data; one rank has few samples."""
    options |= {"dataset": lambda _, rank, __: range(SAMPLES if rank else rank_0)}
    return of_kind(KINDS["own data"], **options)


padded = of_kind(KINDS["accumulate"], collate_fn=drawing, process_fn=augmented, token_budget=BUDGET)
packed = of_kind(KINDS["packed"])
JOBS = {
    "padded": (4, padded),
    "packed": (1, packed),
    "mixed": (2, of_kind(KINDS["mixed"], accumulate=2)),
    "filling": (2, own_data(20)),
    "known": (2, of_kind(KINDS["known wrong lengths"], collate_fn=drawing)),
}


def recorded(make_loader, folder, epochs=1, steps=None, only=None):
    """Each rank's batch at each step and its state afterwards; a ledger records the steps.

    Args:
        make_loader: exchange -> loader.
        folder: of the ledger.
        epochs: how many are taken.
        steps: how many of an epoch, which has no end then.
        only: the steps that are recorded; None: all.
    """

    def run(exchange):
        ledger = Ledger(folder, rank=exchange.rank, world_size=exchange.world_size)
        by_step = {}
        with make_loader(exchange) as loader:
            for epoch in range(epochs):
                for batch in islice(loader, steps):
                    info = pop_step_info(batch)
                    by_step[epoch, info.step] = info, batch, loader.state_dict()
                    if only is None or info.step in only:
                        ledger.record(info)
        ledger.close(ended=steps is None)
        return by_step

    return run


def check(remade, info, batch):
    assert remade.info == info
    assert len(remade.tokens) == len(remade.targets) == info.local_samples
    assert sum(remade.targets) == info.local_targets
    assert remade.batch.keys() == batch.keys()
    for name, value in batch.items():
        remade_value = remade.batch[name]
        if isinstance(value, torch.Tensor):
            assert_close(remade_value, value, rtol=0, atol=0)
        else:
            assert remade_value == value


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "make_loader"), JOBS.values(), ids=JOBS)
def test_a_step_is_made_again_from_a_ledger_or_a_checkpoint(world_size, make_loader, tmp_path):
    ranks = on_ranks(world_size, recorded(make_loader, tmp_path, epochs=2))
    rng = random.Random(world_size)
    for epoch, step in [*rng.sample([*ranks[0]], 3), max(ranks[0])]:
        remade = remake_from_ledger(make_loader, tmp_path, epoch=epoch, step=step)
        assert [remade_step.rank for remade_step in remade] == [*range(world_size)]
        for remade_step, rank in zip(remade, ranks, strict=True):
            info, batch, _ = rank[epoch, step]
            if info.is_filler:
                assert remade_step.batch is None
                assert remade_step.info.is_filler
                assert remade_step.info.optimizer_targets == info.optimizer_targets
            else:
                check(remade_step, info, batch)
    last = max(step for epoch, step in ranks[0] if epoch == 0)
    for number, step in enumerate(rng.sample(range(last - 3), 2)):
        states = [rank[0, step][2] for rank in ranks]
        if number == 0:  # as a trainer writes them
            (tmp_path / "states").mkdir()
            for rank, state in enumerate(states):
                path = tmp_path / "states" / rank_file(rank, world_size)
                save_state({"epoch": 1, "loader": state}, path)
            states = tmp_path / "states"
        further = rng.randrange(3)
        remade = remake_from_checkpoint(make_loader, states, further=further)
        for remade_step, rank in zip(remade, ranks, strict=True):
            check(remade_step, *rank[0, step + 1 + further][:2])


@pytest.mark.parametrize("lost", [[9, 10, 11], [12]])
def test_a_step_whose_optimizer_step_was_not_recorded_whole_has_no_weight(lost, tmp_path):
    steps = [step for step in range(14) if step not in lost]  # 12, 13, 14 are one
    ranks = on_ranks(2, recorded(padded, tmp_path, steps=15, only=steps))
    remade = remake_from_ledger(padded, tmp_path, epoch=0, step=13)
    for remade_step, rank in zip(remade, ranks, strict=True):
        info, batch, _ = rank[0, 13]
        assert remade_step.info.keys == info.keys
        assert math.isnan(remade_step.info.loss_scale)
        assert remade_step.info.optimizer_targets == 0
        assert remade_step.info.all_targets == info.all_targets
        for name, value in batch.items():
            assert_close(remade_step.batch[name], value, rtol=0, atol=0)
    whole = remake_from_ledger(padded, tmp_path, epoch=0, step=7)
    check(whole[1], *ranks[1][0, 7][:2])


def test_a_step_of_an_iterable_is_made_again_from_a_checkpoint_alone(tmp_path):
    make_loader = of_kind(
        Kind({"dataset": lambda _, *shard: IterableSource(range(SAMPLES), *shard)})
    )
    ranks = on_ranks(2, recorded(make_loader, tmp_path))
    with pytest.raises(ValueError, match="cannot read items by their keys.*remake_from_checkpoint"):
        remake_from_ledger(make_loader, tmp_path, epoch=0, step=3)
    remade = remake_from_checkpoint(make_loader, [rank[0, 9][2] for rank in ranks])
    for remade_step, rank in zip(remade, ranks, strict=True):
        check(remade_step, *rank[0, 10][:2])


def test_a_key_of_ones_own_is_not_taken_for_that_of_another_sample(tmp_path):
    def observe(sample):
        return Observation(2, key=99 - sample["n"])

    def make_loader(group):
        data = [{"input_ids": [n, n], "n": n} for n in range(100)]
        return ODBDataLoader(data, token_budget=64, window=8, observe=observe, process_group=group)

    on_ranks(1, recorded(make_loader, tmp_path))
    with pytest.raises(StateError, match=r"is read for key \d+ is Sample.*`Observation.key`"):
        remake_from_ledger(make_loader, tmp_path, epoch=0, step=3)


def test_a_step_that_is_not_there_is_an_error(tmp_path):
    ranks = on_ranks(2, recorded(packed, tmp_path))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in tmp_path.glob("*.ledger"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / path.name).write_bytes(content)
    last, state = max(ranks[0])[1], {"model": 2}
    late = [rank[0, last - 2][2] for rank in ranks]
    from_ledger, from_checkpoint = remake_from_ledger, remake_from_checkpoint
    for remake, source, options, error, match in (
        (from_ledger, tmp_path, {"epoch": 0, "step": 999}, StateError, "no step 999 of epoch 0"),
        (from_ledger, tmp_path, {"epoch": 1, "step": 0}, StateError, "no step 0 of epoch 1"),
        (from_ledger, damaged, {"epoch": 0, "step": 0}, StateError, "is damaged"),
        (from_ledger, tmp_path / "x", {"epoch": 0, "step": 0}, FileNotFoundError, "no ledger"),
        (
            from_checkpoint,
            tmp_path,
            {},
            FileNotFoundError,
            r"has no states, but folders \['damaged'\]",
        ),
        (from_checkpoint, damaged, {}, FileNotFoundError, "has no states: pass the folder"),
        (from_checkpoint, [state, state], {}, StateError, "state of rank [01] holds none"),
        (from_checkpoint, [late[0], state], {}, StateError, None),
        (from_checkpoint, [state, late[1]], {}, StateError, "state of rank 0 holds none"),
        (from_checkpoint, late, {"further": 5}, StateError, "has 2 steps after this state"),
    ):
        with pytest.raises(error, match=match):
            remake(packed, source, **options)


@pytest.mark.parametrize("out", [8, 10])  # between two steps, and within one
def test_the_step_of_all_virtual_ranks_is_made_again(out):
    def make_loader(group):
        data = [{"input_ids": [n] * (n % 30 + 1)} for n in range(400)]
        options = {"token_budget": 64, "window": 8, "accumulate": 2, "process_group": group}
        return ODBDataLoader(data, virtual_ranks=4, **options)

    batches = iter(loader := make_loader(Exchange()))
    [next(batches) for _ in range(out)]
    state = loader.state_dict()
    resumed = make_loader(Exchange())
    resumed.load_state_dict(state)
    steps = iter(resumed)
    expected = [next(steps) for _ in range(4 - out % 4)]
    remade = remake_from_checkpoint(make_loader, [state])
    assert [remade_step.rank for remade_step in remade] == [0, 1, 2, 3]
    for remade_step, batch in zip(remade[out % 4 :], expected, strict=True):
        check(remade_step, pop_step_info(batch), batch)


def test_of_a_graph_without_an_aligner_too(tmp_path):
    def make_loader(group):
        node = LengthObserver(ParallelProcessor(ShardedSampler(90), augmented))
        return Loader(GroupCollator(WindowBucketer(node, BUDGET, 8), noisy, seed=3))

    (steps,) = on_ranks(1, recorded(make_loader, tmp_path))
    for step in (0, 7, 11):
        check(remake_from_ledger(make_loader, tmp_path, epoch=0, step=step)[0], *steps[0, step][:2])
        state = steps[0, step][2]
        (remade_step,) = remake_from_checkpoint(make_loader, [state], further=2)
        check(remade_step, *steps[0, step + 3][:2])


def test_a_step_of_a_run_without_an_end_is_made_again_by_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jobs_here", sys.modules[__name__])
    ranks = on_ranks(2, recorded(padded, tmp_path, steps=14))
    out, step = tmp_path / "step.pt", 11
    arguments = ["inspect", str(tmp_path), "--loader", "jobs_here:padded", "--step", str(step)]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--out", str(out)])
    printed = capsys.readouterr().out
    for rank, saved in enumerate(load_state(out)):
        info, batch, _ = ranks[rank][0, step]
        assert tuple(saved["info"]["keys"]) == info.keys
        assert f"rank {rank}, epoch 0, step {step}: {len(info.keys)} sample" in printed
        assert all(f"  {key}: " in printed for key in info.keys)
        for name, value in batch.items():
            assert_close(saved["batch"][name], value, rtol=0, atol=0)
