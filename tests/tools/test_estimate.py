import random

import numpy as np
import pytest
import torch
from in_process import InProcessHub
from refusals import refuses

from odb_nodes import IterableSource, JsonlSource, ODBDataLoader, TokenBudget
from odb_nodes.core.loader.options import LoaderOptions
from odb_nodes.tools.estimate import (
    estimate_epoch,
    estimate_loader_steps,
    estimate_steps,
    table_of_loader,
)
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import lognormal_lengths, simulate

LENGTHS = lognormal_lengths(900, cv=1.0, mean_tokens=90, longest_tokens=700)
DATASET = [{"input_ids": np.ones(length, np.int64)} for length in LENGTHS]
OPTIONS = {"token_budget": 1500, "window": 64, "seed": 3}


def halved(sample):
    return {"input_ids": sample["input_ids"][::2]}


@pytest.mark.parametrize(
    "change",
    [
        {"accumulate": 3, "process_fn": halved},
        {"shuffle": False},
        {"exclude": range(0, 900, 2), "sampler": range(0, 900, 3)},
        {"token_budget": TokenBudget(1500, layout="packed"), "largest_first": 3},
        {"lengths": LENGTHS, "window": "auto", "exclude": range(9)},
        {"lengths": LENGTHS, "window": "auto", "shuffle": False, "largest_first": 3},
    ],
)
def test_it_is_the_epoch_where_all_samples_are_looked_at(change):
    loader = ODBDataLoader(DATASET, **{**OPTIONS, **change})
    estimate = estimate_epoch(loader, samples=None)
    infos = [batch["odb_step_info"] for batch in loader]
    assert estimate.steps == len(infos)
    assert estimate.optimizer_steps == -(-len(infos) // loader.accumulate)
    padded = sum(info.local_padded_tokens for info in infos)
    real = sum(info.local_tokens for info in infos)
    assert estimate.padding_share == pytest.approx(1 - real / padded)
    assert (estimate.relative_error, estimate.balance) == (0.0, 1.0)


def test_it_is_of_all_ranks_and_asks_none():
    loader = ODBDataLoader(DATASET, process_group=InProcessHub(4).exchange(2), **OPTIONS)
    expected = simulate(LengthTable.of(LENGTHS), world_size=4, budget=1500, window=64, seed=3)
    assert estimate_epoch(loader, samples=None).report == expected
    sharded = ODBDataLoader(
        DATASET, process_group=InProcessHub(4).exchange(2), sharded=True, **OPTIONS
    )
    steps = estimate_epoch(sharded, samples=None).steps
    four = LengthTable.of(np.tile(LENGTHS, 4))
    expected = simulate(four, world_size=4, budget=1500, window=64, seed=3)
    assert steps == pytest.approx(expected.steps, rel=0.03)


class Blocks(list):
    shuffle_blocks, mixed_blocks = range(0, 200, 20), 2


@pytest.mark.parametrize(
    ("dataset", "change"),
    [
        (DATASET[:200], {}),
        (DATASET[:200], {"sampler": [n * 7 % 200 for n in range(150)]}),
        (DATASET[:200], {"state": "payload"}),
        (DATASET[:200], {"lengths": LENGTHS[:200]}),
        (Blocks(DATASET[:200]), {}),
        ({"a": Blocks(DATASET[:200]), "b": DATASET[200:230]}, {"weights": {"a": 2, "b": 1}}),
    ],
    ids=["plain", "sampler", "payload", "lengths", "blocks", "mixed blocks"],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_it_is_the_epoch_of_all_ranks_however_they_read(ranks, dataset, change, tmp_path):
    loader = ODBDataLoader(dataset, virtual_ranks=ranks, round_size=4, **OPTIONS, **change)
    table = table_of_loader(loader)
    table.save(tmp_path / "table.npz")
    loaded = LengthTable.load(tmp_path / "table.npz")
    assert loaded.digest == table.digest
    assert {name: tuple(block) for name, block in loaded.blocks.items()} == table.blocks
    report = estimate_epoch(loader, samples=None).report
    infos = [batch["odb_step_info"] for batch in loader]
    trained = [info for info in infos if not info.is_filler]
    assert (report.steps * ranks, report.filler_slots) == (len(infos), len(infos) - len(trained))
    assert report.padded_tokens == sum(info.local_padded_tokens for info in trained)


def test_some_samples_give_it_about():
    loader = ODBDataLoader(DATASET, **OPTIONS)
    whole = estimate_epoch(loader, samples=None)
    errors = [estimate_epoch(loader, samples=n).relative_error for n in (50, 200)]
    assert errors[1] < errors[0] / 1.5
    estimate = estimate_epoch(loader, samples=200)
    assert estimate.steps == pytest.approx(whole.steps, rel=3 * estimate.relative_error)
    text = str(estimate)
    assert f"{estimate.steps:,} steps (+- " in text and "padding" in text


@pytest.mark.parametrize("world_size", [1, 4])
def test_optimizer_steps_are_estimated_without_a_loader(world_size):
    options = {"world_size": world_size, "budget": 1500, "window": 64, "accumulate": 2}
    steps = simulate(LENGTHS, **options).steps / 2
    for samples, error in ((900, 0.05), (300, 0.15)):
        before = torch.get_rng_state()
        estimate = estimate_steps(DATASET, samples=samples, **options)
        # Ranks share out the end of an epoch: so short a one has a step less than is estimated.
        assert estimate == pytest.approx(steps, rel=error, abs=world_size > 1)
        assert torch.equal(torch.get_rng_state(), before)


def test_the_error_is_that_of_the_mean_of_draws():
    table = LengthTable.of(LENGTHS)
    draws = [np.random.default_rng(seed).permutation(900)[:300] for seed in range(100)]
    means = [LENGTHS[draw].mean() / LENGTHS.mean() for draw in draws]
    errors = [table.rows(draw).relative_error for draw in draws]
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.15)


def test_the_loader_and_the_generators_stay_where_they_are():
    def crop(sample):
        return {"input_ids": sample["input_ids"][: random.randint(1, 400)]}

    def take(estimates):
        loader = ODBDataLoader(DATASET, process_fn=crop, **OPTIONS)
        batches = []
        for batch in loader:
            batches.append(batch["input_ids"].shape)
            if estimates and len(batches) in (1, 5):
                before = random.getstate(), torch.get_rng_state(), loader.state_dict()
                estimate_epoch(loader, samples=20)
                assert random.getstate() == before[0]
                assert torch.equal(torch.get_rng_state(), before[1])
                assert loader.state_dict() == before[2]
        return batches

    assert take(estimates=True) == take(estimates=False)


def test_lines_of_json_are_read_anew(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f'{{"input_ids": {[1] * n}}}\n' for n in LENGTHS[:100].tolist()))
    with ODBDataLoader(JsonlSource(path), **OPTIONS) as loader:
        batches = iter(loader)
        next(batches)
        assert estimate_epoch(loader, samples=None).steps == 1 + sum(1 for _ in batches)
        assert len(table_of_loader(loader, samples=10)) == 10


REFUSALS = [
    (ODBDataLoader(IterableSource(DATASET), **OPTIONS), {}, TypeError, "IterableSource"),
    (ODBDataLoader(DATASET, **OPTIONS), {"samples": 0}, ValueError, "`samples`"),
    (DATASET, {}, TypeError, "`loader`"),
]
test_errors_name_what_is_wrong = refuses(
    REFUSALS, lambda loader, options: estimate_epoch(loader, **options)
)


def test_where_lengths_are_known_the_steps_are_counted_and_nothing_is_processed():
    lengths = [1 + 37 * index % 90 for index in range(400)]
    options = LoaderOptions(token_budget=256, lengths=lengths, process_fn=never, accumulate=2)
    loader = ODBDataLoader(
        [{"input_ids": [1] * tokens} for tokens in lengths], token_budget=256, lengths=lengths
    )
    steps = estimate_loader_steps(range(400), options, world_size=1, samples=8)
    assert steps == -(-sum(1 for _ in loader) // 2)


def never(item):
    raise AssertionError(f"{item} is processed")
