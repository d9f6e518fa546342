"""Each trainer integration records the steps that it trained on, and no others."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import accelerate_jobs as a
import language_models as lm
import lightning_runs as l
import trainer_jobs as t
from accelerate import Accelerator
from ledgers import check_ledger, rows_of
from transformers import TrainerCallback

from odb_nodes import ODBDataLoader, audit, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from odb_nodes.integrations.lightning import ODBCallback

SIZE = 40


def keys_of(folder):
    """Per recorded step, its keys."""
    return [[key for key, *_ in step] for step in rows_of(folder)]


def digests(found):
    return [epoch.digest for epoch in found.epochs]


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_records_what_it_trained_on_and_goes_on_after_each_checkpoint(
    tmp_path, accumulate
):
    folder = tmp_path / "ledger"
    options = {
        "gradient_accumulation_steps": accumulate,
        "odb": {"ledger": folder},
        "eval_dataset": lm.Texts(9),
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    whole = t.make_trainer(tmp_path, "whole", save_strategy="steps", save_steps=1, **options)
    whole.train()
    entries = t.entries_of(tmp_path, "whole")
    taken = [
        ids
        for entry in entries
        for ids, fills in zip(entry["ids"], entry["fillers"], strict=True)
        if not fills
    ]
    assert keys_of(folder) == taken
    expected = digests(check_ledger(folder, SIZE, attempts=1))
    half = len(entries) // 2
    for number, place in enumerate((1, half)):
        resumed = t.make_trainer(tmp_path, f"from-{place}", **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{place}"))
        assert digests(check_ledger(folder, SIZE, attempts=number + 2)) == expected


def test_a_step_of_a_trainer_that_failed_is_not_recorded(tmp_path):
    class Failing(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    trainer = t.make_trainer(tmp_path, odb={"ledger": tmp_path / "ledger"})
    trainer.add_callback(Failing())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert len(keys_of(tmp_path / "ledger")) == 4
    assert audit(tmp_path / "ledger", SIZE).state == "open"


# --- Accelerate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accelerate_records_what_it_trained_on_and_goes_on_after_each_checkpoint(
    tmp_path, accumulate
):
    folder = tmp_path / "ledger"
    options = {"accumulate": accumulate, "ledger": folder}
    a.train(tmp_path, "whole", save_every=1, **options)
    entries = lm.read(tmp_path / "whole-0.jsonl")
    assert keys_of(folder) == [ids for entry in entries for ids in entry["ids"]]
    expected = digests(check_ledger(folder, SIZE, attempts=1))
    half = len(entries) // 2
    for number, place in enumerate((half - 1, half)):
        a.train(tmp_path, f"from-{place}", resume=f"{tmp_path}/step-{place}", **options)
        assert digests(check_ledger(folder, SIZE, attempts=number + 2)) == expected


def loader_of(accelerator, folder):
    loader = ODBDataLoader(lm.Texts(SIZE), token_budget=64, window=12)
    return configure_accelerator(accelerator, loader, folder)


def test_accelerate_records_a_step_that_is_done(tmp_path):
    with loader_of(Accelerator(cpu=True), tmp_path / "ledger") as loader:
        for number, _ in enumerate(loader):
            assert len(rows_of(tmp_path / "ledger") if number else []) == number
            if number == 4:
                break
    assert len(rows_of(tmp_path / "ledger")) == 5  # the loop was left after the step
    assert audit(tmp_path / "ledger").state == "ended"
    with (
        pytest.raises(KeyboardInterrupt),
        loader_of(Accelerator(cpu=True), tmp_path / "failed") as loader,
    ):
        for number, _ in enumerate(loader):
            if number == 4:
                raise KeyboardInterrupt
    assert len(rows_of(tmp_path / "failed")) == 4
    assert audit(tmp_path / "failed").state == "open"


def test_accelerate_records_a_step_before_it_is_saved_and_an_attempt_after_it_is_loaded(tmp_path):
    accelerator, folder = Accelerator(cpu=True), tmp_path / "ledger"
    with loader_of(accelerator, folder) as loader:
        for batch in loader:
            step = pop_step_info(batch).step
            if step == 3:
                accelerator.save_state(tmp_path / "saved")
                assert len(rows_of(folder)) == 4
            if step == 6:
                break
        accelerator.load_state(tmp_path / "saved")
        for _ in range(2):
            for _ in loader:
                pass
    check_ledger(folder, SIZE, attempts=2)


# --- Lightning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["saved before us", "saved after us"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_records_what_it_trained_on_and_goes_on_after_each_checkpoint(
    tmp_path, accumulate, before
):
    folder = tmp_path / "ledger"
    save, ours = l.SaveEverywhere(tmp_path), ODBCallback(ledger=folder)
    odb = [save, ours] if before else [ours, save]
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    whole, _ = l.fit(odb=odb, **options)
    assert keys_of(folder) == [ids for _, ids, is_filler, _ in whole.seen if not is_filler]
    expected = digests(check_ledger(folder, l.SIZE, attempts=1))
    for path in save.paths[4:-3:13]:
        l.fit(odb=[ODBCallback(ledger=folder)], checkpoint=path, **options)
        assert digests(check_ledger(folder, l.SIZE)) == expected, path


def test_a_step_of_lightning_that_failed_is_not_recorded(tmp_path):
    class Failing(l.Module):
        def training_step(self, batch, batch_idx):
            if len(self.seen) == 4:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    with pytest.raises(SystemExit):
        l.fit(module=Failing(), odb=[ODBCallback(ledger=tmp_path)], max_epochs=1)
    assert len(keys_of(tmp_path)) == 4
    assert audit(tmp_path).state == "open"
