"""Ranks of one process write one file, and wait for nobody for ever."""

from dataclasses import replace

import pytest
import torch
from aligned_ranks import on_ranks
from in_process import InProcessHub
from monitors import loader_of, loss_of, steps_of

from odb_nodes import ODBDataLoader, PeerError, StateError, pop_step_info
from odb_nodes.monitor import Monitor, read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")


def samples_of(rank):
    return [{"input_ids": [1] * (n % (9 + 7 * rank) + 2)} for n in range(30 + 20 * rank)]


def test_ranks_write_one_file_with_the_mean_over_the_targets_of_all(tmp_path):
    """Two ranks with data of their own, of which one has less, and fills."""
    hub = InProcessHub(2, 20.0)  # an exchange meets the next call of the others: one for each use

    def run(exchange):
        meeting = hub.exchange(exchange.rank)
        loader = ODBDataLoader(
            [*samples_of(0), *samples_of(1)], token_budget=64, window=8, process_group=exchange
        )
        infos = []
        with Monitor(tmp_path, every=4, process_group=meeting, progress=False) as monitor:
            for batch in monitor.watch(loader):
                info = pop_step_info(batch)
                infos.append(info)
                loss = loss_of(info) + exchange.rank
                monitor.step(batch, info, loss=loss, ooms=exchange.rank, lr=5.0 + exchange.rank)
        return infos

    both = on_ranks(2, run)
    (epoch,) = read_run(tmp_path).epochs
    assert read_run(tmp_path).attempts[0]["world_size"] == 2
    weighted = sum(
        (float(loss_of(info)) + rank) * info.local_targets
        for rank, infos in enumerate(both)
        for info in infos
        if info.local_targets
    )
    targets = sum(info.local_targets for infos in both for info in infos)
    assert epoch["sum"]["targets"] == targets
    assert epoch["mean"]["loss"] == pytest.approx(weighted / targets, rel=1e-14)
    assert epoch["sum"]["samples"] == 80 and epoch["last"]["lr"] == 5.0  # of rank 0
    assert epoch["sum"]["ooms"] == epoch["sum"]["optimizer_steps"] == len(both[0])
    padded = [[info.local_padded_tokens for info in infos] for infos in both]
    busiest = sum(map(max, *padded))
    assert epoch["mean"]["rank_balance"] == pytest.approx(sum(map(sum, padded)) / (2 * busiest))


@pytest.mark.parametrize(
    ("every", "timeout_s", "error", "match"),
    [
        ([1, 2], 20.0, StateError, "`Monitor.every` is 1 on rank 0, 2 on rank 1"),
        ([1, 99], 0.5, PeerError, None),  # rank 1 does not come: an error and no hang
    ],
)
def test_ranks_at_different_steps_are_an_error(tmp_path, every, timeout_s, error, match):
    told = steps_of(loader_of(accumulate=1))

    def run(exchange):
        monitor = Monitor(tmp_path, every=every[exchange.rank], process_group=exchange)
        for step in told if every[exchange.rank] < 3 else []:
            monitor.step(*step)

    with pytest.raises(error, match=match):
        on_ranks(2, run, timeout_s=timeout_s)


def test_the_tokens_and_squares_are_those_of_the_dearest_rank_of_each_step(tmp_path):
    hub, rows = InProcessHub(2, 20.0), {0: [4, 4, 1], 1: [1, 8, 1]}  # of 1000, 1000, 20000 tokens
    widths = [1000, 500, 20_000]
    ((_, info), *_) = steps_of(loader_of(accumulate=1))

    def run(exchange):
        with Monitor(tmp_path, every=3, process_group=hub.exchange(exchange.rank)) as monitor:
            for step, (height, width) in enumerate(zip(rows[exchange.rank], widths, strict=True)):
                if exchange.rank == 1 and step == 2:
                    width = 19_000
                ids = torch.empty(height, width, dtype=torch.int8)
                told = replace(info, step=step, local_padded_tokens=height * width)
                monitor.step({"input_ids": ids}, told)

    on_ranks(2, run)
    (one,) = read_run(tmp_path).steps
    assert one["sum"]["dearest_tokens"] == 4 * 1000 + 8 * 500 + 20_000
    assert one["sum"]["dearest_squares"] == 4 * 1000**2 + 8 * 500**2 + 20_000**2
