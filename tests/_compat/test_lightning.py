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

pytestmark = [
    pytest.mark.slow,  # importing it takes seconds
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is dep:FutureWarning"),
]

BATCHES = 4


def canary(what, used_in="callback"):
    file = f"_compat/lightning.py (`integrations/lightning/{used_in}.py`)"
    return relies_on("lightning", what, file)


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
            return self.weight * 1.0 + 3.0
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


def noting(answers, **asked):
    """A callback that keeps what functions return at their hooks."""

    def hook(ask):
        return lambda self, *given, **named: answers.append(ask(*given, *named.values()))

    return type("Notes", (Callback,), {name: hook(ask) for name, ask in asked.items()})()


def trainer_of(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 2, **quiet}
    return Trainer(callbacks=list(callbacks), **{**given, **options})


def fit(hook, ask, module=None, batches=None, **options):
    """What `ask` returns at each call of a hook."""
    trainer = trainer_of(noting(answers := [], **{hook: ask}), **options)
    trainer.fit(module or Module(), batches or Batches())
    return answers


@pytest.mark.parametrize("is_scaled", [False, True])
@canary("MixedPrecision.pre_backward")
def test_the_loss_before_backward_is_divided_and_scaled(is_scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if is_scaled else []
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "plugins": plugins}
    ask = lambda *given: (given[-1].item(), compat.mean_loss(*given).item())  # noqa: E731
    assert (
        fit("on_before_backward", ask, **options) == [(96.0 if is_scaled else 1.5, 3.0)] * BATCHES
    )


@canary("the order in which the fit loop reads an unsized loader", "run")
def test_batches_are_read_one_ahead_and_trained_on_in_their_order():
    batches = Batches()
    ask = lambda _, __, batch, idx: (batch.item(), idx, batches.read)  # noqa: E731
    answers = fit("on_train_batch_start", ask, batches=batches, max_epochs=1)
    assert answers == [(0, 0, 2), (1, 1, 3), (2, 2, 4), (3, 3, 4)], answers


@canary("fit_loop.total_batch_idx", "run")
def test_a_batch_is_counted_before_its_hook():
    answers = fit("on_train_batch_start", lambda trainer, *_: compat.batches_begun(trainer))
    assert answers == list(range(1, 2 * BATCHES + 1)), answers


@pytest.mark.parametrize("accumulate", [1, 3])
@canary("the division of the loss by accumulate_grad_batches")
def test_automatic_optimization_divides_by_all_batches_of_a_step(accumulate):
    module, options = Module(), {"max_epochs": 1, "accumulate_grad_batches": accumulate}
    ask = lambda trainer, *_: compat.loss_divisor(trainer, module)  # noqa: E731
    (divisor,) = {*fit("on_train_batch_end", ask, module, **options)}
    steps = [accumulate] * (BATCHES // accumulate) + [BATCHES % accumulate]
    expected = [batches / divisor for batches in steps if batches]
    assert module.gradients == pytest.approx(expected), module.gradients


@canary("LightningModule.manual_backward")
def test_manual_optimization_divides_by_nothing():
    module = Module(automatic=False)
    ask = lambda trainer, *_: compat.loss_divisor(trainer, module)  # noqa: E731
    assert {*fit("on_train_batch_end", ask, module, max_epochs=1)} == {1}
    assert module.gradients == [1.0] * BATCHES, module.gradients


@canary("Strategy.handles_gradient_accumulation, or when global_step counts")
def test_the_optimizer_steps_at_the_end_of_an_epoch_before_the_hook():
    before, after = [], []
    trainer = trainer_of(
        noting(before, on_train_batch_start=lambda trainer, *_: trainer.global_step),
        noting(after, on_train_batch_end=lambda trainer, *_: trainer.global_step),
        accumulate_grad_batches=3,
    )
    assert compat.steps_at_epoch_end(trainer)
    trainer.fit(Module(), Batches())
    assert (before, after) == ([0, 0, 0, 1, 2, 2, 2, 3], [0, 0, 1, 2, 2, 2, 3, 4])


@canary("Strategy.handles_gradient_accumulation")
def test_deepspeed_steps_by_itself():
    for kind, steps in {DeepSpeedStrategy: False, SingleDeviceStrategy: True}.items():
        value = kind.handles_gradient_accumulation.fget(None)
        strategy = SimpleNamespace(handles_gradient_accumulation=value)
        for accumulate in (1, 3):
            trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=accumulate)
            assert compat.steps_at_epoch_end(trainer) is (steps or accumulate == 1)


@pytest.mark.parametrize("every", [1, 3])
@canary("_LoggerConnector.should_update_logs")
def test_what_is_logged_after_a_step_is_passed_on(every):
    answers = fit(
        "on_train_batch_end",
        lambda trainer, *_: (
            compat.is_logged(trainer),
            trainer._logger_connector.should_update_logs,
        ),
        log_every_n_steps=every,
    )
    assert all(ours == theirs for ours, theirs in answers), answers
    assert len({*answers}) == (1 if every == 1 else 2)


@canary("Trainer.state.fn and the stage")
def test_what_runs_is_told_by_a_string():
    ask = lambda trainer, _, stage: (stage == "fit", compat.is_fitting(trainer))  # noqa: E731
    trainer = trainer_of(noting(answers := [], setup=ask), max_epochs=1)
    trainer.fit(Module(), Batches())
    trainer.test(Module(), Batches(), verbose=False)
    assert answers == [(True, True), (False, False)], answers


@pytest.mark.parametrize("given", [Batches(), [Batches()], {"a": Batches()}])
@canary("Trainer.train_dataloader")
def test_the_trainer_tells_what_the_hook_has_returned(given):
    ask = lambda trainer, *_: trainer.train_dataloader  # noqa: E731
    for answer in fit("on_train_batch_start", ask, batches=given, max_epochs=1):
        assert answer is given or (type(answer) is type(given) and not isinstance(given, Batches))


def checkpoint_within_an_epoch(path):
    """What Lightning writes after 2 of 4 batches of the second epoch."""

    def save(trainer, *_):
        if trainer.current_epoch == 1 and trainer.global_step == BATCHES + 2:
            trainer.save_checkpoint(path)

    fit("on_train_batch_start", save)
    return torch.load(path, weights_only=True)


@canary("the progress of the loops in a checkpoint")
def test_the_progress_in_a_checkpoint_has_the_counters_that_we_set(tmp_path):
    progress = compat.loop_progress(checkpoint_within_an_epoch(tmp_path / "a.ckpt"))
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


@canary("how the loops resume from their progress in a checkpoint")
def test_a_run_resumes_from_the_counters_that_we_set(tmp_path):
    path, seen = tmp_path / "a.ckpt", []
    checkpoint = checkpoint_within_an_epoch(path)
    for epoch, steps, total in ((1, 2, BATCHES + 2), (1, 0, BATCHES), (0, 3, 3)):
        progress = compat.loop_progress(checkpoint)
        compat.set_progress(progress, epoch=epoch, steps=steps, total_steps=total)
        torch.save(checkpoint, path)
        where = lambda trainer, _, __, idx: (trainer.current_epoch, idx)  # noqa: E731
        notes = noting(answers := [], on_train_batch_start=where)
        trainer_of(notes).fit(Module(), Batches(), ckpt_path=path)
        seen.append(answers[0])
    assert seen == [(1, 2), (1, 0), (0, 3)], seen
