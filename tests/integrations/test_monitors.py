"""Each trainer integration has a `Monitor` write the same file, and its checkpoints resume it."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import accelerate_jobs as a
import language_models as lm
import lightning_runs as l
import torch
import trainer_jobs as t
from accelerate import Accelerator
from gradients import mean_loss, samples_of
from monitors import records_of
from rank_jobs import RankJob
from transformers import TrainerCallback

from odb_nodes import ODBDataLoader, PaddingCollate, StateError, pop_step_info
from odb_nodes.integrations.accelerate import configure_accelerator
from odb_nodes.integrations.lightning import ODBCallback
from odb_nodes.monitor import Monitor, read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for batches", "ignore:.*are padding")
TOLERANCE = 1e-9
SIZE = 40


def monitor_of(folder, every=1):
    return Monitor(folder, every=every, progress=False)


def targets_of(ids):
    return sum(int((lm.sample_of(id)["labels"][1:] != -100).sum()) for id in ids)


def check_losses(folder, entries):
    """The loss of each step is that of the mean over all targets of its samples, one by one.

    That of an epoch is the mean over those of all its steps.
    """
    run = read_run(folder)
    assert [one["step"] for one in run.steps] == [*range(1, len(entries) + 1)]
    totals = {one["epoch"]: [0.0, 0] for one in run.epochs}
    for one, entry in zip(run.steps, entries, strict=True):
        ids = [
            id
            for ids, fills in zip(entry["ids"], entry["fillers"], strict=True)
            for id in ids
            if not fills
        ]
        expected = lm.expected_loss(torch.tensor(entry["before"], dtype=torch.float64), ids)
        targets = targets_of(ids)
        assert ("loss" in one["mean"]) == (targets > 0)
        assert one["mean"].get("loss", 0.0) == pytest.approx(expected, rel=TOLERANCE)
        assert one["sum"]["samples"] == len(ids)
        totals[one["epoch"]][0] += expected * targets
        totals[one["epoch"]][1] += targets
    for one in run.epochs:
        total, targets = totals[one["epoch"]]
        assert one["mean"]["loss"] == pytest.approx(total / targets, rel=TOLERANCE)


def check_epochs(folder, size, epochs=2):
    found = read_run(folder).epochs
    assert [one["epoch"] for one in found] == [*range(epochs)]
    assert [one["sum"]["samples"] for one in found] == [size] * epochs
    assert {*found[0]["mean"]} >= {"loss", "padding_share", "data_wait_share", "real_tokens_per_s"}
    assert found[0]["last"]["lr"] > 0


def same(found, expected):
    """Equal records, where losses may differ in the last bits."""
    for ones, others in zip(found, expected, strict=True):
        for one, other in zip(ones, others, strict=True):
            assert one["mean"] == pytest.approx(other["mean"], rel=TOLERANCE)
            assert one | {"mean": 0, "peak": 0, "last": 0} == other | {
                "mean": 0,
                "peak": 0,
                "last": 0,
            }


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["Normalizing", "Ignoring"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_tells_its_monitor_the_exact_loss(tmp_path, accumulate, model):
    options = {"gradient_accumulation_steps": accumulate, "max_grad_norm": 1.0}
    monitor = monitor_of(tmp_path / "run")
    trainer = t.make_trainer(tmp_path, model=model, odb={"monitor": monitor}, **options)
    trainer.train()
    check_losses(tmp_path / "run", t.entries_of(tmp_path, "train"))
    check_epochs(tmp_path / "run", SIZE)
    norms = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    steps = read_run(tmp_path / "run").steps
    assert [one["last"]["grad_norm"] for one in steps[1::2]] == pytest.approx(norms)
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert steps[0]["last"]["lr"] == t.LR >= rates[0]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_goes_on_with_its_monitor_after_each_checkpoint(tmp_path, accumulate):
    options = {"gradient_accumulation_steps": accumulate}
    saving = {"save_strategy": "steps", "save_steps": 1}
    monitor = monitor_of(tmp_path / "run", every=3)
    t.make_trainer(tmp_path, "whole", odb={"monitor": monitor}, **saving, **options).train()
    expected, steps = records_of(tmp_path / "run"), len(t.entries_of(tmp_path, "whole"))
    for place in (1, steps // 2, steps // 2 + 1):
        monitor = monitor_of(tmp_path / "run", every=3)
        resumed = t.make_trainer(tmp_path, f"at-{place}", odb={"monitor": monitor}, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{place}"))
        same(records_of(tmp_path / "run"), expected)


def test_a_step_of_a_trainer_that_failed_is_not_recorded_and_nobody_is_waited_for(tmp_path):
    class Failing(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 4:
                raise KeyboardInterrupt

    trainer = t.make_trainer(tmp_path, odb={"monitor": monitor_of(tmp_path / "run", every=3)})
    trainer.add_callback(Failing())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [one["step"] for one in read_run(tmp_path / "run").steps] == [3]
    assert "clip_grad_norm_" not in vars(trainer.accelerator)


def test_a_checkpoint_without_a_monitor_is_gone_on_from_at_its_step(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    t.make_trainer(tmp_path, "whole", **saving).train()
    resumed = t.make_trainer(tmp_path, "resumed", odb={"monitor": str(tmp_path / "run")})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    run = read_run(tmp_path / "run")
    assert run.attempts[0]["resumed_at"] == 4
    assert run.steps[0]["first_step"] == 5


def test_two_ranks_of_a_trainer_write_the_loss_over_the_targets_of_both(tmp_path):
    here = str(Path(__file__).parent)
    body = f"import sys; sys.path.insert(0, {here!r})\nimport trainer_jobs as t\nt.main()"
    options = {"folder": str(tmp_path), "num_train_epochs": 1, "gradient_accumulation_steps": 2}
    options["odb"] = {"monitor": str(tmp_path / "run")}
    warm = ("transformers.trainer_seq2seq", "odb_nodes.integrations.huggingface")
    with RankJob(tmp_path, body, 2, json.dumps(options), init=False, warm=warm) as job:
        job.finish(200)
    both = [lm.read(tmp_path / f"train-{rank}.jsonl") for rank in range(2)]
    total = targets = 0
    for entries in zip(*both, strict=True):
        ids = [
            id
            for entry in entries
            for ids, fills in zip(entry["ids"], entry["fillers"], strict=True)
            for id in ids
            if not fills
        ]
        before = torch.tensor(entries[0]["before"], dtype=torch.float64)
        total += lm.expected_loss(before, ids) * targets_of(ids)
        targets += targets_of(ids)
    run = read_run(tmp_path / "run")
    assert run.attempts[0]["world_size"] == 2
    assert run.epochs[0]["sum"]["samples"] == SIZE
    assert run.epochs[0]["mean"]["loss"] == pytest.approx(total / targets, rel=TOLERANCE)


# --- Accelerate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_accelerate_has_the_same_file_and_goes_on_with_it(tmp_path, accumulate):
    options = {"accumulate": accumulate}
    a.train(tmp_path, "whole", save_every=1, monitor=monitor_of(tmp_path / "run"), **options)
    entries = lm.read(tmp_path / "whole-0.jsonl")
    check_losses(tmp_path / "run", entries)
    check_epochs(tmp_path / "run", SIZE)
    expected, half = records_of(tmp_path / "run"), len(entries) // 2
    for place in (half - 1, half):
        monitor = monitor_of(tmp_path / "run")
        resume = f"{tmp_path}/step-{place}"
        a.train(tmp_path, f"from-{place}", resume=resume, monitor=monitor, **options)
        same(records_of(tmp_path / "run"), expected)


def test_accelerate_refuses_to_save_what_the_monitor_was_not_told(tmp_path):
    accelerator, monitor = Accelerator(cpu=True), monitor_of(tmp_path / "run")
    loader = ODBDataLoader(lm.Texts(SIZE), token_budget=64, window=12)
    with configure_accelerator(accelerator, loader, monitor=monitor) as loader:
        for batch in loader:
            info = pop_step_info(batch)
            with pytest.raises(StateError, match="`monitor.step` must be called for step 0"):
                accelerator.save_state(tmp_path / "saved")
            monitor.step(batch, info)
            accelerator.save_state(tmp_path / "saved-2")
            break


def test_accelerate_goes_on_at_the_step_of_each_checkpoint_without_a_monitor(tmp_path):
    options = {"token_budget": 64, "window": 12, "accumulate": 2}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with configure_accelerator(accelerator, ODBDataLoader(lm.Texts(SIZE), **options)) as loader:
        for batch in loader:
            step, is_micro = divmod(pop_step_info(batch).step + 1, 2)
            if not is_micro:
                accelerator.save_state(tmp_path / f"step-{step}")
            if step == 3:
                break
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    monitor, loader = monitor_of(tmp_path / "run"), ODBDataLoader(lm.Texts(SIZE), **options)
    with configure_accelerator(accelerator, loader, monitor=monitor) as loader:
        for step in (3, 2):
            accelerator.load_state(tmp_path / f"step-{step}")
            for batch in loader:
                info = pop_step_info(batch)
                monitor.step(batch, info)
                if info.step == 7:
                    break
            assert [one["step"] for one in read_run(tmp_path / "run").steps] == [
                *range(step + 1, 5)
            ]
    assert [one["resumed_at"] for one in read_run(tmp_path / "run").attempts] == [3, 2]


# --- Lightning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["saved before us", "saved after us"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_lightning_has_the_same_file_and_goes_on_with_it(tmp_path, accumulate, before):
    save, folder = l.SaveEverywhere(tmp_path), tmp_path / "run"
    ours = ODBCallback(monitor=monitor_of(folder, every=2))
    odb = [save, ours] if before else [ours, save]
    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    _, trainer = l.fit(odb=odb, **options)
    check_epochs(folder, l.SIZE)
    expected = records_of(folder)
    assert expected[0][-1]["step"] == trainer.global_step
    for path in save.paths[4:-3:13]:
        odb = [ODBCallback(monitor=monitor_of(folder, every=2))]
        l.fit(odb=odb, checkpoint=path, **options)
        same(records_of(folder), expected)


def test_lightning_tells_the_exact_loss_and_the_norm(tmp_path, monkeypatch):
    monkeypatch.setattr(
        l.Module, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), lr=0.0)
    )
    odb = [ODBCallback(monitor=monitor_of(tmp_path))]
    module, _ = l.fit(odb=odb, max_epochs=1, accumulate_grad_batches=3)
    samples = samples_of(0, l.SIZE)
    steps = read_run(tmp_path).steps
    for one, groups, gradient in zip(steps, module.groups(), module.gradients, strict=True):
        total = targets = 0
        for id in sum(groups, []):
            batch = PaddingCollate()([samples[id]])
            count = int((batch["labels"][:, 1:] != -100).sum())
            total += mean_loss(module.model, batch).item() * count
            targets += count
        assert one["mean"]["loss"] == pytest.approx(total / targets, rel=TOLERANCE)
        assert one["last"]["grad_norm"] == pytest.approx(gradient.norm().item())
