"""Canaries: what we rely on inside of Lightning."""

import copy
from types import SimpleNamespace

import pytest
import torch
from canary import relies_on

from odb_nodes._compat import lightning as compat
from odb_nodes.integrations.lightning.run import RunState

pytest.importorskip("lightning.pytorch")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy

pytestmark = [
    pytest.mark.slow,  # importing it takes seconds
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is dep:FutureWarning"),
]

BATCHES = 4


def canary(behaviour, used_in="callback"):
    file = f"_compat/lightning.py (`integrations/lightning/{used_in}.py`)"
    return relies_on("lightning", behaviour, file)


class Batches:
    """Has no length."""

    def __iter__(self):
        return iter(torch.arange(float(BATCHES)).unbind())


class Module(LightningModule):
    """A loss of 3."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return self.weight * 1.0 + 3.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(hook, ask, **options):
    """What `ask` returns at each call of a hook."""
    answers = []

    def note(self, *arguments, **named):
        answers.append(ask(*arguments, *named.values()))

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 2, **quiet}
    callback = type("Notes", (Callback,), {hook: note})()
    Trainer(callbacks=[callback], **{**arguments, **options}).fit(Module(), Batches())
    return answers


@pytest.mark.parametrize("is_scaled", [False, True])
@canary("MixedPrecision.pre_backward")
def test_the_loss_before_backward_is_divided_and_scaled(is_scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)] if is_scaled else []
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "plugins": plugins}
    ask = lambda *arguments: (arguments[-1].item(), compat.mean_loss(*arguments).item())  # noqa: E731
    assert (
        fit("on_before_backward", ask, **options) == [(96.0 if is_scaled else 1.5, 3.0)] * BATCHES
    )


@canary("fit_loop.total_batch_idx", "run")
def test_a_batch_is_counted_before_its_hook():
    answers = fit("on_train_batch_start", lambda trainer, *_: compat.batches_begun(trainer))
    assert answers == list(range(1, 2 * BATCHES + 1)), answers


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
    compat.set_progress(progress, RunState(epoch=1, steps=2, total_steps=BATCHES + 2))
    for name, done in (("total", BATCHES + 2), ("current", 2)):
        assert {*batches[name].values()} == {done}, batches
    copied = copy.deepcopy(progress)
    compat.set_progress(progress, RunState(epoch=1, steps=2, total_steps=BATCHES + 2))
    assert progress == copied
