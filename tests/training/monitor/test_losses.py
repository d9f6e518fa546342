"""The loss of each sample: computed with the batch, kept over epochs and resumes."""

import json
import os
import time
import warnings

import pytest
import torch
from aligned_ranks import on_ranks
from in_process import InProcessHub
from monitors import DATA, loader_of, records_of
from torch.nn.functional import cross_entropy

from odb_nodes import ODBDataLoader, TokenBudget, pop_step_info
from odb_nodes.training.monitor import (
    Monitor,
    RowLosses,
    SampleLoss,
    read_losses,
    read_run,
    report,
    row_losses,
    worst_samples,
)
from odb_nodes.training.monitor.losses import SampleLossWriter
from odb_nodes.training.monitor.records import line_of

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches")
SAMPLES = [
    {
        "input_ids": [3 * n % 17 + 1 for n in range(m % 9 + 2)],
        "labels": [-100] * (m % 3) + [5] * (m % 9 + 2 - m % 3),
    }
    for m in range(24)
]


def logits_of(batch):
    """Logits that depend on a token alone, so that they are the same in every batch."""
    table = torch.randn(18, 18, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return table[batch["input_ids"]].requires_grad_()


@pytest.mark.parametrize("layout", ["padded", "packed", "packed with images"])
def test_the_loss_of_each_sample_is_that_of_the_sample_alone(layout):
    budget = TokenBudget(tokens=48, layout=layout[:6])
    seen = set()
    for batch in ODBDataLoader(SAMPLES, token_budget=budget, window=6):
        info = pop_step_info(batch)
        logits = logits_of(batch)
        places = batch.get("position_ids")
        if layout == "packed with images":  # of the text, then in time, height and width
            places = torch.stack([places, *[torch.zeros_like(places)] * 3])
        losses = row_losses(logits, batch["labels"], position_ids=places)
        for number, key in enumerate(info.keys):
            sample = {name: torch.tensor([values]) for name, values in SAMPLES[key].items()}
            alone = cross_entropy(
                logits_of(sample)[0, :-1].float(), sample["labels"][0, 1:], reduction="sum"
            )
            assert losses.sums[number].item() == pytest.approx(alone.item(), rel=1e-5, abs=1e-6)
            assert losses.targets[number] == (sample["labels"][0, 1:] != -100).sum()
            seen.add(key)
        assert losses.targets.sum() == info.local_targets
        assert losses.sums.requires_grad
    assert seen == {*range(24)}


def loss_of(source, key, epoch):
    return 1.0 + key / 64 + (source == "code") - epoch / 4


def step(monitor, batch, info):
    targets = [
        len(DATA[s][k]["input_ids"]) - 1 for s, k in zip(info.row_sources, info.keys, strict=True)
    ]
    means = [loss_of(s, k, info.epoch) for s, k in zip(info.row_sources, info.keys, strict=True)]
    sums = torch.tensor(means) * torch.tensor(targets)
    monitor.step(batch, info, row_losses=RowLosses(sums, torch.tensor(targets)))


def train(monitor, loader, epochs, steps=None, states=None):
    done = 0
    for _ in range(epochs):
        for batch in monitor.watch(loader):
            info = pop_step_info(batch)
            step(monitor, batch, info)
            done += info.ends_optimizer_step
            if states is not None and info.ends_optimizer_step:
                states.append((monitor.state_dict(), loader.state_dict()))
            if done == steps:
                return


def expected(epochs):
    return {
        SampleLoss(source, key, 0, epoch, len(row["input_ids"]) - 1, loss_of(source, key, epoch))
        for epoch in range(epochs)
        for source, rows in DATA.items()
        for key, row in enumerate(rows)
    }


def losses_monitor(folder, **options):
    return Monitor(folder, every=3, losses_by_sample=True, progress=False, **options)


def test_each_sample_has_one_loss_per_epoch_also_after_resumes(tmp_path):
    with losses_monitor(tmp_path) as monitor:
        states = []
        train(monitor, loader_of(), 2, states=states)
    losses = read_losses(tmp_path)
    assert len(losses) == 200 and {*losses} == expected(2)
    for number in range(0, len(states), 7):
        folder = tmp_path / str(number)
        with losses_monitor(folder) as monitor:
            train(monitor, loader_of(), 2, steps=number + 3)
        state, position = states[number]
        with losses_monitor(folder) as monitor:
            loader = loader_of()
            monitor.load_state_dict(state)
            loader.load_state_dict(position)
            train(monitor, loader, 2 - state["epoch"])
        resumed_losses = read_losses(folder)
        assert len(resumed_losses) == 200 and {*resumed_losses} == expected(2), number


def test_losses_of_the_run_and_of_sources_come_from_the_samples(tmp_path):
    """Without `losses_by_sample` the records are equal, and no other file is written."""
    for name, kept in (("with", True), ("without", False)):
        with Monitor(tmp_path / name, every=3, losses_by_sample=kept) as monitor:
            train(monitor, loader_of(), 1)
    assert records_of(tmp_path / "with") == records_of(tmp_path / "without")
    assert [path.name for path in (tmp_path / "without").iterdir()] == ["monitor.jsonl"]
    (epoch,) = read_run(tmp_path / "with").epochs
    for name in ("loss/web", "loss/code", "loss"):
        rows = [loss for loss in expected(1) if name.endswith((loss.source, "loss"))]
        mean = sum(loss.loss * loss.targets for loss in rows) / sum(loss.targets for loss in rows)
        assert epoch["mean"][name] == pytest.approx(mean, rel=1e-6)


def test_a_block_that_is_cut_short_or_damaged_is_left_out(tmp_path):
    with losses_monitor(tmp_path) as monitor:
        train(monitor, loader_of(), 1)
    (path,) = tmp_path.glob("losses-*.bin")
    data, whole = path.read_bytes(), read_losses(tmp_path)
    last = data.rindex(b"\n")
    path.write_bytes(data[:-7])
    cut = read_losses(tmp_path)
    assert 0 < len(cut) < len(whole) and cut == whole[: len(cut)]
    path.write_bytes(data[:-7] + data)  # what follows a kill is read, and takes its place
    assert read_losses(tmp_path) == whole
    is_last_block_warned_of = False
    for offset in range(0, len(data), 37):
        path.write_bytes(data[:offset] + bytes([data[offset] ^ 4]) + data[offset + 1 :])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = {*read_losses(tmp_path)}
        damaged = ["are damaged" in str(warning.message) for warning in caught]
        is_harmless = losses == {*whole}  # base64 ignores some bits of a line's last character
        assert losses < {*whole} or (is_harmless and not damaged)
        assert damaged == [True] or (not damaged and (is_harmless or offset >= last))
        is_last_block_warned_of |= bool(damaged) and offset >= last
    assert is_last_block_warned_of  # unless a kill may have cut it short
    assert len(data) < 16 * len(whole)


@pytest.mark.filterwarnings("ignore:.*monitor.jsonl. cannot be written")
def test_a_full_disk_warns_once(tmp_path, monkeypatch):
    with losses_monitor(tmp_path) as monitor:
        loader = loader_of()
        train(monitor, loader, 1, steps=3)
        monkeypatch.setattr(os, "write", lambda file, data: 0)
        with pytest.warns(UserWarning, match="the losses of these samples are missing") as caught:
            train(monitor, loader, 1)
        assert sum("losses of these samples" in str(warning.message) for warning in caught) == 1


def test_the_worst_samples_have_the_highest_loss_at_last(tmp_path):
    nan = float("nan")
    history = [("a", 1, (3.0, 1.0)), ("a", 2, (1.0, 2.0)), ("b", 1, (0.5, nan)), ("b", 2, (9.0,))]
    losses = [
        SampleLoss(source, key, 0, epoch, 4, loss)
        for source, key, values in history
        for epoch, loss in enumerate(values)
    ]
    histories = worst_samples([*losses, SampleLoss("c", 1, 0, 0, 0, 99.0)], 3)
    assert [(history[-1].source, history[-1].key) for history in histories] == [
        ("b", 1),
        ("b", 2),
        ("a", 2),
    ]
    assert [loss.loss for loss in histories[2]] == [1.0, 2.0]


def test_losses_of_fewer_samples_than_the_batch_has_are_refused_at_once(tmp_path):
    budget = TokenBudget(tokens=48, layout="packed")
    batch = next(iter(ODBDataLoader(SAMPLES, token_budget=budget, window=6)))
    info = pop_step_info(batch)
    losses = row_losses(logits_of(batch), batch["labels"])
    with pytest.raises(ValueError, match=r"each of the \d+ samples .* has 1 .*`position_ids="):
        losses_monitor(tmp_path).step(batch, info, row_losses=losses)
    with pytest.raises(ValueError, match=r"`logits` must be \(B, T, vocabulary\)"):
        row_losses(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.int64))


def test_samples_of_ranks_with_separate_data_are_distinguished(tmp_path):
    hub = InProcessHub(2, 20.0)

    def run(exchange):
        data = [{"input_ids": [1] * (n % 9 + 4)} for n in range(20)]
        loader = ODBDataLoader(
            data, token_budget=64, window=8, sharded=True, process_group=exchange
        )
        meeting = hub.exchange(exchange.rank)
        with losses_monitor(tmp_path / "run", process_group=meeting) as monitor:
            for batch in monitor.watch(loader):
                info = pop_step_info(batch)
                sums = torch.tensor([1.0 + 100 * exchange.rank + key for key in info.keys])
                targets = torch.ones(len(info.keys), dtype=torch.int64)
                monitor.step(batch, info, row_losses=RowLosses(sums, targets))
                Monitor(tmp_path / "other").load_state_dict(monitor.state_dict())

    on_ranks(2, run)
    losses = read_losses(tmp_path / "run")
    assert {(loss.rank, loss.key): loss.loss for loss in losses} == {
        (rank, key): 1.0 + 100 * rank + key for rank in range(2) for key in range(20)
    }
    assert [history[-1].rank for history in worst_samples(losses, 21)] == [1] * 20 + [0]
    report(tmp_path / "run", html=tmp_path / "r.html", json=tmp_path / "r.json")
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert run["worst"][0][-1]["loss"] == 120.0
    worst = (tmp_path / "r.html").read_text().partition("with the highest loss")[2]
    assert "<td>19</td><td>0</td><td>1</td>" in worst  # key, repeat, rank


@pytest.mark.parametrize("comes_back", [False, True])
@pytest.mark.parametrize("begins_at", [0, 2])
def test_files_of_ranks_that_left_the_run_do_not_count(
    tmp_path, monkeypatch, begins_at, comes_back
):
    """A run of one rank begins anew in the folder of one of two, or goes on from its step 2.

    The second rank may come back at step 4.
    """
    now_s = 100.0
    monkeypatch.setattr(time, "time", lambda: now_s)

    def write(rank, *rows):
        part = SampleLossWriter(tmp_path, rank)
        for loss, before, step in rows:
            part.write([SampleLoss("", rank, 0, 0, 5, loss)], before, step)
        part.close()

    for rank in range(2):
        write(rank, (9.0 - (rank == 0), 0, 1), (8.0, 1, 2), (7.0, 2, 3))
    now_s = 300.0
    write(0, (1.0, 0, 4))
    begins = [(0, 2, 99.0), (begins_at, 1, 200.0)]
    expected = {(0, 1.0)} | ({(1, 9.0), (1, 8.0)} if begins_at else set())
    if comes_back:
        now_s = 400.0
        write(1, (2.0, 4, 5))
        begins.append((4, 2, 400.0))
        expected.add((1, 2.0))
    names = ("step", "world_size", "time_s")
    attempts = [
        {"kind": "attempt", "version": 2, **dict(zip(names, begin, strict=True))}
        for begin in begins
    ]
    (tmp_path / "monitor.jsonl").write_text("".join(map(line_of, attempts)))
    assert {(loss.key, loss.loss) for loss in read_losses(tmp_path)} == expected
