"""Canaries: what we rely on inside of Lightning."""

import copy
from types import SimpleNamespace

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import lightning as compat

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy

pytestmark = pytest.mark.slow  # importing it takes seconds

BATCHES = 4
USED_IN = "_compat/lightning.py (`integrations/lightning/{}.py`)"


class Batches:
    """Has no length, and counts what was read."""

    read = 0

    def __iter__(self):
        for number in range(BATCHES):
            self.read += 1
            yield torch.tensor([float(number)])


class Module(LightningModule):
    """A loss whose gradient is 1 per batch; notes the gradient of every optimizer step."""

    def __init__(self, automatic=True):
        super().__init__()
        self.automatic_optimization = automatic
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return self.weight * 1.0
        self.manual_backward(self.weight * 1.0)
        self.gradients.append(self.weight.grad.item())
        self.optimizers().step()
        self.optimizers().zero_grad()

    def on_before_optimizer_step(self, optimizer):
        if self.automatic_optimization:
            self.gradients.append(self.weight.grad.item())

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Notes(Callback):
    """Asks at each hook, and keeps the answers."""

    def __init__(self, **asked):
        self.asked = asked
        self.answers = []

    def note(self, hook, *given):
        if hook in self.asked:
            self.answers.append(self.asked[hook](*given))

    def setup(self, *given, **named):
        self.note("setup", *given, *named.values())

    def on_train_batch_start(self, *given):
        self.note("on_train_batch_start", *given)

    def on_train_batch_end(self, *given):
        self.note("on_train_batch_end", *given)

    def on_save_checkpoint(self, *given):
        self.note("on_save_checkpoint", *given)


def trainer_of(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 2, **quiet}
    return Trainer(callbacks=list(callbacks), **{**given, **options})


def fit(callback, module=None, batches=None, **options):
    trainer = trainer_of(callback, **options)
    trainer.fit(module or Module(), batches or Batches())
    return callback.answers


@pytest.mark.parametrize("is_scaled", [False, True])
def test_the_loss_before_backward_is_divided_and_scaled(is_scaled):
    class Losses(Callback):
        def __init__(self):
            self.answers = []

        def on_before_backward(self, trainer, module, loss):
            self.seen = loss.item()
            self.answers.append(compat.mean_loss(trainer, module, loss).item())

    class Three(Module):
        def training_step(self, batch, batch_idx):
            return self.weight * 1.0 + 3.0

    with relies_on("lightning", "MixedPrecision.pre_backward", USED_IN.format("callback")):
        plugins = []
        if is_scaled:
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
            plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
        losses = Losses()
        fit(losses, Three(), max_epochs=1, accumulate_grad_batches=2, plugins=plugins)
        assert losses.seen == (96.0 if is_scaled else 1.5)
        assert losses.answers == [3.0] * BATCHES


def test_batches_are_read_one_ahead_and_trained_on_in_their_order():
    what = "the order in which the fit loop reads batches of an unsized loader"
    with relies_on("lightning", what, USED_IN.format("batches")):
        batches = Batches()
        notes = Notes(
            on_train_batch_start=lambda _, __, batch, idx: (batch.item(), idx, batches.read)
        )
        answers = fit(notes, batches=batches, max_epochs=1)
        assert answers == [(0, 0, 2), (1, 1, 3), (2, 2, 4), (3, 3, 4)], answers


def test_a_batch_is_counted_before_its_hook():
    with relies_on("lightning", "fit_loop.total_batch_idx", USED_IN.format("callback")):
        notes = Notes(on_train_batch_start=lambda trainer, *_: compat.batches_begun(trainer))
        answers = fit(notes)
        assert answers == list(range(1, 2 * BATCHES + 1)), answers


@pytest.mark.parametrize("accumulate", [1, 3])
def test_automatic_optimization_divides_by_all_batches_of_a_step(accumulate):
    what = "the division of the loss by accumulate_grad_batches"
    with relies_on("lightning", what, USED_IN.format("callback")):
        module = Module()
        notes = Notes(on_train_batch_end=lambda trainer, *_: compat.loss_divisor(trainer, module))
        (divisor,) = {*fit(notes, module, max_epochs=1, accumulate_grad_batches=accumulate)}
        steps = [accumulate] * (BATCHES // accumulate) + [BATCHES % accumulate]
        expected = [batches / divisor for batches in steps if batches]
        assert module.gradients == pytest.approx(expected), module.gradients


def test_manual_optimization_divides_by_nothing():
    with relies_on("lightning", "LightningModule.manual_backward", USED_IN.format("callback")):
        module = Module(automatic=False)
        notes = Notes(on_train_batch_end=lambda trainer, *_: compat.loss_divisor(trainer, module))
        assert {*fit(notes, module, max_epochs=1)} == {1}
        assert module.gradients == [1.0] * BATCHES, module.gradients


def test_the_optimizer_steps_at_the_end_of_an_epoch_before_the_hook():
    what = "Strategy.handles_gradient_accumulation, or when Trainer.global_step counts"
    with relies_on("lightning", what, USED_IN.format("checks")):
        before = Notes(on_train_batch_start=lambda trainer, *_: trainer.global_step)
        after = Notes(on_train_batch_end=lambda trainer, *_: trainer.global_step)
        trainer = trainer_of(before, after, accumulate_grad_batches=3)
        assert compat.steps_at_epoch_end(trainer)
        trainer.fit(Module(), Batches())
        assert before.answers == [0, 0, 0, 1, 2, 2, 2, 3], before.answers
        assert after.answers == [0, 0, 1, 2, 2, 2, 3, 4], after.answers


def test_deepspeed_steps_by_itself():
    what = "Strategy.handles_gradient_accumulation"
    with relies_on("lightning", what, USED_IN.format("checks")):
        strategies = {DeepSpeedStrategy: False, SingleDeviceStrategy: True}
        for kind, steps in strategies.items():
            value = kind.handles_gradient_accumulation.fget(None)
            strategy = SimpleNamespace(handles_gradient_accumulation=value)
            for accumulate in (1, 3):
                trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=accumulate)
                assert compat.steps_at_epoch_end(trainer) is (steps or accumulate == 1)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_what_is_logged_after_a_step_is_passed_on(every):
    what = "_LoggerConnector.should_update_logs"
    with relies_on("lightning", what, USED_IN.format("callback")):
        notes = Notes(
            on_train_batch_end=lambda trainer, *_: (
                compat.is_logged(trainer),
                trainer._logger_connector.should_update_logs,
            )
        )
        answers = fit(notes, log_every_n_steps=every)
        assert all(ours == theirs for ours, theirs in answers), answers
        assert len({*answers}) == (1 if every == 1 else 2)


def test_what_runs_is_told_by_a_string():
    with relies_on("lightning", "Trainer.state.fn and the stage", USED_IN.format("callback")):
        notes = Notes(setup=lambda trainer, _, stage: (stage == "fit", compat.is_fitting(trainer)))
        trainer = trainer_of(notes, max_epochs=1)
        trainer.fit(Module(), Batches())
        trainer.test(Module(), Batches(), verbose=False)
        assert notes.answers == [(True, True), (False, False)], notes.answers


@pytest.mark.parametrize("loaders", [list, dict])
def test_the_trainer_tells_what_the_hook_has_returned(loaders):
    with relies_on("lightning", "Trainer.train_dataloader", USED_IN.format("callback")):
        given = [Batches()] if loaders is list else {"a": Batches()}
        notes = Notes(on_train_batch_start=lambda trainer, *_: trainer.train_dataloader)
        assert all(isinstance(one, loaders) for one in fit(notes, batches=given, max_epochs=1))
        batches = Batches()
        notes = Notes(on_train_batch_start=lambda trainer, *_: trainer.train_dataloader)
        assert all(one is batches for one in fit(notes, batches=batches, max_epochs=1))


def progress_within_an_epoch(path):
    """What Lightning writes after 2 of 4 batches of the second epoch."""
    kept = []

    class Save(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.current_epoch == 1 and trainer.global_step == BATCHES + 2 and not kept:
                kept.append(None)
                trainer.save_checkpoint(path)

    trainer_of(Save()).fit(Module(), Batches())
    return compat.loop_progress(torch.load(path, weights_only=True))


def test_the_progress_in_a_checkpoint_has_the_counters_that_we_set(tmp_path):
    what = "the progress of the loops in a checkpoint"
    with relies_on("lightning", what, USED_IN.format("callback")):
        progress = progress_within_an_epoch(tmp_path / "a.ckpt")
        assert compat.epochs_processed(progress) == 1
        batches = progress["epoch_loop.batch_progress"]
        for name, ready in (("total", BATCHES + 3), ("current", 3)):
            done = {"ready": ready, "started": ready - 1, "processed": ready - 1}
            assert batches[name] == done | {"completed": ready - 1}, batches
        assert batches["is_last_batch"] is False
        compat.set_progress(progress, epoch=1, steps=2, total_steps=BATCHES + 2)
        for name, done in (("total", BATCHES + 2), ("current", 2)):
            assert {*batches[name].values()} == {done}, batches
        again = copy.deepcopy(progress)
        compat.set_progress(progress, epoch=1, steps=2, total_steps=BATCHES + 2)
        assert progress == again


def test_a_run_resumes_from_the_counters_that_we_set(tmp_path):
    what = "how the loops resume from their progress in a checkpoint"
    with relies_on("lightning", what, USED_IN.format("callback")):
        path = tmp_path / "a.ckpt"
        progress_within_an_epoch(path)
        checkpoint = torch.load(path, weights_only=True)
        seen = []
        for epoch, steps, total in ((1, 2, BATCHES + 2), (1, 0, BATCHES), (0, 3, 3)):
            progress = compat.loop_progress(checkpoint)
            compat.set_progress(progress, epoch=epoch, steps=steps, total_steps=total)
            torch.save(checkpoint, path)
            notes = Notes(
                on_train_batch_start=lambda trainer, _, __, idx: (trainer.current_epoch, idx)
            )
            trainer_of(notes).fit(Module(), Batches(), ckpt_path=path)
            seen.append(notes.answers[0])
        assert seen == [(1, 2), (1, 0), (0, 3)], seen
