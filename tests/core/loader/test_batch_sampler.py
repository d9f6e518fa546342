"""Batches of indices for loaders that are not ours: those of our loader, resumed exactly by any."""

import copy
import itertools
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from refusals import refuses
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from odb_nodes import (
    ODBDataLoader,
    StateError,
    TokenBatchSampler,
    TokenBudget,
    WeightedSampler,
    pop_step_info,
)
from odb_nodes.core.planning.known_epochs import KnownJob

LENGTHS = np.random.default_rng(0).integers(1, 41, 300).tolist()


def sampler(**options):
    return TokenBatchSampler(LENGTHS, 128, **{"window": 32, "rank": 0, "world_size": 1, **options})


def epochs(batches, number):
    return [[*batches] for _ in range(number)]


def ids(batches):
    return [batch.tolist() for batch in batches]


def loader_of(kind, batch_sampler, **options):
    return kind([*range(len(LENGTHS))], batch_sampler=batch_sampler, **options)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"window": "auto", "largest_first": 3},
        {"window": 40},
        {"window": "auto", "shuffle": False},
        {"window": "auto", "layout": "packed"},
    ],
)
def test_the_batches_are_those_of_our_loader_on_every_rank(world_size, options):
    """On several ranks that loader orders the steps of a round anew."""
    options = {"seed": 5, **options}
    budget = TokenBudget(128, layout=options.pop("layout", "padded"))

    def trained(exchange):
        data = [{"input_ids": [1] * length} for length in LENGTHS]
        loader = ODBDataLoader(
            data, lengths=LENGTHS, token_budget=budget, process_group=exchange, **options
        )
        infos = [[pop_step_info(batch) for batch in loader] for _ in range(2)]
        return [[[] if info.is_filler else [*info.keys] for info in epoch] for epoch in infos]

    for rank, expected in enumerate(on_ranks(world_size, trained)):
        of_rank = TokenBatchSampler(LENGTHS, budget, rank=rank, world_size=world_size, **options)
        for batches in expected:
            assert len(of_rank) == len(batches)
            of_epoch = [*of_rank]
            if world_size > 1:
                assert Counter(map(tuple, of_epoch)) == Counter(map(tuple, batches))
            else:
                assert of_epoch == batches


def test_an_epoch_is_planned_once():
    planned, plan = [], KnownJob.plan

    def counted(job, samples, order, epoch):
        planned.append(epoch)
        return plan(job, samples, order, epoch)

    with patch.object(KnownJob, "plan", counted):
        first = sampler()
        len(first)
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        assert [*batches] and planned == [0]
        again = sampler()
        again.load_state_dict(state)
        again.set_epoch(0)
        assert len(again) and [*again] and planned == [0, 0]
        assert len(again) and [*again] and planned == [0, 0, 1]


def test_an_epoch_may_be_an_integer_of_numpy_or_torch():
    for kind in (np.int64, torch.tensor):
        any_epoch = sampler()
        any_epoch.set_epoch(kind(1))
        assert [*any_epoch] == epochs(sampler(), 2)[1] and type(
            any_epoch.state_dict()["epoch"]
        ) is int
        drawn, plain = WeightedSampler([1.0] * 9), WeightedSampler([1.0] * 9)
        drawn.set_epoch(kind(3))
        plain.set_epoch(3)
        assert [*drawn] == [*plain]


def test_set_epoch_goes_to_any_epoch():
    original = sampler()
    expected = epochs(original, 3)
    assert expected[0] != expected[1] != expected[2]
    original.set_epoch(1)
    assert epochs(original, 2) == expected[1:]
    original.set_epoch(0)
    batches = iter(original)
    assert [next(batches) for _ in range(5)] == expected[0][:5]
    assert [*original] == expected[0]  # An iteration that was left begins the epoch again.
    original.set_epoch(0)
    batches = iter(original)
    assert [next(batches) for _ in range(len(original))] == expected[0]  # and nothing asks for more
    assert len(original) == len(expected[1]) and [*original] == expected[1]


def test_a_state_of_any_step_resumes_exactly():
    expected = epochs(sampler(), 2)
    original, states = sampler(), [sampler().state_dict()]
    states += [original.state_dict() for _ in original]
    for step, state in enumerate(states):
        again = sampler()
        again.load_state_dict(copy.deepcopy(state))
        again.set_epoch(0)  # as trainers call it, which changes nothing
        assert again.state_dict() == state
        assert [*again] == expected[0][step:] and [*again] == expected[1]


@pytest.mark.parametrize("chosen", [0, 3])
@pytest.mark.parametrize("out", [1, 4, None], ids=["first", "within", "last"])
def test_set_epoch_within_an_iteration_changes_the_next_one(chosen, out):
    """A state that is saved after the call gives what the run that goes on yields, too."""

    def make():
        return TokenBatchSampler(LENGTHS[:60], 128, window=32, rank=0, world_size=1)

    original, expected = make(), epochs(make(), 4)
    batches, out = iter(original), len(expected[0]) if out is None else out
    assert [*itertools.islice(batches, out)] == expected[0][:out]
    before = original.state_dict()
    original.set_epoch(chosen)
    assert {**original.state_dict(), "next_epoch": None, "digest": 0} == {**before, "digest": 0}
    for step in (out - 1, out):  # The last batch may wait in a worker of a `DataLoader`.
        state, again = original.state_dict(step), make()
        again.load_state_dict(state)
        assert len(again) == len(expected[0])
        assert [*again] == expected[0][step:] and [*again] == expected[chosen]
        again.load_state_dict(state)
        again.set_epoch(0)  # by the loop that resumes: it decides
        assert [*again] == expected[0][step:] and [*again] == expected[1]
    assert [*batches] == expected[0][out:]
    assert original.state_dict()["epoch"] == chosen and len(original) == len(expected[chosen])
    assert [*original] == expected[chosen]


def test_an_epoch_that_contradicts_a_loaded_state_leaves_out_no_batch():
    expected = epochs(sampler(), 2)
    original, again = sampler(), sampler()
    next(iter(original))
    again.load_state_dict(original.state_dict())
    with pytest.raises(StateError, match=r"be given 0, .* got 1, .* `set_epoch\(0\)` to continue"):
        again.set_epoch(1)
    assert [*again] == expected[0][1:]
    again.load_state_dict(sampler().state_dict())  # before the first batch
    again.set_epoch(1)
    assert [*again] == expected[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_resumes_exactly(workers):
    def loader():
        return loader_of(StatefulDataLoader, sampler(), num_workers=workers)

    expected = [ids(epoch) for epoch in epochs(loader(), 2)]
    assert expected == epochs(sampler(), 2)
    for step in 1, 7, len(expected[0]) - 1:
        original = loader()
        batches = iter(original)
        for _ in range(step):
            next(batches)
        state = original.state_dict()
        del batches
        again = loader()
        again.load_state_dict(state)
        assert ids(again) == expected[0][step:]
        assert ids(again) == expected[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated")
def test_lightning_and_accelerate_train_each_epoch_anew(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    accelerate = pytest.importorskip("accelerate")
    expected, seen = epochs(sampler(), 3), []

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def training_step(self, batch, _):
            seen.append(batch.tolist())
            return self.weight * batch.numel()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    names = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"
    quiet = {"accelerator": "cpu", "default_root_dir": tmp_path, **dict.fromkeys(names, False)}
    trainer = lightning.Trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1, **quiet)
    trainer.fit(Model(), loader_of(DataLoader, sampler()))
    assert seen == [*itertools.chain(*expected)]
    prepared = accelerate.Accelerator(cpu=True).prepare(loader_of(DataLoader, sampler()))
    assert [ids(epoch) for epoch in epochs(prepared, 3)] == expected
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


test_what_cannot_be_is_named = refuses(
    [
        ({"lengths": [3, 0]}, ValueError, "`lengths` .*at least 1"),
        ({"lengths": [3], "world_size": 2}, ValueError, "each of the 2 ranks, but has 1"),
        ({"budget": TokenBudget(8, max_patches=4)}, ValueError, "no `max_patches`"),
        ({"shuffle": 1}, TypeError, "`shuffle`"),
        ({"window": "all"}, ValueError, "`window`.*'all'"),
        ({"largest_first": -1}, ValueError, "`largest_first`.*-1"),
        ({"seed": "a"}, TypeError, "`seed`.*'a'"),
        ({"rank": 2}, ValueError, "`rank`"),
    ],
    lambda changed: TokenBatchSampler(
        **{"lengths": [3, 5], "budget": 8, "rank": 0, "world_size": 1, **changed}
    ),
)


def test_a_state_of_other_settings_or_a_damaged_one_is_refused():
    saved = sampler(seed=1)
    batches = iter(saved)
    for _ in range(3):
        next(batches)
    state = saved.state_dict(3)
    with pytest.raises(
        StateError, match=r"`seed` was 1 when saved, but is 0 now.* `set_epoch\(1\)`"
    ):
        sampler().load_state_dict(state)
    with pytest.raises(StateError, match="`lengths`"):
        TokenBatchSampler([1, *LENGTHS[1:]], 128, window=32, seed=1).load_state_dict(state)
    with pytest.raises(StateError, match="damaged"):
        sampler(seed=1).load_state_dict({**state, "step": 4})
    with pytest.raises(ValueError, match="`step`"):
        sampler().state_dict(-1)
    with pytest.raises(ValueError, match="`step` must be at most 3"):
        saved.state_dict(4)


@pytest.mark.slow
def test_a_plain_loader_with_workers_resumes_by_the_steps_that_were_trained():
    original = sampler()
    batches = iter(loader_of(DataLoader, original, num_workers=2))
    trained = [next(batches).tolist() for _ in range(5)]
    state = original.state_dict(len(trained))
    assert original.step > len(trained)
    rest = [*batches][:-1]  # The workers have the last ones, though the sampler is at its end.
    assert original.state_dict(len(trained)) == state
    assert original.state_dict(5 + len(rest))["step"] == 5 + len(rest)
    del batches
    again = sampler()
    again.load_state_dict(state)
    assert [*trained, *ids(loader_of(DataLoader, again, num_workers=2))] == [*sampler()]
