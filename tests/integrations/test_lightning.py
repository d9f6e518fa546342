"""Dynamic batches under Lightning, on one rank: what is trained on, and how it resumes."""

import csv
import subprocess
import sys

import pytest

pytest.importorskip("lightning.pytorch")

import lightning_runs as r
import torch
from gradients import OneProcess, mean_loss, relative_error, samples_of
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from odb_nodes import ODBDataLoader, StateError, pop_step_info
from odb_nodes.integrations.learning_rate import LrScaling
from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule

TOLERANCE = 1e-12
ENDS = {1: [{"max_epochs": 2}, {"max_steps": 17}], 3: [{"max_epochs": 2}, {"max_steps": 7}]}


def every_sample_once(module, epochs, size=r.SIZE):
    for epoch in range(epochs):
        ids = [one for number, ids, is_filler, _ in module.seen for one in ids if number == epoch]
        if sorted(ids) != list(range(size)):
            return False
    return True


# --- the loss -------------------------------------------------------------------------------------


def gradient_errors(module, size=r.SIZE):
    one = OneProcess([size])
    return [
        relative_error(gradient, one.gradient(groups, "exact"))
        for gradient, groups in zip(module.gradients, module.groups(), strict=True)
    ]


@pytest.fixture
def frozen(monkeypatch):
    """The weights stay those that the expected gradients are computed with."""
    monkeypatch.setattr(
        r.Module, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), lr=0.0)
    )


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_gradient_is_that_of_the_mean_over_all_targets(accumulate, frozen):
    module, trainer = r.fit(max_epochs=2, accumulate_grad_batches=accumulate)
    assert max(gradient_errors(module)) <= TOLERANCE
    assert every_sample_once(module, 2)
    assert len(module.seen) % accumulate != 0 or accumulate == 1  # An epoch ends within a step.
    assert trainer.global_step == len(module.gradients)


def test_losses_that_are_not_weighed_give_another_gradient(frozen, monkeypatch):
    monkeypatch.setattr(ODBCallback, "on_before_backward", Callback.on_before_backward)
    module, _ = r.fit(max_epochs=1, accumulate_grad_batches=3)
    assert min(gradient_errors(module)) > 1e-3


def test_losses_that_are_weighed_twice_give_another_gradient(frozen):
    class Twice(ODBCallback):
        def on_before_backward(self, *given):
            super().on_before_backward(*given)
            super().on_before_backward(*given)

    module, _ = r.fit(max_epochs=1, accumulate_grad_batches=3, odb=[Twice()])
    assert min(gradient_errors(module)) > 1e-3


def test_a_module_that_weighs_by_the_step_info_does_not_weigh_twice(frozen):
    class Weighing(r.Module):
        def training_step(self, batch, batch_idx):
            (callback,) = self.trainer.callbacks
            return super().training_step(batch, batch_idx) * callback.step_info.loss_scale

    module, _ = r.fit(module=Weighing(), max_epochs=1, accumulate_grad_batches=3)
    assert max(gradient_errors(module)) <= TOLERANCE


def test_a_module_that_takes_the_step_info_from_the_batch_is_refused():
    class Popping(r.Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * pop_step_info(batch).loss_scale

    with pytest.raises(KeyError, match="popped before"):
        r.fit(module=Popping(), max_epochs=1)


class ManualModule(r.Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.note(batch)
        self.manual_backward(mean_loss(self, batch))
        (callback,) = (one for one in self.trainer.callbacks if isinstance(one, ODBCallback))
        if callback.step_info.ends_optimizer_step:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_manual_optimization_is_exact_too(accumulate, frozen):
    module = ManualModule()
    callback = ODBCallback()
    loader = ODBDataLoader(samples_of(0, r.SIZE), token_budget=60, window=8, accumulate=accumulate)
    module.train_dataloader = lambda: callback.batches(loader)
    r.trainer_of(odb=[callback], max_epochs=1).fit(module)
    assert max(gradient_errors(module)) <= TOLERANCE


def test_a_manual_backward_that_is_not_weighed_is_refused():
    class Unweighed(ManualModule):
        def manual_backward(self, loss):
            loss.backward()

    with pytest.raises(RuntimeError, match=r"`self.manual_backward\(loss\)`"):
        r.fit(module=Unweighed(), max_epochs=1)


def test_steps_in_parts_need_a_loop_of_ones_own():
    with pytest.raises(ValueError, match="`on_oom` must not be given.*`odb_nodes.memory.OomGuard`"):
        ODBDataModule([], token_budget=60, on_oom="split")


def test_another_accumulation_than_the_loader_has_is_refused():
    module, callback = r.Module(), ODBCallback()
    loader = ODBDataLoader(samples_of(0, r.SIZE), token_budget=60, window=8)
    module.train_dataloader = lambda: callback.batches(loader)
    with pytest.raises(RuntimeError, match="`accumulate=trainer.accumulate_grad_batches`"):
        r.trainer_of(odb=[callback], max_epochs=1, accumulate_grad_batches=3).fit(module)


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["saved before us", "saved after us"])
@pytest.mark.parametrize(
    ("accumulate", "end"), [(accumulate, end) for accumulate in ENDS for end in ENDS[accumulate]]
)
def test_a_run_resumes_exactly_from_every_hook_that_can_save(
    accumulate, end, before, tmp_path, exhaustive
):
    save = r.SaveEverywhere(tmp_path)
    odb = [save, ODBCallback()] if before else [ODBCallback(), save]
    options = {"accumulate_grad_batches": accumulate, **end}
    whole, trainer = r.fit(odb=odb, **options)
    assert len(save.paths) >= 30
    # Neighbours of each kind of place in turn; all of them with --exhaustive.
    for path in save.paths if exhaustive else save.paths[before::3] + save.paths[-3:]:
        resumed, its_trainer = r.fit(checkpoint=path, **options)
        r.check_resumed(whole, trainer, resumed, its_trainer)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_run_that_has_ended_goes_on_with_more_steps(accumulate, tmp_path):
    options = {"accumulate_grad_batches": accumulate}
    whole, trainer = r.fit(max_steps=9, **options)
    for steps in range(1, 9):
        save = r.SaveEverywhere(tmp_path)
        first, _ = r.fit(save, max_steps=steps, **options)
        for path in save.paths[-3:]:  # after the last batch, its epoch, and the run
            resumed, its_trainer = r.fit(checkpoint=path, max_steps=9, **options)
            r.check_resumed(whole, trainer, resumed, its_trainer)
            assert len(first.seen) + len(resumed.seen) == len(whole.seen)


def test_a_second_fit_begins_the_next_epoch_and_resumes_too(tmp_path):
    options = {"accumulate_grad_batches": 3}
    once, _ = r.fit(max_epochs=2, **options)
    save = r.SaveEverywhere(tmp_path)
    twice = r.Module()
    trainer = r.trainer_of(save, max_epochs=1, **options)
    trainer.fit(twice, datamodule=r.data())
    trainer.fit_loop.max_epochs = 2
    first = len(save.paths)
    trainer.fit(twice, datamodule=r.data())
    assert twice.seen == once.seen  # not the weights: Lightning makes another optimizer
    for path in save.paths[first + 2 :: 3]:
        r.check_resumed(twice, trainer, *r.fit(checkpoint=path, max_epochs=2, **options))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_an_exception_saves_resumes_exactly(accumulate, tmp_path):
    class Failing(r.Module):
        fails_at = 0

        def training_step(self, batch, batch_idx):
            if len(self.seen) == self.fails_at:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    class SaveAtException(Callback):
        def on_exception(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / "exception.ckpt")

    options = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    whole, trainer = r.fit(**options)
    for fails_at in range(0, len(whole.seen), 2):
        failing = Failing()
        failing.fails_at = fails_at
        with pytest.raises(SystemExit):
            r.fit(SaveAtException(), module=failing, **options)
        path = str(tmp_path / "exception.ckpt")
        resumed, its_trainer = r.fit(checkpoint=path, **options)
        done = r.check_resumed(whole, trainer, resumed, its_trainer)
        assert len(whole.seen) - done <= fails_at < len(whole.seen) - done + accumulate


class Validating(r.Module):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", mean_loss(self, batch), batch_size=1)


class ValidatedData(ODBDataModule):
    def val_dataloader(self):
        samples = [
            {key: torch.as_tensor(value)[None] for key, value in sample.items()}
            for sample in samples_of(0, 3)
        ]
        return DataLoader(samples, batch_size=None)


@pytest.mark.parametrize("end", [{"max_epochs": 2}, {"max_steps": 17}])
@pytest.mark.parametrize("every", [4, 1.0], ids=["within epochs", "after epochs"])
def test_checkpoints_of_validations_resume_exactly(every, end, tmp_path):
    def fit(checkpoint=None, **saving):
        module = Validating()
        given = {"token_budget": 60, "window": 8}
        saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1, **saving)
        trainer = r.trainer_of(
            saver,
            enable_checkpointing=True,
            val_check_interval=every,
            num_sanity_val_steps=1,
            **end,
        )
        trainer.fit(
            module, datamodule=ValidatedData(samples_of(0, r.SIZE), **given), ckpt_path=checkpoint
        )
        return module, trainer

    whole, trainer = fit()
    paths = sorted(map(str, tmp_path.glob("*.ckpt")))
    assert len(paths) >= 2
    for path in paths:
        r.check_resumed(whole, trainer, *fit(path))


def test_dropout_goes_on_with_the_same_random_numbers(tmp_path):
    save = r.SaveEverywhere(tmp_path)
    options = {"max_epochs": 2, "accumulate_grad_batches": 3}
    whole, trainer = r.fit(save, module=r.Module(dropout=0.3), **options)
    for path in save.paths[::7]:
        torch.manual_seed(99)
        resumed = r.fit(checkpoint=path, module=r.Module(dropout=0.3), **options)
        r.check_resumed(whole, trainer, *resumed)


def test_the_estimate_of_steps_does_not_disturb_a_restore(tmp_path):
    class Scheduled(r.Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.estimated = self.trainer.estimated_stepping_batches
            steps = self.trainer.datamodule.estimated_steps()
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    save = r.SaveEverywhere(tmp_path)
    options = {"max_epochs": 2, "max_steps": 11, "accumulate_grad_batches": 2}
    whole, trainer = r.fit(save, module=Scheduled(), **options)
    assert whole.estimated == 11
    for path in save.paths[::5]:
        r.check_resumed(whole, trainer, *r.fit(checkpoint=path, module=Scheduled(), **options))


def test_the_estimate_of_steps_is_about_right():
    class Estimating(r.Module):
        def on_train_start(self):
            self.estimated = self.trainer.datamodule.estimated_steps()

    module, trainer = r.fit(module=Estimating(), max_epochs=2, accumulate_grad_batches=3)
    assert abs(module.estimated - trainer.global_step) <= 2


def test_steps_that_cannot_be_estimated_are_an_error():
    data = ODBDataModule({"a": samples_of(0, 3), "b": samples_of(3, 3)}, token_budget=60)
    data.trainer = r.trainer_of(max_epochs=1)
    with pytest.raises(TypeError, match="it is `dict`. Make the schedule for a number"):
        data.estimated_steps()


def test_the_learning_rate_follows_the_samples_of_a_step():
    class Scaled(r.Module):
        def on_fit_start(self):
            (self.odb,) = (one for one in self.trainer.callbacks if isinstance(one, ODBCallback))
            self.rates, self.samples = [], []

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            self.samples.append(self.odb.step_info.optimizer_samples)
            with LrScaling(reference_samples=4, rule="linear").applied(optimizer, self.samples[-1]):
                super().optimizer_step(epoch, batch_idx, optimizer, closure)
            assert optimizer.param_groups[0]["lr"] == self.lr

        def on_before_optimizer_step(self, optimizer):
            self.rates.append(optimizer.param_groups[0]["lr"])

    module, _ = r.fit(module=Scaled(), max_epochs=1, accumulate_grad_batches=3)
    assert sum(module.samples) == r.SIZE
    assert module.rates == pytest.approx([module.lr * samples / 4 for samples in module.samples])


# --- what is refused ------------------------------------------------------------------------------


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    save = r.SaveEverywhere(tmp_path)
    r.fit(save, max_steps=3)
    path = save.paths[-1]
    for key, change, message in (
        ("without", lambda states: None, "saved without `ODBCallback`"),
        ("ranks", lambda states: states * 2, r"one of each rank, but are of ranks \[0, 0\]"),
    ):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["odb_nodes"] = change(checkpoint["odb_nodes"])
        changed = str(tmp_path / key)
        torch.save(checkpoint, changed)
        with pytest.raises(StateError, match=message):
            r.fit(checkpoint=changed, max_steps=5)
    with pytest.raises(StateError, match=r"`seed` was 0 .* leave out `ckpt_path`"):
        r.fit(checkpoint=path, data_options={"seed": 5}, max_steps=5)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 5},
        {"limit_train_batches": 1},
        {"limit_train_batches": 0.5},
        {"overfit_batches": 2},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
)
def test_arguments_that_lose_samples_are_refused(options):
    with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
        r.fit(max_epochs=1, **options)


def test_an_epoch_that_is_left_is_refused():
    class Leaving(Callback):
        def on_train_epoch_end(self, trainer, module):
            assert trainer.global_step == 3

    class Module(r.Module):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    with pytest.raises(RuntimeError, match="left before its end"):
        r.fit(Leaving(), module=Module(), max_epochs=2)


def test_a_trainer_without_the_callback_is_refused():
    with pytest.raises(RuntimeError, match="must have one `ODBCallback`, but has 0"):
        r.fit(odb=[], max_epochs=1)
    module = r.Module()
    module.train_dataloader = lambda: DataLoader(samples_of(0, 4), batch_size=None)
    with pytest.raises(RuntimeError, match="`ODBCallback` has no batches"):
        r.trainer_of(max_epochs=1).fit(module)


def test_a_fast_dev_run_runs():
    module, _ = r.fit(fast_dev_run=2, accumulate_grad_batches=3)
    assert len(module.seen) == 2


def test_evaluation_needs_no_states(tmp_path):
    tested = []

    class Testing(r.Module):
        def test_step(self, batch, batch_idx):
            tested.append(batch)

    save = r.SaveEverywhere(tmp_path)
    r.fit(save, max_steps=2)
    loader = DataLoader([1], batch_size=None)
    r.trainer_of().test(Testing(), loader, ckpt_path=save.paths[-1], verbose=False)
    assert tested == [1]


# --- metrics, threads, imports --------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_metrics_reach_the_logger(accumulate, tmp_path):
    logger = CSVLogger(tmp_path)
    _, trainer = r.fit(
        max_epochs=2, logger=logger, log_every_n_steps=2, accumulate_grad_batches=accumulate
    )
    with open(logger.experiment.metrics_file_path) as file:
        logged = [row for row in csv.DictReader(file) if row["odb/padding_share"]]
    assert [int(row["step"]) for row in logged] == list(range(1, trainer.global_step, 2))
    assert all(0 <= float(row["odb/padding_share"]) < 1 for row in logged)
    epochs = [float(row["odb/epoch"]) for row in logged]
    assert epochs == sorted(epochs) and 1.7 < epochs[-1] <= 2
    samples = sum(2 * float(row["odb/samples_per_step"]) for row in logged)
    assert round(samples) == round(r.SIZE * epochs[-1])


def test_a_tuner_is_told_that_it_cannot_search():
    trainer, module = r.trainer_of(max_epochs=1), r.Module()
    with pytest.raises(RuntimeError, match=r"`lr_find` and `scale_batch_size` are not possible"):
        Tuner(trainer).lr_find(module, datamodule=r.data())


def test_loaders_that_are_no_single_one_of_this_run_are_refused():
    callback = ODBCallback()

    def batches():
        return callback.batches(ODBDataLoader(samples_of(0, r.SIZE), token_budget=60, window=8))

    for kind in (lambda: [batches(), batches()], lambda: {"a": batches()}):
        module = r.Module()
        module.train_dataloader = kind
        with pytest.raises(ValueError, match="must return one `callback.batches"):
            r.trainer_of(odb=[callback], max_epochs=1).fit(module)
    with pytest.raises(RuntimeError, match="What was made before `fit`"):
        r.trainer_of(odb=[callback], max_epochs=1).fit(r.Module(), batches())


@pytest.mark.parametrize("own", [True, False])
def test_what_a_skipped_validation_draws_is_missing_but_with_a_generator_of_its_own(tmp_path, own):
    """As the guide says; should it be equal without one, the guide is to be changed."""

    class Validated(r.Module):
        def validation_step(self, batch, batch_idx):
            pass

    class Data(ODBDataModule):
        def val_dataloader(self):
            return DataLoader([0, 1], generator=torch.Generator() if own else None)

    def fit(*callbacks, checkpoint=None):
        module = Validated(dropout=0.3)
        options = {"max_epochs": 1, "val_check_interval": 4, "accumulate_grad_batches": 3}
        trainer = r.trainer_of(*callbacks, **options, num_sanity_val_steps=0)
        data = Data(samples_of(0, r.SIZE), token_budget=60, window=8)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
        return module, trainer

    save = r.SaveEverywhere(tmp_path)
    whole, trainer = fit(save)
    equal = []
    for path in save.paths[::5]:
        resumed, its_trainer = fit(checkpoint=path)
        r.check_resumed(whole, trainer, resumed, its_trainer, tolerance=1.0)
        equal.append(torch.equal(resumed.weights, whole.weights))
    assert all(equal) is own


def test_nothing_is_left_running_after_a_run_or_an_exception():
    loaders = []

    class Noting(ODBCallback):
        def batches(self, loader):
            loaders.append(loader)
            return super().batches(loader)

    class Failing(r.Module):
        def training_step(self, batch, batch_idx):
            assert loaders[-1].worker_pids
            if len(self.seen) == 2:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    workers = {"num_workers": 1}
    with pytest.raises(ArithmeticError):
        r.fit(odb=[Noting()], module=Failing(), data_options=workers, max_epochs=1)
    r.fit(odb=[Noting()], data_options=workers, max_steps=2)
    assert [loader.worker_pids for loader in loaders] == [[], []]


def test_workers_do_not_change_what_is_trained_on():
    alone, _ = r.fit(max_epochs=2)
    beside, _ = r.fit(max_epochs=2, data_options={"num_workers": 1})
    assert beside.seen == alone.seen
    assert torch.equal(beside.weights, alone.weights)


def test_the_library_does_not_import_lightning():
    program = "import sys; from odb_nodes import *; print('lightning' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_a_missing_lightning_names_what_to_install():
    program = "import sys; sys.modules['lightning.pytorch'] = None; "
    program += "import odb_nodes.integrations.lightning"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode and "pip install 'odb-nodes[lightning]'" in done.stderr
