"""A module of Lightning whose steps run out of memory trains as one whose steps do not."""

from types import SimpleNamespace

import language_models as lm
import pytest
import torch
import trainers as t
from ledgers import check_ledger
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from memory_faults import above, fail, never
from torch.distributed.fsdp import fully_shard

from odb_nodes import ODBDataLoader, StepMemoryError, audit
from odb_nodes.integrations.lightning import ODBCallback
from odb_nodes.integrations.lightning.callback import _check_guard
from odb_nodes.memory import OomGuard
from odb_nodes.monitor import Monitor, read_run
from odb_nodes.tasks import TaskWeights

pytestmark = pytest.mark.filterwarnings(t.OF_LIGHTNING)

SIZE = 40


class Guarded(LightningModule):
    """Optimizes by hand: each batch is an optimizer step, its batches."""

    def __init__(self, odb, on_oom="split", fails=never, place="forward", size=SIZE, **options):
        super().__init__()
        self.automatic_optimization = False
        self.model = fail(lm.Averaging(), "features", fails, place)
        self.odb, self.on_oom, self.size, self.options = odb, on_oom, size, options
        self.gradients = []

    def training_step(self, step, batch_idx):
        step.backward(self.trainer.strategy.model, lambda batch: self.model(**batch)["loss"])
        if self.trainer.world_size == 1:
            self.gradients.append(lm.gradient_of(self.model))
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=t.LR)

    def train_dataloader(self):
        options = {"token_budget": 64, "window": 12, "round_size": 4, **self.options}
        loader = ODBDataLoader(lm.Texts(self.size), **options)
        self.guard = OomGuard(loader, self.on_oom, guard_above=0.0)
        return self.odb.batches(self.guard)


class Sharded(Guarded):
    """Ranks compute together; one runs out of memory."""

    def configure_model(self):
        fully_shard(self.model)


def fit(*callbacks, kind=Guarded, resume=None, trainer=(), recorded=(), **options):
    odb = ODBCallback(**dict(recorded))
    module = kind(odb, **options)
    runner = t.lightning_trainer(odb, *callbacks, **{"max_epochs": 2, **dict(trainer)})
    runner.fit(module, ckpt_path=resume)
    return module


class Logged(Callback):
    """Keeps what is logged after each batch."""

    def __init__(self):
        self.metrics = []

    def on_train_batch_end(self, trainer, *_):
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items()})


@pytest.mark.parametrize(("accumulate", "place"), [(1, "forward"), (3, "backward")])
def test_a_run_is_that_without_failures_and_resumes_exactly(tmp_path, accumulate, place):
    options = {"accumulate": accumulate, "place": place}
    folder = {"ledger": tmp_path / "ledger", "monitor": Monitor(tmp_path / "monitor", every=1)}
    whole = fit(**options)
    callbacks = (save := t.SaveEach(tmp_path)), (logged := Logged())
    every = {"log_every_n_steps": 1}
    found = fit(*callbacks, fails=above(30), recorded=folder, trainer=every, **options)
    assert whole.guard.ooms == 0 < found.guard.ooms
    assert sum(one["odb/ooms"] for one in logged.metrics) == found.guard.ooms
    assert max(one["odb/parts"] for one in logged.metrics) > 1
    assert found.guard.split_steps > 2
    weights = lm.weights_of(found.model)
    assert weights == pytest.approx(lm.weights_of(whole.model), abs=1e-10)
    check_ledger(tmp_path / "ledger", SIZE, attempts=1, epochs=2)
    steps = read_run(tmp_path / "monitor").steps
    assert len(steps) == len(found.gradients) == save.number
    assert sum(one["sum"]["samples"] for one in steps) == 2 * SIZE
    assert all(one["mean"]["loss"] > 0 for one in steps)
    assert sum(one["sum"].get("ooms", 0) for one in steps) == found.guard.ooms
    for number in (1, save.number - 2):
        resumed = fit(resume=f"{tmp_path}/{number}.ckpt", fails=above(30), **options)
        assert len(resumed.gradients) == save.number - number
        assert torch.equal(lm.weights_of(resumed.model), weights)


def test_a_sample_that_does_not_fit_alone_is_an_error_or_left_out(tmp_path):
    with pytest.raises(StepMemoryError, match=r"rank 0: a sample \(key \d+\) with 2\d"):
        fit(fails=above(20))
    fit(fails=above(20), on_oom="skip", recorded={"ledger": tmp_path})
    report = str(audit(tmp_path, SIZE))
    texts = [lm.sample_of(key) for key in range(SIZE)]
    long = [one for one in texts if len(one["input_ids"]) > 20 and lm.targets_of(one["labels"])]
    assert f"{len(long)} skipped (out of memory)" in report


class Forgets(Guarded):
    def training_step(self, step, batch_idx):
        self.optimizers().step()


class Starts(Guarded):
    """Optimizes automatically."""

    def __init__(self, odb, **options):
        super().__init__(odb, **options)
        self.automatic_optimization = True


TASKS = {"task_weights": TaskWeights({"even": 1.0, "odd": 9.0})}
REFUSED = {
    "tasks": ({"recorded": TASKS}, ValueError, "`task_weights` must not be given with an `Oom"),
    "automatic": ({"kind": Starts}, ValueError, "automatic_optimization = False"),
    "no backward": ({"kind": Forgets}, RuntimeError, "did not call `step.backward"),
}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (FSDPStrategy(), "computes no steps under `FSDPStrategy`"),
        (object.__new__(DeepSpeedStrategy), "computes no steps under `DeepSpeedStrategy`"),
        (DDPStrategy(), "`guard_above` of the `OomGuard` must be 0.0 under DDP"),
    ],
)
def test_a_strategy_needs_steps_that_can_be_taken_back(strategy, message):
    module = SimpleNamespace(automatic_optimization=False)
    trainer = SimpleNamespace(strategy=strategy, lightning_module=module)
    with pytest.raises(ValueError, match=message):
        _check_guard(trainer, SimpleNamespace(guard_above=0.8), None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_guard_cannot_do_is_refused_by_name(name):
    options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        fit(**options)


def test_two_ranks_train_as_without_failures(tmp_path):
    body = """
        import test_lightning_guard as j
        from memory_faults import above, never
        given = {"trainer": {"strategy": "ddp", "devices": 2}, "accumulate": 2, "size": 37}
        runs = [j.fit(fails=fails, **given) for fails in (never, above(25))]
        found = [[lm.weights_of(one.model).tolist(), one.guard.ooms] for one in runs]
        del runs
        r.finish(found)
    """
    (whole, failing), (other, _) = t.results_of(tmp_path, body, init=False)
    assert whole[0] == other[0] and whole[1] == 0 < failing[1]
    assert failing[0] == pytest.approx(whole[0], abs=1e-10)


def test_ranks_that_compute_together_train_and_end_together(tmp_path):
    body = """
        import test_lightning_guard as j
        from lightning.pytorch.strategies import ModelParallelStrategy
        from memory_faults import above, never
        given = {"kind": j.Sharded, "size": 37, "timeout_s": 20}

        def ranks():
            return {"strategy": ModelParallelStrategy(), "devices": 2, "max_epochs": 1}

        print(len(j.fit(trainer=ranks(), **given).odb.step_info.keys) > 0, flush=True)
        j.fit(fails=above(60 + 9 * rank), trainer=ranks(), **given)
    """
    with t.on_ranks(tmp_path, 2, body, init=False) as job:
        results = job.results(150)
    assert all("True" in out for _, out, _ in results), results
    assert all(code and "StepMemoryError" in errors for code, _, errors in results), results
