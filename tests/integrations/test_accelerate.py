"""Accelerate alone: its checkpoints, its counting of micro-steps, its guard."""

import ast
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import language_models as lm
import pytest
import torch
import trainers
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from ledgers import check_ledger, rows_of
from refusals import refuses

from odb_nodes import ODBDataLoader, StateError, load_rank_state, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from odb_nodes.training.memory import OomGuard
from odb_nodes.training.monitor import Monitor

SIZE = 40


def configured(accumulate=1, window=12, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    loader = ODBDataLoader(
        lm.Texts(SIZE), token_budget=64, window=window, round_size=4, accumulate=accumulate
    )
    return accelerator, configure_accelerator(accelerator, loader, **options)


# --- memory ---------------------------------------------------------------------------------------


def test_metrics_of_steps_that_a_guard_takes_are_no_figures():
    with configured()[1] as loader:
        guard = OomGuard(loader.loader)
        assert next(iter(guard)).infos
        assert loader.take_metrics() == {}
        with pytest.raises(TypeError, match="Pass the `.loader`"):
            OomGuard(loader)


# --- micro-steps ----------------------------------------------------------------------------------


def test_saving_within_an_optimizer_step_is_refused(tmp_path):
    accelerator, loader = configured(3)
    with loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(StateError, match="step 0 is micro-step 1 of 3"):
            accelerator.save_state(tmp_path)
        next(batches), next(batches)
        accelerator.save_state(tmp_path)
        next(batches)
        accelerator.load_state(tmp_path)
        accelerator.save_state(tmp_path)
        assert loader.loader.step == 3


def test_an_epoch_that_was_left_within_an_optimizer_step_disturbs_no_other():
    accelerator, loader = configured(3)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with loader:
        for most in (1, 1000):
            for number, batch in enumerate(loader, 1):
                info = pop_step_info(batch)
                with accelerator.accumulate(model):
                    assert accelerator.sync_gradients == info.ends_optimizer_step
                if number == most:
                    break


def test_another_accumulation_in_mid_run_is_refused():
    accelerator, loader = configured(3)
    with loader:
        batches = iter(loader)
        next(batches)
        accelerator.gradient_accumulation_steps = 2
        with pytest.raises(ValueError, match=r"`gradient_accumulation_steps` \(2\)"):
            next(batches)


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_of_another_configuration_says_how_to_load_it(tmp_path):
    accelerator, loader = configured()
    with loader:
        next(iter(loader))
        accelerator.save_state(tmp_path)
    accelerator, loader = configured(window=8)
    with loader:
        accelerator.load_state(tmp_path)
        with pytest.raises(StateError, match=r"`window` was 12 .* `loader.loader.load_state_dict"):
            next(iter(loader))
        loader.loader.load_state_dict(load_rank_state(tmp_path), strict=False)
        with pytest.warns(UserWarning, match="`window` was 12"):
            next(iter(loader))


def test_a_checkpoint_from_before_the_loader_says_how_to_begin_with_it(tmp_path):
    Accelerator(cpu=True).save_state(tmp_path)
    accelerator, loader = configured()
    with loader, pytest.raises(FileNotFoundError, match="call `load_state` before"):
        accelerator.load_state(tmp_path)


def test_a_step_is_recorded_before_it_is_saved_and_a_load_is_an_attempt(tmp_path):
    folder = tmp_path / "ledger"
    accelerator, loader = configured(ledger=folder)
    with loader:
        for number, _ in enumerate(loader):
            assert len(rows_of(folder) if number else []) == number
            if number == 3:
                accelerator.save_state(tmp_path / "saved")
                assert len(rows_of(folder)) == 4
            if number == 6:
                break
        accelerator.load_state(tmp_path / "saved")
        for _ in range(2):
            assert sum(1 for _ in loader)
    check_ledger(folder, SIZE, attempts=2)


def test_a_checkpoint_waits_for_the_monitor(tmp_path):
    monitor = Monitor(tmp_path / "run", progress=False)
    accelerator, loader = configured(monitor=monitor)
    with loader:
        batch = next(iter(loader))
        with pytest.raises(StateError, match="`monitor.step` must be called for step 0"):
            accelerator.save_state(tmp_path / "refused")
        monitor.step(batch, pop_step_info(batch))
        accelerator.save_state(tmp_path / "saved")


# --- the loader and its accelerator ---------------------------------------------------------------


def test_prepare_leaves_the_loader_as_it_is():
    accelerator, loader = configured()
    with loader:
        assert accelerator.prepare(loader) is loader
        assert sum(len(batch["id"]) for batch in loader) == SIZE
        assert loader.dataset is loader.loader.dataset


PREPARED = """
import warnings
import torch
from accelerate import Accelerator
from odb_nodes import ODBDataLoader
loader = ODBDataLoader([{"input_ids": [1, 2]}] * 9, token_budget=4)
with warnings.catch_warnings(record=True) as before:
    list(loader)
model, loader = Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1), loader)
with warnings.catch_warnings(record=True) as after:
    list(loader)
import odb_nodes.integrations.accelerate
with warnings.catch_warnings(record=True) as imported:
    list(loader)
print([[str(one.message) for one in found] for found in (before, after, imported)])
"""


def test_a_loader_that_was_only_prepared_says_that_nothing_of_it_is_saved():
    command = [sys.executable, "-c", PREPARED]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    before, after, imported = ast.literal_eval(run.stdout)
    assert (before, imported) == ([], [])
    (message,) = after
    assert "neither saves this loader" in message
    assert "configure_accelerator(accelerator, loader)" in message


def test_an_accelerator_has_one_loader_at_a_time_which_does_not_keep_it():
    accelerator, loader = configured()
    with loader, pytest.raises(ValueError, match="must have one configured loader"):
        configure_accelerator(accelerator, loader.loader)
    configure_accelerator(accelerator, loader.loader)
    reference = weakref.ref(accelerator)
    del accelerator, loader
    gc.collect()
    assert reference() is None


def alone(**options):
    return GradientAccumulationPlugin(num_steps=2, **options)


REFUSALS = [
    ({"gradient_accumulation_steps": 2}, lambda: [1, 2], TypeError, "must be an `ODBDataLoader`"),
    ({}, lambda: trainers.Job(folder=Path(), accumulate=3).loader(), ValueError, r"_steps` \(1\)"),
    (
        {"gradient_accumulation_plugin": alone(sync_with_dataloader=False)},
        lambda: trainers.Job(folder=Path(), accumulate=2).loader(),
        ValueError,
        "`sync_with_dataloader` must be True",
    ),
]
test_what_does_not_go_together_is_refused = refuses(
    REFUSALS,
    lambda options, loader: configure_accelerator(Accelerator(cpu=True, **options), loader()),
)
